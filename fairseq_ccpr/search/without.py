"""Search in an index some of whose entries are gone, as if it had never had them."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.exact import largest

FIRST_SPARE = 64  # entries that are looked for beyond k at first, at most
DEEPER = 4  # times as many the next time, where more than the spare were gone


def search_without(index: Index, gone: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k nearest entries of each query that are not gone.

    Nothing asks the device for a number while no more than `FIRST_SPARE` entries are gone. Where more are, queries that find too
    few are searched for once more, and deeper.

    Args:
        index: over all entries.
        gone: int64 [m], ascending, on the device of the queries.
        queries: [H, d].

    Returns:
        scores fp32 [H, k], nearest first, and ids int64 [H, k]; -inf and -1 where there are not as many.
    """
    if not len(gone):
        return index.search(queries, k)
    most = max(k, min(k + len(gone), index.deepest))
    depth = min(most, k + FIRST_SPARE)
    scores, ids, more = _left(index, gone, queries, depth, k)
    while depth < most and len(rows := (more & (ids[:, -1] < 0)).nonzero()[:, 0]):
        depth = min(most, DEEPER * depth)
        found = _left(index, gone, queries[rows], depth, k)
        for all_, some in zip((scores, ids, more), found):
            all_[rows] = some
    return scores, ids


def _left(index: Index, gone: Tensor, queries: Tensor, depth: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find what is left of the nearest `depth`: scores and ids [H, k], and bool [H], whether there may be more behind."""
    scores, ids = index.search(queries, depth)
    more = ids[:, -1] >= 0
    place = torch.searchsorted(gone, ids).clamp_max(len(gone) - 1)
    forgotten = gone[place] == ids
    scores, ids = scores.masked_fill(forgotten, float("-inf")), ids.masked_fill(forgotten, -1)
    # Places stand for ids, which may be missing.
    best, places = largest(scores, torch.arange(depth, device=ids.device), k)
    return best, ids.gather(1, places), more
