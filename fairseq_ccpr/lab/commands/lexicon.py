"""`fairseq-ccpr lexicon`: find example sentences for the phrases of a dictionary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairseq_ccpr.cli.command import command, markdown_table
from fairseq_ccpr.common_options import source_language_option, target_language_option
from fairseq_ccpr.lab.xpr.lexicon_build import LexiconCounts, LexiconSettings, SplitCoverage, build_lexicon
from fairseq_ccpr.settings import option

HELP = """\
Find example sentences for the phrases of a dictionary in text of both languages: the training and test data of XPR. The
texts need not be translations of each other.

  fairseq-ccpr lexicon --pairs dictionary.tsv --source-text mono.de.txt --target-text mono.en.txt -s de -t en \\
    --output lexicon/de-en

An example contains the phrase as whole words, in the same case, and at least 10 characters more. The choice depends neither
on the order of the text nor on repeated lines. Near-copies are left out (ROUGE-L over words above 0.5 both ways).
--output gets the folders train, valid and test, 3 : 1 : 1; no string is in two of them; their format is described in
datastores/README.md.
"""


@dataclass
class Options:
    """The command's options besides `LexiconSettings`."""

    pairs: Path = option(help="phrase pairs: source, tab, target", metavar="TSV")
    source_text: list[Path] = option(help="source language, a sentence per line", nargs="+", metavar="TEXT")
    target_text: list[Path] = option(help="target language, a sentence per line", nargs="+", metavar="TEXT")
    output: Path = option(help="folder to write; must not exist", metavar="DIR")
    source_lang: str = source_language_option("source", "name of the source language")
    target_lang: str = target_language_option("target", "name of the target language")


def build(options: Options, settings: LexiconSettings) -> int:
    """Build, and print the outcome."""
    counts, coverage = build_lexicon(
        options.pairs,
        (options.source_text, options.target_text),
        options.output,
        (options.source_lang, options.target_lang),
        settings,
    )
    print(_describe(counts, settings) + "\n")
    print(markdown_table(_table(options, settings.examples, coverage)))
    return 0


def _describe(counts: LexiconCounts, settings: LexiconSettings) -> str:
    alone = "kept, alone" if settings.keep_phrases_alone else "left out"
    return (
        f"{counts.read:,} phrase pairs: {counts.empty:,} without letters, {counts.repeated:,} repeated and "
        f"{counts.near_copies:,} near-copies left out; {counts.without_examples:,} without an example sentence on one side "
        f"{alone}; {counts.not_drawn:,} beyond --limit"
    )


def _table(options: Options, most: int, coverage: dict[str, SplitCoverage]) -> list[list[object]]:
    rows: list[list[object]] = [["set", "pairs"]]
    for language in (options.source_lang, options.target_lang):
        rows[0] += [f"{language} phrases", "examples each", f"with {most}"]
    for name, part in coverage.items():
        sides = zip(part.phrases, part.examples, part.full)
        rows.append(
            [options.output / name, f"{part.pairs:,}"]
            + [cell for n, mean, full in sides for cell in (f"{n:,}", f"{mean:.1f}", f"{full:.0%}")]
        )
    return rows


main = command(HELP, build, Options, LexiconSettings)
