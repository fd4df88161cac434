"""Whether two systems differ in F1 over several tests: paired bootstrap over sources, and Holm's correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.stats import bootstrap

RESAMPLES = 5000
BATCH = 250  # resamples at a time, so that memory stays small
SEED = 1


@dataclass
class Outcome:
    """The outcome for each of S sources in one test.

    Attributes:
        sources: int64 [S], names of the sources, the same in all tests.
        decided: int64 [S], the target that was given, or -1.
        gold: int64 [S], the right one, or -1.
    """

    sources: np.ndarray
    decided: np.ndarray
    gold: np.ndarray

    def counts(self) -> np.ndarray:
        """Count what is right, what was given, and what there was to find: int64 [S, 3]."""
        return np.stack([(self.decided == self.gold) & (self.gold >= 0), self.decided >= 0, self.gold >= 0], 1) * 1


class Difference(NamedTuple):
    """How far a system's F1, of all tests together, is from the baseline's."""

    f1: float
    low: float  # of the interval that holds 95% of the resamples
    high: float
    p: float  # two-sided: how often a resample has the other sign, twice


def compare(baseline: Sequence[Outcome], system: Sequence[Outcome]) -> Difference:
    """Resample sources, with all that became of each in all tests, and compare the F1 of two systems.

    A source that several tests have drawn counts as one, so that tests may share sentences.

    Args:
        baseline: of the tests.
        system: of the same tests, in the same order.
    """
    names = np.concatenate([outcome.sources for outcome in baseline])
    _, places = np.unique(names, return_inverse=True)
    both = np.concatenate([np.concatenate([o.counts() for o in tests]) for tests in (baseline, system)], axis=1)
    sums = [np.bincount(places, column) for column in both.T]  # right, given, gold of the baseline, then of the system
    value = float(partial(_difference, axis=-1)(*sums))
    if len(sums[0]) < 2:
        return Difference(value, value, value, 1.0)
    drawn = bootstrap(
        sums, _difference, paired=True, vectorized=True, n_resamples=RESAMPLES, batch=BATCH, method="percentile",
        rng=np.random.default_rng(SEED),
    )  # fmt: skip
    differences = drawn.bootstrap_distribution
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    p = min(1.0, 2 * (float(beyond) + 1) / (len(differences) + 1))
    low, high = drawn.confidence_interval
    return Difference(value, float(low), float(high), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p for as many comparisons (Holm, 1979); SciPy has only corrections of the false discovery rate.

    >>> holm([0.03, 0.01, 0.5])
    [0.06, 0.03, 0.5]
    """
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(1, np.maximum.accumulate(raised))
    return corrected.tolist()


def _difference(*counts: np.ndarray, axis: int) -> np.ndarray:
    """Subtract the F1 of the first three counts from that of the others: right, given and wanted of each."""
    one, other = (
        2 * right.sum(axis) / np.maximum(given.sum(axis) + wanted.sum(axis), 1)
        for right, given, wanted in (counts[:3], counts[3:])
    )
    return other - one
