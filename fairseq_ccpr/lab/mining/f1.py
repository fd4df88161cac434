"""F1 of sentence pairs: of answers, by thresholds with and without labels, and whether two methods differ in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, bootstrap

BLOCK_SOURCES = 1024  # that are matched at a time
ROUNDS = 5  # of estimation
FEWEST = 20  # sources that surely have a partner, even if they seem to be fewer
RESAMPLES = 5000
BATCH = 250  # resamples at a time, so that memory stays small
SEED = 1


@dataclass
class Answers:
    """The likeliest partner of each of S sentences, whether or not it is likely enough."""

    partners: np.ndarray  # int64 [S], -1 for none
    scores: np.ndarray  # float64 [S], a probability or a margin; 0 where there is no partner

    def spread(self, rows: np.ndarray, sentences: int) -> Answers:
        """Expand to `sentences` answers, of which these belong to `rows`, int64 [S]; the others have no partner."""
        spread = Answers(np.full(sentences, -1), np.zeros(sentences))
        spread.partners[rows], spread.scores[rows] = self.partners, self.scores
        return spread


# n sources, and the target that is hidden from each (-1: none) -> the likeliest target of each, both int64
# [n]. What is hidden is as good as missing.
Matcher = Callable[[np.ndarray, np.ndarray], Answers]


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
    """Compare decisions with the truth, both int64 [S], -1 for none."""
    right, given, pairs = (
        int(cases.sum()) for cases in ((decided == gold) & (gold >= 0), decided >= 0, gold >= 0)
    )
    return Score(right / max(given, 1), right / max(pairs, 1), 2 * right / max(given + pairs, 1))


def f1_by_threshold(answers: Answers, gold: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Compute F1 for each of P thresholds, float64 [P]."""
    given = (answers.scores >= thresholds[:, None]) & (answers.partners >= 0)  # [P, S]
    right = given & (answers.partners == gold)
    # 2 right / (given + gold) is the harmonic mean of right / given and right / gold.
    return 2 * right.sum(axis=1) / np.maximum(given.sum(axis=1) + (gold >= 0).sum(), 1)


def steadiest(values: np.ndarray) -> tuple[int, ...]:
    """Locate the highest value of a grid; of equal ones, that with the highest values around it; of those, the first.

    On a hundred sentences many settings do equally well, and one next to a cliff is the wrong one to take.

    >>> steadiest(np.array([0.5, 0.9, 0.1, 0.8, 0.9, 0.8]))
    (4,)
    """
    around = values
    for axis in range(values.ndim):
        padded = np.pad(
            around, [(1, 1) if other == axis else (0, 0) for other in range(values.ndim)], mode="edge"
        )
        around = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=axis).mean(axis=-1)
    best = np.flatnonzero(values.ravel() == values.max())
    chosen = best[around.ravel()[best].round(9).argmax()]
    return tuple(int(index) for index in np.unravel_index(chosen, values.shape))


def tuned_threshold(answers: Answers, gold: np.ndarray) -> tuple[float, float]:
    """Choose the threshold among all that separate the answers differently: it, and its F1."""
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
    scores: tuple[list[np.ndarray], list[np.ndarray]] = [np.empty(0)], [np.empty(0)]
    for start in range(0, sources, BLOCK_SOURCES):
        rows = np.arange(start, min(start + BLOCK_SOURCES, sources))
        hidden = np.full(len(rows), -1)
        for found in scores:
            answers = match(rows, hidden)
            found.append(np.where(answers.partners >= 0, answers.scores, -np.inf))
            hidden = answers.partners
    return estimated_threshold(*map(np.concatenate, scores))


def estimated_threshold(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Estimate the threshold of the highest F1 from scores alone.

    Where a source has a partner, its second score is the best of the wrong ones, and so is the only score of
    a source without one. With F_2 the distribution of second scores, of sources that surely have partners:

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
        wrong = np.sort(by_score[: max(FEWEST, round(sure))])
        alone = min(1 - 1 / len(first), 2 * float(np.mean(first < np.median(wrong))))
        false = alone * (1 - np.searchsorted(wrong, thresholds) / len(wrong))
        f1 = 2 * (given - false) / (given + 1 - alone)
        best = int(f1.argmax())
        sure = given[best] * len(first)
    return Estimate(float(thresholds[best]), 1 - alone, min(1.0, float(f1[best])))


def _between(scores: np.ndarray) -> np.ndarray:
    distinct = np.unique(scores)
    return np.concatenate([distinct[:1], (distinct[1:] + distinct[:-1]) / 2, distinct[-1:] + 1])


def mcnemar(one: np.ndarray, two: np.ndarray) -> float:
    """Compute the p-value of McNemar's exact test, over the cases, bool [S], where only one of two methods is right."""
    only_one, only_two = int((one & ~two).sum()), int((two & ~one).sum())
    return float(binomtest(only_one, only_one + only_two).pvalue) if only_one + only_two else 1.0


@dataclass
class Outcome:
    """The outcome for each of S sources in one test."""

    sources: np.ndarray  # int64 [S], names of the sources, the same in all tests
    decided: np.ndarray  # int64 [S], the target that was given, or -1
    gold: np.ndarray  # int64 [S], the right one, or -1

    def counts(self) -> np.ndarray:
        """Count what is right, what was given, and what there was to find: int64 [S, 3]."""
        return (
            np.stack([(self.decided == self.gold) & (self.gold >= 0), self.decided >= 0, self.gold >= 0], 1)
            * 1
        )


class Difference(NamedTuple):
    """How far a system's F1, of all tests together, is from the baseline's."""

    f1: float
    low: float  # of the interval that holds 95% of the resamples
    high: float
    p: float  # two-sided: how often a resample has the other sign, twice


def compare(baseline: Sequence[Outcome], system: Sequence[Outcome]) -> Difference:
    """Resample sources, with all that became of each in all tests, and compare the F1 of two systems.

    A source that several tests have drawn counts as one, so that tests may share sentences.
    """
    _, places = np.unique(np.concatenate([outcome.sources for outcome in baseline]), return_inverse=True)
    both = np.concatenate(
        [np.concatenate([o.counts() for o in tests]) for tests in (baseline, system)], axis=1
    )
    # right, given, gold of the baseline, then of the system
    sums = [np.bincount(places, column) for column in both.T]
    value = float(_difference(*sums, axis=-1))
    if len(sums[0]) < 2:
        return Difference(value, value, value, 1.0)
    drawn = bootstrap(
        sums,
        _difference,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=BATCH,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    differences = drawn.bootstrap_distribution
    beyond = min((differences <= 0).sum(), (differences >= 0).sum())
    p = min(1.0, 2 * (float(beyond) + 1) / (len(differences) + 1))
    low, high = drawn.confidence_interval
    return Difference(value, float(low), float(high), p)


def _difference(*counts: np.ndarray, axis: int) -> np.ndarray:
    one, other = (
        2 * right.sum(axis) / np.maximum(given.sum(axis) + gold.sum(axis), 1)
        for right, given, gold in (counts[:3], counts[3:])
    )
    return other - one


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p for as many comparisons (Holm, 1979); SciPy has only corrections of the false discovery rate."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(1, np.maximum.accumulate(raised))
    return corrected.tolist()
