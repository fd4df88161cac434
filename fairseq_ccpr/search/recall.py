"""How many of the true nearest neighbours an index finds."""

from __future__ import annotations

from torch import Tensor

from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.tiled import scores_of


def recall(index: Index, exact: ExactIndex, queries: Tensor, k: int) -> float:
    """The share of the k nearest keys that `index` finds, on average over the queries.

    A key as near as the last of the k counts: which of several equal ones is found makes no difference.

    Args:
        index, exact: of the same keys.
        queries: [H, d], any float dtype, on the device of `exact`.
        k: at most N.
    """
    wanted, found = exact.search(queries, k)[1], index.search(queries, k)[1]
    least = scores_of(exact.keys, queries, wanted, exact.metric)[:, -1:]
    scores = scores_of(exact.keys, queries, found.clamp_min(0), exact.metric)
    return float(((scores >= least) & (found >= 0)).float().mean())
