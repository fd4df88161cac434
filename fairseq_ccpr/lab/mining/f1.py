"""Precision, recall and F1 of sentence pairs, and McNemar's test whether two methods differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

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
