"""Exact search in Triton: products of half-precision keys and queries whose scores never reach memory.

Only the largest score of each run of keys is written; `selection` says why that is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from fairseq_ccpr.search.fused_tiling import BUCKET, Device, choose_tiling
from fairseq_ccpr.search.launching import LaunchError, first_line

PROGRAMS_PER_PROCESSOR = 8  # each reads its tiles one after another, the next while it works on one
SCORED_DIMENSIONS = 64  # that are compared at a time where keys are scored again
INTERPRETER = Device(232_448, 9)  # as an H100, so that the same tiles are tested
# Arguments that change during translation: a kernel for each of their divisors would be compiled in the midst of decoding.
_CHANGING = ["size", "count", "tiles", "tiles_each"]


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    matrix, row, there, start, DIMENSION: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Load some dimensions of some rows of a matrix [?, DIMENSION], zeros where there are none: [rows, CHUNK]."""
    column = start + tl.arange(0, CHUNK)
    at = row.to(tl.int64)[:, None] * DIMENSION + column[None, :]
    return tl.load(matrix + at, mask=there[:, None] & (column < DIMENSION)[None, :], other=0.0)


@triton.jit
def hold_queries(  # type: ignore[no-untyped-def]
    queries, query, known, DIMENSION: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Load a tile of queries to keep, [CHUNK, queries]; of wide ones nothing."""
    if DIMENSION <= CHUNK:
        return tl.trans(_load_tile(queries, query, known, 0, DIMENSION, CHUNK))
    else:
        return known


@triton.jit
def largest_products(  # type: ignore[no-untyped-def]
    keys, half_norms, key, there, high, low, high_tile, low_tile, query, known, scale,
    DIMENSION: tl.constexpr, CHUNK: tl.constexpr, BUCKET: tl.constexpr, QUERIES: tl.constexpr,
    DISTANCES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Find the largest score of a tile of keys for each of a tile of queries, fp32 [QUERIES]."""
    products = tl.zeros((BUCKET, QUERIES), tl.float32)
    if DIMENSION <= CHUNK:
        block = _load_tile(keys, key, there, 0, DIMENSION, CHUNK)
        products = tl.dot(block, high_tile, products)
        if SPLIT:
            products = tl.dot(block, low_tile, products)
    else:
        for start in tl.range(0, DIMENSION, CHUNK, num_stages=STAGES):
            block = _load_tile(keys, key, there, start, DIMENSION, CHUNK)
            part = _load_tile(high, query, known, start, DIMENSION, CHUNK)
            products = tl.dot(block, tl.trans(part), products)
            if SPLIT:
                part = _load_tile(low, query, known, start, DIMENSION, CHUNK)
                products = tl.dot(block, tl.trans(part), products)
    products *= scale[None, :]
    if DISTANCES:
        # -|q-x|^2 / 2 = q.x - |x|^2 / 2 - |q|^2 / 2, and the last is the same for every key.
        products -= tl.load(half_norms + key, mask=there, other=0.0)[:, None]
    return tl.max(tl.where(there[:, None], products, float("-inf")), axis=0)


@triton.jit(do_not_specialize=_CHANGING)
def _maxima_kernel(  # type: ignore[no-untyped-def]
    keys, half_norms, high, low, scales, maxima, size, count, tiles, tiles_each,
    DIMENSION: tl.constexpr, CHUNK: tl.constexpr, BUCKET: tl.constexpr, QUERIES: tl.constexpr,
    DISTANCES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compare some tiles of keys with a block of queries: maxima[tile, query]."""
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    known = query < count
    scale = tl.load(scales + query, mask=known, other=0.0)
    row = tl.arange(0, BUCKET)
    # Outside of the loop, whose pipeline would keep as many copies as it has stages.
    high_tile = hold_queries(high, query, known, DIMENSION, CHUNK)
    low_tile = hold_queries(low, query, known, DIMENSION, CHUNK) if SPLIT else high_tile
    first = tl.program_id(1) * tiles_each
    for tile in tl.range(first, tl.minimum(first + tiles_each, tiles), num_stages=STAGES if DIMENSION <= CHUNK else 1):
        key = tile * BUCKET + row
        largest = largest_products(
            keys, half_norms, key, key < size, high, low, high_tile, low_tile, query, known, scale,
            DIMENSION, CHUNK, BUCKET, QUERIES, DISTANCES, SPLIT, STAGES,
        )  # fmt: skip
        tl.store(maxima + tile.to(tl.int64) * count + query, largest, mask=known)


@triton.jit(do_not_specialize=["size", "chosen"])
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
    total = tl.zeros((BUCKET,), tl.float32)
    for start in tl.range(0, DIMENSION, CHUNK):
        column = start + tl.arange(0, CHUNK)
        block = _load_tile(keys, key, there, start, DIMENSION, CHUNK).to(tl.float32)
        wanted = tl.load(queries + query * DIMENSION + column, mask=column < DIMENSION, other=0.0)[None, :]
        if DISTANCES:
            total -= tl.sum((block - wanted) * (block - wanted), axis=1)
        else:
            total += tl.sum(block * wanted, axis=1)
    tl.store(scores + place * BUCKET + row, tl.where(there, total, float("-inf")))


def bucket_maxima(keys: Tensor, queries: Tensor, half_norms: Tensor | None) -> Tensor:
    """Find the largest score of each run of `BUCKET` keys.

    Queries of another dtype than the keys are represented as the sum of two vectors of that dtype, with negligible loss.

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
    high, low, scales = split_queries(queries, keys.dtype)
    sizes = maxima_sizes(dimension, count, half_norms is not None, low is not None, describe_device(keys.device))
    blocks = triton.cdiv(count, sizes["QUERIES"])
    tiles_each = max(1, tiles * blocks // (PROGRAMS_PER_PROCESSOR * _processors(keys.device)))
    # Blocks of queries that read the same keys run side by side, and find them in the cache.
    launch(
        _maxima_kernel, (blocks, triton.cdiv(tiles, tiles_each)),
        keys, keys if half_norms is None else half_norms, high, high if low is None else low, scales, maxima,
        size, count, tiles, tiles_each, **sizes,
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
    launch(
        _scores_kernel, (count, chosen), keys, queries.float().contiguous(), buckets.contiguous(), scores, size, chosen,
        **scores_sizes(dimension, metric == "l2"),
    )  # fmt: skip
    return scores


def maxima_sizes(dimension: int, queries: int, distances: bool, split: bool, device: Device) -> dict[str, Any]:
    """Choose what the kernel of maxima is compiled for; see `choose_tiling`."""
    tiling = choose_tiling(dimension, queries, split, device)
    return {
        "DIMENSION": dimension, "CHUNK": tiling.chunk, "BUCKET": BUCKET, "QUERIES": tiling.queries,
        "DISTANCES": distances, "SPLIT": split, "STAGES": tiling.stages, "num_warps": tiling.warps,
    }  # fmt: skip


def scores_sizes(dimension: int, distances: bool) -> dict[str, Any]:
    """Choose what the kernel of scores is compiled for."""
    chunk = min(SCORED_DIMENSIONS, max(16, triton.next_power_of_2(dimension)))
    return {"DIMENSION": dimension, "CHUNK": chunk, "BUCKET": BUCKET, "DISTANCES": distances}


def launch(kernel: Any, grid: tuple[int, ...], keys: Tensor, *others: Any, **sizes: Any) -> None:
    """Launch a kernel on the device of the keys."""
    with _refusals(), torch.cuda.device_of(keys):
        kernel[grid](keys, *others, **sizes)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise a LaunchError where Triton, the driver, or the C compiler that Triton calls, fails."""
    try:
        yield
    except Exception as error:
        raise LaunchError(f"a kernel of exact search cannot run here ({first_line(error)})") from error


def split_queries(queries: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
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


@cache
def describe_device(device: torch.device) -> Device:
    """Return the properties of a device that a kernel depends on; cached."""
    if device.type != "cuda":
        return INTERPRETER
    with _refusals():
        index = torch.cuda.current_device() if device.index is None else device.index
        shared = driver.active.utils.get_device_properties(index)["max_shared_mem"]  # by which Triton refuses a launch
    return Device(shared, torch.cuda.get_device_properties(device).major)
