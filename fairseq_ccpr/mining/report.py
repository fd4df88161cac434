"""Tables and curves of the mining benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fairseq_ccpr.mining.benchmark import BASELINE, RFR, MiningResult

Rows = list[list[Any]]


def main_table(results: Sequence[MiningResult], non_pairing: float) -> Rows:
    """Tabulate F1, precision and recall of the baseline and RFR, with settings of the first tuning set."""
    rows: Rows = [["set", "encoder", "system", "F1", "precision", "recall", "p"]]
    for result in _main_test(results, non_pairing):
        if result.system in (BASELINE, RFR):
            numbers = [_percent(value) for value in (result.f1, result.precision, result.recall)]
            rows.append([result.set, result.encoder, result.system, *numbers, p_value(result.p)])
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
    """Tabulate F1 by the share of non-pairing sentences: figure 2 of the paper."""
    chosen = [result for result in results if result.tuning_set == 0 and result.system in (BASELINE, RFR)]
    shares = sorted({result.non_pairing for result in chosen})
    rows: Rows = [["set", "encoder", "system", *(f"{share:.0%}" for share in shares)]]
    for key in dict.fromkeys((result.set, result.encoder, result.system) for result in chosen):
        by_share = {r.non_pairing: r.f1 for r in chosen if (r.set, r.encoder, r.system) == key}
        rows.append([*key, *(_percent(by_share[share]) if share in by_share else "" for share in shares)])
    return rows


def tuning_table(results: Sequence[MiningResult], non_pairing: float) -> Rows:
    """Tabulate the mean and standard deviation of F1 over the tuning sets: table 8 of the paper."""
    chosen = [r for r in results if r.non_pairing == non_pairing and r.system in (BASELINE, RFR)]
    rows: Rows = [["set", "encoder", BASELINE, RFR]]
    for key in dict.fromkeys((result.set, result.encoder) for result in chosen):
        values = [[r.f1 for r in chosen if (r.set, r.encoder, r.system) == (*key, s)] for s in (BASELINE, RFR)]
        rows.append([*key, *(f"{100 * np.mean(v):.1f} ± {100 * np.std(v, ddof=1):.1f}" for v in values)])
    return rows


def curves(results: Sequence[MiningResult]) -> dict[str, dict[float, float]]:
    """Collect F1 in per cent by share of non-pairing sentences, for each set, encoder and system."""
    by_name: dict[str, dict[float, float]] = {}
    for result in results:
        if result.tuning_set == 0 and result.system in (BASELINE, RFR):
            name = f"{result.set}, {result.encoder}, {result.system}"
            by_name.setdefault(name, {})[result.non_pairing] = 100 * result.f1
    return {name: dict(sorted(points.items())) for name, points in by_name.items()}


def p_value(p: float | None) -> str:
    """Format a probability for a table.

    >>> p_value(None), p_value(0.0312), p_value(1e-9)
    ('', '.031', '< .001')
    """
    if p is None:
        return ""
    return "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def _main_test(results: Sequence[MiningResult], non_pairing: float) -> list[MiningResult]:
    return [r for r in results if r.tuning_set == 0 and r.non_pairing == non_pairing]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
