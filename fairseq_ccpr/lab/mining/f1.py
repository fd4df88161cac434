"""Precision, recall and F1 of sentence pairs, and whether two methods differ (McNemar, Holm)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, bootstrap

from fairseq_ccpr.lab.mining.pknn import Answers


@dataclass(frozen=True)
class Score:
    """Of the pairs that are given, the fraction that is right; of all right pairs, that given; their harmonic mean."""

    precision: float
    recall: float
    f1: float


def decide(answers: Answers, threshold: float) -> np.ndarray:
    """Keep the partner of each sentence, int64 [S], or -1 where its score is below the threshold."""
    return np.where(answers.scores >= threshold, answers.partners, -1)


def score(decided: np.ndarray, gold: np.ndarray) -> Score:
    """Compare decisions with the truth.

    Args:
        decided: int64 [S], -1 for none.
        gold: int64 [S], likewise.

    >>> score(np.array([0, 2, -1, 3]), np.array([0, 1, 2, -1])).precision
    0.3333333333333333
    """
    right = int(((decided == gold) & (gold >= 0)).sum())
    return _score(right, int((decided >= 0).sum()), int((gold >= 0).sum()))


def f1_by_threshold(answers: Answers, gold: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Compute F1 for each of P thresholds, float64 [P]."""
    given = (answers.scores >= thresholds[:, None]) & (answers.partners >= 0)  # [P, S]
    right = given & (answers.partners == gold)
    # 2 right / (given + gold) is the harmonic mean of right / given and right / gold.
    return 2 * right.sum(axis=1) / np.maximum(given.sum(axis=1) + (gold >= 0).sum(), 1)


def mcnemar(one: np.ndarray, two: np.ndarray) -> float:
    """Compute the p-value of McNemar's exact test, over the cases where only one of two methods is right.

    Args:
        one: bool [S], where the first method is right.
        two: bool [S], where the second is.

    >>> right = np.array([True] * 10)
    >>> mcnemar(right, ~right), mcnemar(right, right)
    (0.001953125, 1.0)
    """
    only_one, only_two = int((one & ~two).sum()), int((two & ~one).sum())
    return float(binomtest(only_one, only_one + only_two).pvalue) if only_one + only_two else 1.0


def _score(right: int, given: int, gold: int) -> Score:
    return Score(right / max(given, 1), right / max(gold, 1), 2 * right / max(given + gold, 1))


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
