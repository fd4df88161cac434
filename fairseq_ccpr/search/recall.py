"""Which neighbours have the token of the query, and which of the nearest keys an index finds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.exact import ExactIndex, scores_of

SAMPLE, DEPTH, SEED = 256, 8, 1


def matching_neighbours(
    index: Index,
    values: Tensor,
    queries: Tensor,
    targets: Tensor,
    k: int,
    sentences: Tensor | None = None,
    own: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """Mark which of the k nearest neighbours have the query's token, those of its own sentence left out.

    Args:
        values: [N], the token of each key; `targets` [Q], that of each query.
        sentences: [N], the sentence of each key; with `own` [Q], that of each query, and `longest`, the most
            keys that one of those has. Without these, no key is left out.

    Returns:
        bool [Q, k], nearest first; False where there are fewer than k.
    """
    _, ids = index.search(queries, k + longest)
    allowed = ids >= 0
    if sentences is not None and own is not None:
        allowed &= sentences[ids.clamp_min(0)] != own.unsqueeze(1)
    matches = (values[ids.clamp_min(0)] == targets.unsqueeze(1)) & allowed
    first = (~allowed).byte().argsort(dim=1, stable=True)[:, :k]
    return matches.gather(1, first)


def recall_of_sample(index: Index, keys: np.ndarray, depth: int = 0) -> float | None:
    """Measure what fraction of the `DEPTH` neighbours of random keys a search finds; None where keys are few.

    Args:
        depth: neighbours that it asks for; at least the key itself, which does not count, and `DEPTH`.
    """
    if len(keys) <= DEPTH:
        return None
    rows = np.sort(np.random.default_rng(SEED).choice(len(keys), min(SAMPLE, len(keys)), replace=False))
    exact, queries = ExactIndex(keys, index.metric), torch.from_numpy(keys[rows]).float()
    # A key is its own nearest, or one of those as near: it is among those found, but for what the index
    # misses.
    hits = (
        found_among_nearest(index, exact, queries, DEPTH + 1, min(max(depth, DEPTH + 1), len(keys))).sum(
            dim=1
        )
        - 1
    )
    return float((hits.clamp(0, DEPTH) / DEPTH).mean())


def found_among_nearest(index: Index, exact: ExactIndex, queries: Tensor, k: int, depth: int) -> Tensor:
    """Tell which of the `depth` keys that `index` finds are as near as the k nearest, bool [H, depth]."""
    nearest, found = exact.search(queries, k)[1], index.search(queries, depth)[1]
    least = scores_of(exact.keys, queries, nearest, exact.metric)[:, -1:]
    scores = scores_of(exact.keys, queries, found.clamp_min(0), exact.metric)
    return (scores >= least) & (found >= 0)
