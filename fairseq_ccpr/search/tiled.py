"""Exact search in torch: keys are converted to fp32 tile by tile, so memory does not grow with them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BUCKET = 16  # keys in a run; on a CPU, what is scored again counts
TILE_NUMBERS = 1 << 24  # numbers in a tile of keys, or of scores: 64 MB in fp32
CACHE_NUMBERS = 1 << 20  # on a CPU, whose cache holds 4 MB


def bucket_maxima(keys: Tensor, queries: Tensor, half_norms: Tensor | None) -> Tensor:
    """Find the largest score of each run of `BUCKET` keys.

    Args:
        keys: [N, d], any float dtype.
        queries: [H, d], any float dtype, H at least 1.
        half_norms: |x|^2 / 2 of each key, fp32 [N], to rank by distance; None to rank by inner product.

    Returns:
        fp32 [M, H], M being N / BUCKET rounded up; inner products less `half_norms`.
    """
    maxima = torch.empty(-(-len(keys) // BUCKET), len(queries), device=keys.device)
    for start, scores in _score_tiles(keys, queries, half_norms):
        if missing := -len(scores) % BUCKET:
            scores = torch.nn.functional.pad(scores, (0, 0, 0, missing), value=float("-inf"))
        runs = scores.view(-1, BUCKET, len(queries))
        torch.amax(runs, dim=1, out=maxima[start // BUCKET :][: len(runs)])
    return maxima


def all_scores(keys: Tensor, queries: Tensor, half_norms: Tensor | None) -> Tensor:
    """Score all keys as `bucket_maxima` does, fp32 [N, H]."""
    scores = torch.empty(len(keys), len(queries), device=keys.device)
    for _ in _score_tiles(keys, queries, half_norms, scores):
        pass
    return scores


def _score_tiles(
    keys: Tensor, queries: Tensor, half_norms: Tensor | None, into: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Score keys tile by tile: the first row of each tile, and its scores, fp32 [rows, H], which may be part of `into`."""
    columns = queries.float().T
    rows = BUCKET * max(1, _tile_numbers(keys.device) // (BUCKET * max(keys.size(1), len(queries))))
    for start in range(0, len(keys), rows):
        tile = slice(start, start + rows)
        scores = torch.mm(keys[tile].float(), columns, out=into[tile] if into is not None else None)
        if half_norms is not None:
            # -|q-x|^2 / 2 = q.x - |x|^2 / 2 - |q|^2 / 2, and the last is the same for every key.
            scores -= half_norms[tile, None]
        yield start, scores


def bucket_scores(keys: Tensor, queries: Tensor, buckets: Tensor, metric: str) -> Tensor:
    """Score all keys in the runs chosen for each query.

    Args:
        keys: [N, d], any float dtype.
        queries: [H, d], any float dtype, H at least 1.
        buckets: int64 [H, n], runs of `BUCKET` keys.
        metric: `l2` or `ip`.

    Returns:
        fp32 [H, n * BUCKET]; -inf after the last key.
    """
    ids = (buckets.unsqueeze(2) * BUCKET + torch.arange(BUCKET, device=keys.device)).flatten(1)
    scores = scores_of(keys, queries, ids.clamp_max(len(keys) - 1), metric)
    return scores.masked_fill_(ids >= len(keys), float("-inf"))


def scores_of(keys: Tensor, queries: Tensor, ids: Tensor, metric: str) -> Tensor:
    """Score given keys, fp32 [H, n].

    Args:
        keys: [N, d], any float dtype.
        queries: [H, d], any float dtype.
        ids: int64 [H, n].
        metric: `l2` or `ip`.
    """
    scores = torch.empty(ids.shape, device=keys.device)
    rows = max(1, _tile_numbers(keys.device) // (ids.size(1) * keys.size(1)))
    for start in range(0, len(queries), rows):
        block = slice(start, start + rows)
        found = keys[ids[block]].float()  # [rows, n, d], a copy
        query = queries[block].float().unsqueeze(1)
        if metric == "ip":
            scores[block] = found.mul_(query).sum(2)
        else:
            scores[block] = found.sub_(query).square_().sum(2).neg_()
    return scores


def _tile_numbers(device: torch.device) -> int:
    return TILE_NUMBERS if device.type == "cuda" else CACHE_NUMBERS
