"""Vectors minus their mean: what all texts of a language have in common says nothing about a pair."""

from __future__ import annotations

import numpy as np

from fairseq_ccpr.lab.mining.neighbours import SentenceKeys

LEAST = 300  # vectors that a mean is made of: of fewer it would be that of the subject, or of one sentence
BLOCK = 4096  # vectors at a time
DECIMALS = 9


class Centre:
    """The mean of vectors that come in blocks."""

    def __init__(self) -> None:
        self._sum, self._count = np.zeros(1), 0

    def add(self, vectors: np.ndarray) -> Centre:
        """Add up some vectors, [n, d]."""
        self._sum = self._sum + vectors.sum(axis=0, dtype=np.float64)
        self._count += len(vectors)
        return self

    def subtract_(self, vectors: np.ndarray) -> np.ndarray:
        """Take the mean away from vectors [n, d], in place, and bring them to length 1; leave them if there were few."""
        if self._count >= LEAST:
            mean = (self._sum / self._count).round(DECIMALS).astype(np.float32)
            for start in range(0, len(vectors), BLOCK):
                block = vectors[start : start + BLOCK].astype(np.float32) - mean
                lengths = np.linalg.norm(block, axis=1, keepdims=True)
                vectors[start : start + BLOCK] = block / np.maximum(lengths, np.finfo(np.float32).tiny)
        return vectors


def centred(keys: SentenceKeys) -> SentenceKeys:
    """Centre the keys of a text, and its fragments, each by a mean of their own."""
    values, fragments = (Centre().add(rows).subtract_(rows.copy()) for rows in (keys.keys, keys.fragments))
    return keys._replace(keys=values, fragments=fragments)
