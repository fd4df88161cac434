"""Merging the phrases of a text into XPR's phrase types: one entry for each string."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fairseq_ccpr.datastore.phrase import KEYS, OFFSETS, SENTENCES, SPANS
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.storage.arrays import GrowingArray, save_array
from fairseq_ccpr.storage.text_lines import TextLines

BLOCK = 4096  # types at a time


@torch.inference_mode()
def merge_types(folder: Path, sentences: int, encoder: XprEncoder) -> int:
    """Replace P phrase vectors, fp16 [P, H], by N keys of types, fp16 [N, o], and spans by the first of each type.

    1. Number the strings in the order in which they first come.
    2. Project the mean over all places of each string.

    Args:
        folder: keys, spans, sentences and their offsets, as `phrase/` has them.
        sentences: S.
        encoder: whose head projects.

    Returns:
        N.
    """
    means = np.load(folder / f"{KEYS}.npy", mmap_mode="r", allow_pickle=False)
    spans = np.load(folder / f"{SPANS}.npy", allow_pickle=False)
    types = number_strings(spans, TextLines(folder / SENTENCES, folder / f"{OFFSETS}.npy", sentences))
    order = types.argsort(kind="stable")
    starts = np.searchsorted(types[order], np.arange(types.max() + 2))  # [N + 1]
    device = next(encoder.parameters()).device
    keys = GrowingArray(folder / "types.npy", (encoder.dimension,), "float16")
    for first in range(0, len(starts) - 1, BLOCK):
        borders = starts[first : first + BLOCK + 1]
        rows = means[order[borders[0] : borders[-1]]].astype(np.float32)
        sums = np.add.reduceat(rows, borders[:-1] - borders[0], axis=0)
        pooled = torch.from_numpy(sums / np.diff(borders)[:, None]).to(device)
        keys.append(encoder.project(pooled).half().cpu().numpy())
    keys.close()
    save_array(folder / f"{SPANS}.npy", spans[order[starts[:-1]]])
    (folder / "types.npy").replace(folder / f"{KEYS}.npy")
    return len(starts) - 1


def number_strings(spans: np.ndarray, lines: TextLines) -> np.ndarray:
    """Number the strings of spans, int64 [P], in the order in which they first come; equal strings share a number.

    Args:
        spans: int32 [P, 3], sentence, start and end in characters, by sentence.
        lines: the sentences.
    """
    numbers: dict[str, int] = {}
    types = np.empty(len(spans), np.int64)
    current, text = -1, ""
    for row, (sentence, start, end) in enumerate(spans.tolist()):
        if sentence != current:
            current, text = sentence, lines[sentence]
        types[row] = numbers.setdefault(text[start:end], len(numbers))
    return types
