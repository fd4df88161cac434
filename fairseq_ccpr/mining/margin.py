"""The margin-ratio baseline (Artetxe and Schwenk, 2019): how much nearer a pair is than its neighbourhood."""

from __future__ import annotations

import numpy as np

from fairseq_ccpr.mining.pknn import DECIMALS, Answers


def margin_answers(cosines: np.ndarray, ids: np.ndarray, back_means: np.ndarray, targets: np.ndarray) -> Answers:
    """For each source sentence the neighbour of the highest margin, cos(x, y) / ((m_x + m_y) / 2).

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
    """The mean cosine of each row's neighbours, [S, k] -> [S]; 0 where there are none.

    >>> mean_of_found(np.array([[0.5, 0.25, -np.inf]]))
    array([0.375])
    """
    found = np.isfinite(cosines)
    return np.where(found, cosines, 0.0).sum(axis=1) / np.maximum(found.sum(axis=1), 1)
