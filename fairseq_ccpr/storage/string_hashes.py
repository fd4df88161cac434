"""Numbers for strings that stand in text, so that equal ones are found without a Python loop over them."""

from __future__ import annotations

from functools import cache

import numpy as np

from fairseq_ccpr.storage.text_lines import TextLines

BLOCK = 1 << 14  # strings at a time
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 1 << 64)


def hash_strings(spans: np.ndarray, lines: TextLines) -> np.ndarray:
    """Hashes of strings that stand in lines of text: sum_i c_i b^i modulo 2^64 over their characters c_0, c_1, ...

    Those of a block of strings come from one running sum over the characters of their lines. That two different phrases of a
    text have the same hash is as good as impossible.

    Args:
        spans: int32 [n, 3], line, start and end in characters.

    Returns:
        uint64 [n].
    """
    blocks = [_of_block(spans[start : start + BLOCK], lines) for start in range(0, len(spans), BLOCK)]
    return np.concatenate([np.empty(0, np.uint64), *blocks])


def _of_block(spans: np.ndarray, lines: TextLines) -> np.ndarray:
    numbers, which = np.unique(spans[:, 0], return_inverse=True)
    characters, begins = lines.characters(numbers)
    powers, inverses = (_powers(base, len(characters).bit_length()) for base in (BASE, INVERSE))
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum(characters * powers[: len(characters)], out=sums[1:])
    start, end = begins[which] + spans[:, 1], begins[which] + spans[:, 2]
    return (sums[end] - sums[start]) * inverses[start]


@cache
def _powers(base: int, bits: int) -> np.ndarray:
    """1, b, b^2, ... modulo 2^64, uint64 [2^bits]."""
    powers = np.full(1 << bits, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, out=powers)
