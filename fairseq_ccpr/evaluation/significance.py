"""Any number of systems on one test set: BLEU, chrF and TER, with paired bootstrap resampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest


@dataclass
class SystemsComparison:
    """A row a system, the first being the baseline, and how it was computed."""

    rows: list[dict[str, Any]]  # system; for each metric its score, and against the baseline p
    signatures: dict[str, str]


def compare_systems(systems: dict[str, list[str]], references: list[list[str]], samples: int) -> SystemsComparison:
    """Score systems, and test each against the first (Koehn, 2004), with sacrebleu.

    Args:
        systems: translations by name, line by line.
        references: one list of lines for each reference translation.
        samples: of the bootstrap.
    """
    metrics: dict[str, Metric] = {
        "BLEU": BLEU(references=references),
        "chrF": CHRF(references=references),
        "TER": TER(references=references),
    }
    named: list[tuple[str, Sequence[str]]] = [
        (f"{'Baseline: ' if number == 0 else ''}{name}", lines) for number, (name, lines) in enumerate(systems.items())
    ]
    signatures, scores = PairedTest(named, metrics, references=None, test_type="bs", n_samples=samples)()
    columns = [column for column in scores if column != "System"]  # sacrebleu says chrF2 for chrF
    rows = []
    for number, name in enumerate(systems):
        row: dict[str, Any] = {"system": name}
        for metric, column in zip(metrics, columns):
            result = scores[column][number]
            assert not isinstance(result, str)  # the names alone are
            row[metric] = round(result.score, 2)
            row[f"{metric} p"] = None if result.p_value is None else round(result.p_value, 4)
        rows.append(row)
    return SystemsComparison(rows, {name: signature.format() for name, signature in signatures.items()})
