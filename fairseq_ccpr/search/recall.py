"""Recall: how many of the true nearest neighbours an index finds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.exact import ExactIndex, scores_of

SAMPLE, DEPTH, SEED = 256, 8, 1


def recall(index: Index, exact: ExactIndex, queries: Tensor, k: int) -> float:
    """Measure what fraction of the k nearest keys `index` finds, on average over the queries.

    A key as near as the last of the k counts: which of several equal ones is found makes no difference.

    Args:
        index, exact: of the same keys.
        queries: [H, d], any float dtype, on the device of `exact`.
        k: at most N.
    """
    return float(_hits(index, exact, queries, k, k).float().mean())


def recall_of_sample(index: Index, keys: np.ndarray, depth: int = 0) -> float | None:
    """Measure what fraction of the `DEPTH` nearest keys an index finds for random ones of its own keys, which do not count.

    Args:
        index: of `keys`, on the CPU.
        keys: [N, d]; may be memory-mapped.
        depth: neighbours that a search asks for; at least the key itself and `DEPTH`.

    Returns:
        None where there are too few keys.
    """
    if len(keys) <= DEPTH:
        return None
    rows = np.sort(np.random.default_rng(SEED).choice(len(keys), min(SAMPLE, len(keys)), replace=False))
    exact, queries = ExactIndex(keys, index.metric), torch.from_numpy(keys[rows]).float()
    # A key is its own nearest, or one of those as near: it is among those found, but for what the index misses.
    hits = _hits(index, exact, queries, DEPTH + 1, min(max(depth, DEPTH + 1), len(keys))).sum(dim=1) - 1
    return float((hits.clamp(0, DEPTH) / DEPTH).mean())


def _hits(index: Index, exact: ExactIndex, queries: Tensor, k: int, depth: int) -> Tensor:
    """Mark which of the `depth` keys that `index` finds are as near as the k nearest, bool [H, depth]."""
    wanted, found = exact.search(queries, k)[1], index.search(queries, depth)[1]
    least = scores_of(exact.keys, queries, wanted, exact.metric)[:, -1:]
    scores = scores_of(exact.keys, queries, found.clamp_min(0), exact.metric)
    return (scores >= least) & (found >= 0)
