"""Inverted lists read once for all queries that want them, in Triton: for batches whose queries share lists.

A tile of queries that want the same list reads it, run by run, and keeps the largest score of each run, as `fused` does for
all keys. Letters: H queries, p lists for each, L lists, M runs of the longest list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_ccpr.search.fused import (
    describe_device,
    hold_queries,
    largest_products,
    launch,
    maxima_sizes,
    split_queries,
)
from fairseq_ccpr.search.fused_tiling import BUCKET
from fairseq_ccpr.search.list_tiles import tiles_of_pairs


@triton.jit
def _lists_kernel(  # type: ignore[no-untyped-def]
    keys, half_norms, high, low, scales, maxima, pairs, described, probes, longest,
    DIMENSION: tl.constexpr, CHUNK: tl.constexpr, BUCKET: tl.constexpr, QUERIES: tl.constexpr,
    DISTANCES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compare the keys of one list with a tile of the queries that want it: maxima[pair, run]."""
    tile = described + 5 * tl.program_id(0)  # its first pair, how many, the list's first run, runs and keys
    slot = tl.arange(0, QUERIES)
    known = slot < tl.load(tile + 1)
    pair = tl.load(pairs + tl.load(tile) + slot, mask=known, other=0)
    query = pair // probes
    scale = tl.load(scales + query, mask=known, other=0.0)
    row = tl.arange(0, BUCKET)
    high_tile = hold_queries(high, query, known, DIMENSION, CHUNK)
    low_tile = hold_queries(low, query, known, DIMENSION, CHUNK) if SPLIT else high_tile
    first, size = tl.load(tile + 2), tl.load(tile + 4)
    for run in tl.range(0, tl.load(tile + 3), num_stages=STAGES if DIMENSION <= CHUNK else 1):
        place = run * BUCKET + row  # in the list
        largest = largest_products(
            keys, half_norms, first * BUCKET + place, place < size, high, low, high_tile, low_tile, query, known, scale,
            DIMENSION, CHUNK, BUCKET, QUERIES, DISTANCES, SPLIT, STAGES,
        )  # fmt: skip
        tl.store(maxima + pair * longest + run, largest, mask=known)


def list_maxima(
    keys: Tensor,
    half_norms: Tensor | None,
    queries: Tensor,
    chosen: Tensor,
    sizes: Tensor,
    first_runs: Tensor,
    longest: int,
) -> Tensor:
    """Find the largest score of each run of `BUCKET` keys in the lists chosen for each query.

    Args:
        keys: fp16 [P, d], of all lists, each from a multiple of `BUCKET` on.
        half_norms: |x|^2 / 2 of each key, fp32 [P], to rank by distance; None to rank by inner product.
        queries: [H, d], any float dtype.
        chosen: int64 [H, p], different lists.
        sizes: int64 [L], keys of each list.
        first_runs: int64 [L], the run that each list begins with.
        longest: M.

    Returns:
        fp32 [H, p, M]; -inf beyond the end of a list.
    """
    (count, probes), dimension = chosen.shape, keys.size(1)
    maxima = torch.full((count, probes, longest), float("-inf"), device=keys.device)
    high, low, scales = split_queries(queries, keys.dtype)
    shared = -(-count * probes // len(sizes))  # queries that want a list, in the mean
    kernel_sizes = maxima_sizes(
        dimension, shared, half_norms is not None, low is not None, describe_device(keys.device)
    )
    pairs, tiles = tiles_of_pairs(chosen, sizes, first_runs, BUCKET, kernel_sizes["QUERIES"])
    launch(
        _lists_kernel, (len(tiles),), keys, keys if half_norms is None else half_norms, high,
        high if low is None else low, scales, maxima, pairs, tiles, probes, longest, **kernel_sizes,
    )  # fmt: skip
    return maxima
