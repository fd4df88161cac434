"""How much of keys and queries a kernel of `fused` holds at a time: as much as the device's shared memory takes."""

from __future__ import annotations

from typing import NamedTuple

BUCKET = 128  # keys in a run, and in a tile
HELD = (
    128  # dimensions up to which a tile of queries is loaded once and kept; wider ones are read with each tile of keys
)
CHUNK = 64  # dimensions of wider keys that a product takes at a time: a row of 128 bytes, as tensor cores like it
MOST_QUERIES = 128  # in a tile
MOST_STAGES = 3, 4  # tiles of keys on their way at a time, whole ones and chunks; more wait for nothing
_HALF, _SINGLE = 2, 4  # bytes of a number
_SCRATCH = 4096  # bytes in which warps compare their maxima; how many differs by version of Triton
_HOPPER = 9  # whose products continue while the next begins, and hold one more tile of keys


class Device(NamedTuple):
    """The properties of a GPU that a kernel depends on."""

    shared: int  # bytes of shared memory that a block of threads may have
    major: int  # of its compute capability


class Tiling(NamedTuple):
    """The sizes that a kernel is compiled for."""

    queries: int  # in a tile
    chunk: int  # dimensions that a product takes at a time, all of them where queries are held
    stages: int  # of the pipeline
    warps: int


def choose_tiling(dimension: int, queries: int, split: bool, device: Device) -> Tiling:
    """Choose the largest tile of queries, and for it the most stages, that fit into shared memory.

    Args:
        dimension: d.
        queries: H.
        split: whether queries are two half-precision parts.

    Returns:
        The sizes; where nothing fits, the least there are, which a launch will refuse.

    >>> choose_tiling(128, 240, True, Device(232_448, 9))  # H100, H200
    Tiling(queries=128, chunk=128, stages=3, warps=8)
    >>> choose_tiling(128, 240, True, Device(101_376, 8))  # L4, RTX 4090
    Tiling(queries=64, chunk=128, stages=2, warps=4)
    """
    held = dimension <= HELD
    chunk = max(16, _power_of_two(dimension)) if held else CHUNK
    block = min(MOST_QUERIES, max(16, _power_of_two(queries)))
    while True:
        for stages in range(MOST_STAGES[not held], 1, -1):
            tiling = Tiling(block, chunk, stages, warps=8 if block == MOST_QUERIES else 4)
            if shared_bytes(tiling, held, split, device.major) <= device.shared:
                return tiling
        if block == 16:
            return tiling
        block //= 2


def shared_bytes(tiling: Tiling, held: bool, split: bool, major: int) -> int:
    """Bound the bytes of shared memory that the kernel of maxima takes on a GPU of a compute capability."""
    keys = tiling.chunk * BUCKET * _HALF + (BUCKET * _SINGLE if held else 0)  # with half their squared lengths
    queries = tiling.chunk * tiling.queries * _HALF * (2 if split else 1)
    copies = tiling.stages - (major < _HOPPER)
    return copies * (keys if held else keys + queries) + (queries if held else 0) + _SCRATCH


def _power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()
