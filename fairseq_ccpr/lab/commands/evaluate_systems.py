"""`fairseq-ccpr evaluate systems`: which of several translations of a test set is better, and whether by chance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from fairseq_ccpr.cli.command import command, markdown_table, write_results
from fairseq_ccpr.common_options import count_option, json_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.near_duplicates import NEAR, highest_resemblance
from fairseq_ccpr.lab.accuracy.significance import SystemsComparison, compare_systems
from fairseq_ccpr.settings import option
from fairseq_ccpr.text.pairs import read_lines

HELP = """\
BLEU, chrF and TER of any number of translations of one test set, each compared with the first by paired bootstrap resampling
as in sacrebleu: the difference, its 95% interval, and p, the probability of a difference as large between equal systems.

  fairseq-ccpr evaluate systems reference.txt base=base.txt knn=knn.txt clknn=clknn.txt
  fairseq-ccpr evaluate systems reference.txt base=base.txt knn=knn.txt --unlike train.tsv

The second command adds the scores of the sentences that have no near-duplicate in the training text.

Files are detokenised text, one sentence per line, plain, .gz or .xz, such as fairseq-ccpr compare --results-path writes.
"""


@dataclass
class Options:
    """The command's options."""

    reference: Path = option(help="reference translation", positional=True, metavar="REFERENCE")
    systems: list[str] = option(
        help="translations; the first is the baseline", positional=True, nargs="+", metavar="[NAME=]FILE"
    )
    more_references: list[Path] = option([], "further references of the same sentences", nargs="+", metavar="FILE")
    unlike: Optional[Path] = option(
        None,
        "score again without sentences whose reference has a near-duplicate in this text, TSV of sentence pairs or target "
        f"sentences: with a word-set Jaccard similarity of {NEAR} or more",
        metavar="TEXT",
    )
    samples: int = count_option(1000, "bootstrap samples")
    json: Optional[Path] = json_option()


def read_text(path: Path) -> list[str]:
    """Read the lines of a text."""
    try:
        return list(read_lines(path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror})") from None


def as_markdown(comparison: SystemsComparison) -> str:
    """Write the table: columns of score, difference and p for each metric."""
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


def compare(options: Options) -> int:
    """Read, score, print."""
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
    results = asdict(comparison)
    if options.unlike is not None:
        rest = unlike(options.unlike, references[0])
        chosen = {name: [lines[i] for i in rest] for name, lines in systems.items()}
        apart = compare_systems(chosen, [[lines[i] for i in rest] for lines in references], options.samples)
        print(f"\n{as_markdown(apart)}\n\n{len(rest):,} sentences without a near-duplicate in {options.unlike}")
        results["unlike"] = {"text": options.unlike.name, "below": NEAR, "sentences": len(rest), "rows": apart.rows}
    for metric, signature in comparison.signatures.items():
        print(f"{metric} {signature}")
    if options.json:
        write_results(options.json, results)
    return 0


def unlike(path: Path, references: list[str]) -> list[int]:
    """Return the numbers of the references without a near-duplicate among the target sentences of a text.

    Raises:
        ConfigurationError: none is left.
    """
    targets = [line.split("\t")[1] if "\t" in line else line for line in read_text(path)]
    rest = np.flatnonzero(highest_resemblance(references, targets) < NEAR).tolist()
    if not rest:
        raise ConfigurationError(
            f"--unlike {path}: every reference has a near-duplicate there, so there is nothing to score; is it the test set?"
        )
    return rest


main = command(HELP, compare, Options)
