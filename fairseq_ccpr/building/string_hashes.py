"""Hashing the strings of a phrase part once, when it is built, so that no search has to."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fairseq_ccpr.datastore.phrase import HASHES, OFFSETS, SENTENCES, SPANS
from fairseq_ccpr.storage.arrays import GrowingArray
from fairseq_ccpr.storage.atomic import atomic_file
from fairseq_ccpr.storage.equal_strings import HASHED, hash_strings
from fairseq_ccpr.storage.text_lines import TextLines


def write_string_hashes(folder: Path, sentences: int) -> None:
    """Write the hash of each phrase's string, uint64 [N], alongside spans and sentences, block by block.

    Args:
        folder: of the phrase part.
        sentences: S.
    """
    spans = np.load(folder / f"{SPANS}.npy", mmap_mode="r", allow_pickle=False)
    lines = TextLines(folder / SENTENCES, folder / f"{OFFSETS}.npy", sentences)
    with atomic_file(folder / f"{HASHES}.npy") as path:
        array = GrowingArray(path, (), "uint64")
        for start in range(0, len(spans), HASHED):
            array.append(hash_strings(spans[start : start + HASHED], lines))
        array.close()
