"""Tables and curves of the mining benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairseq_ccpr.lab.mining.benchmark import MiningResult
from fairseq_ccpr.lab.mining.benchmark_settings import ABLATIONS, BASELINE
from fairseq_ccpr.lab.mining.f1 import compare, holm

Rows = list[list[Any]]


def main_table(results: Sequence[MiningResult], non_pairing: float) -> Rows:
    """Tabulate F1, precision and recall of each system, of the first draw and tuning set; and F1 without labels."""
    rows: Rows = [["set", "encoder", "system", "F1", "precision", "recall", "p", "F1 without labels"]]
    for result in _main_test(results, non_pairing):
        if result.system not in ABLATIONS:
            numbers = [_percent(value) for value in (result.f1, result.precision, result.recall)]
            last = _percent(result.unlabelled_f1)
            rows.append([result.set, result.encoder, result.system, *numbers, p_value(result.p), last])
    return rows


def ablation_table(results: Sequence[MiningResult], non_pairing: float) -> Rows:
    """Tabulate F1 of all systems, a row for each set and encoder."""
    chosen = _main_test(results, non_pairing)
    systems = list(dict.fromkeys(result.system for result in chosen))
    rows: Rows = [["set", "encoder", *systems]]
    for key in dict.fromkeys((result.set, result.encoder) for result in chosen):
        cells = {r.system: _percent(r.f1) for r in chosen if (r.set, r.encoder) == key}
        rows.append([*key, *(cells[system] for system in systems)])
    return rows


def curve_table(results: Sequence[MiningResult]) -> Rows:
    """Tabulate F1 by the fraction of non-pairing sentences: figure 2 of the paper."""
    chosen = _of_curve(results)
    shares = sorted({result.non_pairing for result in chosen})
    rows: Rows = [["set", "encoder", "system", *(f"{fraction:.0%}" for fraction in shares)]]
    for key in dict.fromkeys((result.set, result.encoder, result.system) for result in chosen):
        by_fraction = {r.non_pairing: r.f1 for r in chosen if (r.set, r.encoder, r.system) == key}
        rows.append(
            [*key, *(_percent(by_fraction[fraction]) if fraction in by_fraction else "" for fraction in shares)]
        )
    return rows


def spread_table(results: Sequence[MiningResult], non_pairing: float, labels: bool) -> Rows:
    """Tabulate the mean of F1 over all tests and tuning sets, and its standard deviation: table 8 of the paper.

    Args:
        results: of any tests.
        non_pairing: fraction of the tests that count.
        labels: whether thresholds are tuned; otherwise scores alone set them.
    """
    chosen = [r for r in results if r.non_pairing == non_pairing and r.system not in ABLATIONS]
    systems = list(dict.fromkeys(result.system for result in chosen))
    rows: Rows = [["set", "encoder", *systems]]
    for key in dict.fromkeys((result.set, result.encoder) for result in chosen):
        of_key = [r for r in chosen if (r.set, r.encoder) == key]
        values = [[r.f1 if labels else r.unlabelled_f1 for r in of_key if r.system == system] for system in systems]
        rows.append([*key, *(f"{100 * np.mean(v):.1f} ± {100 * np.std(v, ddof=1):.1f}" for v in values)])
    return rows


@dataclass(frozen=True)
class Comparison:
    """How far a system is from the baseline over all tests and tuning sets of a set and an encoder, and how surely."""

    set: str
    encoder: str
    system: str
    labels: bool  # whether thresholds are tuned; otherwise scores alone set them
    difference: float
    interval: tuple[float, float]
    p: float
    holm: float  # p, corrected for all systems, sets and encoders


def comparisons(results: Sequence[MiningResult], non_pairing: float, labels: bool) -> list[Comparison]:
    """Compare each system with the baseline.

    Args:
        results: of any tests.
        non_pairing: fraction of the tests that count.
        labels: see `Comparison`.
    """
    outcomes = defaultdict(list)
    for r in results:
        if r.non_pairing == non_pairing and r.system not in ABLATIONS:
            outcomes[r.set, r.encoder, r.system].append(r.outcome if labels else r.unlabelled)
    keys = [key for key in outcomes if key[2] != BASELINE]
    found = [compare(outcomes[(*key[:2], BASELINE)], outcomes[key]) for key in keys]
    corrected = holm([each.p for each in found])
    return [
        Comparison(*key, labels, each.f1, (each.low, each.high), each.p, p)
        for key, each, p in zip(keys, found, corrected)
    ]


def comparison_table(compared: Sequence[Comparison]) -> Rows:
    """Tabulate differences in F1, with the intervals that hold 95% of the resamples."""
    rows: Rows = [["set", "encoder", "system", "difference", "interval", "p", "p, Holm"]]
    for one in compared:
        low, high = (f"{100 * end:+.1f}" for end in one.interval)
        numbers = f"{100 * one.difference:+.1f}", f"{low} to {high}", p_value(one.p), p_value(one.holm)
        rows.append([one.set, one.encoder, one.system, *numbers])
    return rows


def curves(results: Sequence[MiningResult]) -> dict[str, dict[float, float]]:
    """Collect F1 in per cent by fraction of non-pairing sentences, for each set, encoder and system."""
    by_name: dict[str, dict[float, float]] = {}
    for result in _of_curve(results):
        name = f"{result.set}, {result.encoder}, {result.system}"
        by_name.setdefault(name, {})[result.non_pairing] = 100 * result.f1
    return {name: dict(sorted(points.items())) for name, points in by_name.items()}


def _of_curve(results: Sequence[MiningResult]) -> list[MiningResult]:
    return [r for r in results if r.draw == r.tuning_set == 0 and r.system not in ABLATIONS]


def p_value(p: float | None) -> str:
    """Format a probability for a table.

    >>> p_value(None), p_value(0.0312), p_value(1e-9)
    ('', '.031', '< .001')
    """
    if p is None:
        return ""
    return "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def _main_test(results: Sequence[MiningResult], non_pairing: float) -> list[MiningResult]:
    return [r for r in results if r.draw == r.tuning_set == 0 and r.non_pairing == non_pairing]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
