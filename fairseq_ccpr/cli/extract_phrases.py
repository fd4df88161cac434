"""`extract_phrases.py`: from sentence pairs to phrase pairs in their contexts."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, markdown_table, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.phrases.aligners import ALIGNERS
from fairseq_ccpr.phrases.pair_build import ExtractionSettings, PairExtraction
from fairseq_ccpr.phrases.statistical_aligners import MAX_WORDS, SYMMETRIZATIONS
from fairseq_ccpr.text.pairs import TextPairs

HELP = """\
Align the words of sentence pairs and write down all phrase pairs that agree with the alignment, with their places in the
sentences: what a phrase retriever is trained on.

  extract_phrases.py --source text.de --target text.en -s de -t en --valid 500 --output phrases/mine
  extract_phrases.py --pairs text.tsv.xz --alignments text.align --output phrases/mine

Text is UTF-8, one sentence a line, plain, .gz or .xz; nothing needs to be tokenised. Alignments made elsewhere are taken in
Pharaoh format (0-0 1-2 ...), and then words are what stands between spaces. --output gets the folders train and, where
sentence pairs are held out, valid; their format is described in datastores/README.md.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="extract_phrases.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    default = {f.name: f.default for f in fields(ExtractionSettings)}
    text = parser.add_argument_group("text")
    text.add_argument("--source", type=Path, metavar="FILE", help="source sentences, one a line")
    text.add_argument("--target", type=Path, metavar="FILE", help="their translations, line by line")
    text.add_argument("--pairs", type=Path, metavar="TSV", help="instead of both: source, tab, target")
    text.add_argument("-s", "--source-lang", default="source", metavar="LANG", help="name of the source language")
    text.add_argument("-t", "--target-lang", default="target", metavar="LANG", help="name of the target language")
    text.add_argument("--name", metavar="NAME", help="name of the set, where several are mixed (name of --output)")
    text.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write; must not exist")
    text.add_argument("--valid", type=int, metavar="N", help="hold out N sentence pairs: the last ones")
    text.add_argument(
        "--valid-pairs", type=Path, metavar="TSV", help="hold out these instead, or the first --valid of them"
    )
    text.add_argument(
        "--max-words", type=int, default=default["max_words"], metavar="N", help="skip longer sentences, and count them"
    )
    words = parser.add_argument_group("word alignment")
    how = words.add_mutually_exclusive_group()
    how.add_argument(
        "--aligner", choices=ALIGNERS, default=default["aligner"],
        help="a model trained on the text itself; or encoder, pretrained, which a small text suits as well",
    )  # fmt: skip
    how.add_argument(
        "--alignments", type=Path, metavar="FILE", help="ready alignments in Pharaoh format, counted from 0"
    )
    words.add_argument(
        "--symmetrization", choices=SYMMETRIZATIONS, default=default["symmetrization"],
        help="how the alignments of both directions become one",
    )  # fmt: skip
    words.add_argument("--encoder", type=Path, metavar="DIR", help="of --aligner encoder, made by convert_encoder.py")
    words.add_argument("--encoder-layer", type=int, metavar="N", help="whose states are compared (half of the way up)")
    words.add_argument(
        "--align-with",
        nargs="+",
        type=Path,
        default=[],
        metavar="TSV",
        help="more sentence pairs for the aligner to learn from",
    )
    phrases = parser.add_argument_group("phrases")
    phrases.add_argument(
        "--max-phrase-words",
        type=int,
        default=default["max_phrase_words"],
        metavar="N",
        help="longest phrase, on either side",
    )
    phrases.add_argument(
        "--max-edge-share", type=float, default=default["max_edge_share"], metavar="X",
        help="no phrase begins or ends with a word that makes up more than this share of all words; 1 allows every word",
    )  # fmt: skip
    phrases.add_argument("--punctuation-edges", action="store_true", help="phrases may begin and end with punctuation")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def extract(options: argparse.Namespace) -> int:
    """Extract, and say how many."""
    if (options.pairs is None) == (options.source is None) or (options.source is None) != (options.target is None):
        raise ConfigurationError("give the text as --source and --target, or as --pairs")
    if options.valid is not None and options.valid < 1:
        raise ConfigurationError(f"--valid is {options.valid}: give at least 1, or leave it out")
    if options.max_words > MAX_WORDS:
        raise ConfigurationError(f"--max-words is {options.max_words}: aligners take up to {MAX_WORDS} words")
    if options.alignments and (options.valid_pairs or options.align_with):
        raise ConfigurationError(
            "--alignments are those of the text alone: hold out with --valid, and leave --valid-pairs and --align-with away"
        )
    settings = ExtractionSettings(**{f.name: getattr(options, f.name) for f in fields(ExtractionSettings)})
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


def main() -> None:
    """Parse, extract, print."""
    options = make_parser().parse_args()
    run("extract_phrases.py", lambda: extract(options))


if __name__ == "__main__":
    main()
