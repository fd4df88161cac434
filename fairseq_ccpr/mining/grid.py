"""Choosing settings by labelled sentences: the whole grid from one search."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fairseq_ccpr.mining.f1 import f1_by_threshold
from fairseq_ccpr.mining.pknn import Answers, answer, distributions, entropy_ranks
from fairseq_ccpr.mining.settings import MarginSettings, RfrSettings


@dataclass(frozen=True)
class Grid:
    """What is tried: table 2 of the paper, and more of beta, for encoders to which all texts are alike, such as e5."""

    k: tuple[int, ...] = tuple(range(5, 51, 5))
    beta: tuple[float, ...] = (*range(50, 101, 5), 200, 500, 1000, 2000, 5000)
    keep: tuple[float, ...] = tuple(i / 10 for i in range(1, 11))
    threshold: tuple[float, ...] = tuple(i / 10 for i in range(11))


def tune_rfr(
    cosines: np.ndarray, classes: np.ndarray, owners: np.ndarray, gold: np.ndarray, grid: Grid, base: RfrSettings
) -> tuple[RfrSettings, float]:
    """The settings of a grid with the highest F1, and that F1.

    Args:
        cosines: [F, k] of the most neighbours the grid has, highest first, -inf where there is none.
        classes: int64 [F, k], the sentence of each neighbour.
        owners: int64 [F], the sentence of each fragment; ascending.
        gold: int64 [S], each sentence's partner or -1.
        grid: what to try.
        base: the settings that are not tuned.
    """
    thresholds = np.array(grid.threshold)
    f1 = np.empty((len(grid.k), len(grid.beta), len(grid.keep), len(thresholds)))
    for i, k in enumerate(grid.k):
        for j, beta in enumerate(grid.beta):
            found = distributions(cosines[:, :k], classes[:, :k], beta, base.entropy_over)
            ranks = entropy_ranks(found.entropies, owners)
            for m, keep in enumerate(grid.keep):
                answers = answer(found, ranks, owners, len(gold), keep)
                f1[i, j, m] = f1_by_threshold(answers, gold, thresholds)
    at = steadiest(f1)
    i, j, m, n = at
    tuned = replace(base, k=grid.k[i], beta=grid.beta[j], keep=grid.keep[m], threshold=grid.threshold[n])
    return tuned, float(f1[at])


def tune_margin(answers: Answers, gold: np.ndarray, base: MarginSettings) -> tuple[MarginSettings, float]:
    """The threshold with the highest F1, of all those that part the answers differently, and that F1."""
    scores = np.unique(answers.scores)
    thresholds = np.concatenate([scores[:1], (scores[1:] + scores[:-1]) / 2, scores[-1:] + 1])
    f1 = f1_by_threshold(answers, gold, thresholds)
    at = steadiest(f1)
    return replace(base, threshold=float(thresholds[at])), float(f1[at])


def steadiest(values: np.ndarray) -> tuple[int, ...]:
    """Where a grid has its highest value; of equal ones, where those around are highest; of equal ones again, the first.

    A hundred sentences leave many settings equal, and one at the edge of a cliff is the wrong one to take.

    >>> steadiest(np.array([0.5, 0.9, 0.1, 0.8, 0.9, 0.8]))
    (4,)
    """
    around = values
    for axis in range(values.ndim):
        padded = np.pad(around, [(1, 1) if other == axis else (0, 0) for other in range(values.ndim)], mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=axis)
        around = windows.mean(axis=-1)
    best = np.flatnonzero(values.ravel() == values.max())
    place = best[around.ravel()[best].round(9).argmax()]
    return tuple(int(at) for at in np.unravel_index(place, values.shape))
