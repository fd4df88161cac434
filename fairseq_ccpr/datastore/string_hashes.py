"""A number for the string of each entry, so that equal strings are found without reading any."""

from __future__ import annotations

import numpy as np

from fairseq_ccpr.datastore.text_lines import TextLines

BLOCK = 1 << 14  # lines at a time
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2^64
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))


def hash_strings(spans: np.ndarray, lines: TextLines) -> np.ndarray:
    """Hashes of strings that stand in lines of text: sum_i m(c_i) b^i modulo 2^64 over their characters c_0, c_1, ...

    Those of all spans of a block of lines come from one running sum over its characters. Two different strings have the same
    one with a probability of about 2^-64.

    Args:
        spans: int32 [N, 3], line, start and end in characters.

    Returns:
        uint64 [N].
    """
    order = None if (np.diff(spans[:, 0]) >= 0).all() else spans[:, 0].argsort(kind="stable")
    ordered = spans if order is None else spans[order]
    hashes = np.empty(len(spans), np.uint64)
    bounds = np.searchsorted(ordered[:, 0], np.arange(0, len(lines) + BLOCK, BLOCK))
    for number, (first, last) in enumerate(zip(bounds[:-1], bounds[1:])):
        if first < last:
            rows = slice(first, last) if order is None else order[first:last]
            hashes[rows] = _of_block(ordered[first:last], number * BLOCK, lines)
    return hashes


def _of_block(spans: np.ndarray, first_line: int, lines: TextLines) -> np.ndarray:
    text = lines.block(first_line, first_line + BLOCK)
    begins = np.cumsum([0, *(len(line) for line in text)])
    characters = np.frombuffer("".join(text).encode("utf-32-le", "surrogatepass"), np.uint32)
    powers = _powers(BASE, len(characters))
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum(_mixed(characters) * powers, out=sums[1:])
    start, end = (begins[spans[:, 0] - first_line] + spans[:, column] for column in (1, 2))
    return (sums[end] - sums[start]) * _powers(INVERSE, len(sums))[start]


def _powers(base: np.uint64, count: int) -> np.ndarray:
    """1, b, b^2, ... modulo 2^64, uint64 [count]."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, out=powers)


def _mixed(characters: np.ndarray) -> np.ndarray:
    """Numbers as if by chance, one for each character: the finalizer of SplitMix64."""
    mixed = (characters.astype(np.uint64) + np.uint64(1)) * BASE
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
