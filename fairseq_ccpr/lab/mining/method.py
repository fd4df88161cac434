"""What a method of mining is, the grid of settings that tuning tries, and thresholds estimated from text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from fairseq_ccpr.lab.mining.encoded_text import EncodedText
from fairseq_ccpr.lab.mining.f1 import f1_by_threshold
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.lab.mining.pknn import Answers


@dataclass(frozen=True)
class Grid:
    """Values of RFR: table 2 of the paper, and larger beta for encoders to which all texts are alike, such as e5."""

    k: tuple[int, ...] = tuple(range(5, 51, 5))
    beta: tuple[float, ...] = (*range(50, 101, 5), 200, 500, 1000, 2000, 5000)
    keep: tuple[float, ...] = tuple(i / 10 for i in range(1, 11))
    threshold: tuple[float, ...] = tuple(i / 10 for i in range(11))


def steadiest(values: np.ndarray) -> tuple[int, ...]:
    """Locate the highest value of a grid; of equal ones, that with the highest values around it; of those, the first.

    On a hundred sentences many settings do equally well, and one next to a cliff is the wrong one to take.

    >>> steadiest(np.array([0.5, 0.9, 0.1, 0.8, 0.9, 0.8]))
    (4,)
    """
    around = values
    for axis in range(values.ndim):
        padded = np.pad(around, [(1, 1) if other == axis else (0, 0) for other in range(values.ndim)], mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=axis)
        around = windows.mean(axis=-1)
    best = np.flatnonzero(values.ravel() == values.max())
    chosen = best[around.ravel()[best].round(9).argmax()]
    return tuple(int(index) for index in np.unravel_index(chosen, values.shape))


# n sources, and the target that is hidden from each (-1: none) -> the likeliest target of each, both int64 [n]
Matcher = Callable[[np.ndarray, np.ndarray], Answers]


class MiningMethod(Protocol):
    """A way to find the translations of sentences: a frozen dataclass whose fields are its settings.

    A method is a file with such a class and a line in `METHODS`. Miner, trials, tuning and files of settings know
    no more of it than this.

    Attributes:
        name: in files of settings and after `--method`.
        window: words of the fragments that its keys are made from; None where sentences are compared as wholes.
        stride: words from one fragment to the next.
        centred: whether its keys are to be centred, each side by itself; see `Centre`.
        threshold: the score from which a pair is one.
    """

    name: ClassVar[str]
    centred: ClassVar[bool]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def window(self) -> int | None: ...  # noqa: D102

    @property
    def stride(self) -> int: ...  # noqa: D102

    @property
    def threshold(self) -> float: ...  # noqa: D102

    def keys(self, text: EncodedText) -> SentenceKeys:
        """Make the keys of a text; `text` has vectors of fragments only if there is a window."""

    def matcher(self, sources: SearchableText, targets: SearchableText) -> Matcher:
        """Prepare to match any of the sources with the targets; both are searchable by the keys of this method.

        Hiding a target from a source gives the answer that the source would have if its partner were not there.
        """

    def tune(
        self, sources: SearchableText, targets: SearchableText, labels: Labels, grid: Grid
    ) -> tuple[MiningMethod, float]:
        """Choose the settings with the highest F1.

        Args:
            sources: the text that the labelled sources are part of.
            targets: what they are matched with.
            labels: what is known of some of the sources.
            grid: values to try, for methods that need some.

        Returns:
            This method with those settings, and its F1.
        """


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
