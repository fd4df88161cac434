"""`fairseq-ccpr extract`: extract phrase pairs in their contexts from sentence pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import command, markdown_table
from fairseq_ccpr.common_options import count_option, quiet_option, source_language_option, target_language_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.phrases.pair_build import ExtractionSettings, PairExtraction
from fairseq_ccpr.settings import option
from fairseq_ccpr.text.pairs import TextPairs

HELP = """\
Align the words of sentence pairs and extract all phrase pairs consistent with the alignment, with their positions in the
sentences: the training data of a phrase encoder.

  fairseq-ccpr extract --source text.de --target text.en -s de -t en --valid 500 --output phrases/mine
  fairseq-ccpr extract --pairs text.tsv.xz --alignments text.align --output phrases/mine

Text is UTF-8, one sentence per line, plain, .gz or .xz; nothing needs to be tokenised. Existing alignments are read in
Pharaoh format (0-0 1-2 ...); words are then separated by spaces. --output gets the folders train and, where
sentence pairs are held out, valid; their format is described in datastores/README.md.
"""


@dataclass
class TextOptions:
    """Where the text is, and where the phrases go."""

    output: Path = option(help="folder to write; must not exist", metavar="DIR")
    source: Optional[Path] = option(None, "source sentences, one per line", metavar="FILE")
    target: Optional[Path] = option(None, "their translations, line by line", metavar="FILE")
    pairs: Optional[Path] = option(None, "instead of both: source, tab, target", metavar="TSV")
    source_lang: str = source_language_option("source", "name of the source language")
    target_lang: str = target_language_option("target", "name of the target language")
    name: Optional[str] = option(None, "name of the set, where several are mixed (name of --output)", metavar="NAME")
    valid: Optional[int] = count_option(None, "hold out N sentence pairs: the last ones")
    valid_pairs: Optional[Path] = option(None, "hold out these instead, or the first --valid of them", metavar="TSV")
    alignments: Optional[Path] = option(
        None, "ready alignments in Pharaoh format, counted from 0; no aligner is run", metavar="FILE"
    )
    align_with: list[Path] = option([], "more sentence pairs for the aligner to learn from", nargs="+", metavar="TSV")
    quiet: bool = quiet_option()


def extract(options: TextOptions, settings: ExtractionSettings) -> int:
    """Extract, and print how many."""
    if (options.pairs is None) == (options.source is None) or (options.source is None) != (options.target is None):
        raise ConfigurationError("give the text as --source and --target, or as --pairs")
    if options.alignments and settings.aligner != ExtractionSettings.aligner:
        raise ConfigurationError(f"--aligner {settings.aligner} and --alignments exclude each other: give one of them")
    if options.alignments and (options.valid_pairs or options.align_with):
        raise ConfigurationError(
            "--alignments are those of the text alone: hold out with --valid, and leave out --valid-pairs and --align-with"
        )
    extraction = PairExtraction(
        TextPairs(options.source, options.target, options.pairs, options.alignments), settings, options.valid,
        TextPairs(pairs=options.valid_pairs) if options.valid_pairs else None,
        [TextPairs(pairs=path) for path in options.align_with], not options.quiet,
    )  # fmt: skip
    name = options.name or options.output.name
    made = extraction.run(options.output, name, (options.source_lang, options.target_lang))
    rows: list[list[object]] = [
        ["set", "sentence pairs", "skipped", "phrase pairs", "a sentence", "dropped: edges", "dropped: no letter"]
    ]
    for split_name, (split, counts) in made.items():
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in split.skipped.items()) or 0
        numbers = f"{counts.kept:,}", f"{counts.kept / split.count:.1f}", f"{counts.edges:,}", f"{counts.wordless:,}"
        rows.append([options.output / split_name, f"{split.count:,}", skipped, *numbers])
    print(markdown_table(rows))
    return 0


main = command(HELP, extract, TextOptions, ExtractionSettings)
