"""Arrays on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fairseq_ccpr.phrases.pair_store import GrowingArray


def test_growing_arrays_are_npy(tmp_path: Path) -> None:
    for count in (0, 1, 12345):
        rows = np.arange(count * 5, dtype=np.int32).reshape(-1, 5)
        array = GrowingArray(tmp_path / "a.npy", (5,), "int32")
        for row in rows:
            array.append(row[None])
        array.close()
        assert (np.load(tmp_path / "a.npy", allow_pickle=False) == rows).all()
