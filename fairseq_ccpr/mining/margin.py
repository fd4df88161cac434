"""The margin-ratio baseline (Artetxe and Schwenk, 2019): how much nearer a pair is than its neighbourhood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fairseq_ccpr.mining.encoded_text import EncodedText
from fairseq_ccpr.mining.f1 import f1_by_threshold
from fairseq_ccpr.mining.grid import Grid, steadiest
from fairseq_ccpr.mining.method import Matcher
from fairseq_ccpr.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.mining.pknn import DECIMALS, Answers
from fairseq_ccpr.settings import option


@dataclass(frozen=True)
class MarginMethod:
    """Matches whole sentences by their margins, searching in both directions; see `MiningMethod`."""

    name: ClassVar[str] = "margin"
    window: ClassVar[None] = None

    threshold: float = option(1.0, "the margin below which there is no pair")
    k: int = option(4, "neighbours of a sentence in either direction", within="[1, inf)", needs="at least 1")

    def keys(self, text: EncodedText) -> SentenceKeys:
        """Take a key a sentence, for those that have words."""
        owners = np.unique(text.text.owners)
        return SentenceKeys(text.sentences[owners], owners, len(text.text.sentences))

    def matcher(self, targets: SearchableText, sources: Callable[[], SearchableText]) -> Matcher:
        """Prepare to match; targets search among the sources when they are first found."""
        source_keys = sources().keys
        back_means = np.full(len(targets.keys), np.nan)  # m_y

        def match(queries: SentenceKeys) -> Answers:
            cosines, ids = targets.keys.search(queries.keys, self.k)
            found = np.unique(ids[ids >= 0])
            new = found[np.isnan(back_means[found])]
            back_means[new] = mean_of_found(source_keys.search(targets.keys.keys_of(new), self.k)[0])
            answers = margin_answers(cosines, ids, back_means, targets.owners)
            return answers.spread(queries.owners, queries.sentences)

        return match

    def tune(
        self, queries: SentenceKeys, gold: np.ndarray, targets: SearchableText, sources: Callable[[], SearchableText],
        grid: Grid,
    ) -> tuple[MarginMethod, float]:  # fmt: skip
        """Choose the threshold among all that separate the answers differently, whatever the grid has."""
        answers = self.matcher(targets, sources)(queries)
        scores = np.unique(answers.scores)
        thresholds = np.concatenate([scores[:1], (scores[1:] + scores[:-1]) / 2, scores[-1:] + 1])
        f1 = f1_by_threshold(answers, gold, thresholds)
        best = steadiest(f1)
        return replace(self, threshold=float(thresholds[best])), float(f1[best])


def margin_answers(cosines: np.ndarray, ids: np.ndarray, back_means: np.ndarray, targets: np.ndarray) -> Answers:
    """Choose for each source sentence the neighbour of the highest margin, cos(x, y) / ((m_x + m_y) / 2).

    m_x is the mean cosine of x and its k neighbours among the targets, m_y that of y and its k among the sources.

    Args:
        cosines: [S, k], -inf where there is no neighbour.
        ids: int64 [S, k], rows of the target index, -1 where there is none.
        back_means: float64 [T], m_y.
        targets: int64 [T], the sentence of each row.

    Returns:
        Partners and margins; of equal margins the lower sentence.
    """
    found = ids >= 0
    forward = mean_of_found(cosines)
    around = (forward[:, None] + np.append(back_means, 0.0)[ids]) / 2
    # Where a neighbourhood is as near as its opposite, there is no ratio to speak of.
    margins = np.where(found & (around > 0), np.where(found, cosines, 0) / np.where(around > 0, around, 1), -np.inf)
    margins = margins.round(DECIMALS)
    partners = np.where(found, np.append(targets, -1)[ids], np.iinfo(np.int64).max)
    best = np.lexsort((partners, -margins), axis=1)[:, :1]
    scores = np.take_along_axis(margins, best, 1)[:, 0]
    chosen = np.take_along_axis(partners, best, 1)[:, 0]
    return Answers(np.where(np.isfinite(scores), chosen, -1), np.where(np.isfinite(scores), scores, 0.0))


def mean_of_found(cosines: np.ndarray) -> np.ndarray:
    """Average the cosines of each row's neighbours, [S, k] -> [S]; 0 where there are none.

    >>> mean_of_found(np.array([[0.5, 0.25, -np.inf]]))
    array([0.375])
    """
    found = np.isfinite(cosines)
    return np.where(found, cosines, 0.0).sum(axis=1) / np.maximum(found.sum(axis=1), 1)
