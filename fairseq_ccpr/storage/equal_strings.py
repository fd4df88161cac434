"""Which of many strings are equal, found on disk: memory holds a 256th of them at a time, as digests."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np

from fairseq_ccpr.storage.arrays import GrowingArray

BUCKETS = 256
BLOCK = 1 << 16  # strings at a time


def first_of_equals(strings: Iterable[str], folder: Path) -> np.ndarray:
    """For each string, the number of the first one that is equal.

    Strings of the same 8 bytes of BLAKE2 count as equal: of 100 million different ones, two are taken for one with a
    chance of .0003.

    Args:
        strings: N of them, read once.
        folder: where the result goes, as `first.npy`, and what is needed until then.

    Returns:
        int64 [N], memory-mapped; may be written to.
    """
    spilled, first = folder / "buckets", folder / "first.npy"
    shutil.rmtree(spilled, ignore_errors=True)  # of a run that was killed
    spilled.mkdir()
    count, strings = 0, iter(strings)
    numbers = GrowingArray(first, (), "int64")
    while block := list(islice(strings, BLOCK)):
        digests = np.frombuffer(b"".join(_digest(string) for string in block), np.uint64)
        numbers.append(np.arange(count, count + len(block)))
        rows = np.stack([digests, np.arange(count, count + len(block), dtype=np.uint64)], axis=1)
        buckets = digests % BUCKETS
        for bucket in np.unique(buckets).tolist():
            with (spilled / str(bucket)).open("ab") as stream:
                stream.write(rows[buckets == bucket].tobytes())
        count += len(block)
    numbers.close()
    found = np.load(first, mmap_mode="r+" if count else None, allow_pickle=False)
    for path in spilled.iterdir():
        digests, places = np.fromfile(path, np.uint64).reshape(-1, 2).T
        _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
        found[places.astype(np.int64)] = places[firsts][groups]
    shutil.rmtree(spilled)
    return found


def _digest(string: str) -> bytes:
    return hashlib.blake2b(string.encode(), digest_size=8).digest()
