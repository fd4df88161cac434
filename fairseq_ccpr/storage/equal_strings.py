"""Finding equal strings: by digests, among more than memory holds, or by hashes of places in text."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from fairseq_ccpr.storage.arrays import GrowingArray
from fairseq_ccpr.storage.text_lines import TextLines

BUCKETS = 256
DIGESTED = 1 << 16  # strings at a time, to be digested
HASHED = 1 << 14  # strings at a time, to be hashed
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 1 << 64)


def digest(string: str) -> bytes:
    """Return 8 bytes of BLAKE2 for a string, the same everywhere; sorting by them shuffles strings."""
    return hashlib.blake2b(string.encode(), digest_size=8).digest()


def digest_number(string: str) -> int:
    """Return the digest as a number that int64 holds."""
    return int.from_bytes(digest(string), "little", signed=True)


def first_of_equals(strings: Iterable[str], folder: Path) -> np.ndarray:
    """Find for each string the first one that is equal, see `first_of_equal_numbers`.

    Strings of the same digest count as equal: of 100 million different ones, two are taken for one with a
    chance of .0003.
    """
    digests = map(digest, strings)
    blocks = iter(lambda: b"".join(islice(digests, DIGESTED)), b"")
    return first_of_equal_numbers((np.frombuffer(block, np.uint64) for block in blocks), folder)


def first_of_equal_numbers(blocks: Iterable[np.ndarray], folder: Path) -> np.ndarray:
    """Find for each number the first one that is equal; memory holds a 256th of them at a time.

    Args:
        blocks: N numbers, uint64 [n] each, as good as random in their lowest bits; read once.

    Returns:
        int64 [N], where that one is, memory-mapped in `folder`; may be written to.
    """
    spilled, first = folder / "buckets", folder / "first.npy"
    shutil.rmtree(spilled, ignore_errors=True)  # left by a run that was killed
    spilled.mkdir()
    count = 0
    numbers = GrowingArray(first, (), "int64")
    for block in blocks:
        numbers.append(np.arange(count, count + len(block)))
        rows = np.stack([block, np.arange(count, count + len(block), dtype=np.uint64)], axis=1)
        buckets = block % BUCKETS
        for bucket in np.unique(buckets).tolist():
            with (spilled / str(bucket)).open("ab") as stream:
                stream.write(rows[buckets == bucket].tobytes())
        count += len(block)
    numbers.close()
    firsts = np.load(first, mmap_mode="r+" if count else None, allow_pickle=False)
    for path in spilled.iterdir():
        digests, rows = np.fromfile(path, np.uint64).reshape(-1, 2).T
        _, first_rows, groups = np.unique(digests, return_index=True, return_inverse=True)
        firsts[rows.astype(np.int64)] = rows[first_rows][groups]
    shutil.rmtree(spilled)
    return firsts


def hash_strings(spans: np.ndarray, lines: TextLines) -> np.ndarray:
    """Hash strings that stand in lines of text: sum_i c_i b^i modulo 2^64 over their characters c_0, c_1, ...

    Unlike digests these need no Python loop over the strings: those of a block come from one running sum over
    the characters of their lines. That two different phrases of a text have the same hash is as good as
    impossible.

    Args:
        spans: int32 [n, 3], line, start and end in characters; the hashes are uint64 [n].
    """
    blocks = [_hash_block(spans[start : start + HASHED], lines) for start in range(0, len(spans), HASHED)]
    return np.concatenate([np.empty(0, np.uint64), *blocks])


def _hash_block(spans: np.ndarray, lines: TextLines) -> np.ndarray:
    numbers, line_of = np.unique(spans[:, 0], return_inverse=True)
    characters, begins = lines.characters(numbers)
    powers, inverses = (_powers(base, len(characters).bit_length()) for base in (BASE, INVERSE))
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum(characters * powers[: len(characters)], out=sums[1:])
    start, end = begins[line_of] + spans[:, 1], begins[line_of] + spans[:, 2]
    return (sums[end] - sums[start]) * inverses[start]


@cache
def _powers(base: int, bits: int) -> np.ndarray:
    """1, b, b^2, ... modulo 2^64, uint64 [2^bits]."""
    powers = np.full(1 << bits, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, out=powers)
