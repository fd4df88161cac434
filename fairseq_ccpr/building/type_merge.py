"""Merging the phrases of a text into XPR's phrase types: one entry for each string. Memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap

from fairseq_ccpr.datastore.phrase import HASHES, KEYS, SPANS, write_string_hashes
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.storage.arrays import GrowingArray, check_space
from fairseq_ccpr.storage.equal_strings import first_of_equal_numbers
from fairseq_ccpr.storage.files import atomic_file, scratch_directory

BLOCK = 4096  # places, or types, at a time


def merge_types(folder: Path, sentences: int, encoder: XprEncoder) -> int:
    """Replace P phrase vectors, fp16 [P, H], by N keys of types, fp16 [N, o], and spans by the first of each type.

    1. Number the strings, identified by their hashes, in the order of their first occurrence.
    2. Add up the vectors of all places of each string, on disk.
    3. Project their means.
    """
    write_string_hashes(folder, sentences)
    spans, hashes, means = (
        np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in (SPANS, HASHES, KEYS)
    )
    with scratch_directory(folder / "types") as scratch:
        blocks = (hashes[start : start + BLOCK] for start in range(0, len(hashes), BLOCK))
        firsts = first_of_equal_numbers(blocks, scratch)
        types, count = number_types(firsts, scratch / "types.npy")
        check_space(folder, count * (4 * means.shape[1] + 8 + 2 * encoder.dimension + 20))
        project = _projection(encoder)
        keys = GrowingArray(scratch / f"{KEYS}.npy", (encoder.dimension,), "float16")
        for block in mean_of_types(means, types, count, scratch):
            keys.append(project(block))
        keys.close()
        for name, rows in ((SPANS, spans), (HASHES, hashes)):
            _keep_firsts(rows, firsts, folder / f"{name}.npy")
        (scratch / f"{KEYS}.npy").replace(folder / f"{KEYS}.npy")
    return count


def number_types(firsts: np.ndarray, path: Path) -> tuple[np.ndarray, int]:
    """Number strings, int64 [P], in `path`, in the order in which they first come, by the first place of an equal one."""
    types = open_memmap(path, "w+", np.int64, (len(firsts),))
    count = 0
    for start in range(0, len(firsts), BLOCK):
        block = firsts[start : start + BLOCK]
        new = block == np.arange(start, start + len(block))
        types[start : start + BLOCK][new] = count + np.arange(new.sum())
        types[start : start + BLOCK] = types[block]
        count += int(new.sum())
    return types, count


def mean_of_types(means: np.ndarray, types: np.ndarray, count: int, scratch: Path) -> Iterator[np.ndarray]:
    """Average the fp16 vectors [P, H] of all places of each string by `types`, int64 [P]: fp32 [n, H] at a time, in order."""
    sums = open_memmap(scratch / "sums.npy", "w+", np.float32, (count, means.shape[1]))
    places = open_memmap(scratch / "places.npy", "w+", np.int64, (count,))
    for start in range(0, len(means), BLOCK):
        block = types[start : start + BLOCK]
        order = block.argsort(kind="stable")
        found, begins, numbers = np.unique(block[order], return_index=True, return_counts=True)
        sums[found] += np.add.reduceat(means[start : start + BLOCK].astype(np.float32)[order], begins, axis=0)
        places[found] += numbers
    for start in range(0, count, BLOCK):
        yield sums[start : start + BLOCK] / places[start : start + BLOCK, None]


def _projection(encoder: XprEncoder) -> Callable[[np.ndarray], np.ndarray]:
    device = next(encoder.parameters()).device

    @torch.inference_mode()
    def project(means: np.ndarray) -> np.ndarray:
        pooled = torch.from_numpy(means.astype(np.float32)).to(device)
        keys: np.ndarray = encoder.project(pooled).half().cpu().numpy()
        return keys

    return project


def _keep_firsts(rows: np.ndarray, firsts: np.ndarray, path: Path) -> None:
    with atomic_file(path) as partial:
        array = GrowingArray(partial, rows.shape[1:], rows.dtype.str)
        for start in range(0, len(rows), BLOCK):
            block = firsts[start : start + BLOCK]
            array.append(rows[start : start + BLOCK][block == np.arange(start, start + len(block))])
        array.close()
