"""Precision of neighbours: how often they carry the query's own token, a measure of keys for whatever use."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_ccpr.search.base import Index


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
        values: [N], the token of each key.
        queries: [Q, d].
        targets: [Q], the token each query stands for.
        sentences: [N], the sentence of each key; with `own` [Q], that of each query, and `longest`, the most keys that
            one of those has. Without them none is left out.

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


def precision_at_k(matches: Tensor) -> Tensor:
    """Compute the fraction of matches among the nearest 1, 2, ... k of each query, fp32 [Q, k].

    >>> precision_at_k(torch.tensor([[True, False]]))
    tensor([[1.0000, 0.5000]])
    """
    return matches.float().cumsum(1) / torch.arange(1, matches.size(1) + 1, device=matches.device)


def any_hit_at_k(matches: Tensor) -> Tensor:
    """Mark whether the nearest 1, 2, ... k hold a match, fp32 [Q, k]."""
    return (matches.cumsum(1) > 0).float()
