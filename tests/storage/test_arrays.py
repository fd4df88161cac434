"""Arrays on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.arrays import GrowingArray, open_array, save_array


def test_growing_arrays_are_npy(tmp_path: Path) -> None:
    for count in (0, 1, 12345):
        rows = np.arange(count * 5, dtype=np.int32).reshape(-1, 5)
        array = GrowingArray(tmp_path / "a.npy", (5,), "int32")
        for row in rows:
            array.append(row[None])
        array.close()
        assert (np.load(tmp_path / "a.npy", allow_pickle=False) == rows).all()


def test_a_damaged_header_is_told_in_a_sentence(tmp_path: Path) -> None:
    path, array = tmp_path / "a.npy", np.arange(12, dtype=np.int32).reshape(4, 3)
    save_array(path, array)
    content = path.read_bytes()
    for bit in range(8 * (len(content) - array.nbytes)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            opened = open_array(path, array.shape, "int32")
        except DatastoreError as error:
            assert str(path) in str(error) and "build the datastore again" in str(error)
        else:
            assert opened.shape == array.shape  # white space, or another order: the checksum has it
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DatastoreError, match="is damaged"):
            open_array(path, array.shape, "int32")
