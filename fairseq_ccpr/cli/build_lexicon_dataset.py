"""`build_lexicon_dataset.py`: from a dictionary and unlabelled text to phrase pairs with example sentences."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, markdown_table, run
from fairseq_ccpr.phrases.lexicon_build import LexiconCounts, LexiconSettings, SplitCoverage, build_lexicon

HELP = """\
Find example sentences of the phrases of a dictionary in text of either language: what XPR is trained and tested on. The
texts need not be translations of each other.

  build_lexicon_dataset.py --pairs dictionary.tsv --source-text mono.de.txt --target-text mono.en.txt -s de -t en \\
    --output lexicon/de-en

An example has the phrase as whole words, in its very letters, and at least 10 characters more; which ones are taken depends
neither on the order of the text nor on repeated lines. Near-copies are left out (ROUGE-L over words above 0.5 both ways).
--output gets the folders train, valid and test, 3 : 1 : 1, and no string is in two of them; their format is described in
datastores/README.md.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="build_lexicon_dataset.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    add, default = parser.add_argument, LexiconSettings
    add("--pairs", required=True, type=Path, metavar="TSV", help="phrase pairs: source, tab, target")
    add("--source-text", required=True, nargs="+", type=Path, metavar="TEXT", help="source language, a sentence a line")
    add("--target-text", required=True, nargs="+", type=Path, metavar="TEXT", help="target language, a sentence a line")
    add("-s", "--source-lang", default="source", metavar="LANG", help="name of the source language")
    add("-t", "--target-lang", default="target", metavar="LANG", help="name of the target language")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to write; must not exist")
    add("--examples", type=int, default=default.examples, metavar="N", help="example sentences of a phrase, at most")
    add(
        "--keep-phrases-alone",
        action="store_true",
        help="keep phrases that no sentence has; they are encoded without one (they are left out, and counted)",
    )
    add(
        "--limit", type=int, metavar="N",
        help="take N of the pairs, always the same ones, and all others between their phrases (all)",
    )  # fmt: skip
    return parser


def build(options: argparse.Namespace) -> int:
    """Build, and say what came of it."""
    settings = LexiconSettings(options.examples, options.keep_phrases_alone, options.limit)
    counts, coverage = build_lexicon(
        options.pairs,
        (options.source_text, options.target_text),
        options.output,
        (options.source_lang, options.target_lang),
        settings,
    )
    print(_describe(counts, settings) + "\n")
    print(markdown_table(_table(options, coverage)))
    return 0


def _describe(counts: LexiconCounts, settings: LexiconSettings) -> str:
    alone = "kept, alone" if settings.keep_phrases_alone else "left out"
    return (
        f"{counts.read:,} phrase pairs: {counts.empty:,} without letters, {counts.repeated:,} repeated and "
        f"{counts.near_copies:,} near-copies left out; {counts.without_examples:,} without an example sentence on one side "
        f"{alone}; {counts.not_drawn:,} beyond --limit"
    )


def _table(options: argparse.Namespace, coverage: dict[str, SplitCoverage]) -> list[list[object]]:
    rows: list[list[object]] = [["set", "pairs"]]
    for language in (options.source_lang, options.target_lang):
        rows[0] += [f"{language} phrases", "examples each", f"with {options.examples}"]
    for name, part in coverage.items():
        sides = zip(part.phrases, part.examples, part.full)
        rows.append(
            [options.output / name, f"{part.pairs:,}"]
            + [cell for n, mean, full in sides for cell in (f"{n:,}", f"{mean:.1f}", f"{full:.0%}")]
        )
    return rows


def main() -> None:
    """Parse, build, print."""
    options = make_parser().parse_args()
    run("build_lexicon_dataset.py", lambda: build(options))


if __name__ == "__main__":
    main()
