"""Tiles of the kernels of exact search follow from the shared memory that a GPU has."""

from __future__ import annotations

import pytest

from fairseq_ccpr.search.fused_tiling import HELD, MOST_QUERIES, Device, choose_tiling, shared_bytes


@pytest.mark.parametrize("device", [Device(64 << 10, 7), Device(101_376, 8), Device(166_912, 8), Device(232_448, 9)])
@pytest.mark.parametrize("dimension", [1, 16, 64, 100, 128, 256, 1024])
def test_tiles_are_as_large_as_shared_memory_takes(dimension: int, device: Device) -> None:
    for split in (False, True):
        tiling = choose_tiling(dimension, 800, split, device)
        held = dimension <= HELD
        assert tiling.stages >= 2 and tiling.queries >= 16
        if tiling.queries > 16:
            assert shared_bytes(tiling, held, split, device.major) <= device.shared
        if tiling.queries < MOST_QUERIES:
            assert shared_bytes(tiling._replace(queries=2 * tiling.queries), held, split, device.major) > device.shared
