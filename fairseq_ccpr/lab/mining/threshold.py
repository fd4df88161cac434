"""The score from which a pair is accepted: set by labels or, without any, by the second-best scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fairseq_ccpr.lab.mining.f1 import f1_by_threshold
from fairseq_ccpr.lab.mining.grid import steadiest
from fairseq_ccpr.lab.mining.method import Matcher
from fairseq_ccpr.lab.mining.pknn import Answers

BLOCK_SOURCES = 1024  # that are matched at a time
ROUNDS = 5  # of estimation
LEAST = 20  # sources that surely have a partner, even if they seem to be fewer


def tuned_threshold(answers: Answers, gold: np.ndarray) -> tuple[float, float]:
    """Choose the threshold among all that separate the answers differently: it, and its F1.

    Args:
        answers: of S sources.
        gold: int64 [S], the partner of each or -1.
    """
    thresholds = _between(answers.scores)
    f1 = f1_by_threshold(answers, gold, thresholds)
    best = steadiest(f1)
    return float(thresholds[best]), float(f1[best])


class Estimate(NamedTuple):
    """A threshold without labels, and what was estimated on the way."""

    threshold: float
    share: float  # of the sources that have a partner
    f1: float


def estimate(match: Matcher, sources: int) -> Estimate:
    """Match all sources, then again with each one's answer hidden from it, and estimate the threshold."""
    first, second = [np.empty(0)], [np.empty(0)]
    for start in range(0, sources, BLOCK_SOURCES):
        rows = np.arange(start, min(start + BLOCK_SOURCES, sources))
        answers = match(rows, np.full(len(rows), -1))
        first.append(_scores(answers))
        second.append(_scores(match(rows, answers.partners)))
    return estimated_threshold(np.concatenate(first), np.concatenate(second))


def _scores(answers: Answers) -> np.ndarray:
    return np.where(answers.partners >= 0, answers.scores, -np.inf)


def estimated_threshold(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Estimate the threshold of the highest F1 from scores alone.

    Where a source has a partner, its second score is the best of the wrong ones, and so is the only score of a source
    without one. With F_2 the distribution of second scores, of sources that surely have partners:

        1 - pi = 2 P(s_1 < median of F_2)                   the share of sources without a partner
        FP(t)  = (1 - pi) P(s_2 >= t),    TP(t) = P(s_1 >= t) - FP(t)
        F1(t)  = 2 TP(t) / (P(s_1 >= t) + pi)

    Those are the sources above the median at first, and then, again and again, those above the threshold.

    Args:
        first: [S], the score of each source's answer, -inf where it has none.
        second: [S], the score when that answer is taken out; likewise.
    """
    if not np.isfinite(first).any():
        return Estimate(0.0, 0.0, 0.0)
    thresholds = _between(first[np.isfinite(first)])
    given = 1 - np.searchsorted(np.sort(first), thresholds) / len(first)
    by_score = second[np.argsort(-first, kind="stable")]
    sure = len(first) / 2
    for _ in range(ROUNDS):
        wrong = np.sort(by_score[: max(LEAST, round(sure))])
        alone = min(1 - 1 / len(first), 2 * float(np.mean(first < np.median(wrong))))
        false = alone * (1 - np.searchsorted(wrong, thresholds) / len(wrong))
        f1 = 2 * (given - false) / (given + 1 - alone)
        best = int(f1.argmax())
        sure = given[best] * len(first)
    return Estimate(float(thresholds[best]), 1 - alone, min(1.0, float(f1[best])))


def _between(scores: np.ndarray) -> np.ndarray:
    """List a threshold below all scores, those midway between neighbouring ones, and one above all."""
    distinct = np.unique(scores)
    return np.concatenate([distinct[:1], (distinct[1:] + distinct[:-1]) / 2, distinct[-1:] + 1])
