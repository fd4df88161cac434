"""Merging phrases into XPR's types: one entry for each string. Memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap

from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.parts import KEYS, SPANS, STRING_HASHES
from fairseq_ccpr.datastore.phrase import write_string_hashes
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.storage.arrays import check_space
from fairseq_ccpr.storage.equal_strings import first_of_equal_numbers
from fairseq_ccpr.storage.files import scratch_directory

TYPED_ROWS = 4096  # places, or types, at a time


def merge_types(folder: Path, places: PhraseSection, encoder: XprEncoder) -> int:
    """Replace P phrase vectors, [P, H], by N keys of types, [N, o], and spans by the first of each type.

    1. Number the strings, identified by their hashes, in the order of their first occurrence.
    2. Add up the vectors of all places of each string, on disk.
    3. Project their means.

    Args:
        places: what is in the folder, whose width is H.

    Returns:
        N.
    """
    write_string_hashes(folder, places)
    spans, hashes = places.open_arrays(folder, SPANS, STRING_HASHES).values()
    means = places.open_keys(folder)
    with scratch_directory(folder / "types") as scratch:
        blocks = (hashes[start : start + TYPED_ROWS] for start in range(0, len(hashes), TYPED_ROWS))
        firsts = first_of_equal_numbers(blocks, scratch)
        types, count = number_types(firsts, scratch / "types.npy")
        merged = replace(places, size=count, dimension=encoder.dimension)
        key_bytes = merged.KEY_FORM.row_bytes(merged.dimension)
        check_space(folder, count * (4 * means.shape[1] + 8 + key_bytes + 20))
        device = next(encoder.parameters()).device
        with torch.inference_mode():
            vectors = (
                encoder.project(torch.from_numpy(block.astype(np.float32)).to(device))
                for block in mean_of_types(means, types, count, scratch)
            )
            merged.write(folder, KEYS, map(merged.KEY_FORM.encode, vectors))
        for name, rows in ((SPANS, spans), (STRING_HASHES, hashes)):
            merged.write(folder, name, _firsts_alone(rows, firsts))
    return count


def number_types(firsts: np.ndarray, path: Path) -> tuple[np.ndarray, int]:
    """Number strings, int64 [P], in the order in which they first come, by the first place of an equal one."""
    types = open_memmap(path, "w+", np.int64, (len(firsts),))
    count = 0
    for start in range(0, len(firsts), TYPED_ROWS):
        block = firsts[start : start + TYPED_ROWS]
        new = block == np.arange(start, start + len(block))
        types[start : start + TYPED_ROWS][new] = count + np.arange(new.sum())
        types[start : start + TYPED_ROWS] = types[block]
        count += int(new.sum())
    return types, count


def mean_of_types(means: np.ndarray, types: np.ndarray, count: int, scratch: Path) -> Iterator[np.ndarray]:
    """Average vectors [P, H] of all places of each string by `types`, int64 [P]: [n, H] at a time, in order."""
    sums = open_memmap(scratch / "sums.npy", "w+", np.float32, (count, means.shape[1]))
    places = open_memmap(scratch / "places.npy", "w+", np.int64, (count,))
    for start in range(0, len(means), TYPED_ROWS):
        block = types[start : start + TYPED_ROWS]
        order = block.argsort(kind="stable")
        found, begins, numbers = np.unique(block[order], return_index=True, return_counts=True)
        sums[found] += np.add.reduceat(
            means[start : start + TYPED_ROWS].astype(np.float32)[order], begins, axis=0
        )
        places[found] += numbers
    for start in range(0, count, TYPED_ROWS):
        yield sums[start : start + TYPED_ROWS] / places[start : start + TYPED_ROWS, None]


def _firsts_alone(rows: np.ndarray, firsts: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), TYPED_ROWS):
        block = firsts[start : start + TYPED_ROWS]
        yield rows[start : start + TYPED_ROWS][block == np.arange(start, start + len(block))]
