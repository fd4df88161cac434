"""Exact search in Triton: products of half-precision keys and queries whose scores never reach memory.

Only the largest score of each run of keys is written; `selection` says why that is enough.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BUCKET = 128  # keys in a run, and in a tile
CHUNK = 128  # dimensions that a product takes at a time
MOST_QUERIES = 128  # in a tile
PROGRAMS_PER_PROCESSOR = 8  # each reads its tiles one after another, the next while it works on one


@triton.jit
def _maxima_kernel(  # type: ignore[no-untyped-def]
    keys, half_norms, high, low, scales, maxima, size, queries, tiles, tiles_each,
    DIMENSION: tl.constexpr, CHUNK: tl.constexpr, BUCKET: tl.constexpr, QUERIES: tl.constexpr,
    DISTANCES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compare some tiles of keys with a block of queries: maxima[tile, query]."""
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    known = query < queries
    scale = tl.load(scales + query, mask=known, other=0.0)
    row = tl.arange(0, BUCKET)
    column = tl.arange(0, CHUNK)
    first = tl.program_id(1) * tiles_each
    for tile in tl.range(first, tl.minimum(first + tiles_each, tiles)):
        key = tile * BUCKET + row
        there = key < size
        products = tl.zeros((BUCKET, QUERIES), tl.float32)
        for start in tl.static_range(0, DIMENSION, CHUNK):
            wide = start + column < DIMENSION
            key_at = key.to(tl.int64)[:, None] * DIMENSION + start + column[None, :]
            query_at = query[None, :] * DIMENSION + start + column[:, None]
            block = tl.load(keys + key_at, mask=there[:, None] & wide[None, :], other=0.0)
            asked = known[None, :] & wide[:, None]
            products = tl.dot(block, tl.load(high + query_at, mask=asked, other=0.0), products)
            if SPLIT:
                products = tl.dot(block, tl.load(low + query_at, mask=asked, other=0.0), products)
        products *= scale[None, :]
        if DISTANCES:
            # -|q-x|^2 / 2 = q.x - |x|^2 / 2 - |q|^2 / 2, and the last is the same for every key.
            products -= tl.load(half_norms + key, mask=there, other=0.0)[:, None]
        products = tl.where(there[:, None], products, float("-inf"))
        tl.store(maxima + tile * queries + query, tl.max(products, axis=0), mask=known)


@triton.jit
def _scores_kernel(  # type: ignore[no-untyped-def]
    keys, queries, buckets, scores, size, chosen,
    DIMENSION: tl.constexpr, CHUNK: tl.constexpr, BUCKET: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    """Score the keys of one run that was chosen for a query, in fp32."""
    query = tl.program_id(0).to(tl.int64)
    place = query * chosen + tl.program_id(1)
    row = tl.arange(0, BUCKET)
    key = tl.load(buckets + place) * BUCKET + row  # int64
    there = key < size
    column = tl.arange(0, CHUNK)
    total = tl.zeros((BUCKET,), tl.float32)
    for start in tl.static_range(0, DIMENSION, CHUNK):
        wide = start + column < DIMENSION
        at = key[:, None] * DIMENSION + start + column[None, :]
        block = tl.load(keys + at, mask=there[:, None] & wide[None, :], other=0.0).to(tl.float32)
        asked = tl.load(queries + query * DIMENSION + start + column, mask=wide, other=0.0)[None, :]
        if DISTANCES:
            total -= tl.sum((block - asked) * (block - asked), axis=1)
        else:
            total += tl.sum(block * asked, axis=1)
    tl.store(scores + place * BUCKET + row, tl.where(there, total, float("-inf")))


def bucket_maxima(keys: Tensor, queries: Tensor, half_norms: Tensor | None) -> Tensor:
    """Find the largest score of each run of `BUCKET` keys.

    Queries of another dtype than the keys are taken as the sum of two of theirs, which loses nothing worth mention.

    Args:
        keys: fp16 or bf16 [N, d], contiguous, N at least 1.
        queries: [H, d], any float dtype, H at least 1.
        half_norms: |x|^2 / 2 of each key, fp32 [N], to rank by distance; None to rank by inner product.

    Returns:
        fp32 [M, H], M being N / BUCKET rounded up; inner products less `half_norms`.
    """
    (size, dimension), count = keys.shape, len(queries)
    tiles = triton.cdiv(size, BUCKET)
    maxima = torch.empty(tiles, count, device=keys.device)
    high, low, scales = _split(queries, keys.dtype)
    block = min(MOST_QUERIES, max(16, triton.next_power_of_2(count)))
    blocks = triton.cdiv(count, block)
    tiles_each = max(1, tiles * blocks // (PROGRAMS_PER_PROCESSOR * _processors(keys.device)))
    # Blocks of queries that read the same keys run side by side, and find them in the cache.
    _maxima_kernel[(blocks, triton.cdiv(tiles, tiles_each))](
        keys, keys if half_norms is None else half_norms, high, high if low is None else low, scales, maxima,
        size, count, tiles, tiles_each,
        DIMENSION=dimension, CHUNK=_chunk(dimension), BUCKET=BUCKET, QUERIES=block,
        DISTANCES=half_norms is not None, SPLIT=low is not None,
        num_warps=8 if block == MOST_QUERIES else 4, num_stages=3 if dimension <= CHUNK else 2,
    )  # fmt: skip
    return maxima


def bucket_scores(keys: Tensor, queries: Tensor, buckets: Tensor, metric: str) -> Tensor:
    """Score all keys in the runs chosen for each query.

    Args:
        keys: fp16 or bf16 [N, d], contiguous.
        queries: [H, d], any float dtype, H at least 1.
        buckets: int64 [H, n], runs of `BUCKET` keys.
        metric: `l2` or `ip`.

    Returns:
        fp32 [H, n * BUCKET]; -inf after the last key.
    """
    (size, dimension), (count, chosen) = keys.shape, buckets.shape
    scores = torch.empty(count, chosen * BUCKET, device=keys.device)
    _scores_kernel[(count, chosen)](
        keys, queries.float().contiguous(), buckets.contiguous(), scores, size, chosen,
        DIMENSION=dimension, CHUNK=min(64, _chunk(dimension)), BUCKET=BUCKET, DISTANCES=metric == "l2",
    )  # fmt: skip
    return scores


def _chunk(dimension: int) -> int:
    return min(CHUNK, max(16, triton.next_power_of_2(dimension)))


def _split(queries: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Split queries into scale * (high + low): two of `dtype` [H, d], and fp32 [H]; no low part if they are of `dtype`."""
    if queries.dtype == dtype:
        return queries.contiguous(), None, torch.ones(len(queries), device=queries.device)
    queries = queries.float()
    # A power of two brings the numbers to 1 at most: then neither part leaves the range of fp16.
    exponents = torch.frexp(queries.abs().amax(dim=1)).exponent
    scaled = torch.ldexp(queries, -exponents.unsqueeze(1))
    high = scaled.to(dtype)
    return high, (scaled - high.float()).to(dtype), torch.ldexp(torch.ones_like(queries[:, 0]), exponents)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
