"""`compare_systems.py`: which of several translations of a test set is better, and whether that may be chance."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, markdown_table, own_arguments, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.significance import SystemsComparison, compare_systems
from fairseq_ccpr.text.pairs import read_lines

HELP = """\
BLEU, chrF and TER of any number of translations of one test set, each against the first by paired bootstrap resampling
as sacrebleu does it: the difference, between which limits it lies in 95% of the samples, and p, the chance of one as large
between equal systems.

  compare_systems.py reference.txt base=base.txt knn=knn.txt clknn=clknn.txt

Files are detokenised text, a sentence a line, plain, .gz or .xz, such as compare_decoding.py --results-path writes.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="compare_systems.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("reference", type=Path, metavar="REFERENCE", help="reference translation")
    parser.add_argument("systems", nargs="+", metavar="[NAME=]FILE", help="translations; the first is the baseline")
    parser.add_argument(
        "--more-references",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="further references of the same sentences",
    )
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="bootstrap samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the same goes as JSON")
    return parser


def read_text(path: Path) -> list[str]:
    """The lines of a text."""
    try:
        return list(read_lines(path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror})") from None


def as_markdown(comparison: SystemsComparison) -> str:
    """The table, with columns of score, difference and p for each metric."""
    metrics = list(comparison.signatures)
    table: list[list[str]] = [["system", *(f"{m}{what}" for m in metrics for what in ("", " difference", " p"))]]
    for row in comparison.rows:
        cells = [row["system"]]
        for metric in metrics:
            difference, interval, p = (row[f"{metric} {what}"] for what in ("difference", "interval", "p"))
            beside = (
                ["", ""] if p is None else [f"{difference:+.2f} [{interval[0]:+.2f}, {interval[1]:+.2f}]", f"{p:.4g}"]
            )
            cells += [f"{row[metric]:.2f}", *beside]
        table.append(cells)
    return markdown_table(table)


def compare(options: argparse.Namespace) -> int:
    """Read, score, print."""
    if options.samples < 1:
        raise ConfigurationError(f"--samples is {options.samples}: give at least 1")
    references = [read_text(path) for path in [options.reference, *options.more_references]]
    systems: dict[str, list[str]] = {}
    for word in options.systems:
        name, _, file = word.rpartition("=")
        name = name or Path(file).stem
        if name in systems:
            raise ConfigurationError(f"two systems are called '{name}': name them, as in NAME={file}")
        systems[name] = read_text(Path(file))
    for name, lines in [*systems.items(), *zip(map(str, options.more_references), references[1:])]:
        if len(lines) != len(references[0]):
            raise ConfigurationError(
                f"'{name}' has {len(lines):,} lines, but {options.reference} has {len(references[0]):,}: "
                "give translations of the same sentences"
            )
    comparison = compare_systems(systems, references, options.samples)
    print(as_markdown(comparison))
    print(f"\n{len(references[0]):,} sentences; p against {next(iter(systems))}, {options.samples:,} bootstrap samples")
    for metric, signature in comparison.signatures.items():
        print(f"{metric} {signature}")
    if options.json:
        options.json.write_text(json.dumps(asdict(comparison), indent=2) + "\n", encoding="utf-8")
    return 0


def main() -> None:
    """Parse, compare, print."""
    options = make_parser().parse_args(own_arguments())
    run("compare_systems.py", lambda: compare(options))


if __name__ == "__main__":
    main()
