"""How much of translations is copied from the text of a datastore: it may say what the source does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fairseq_ccpr.datastore.text import TextDatastore
from fairseq_ccpr.datastore.tuned import Parts
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory

STRETCH = 7  # subwords, some five words
BLOCK = 1 << 20  # subwords of the text at a time
# Odd, so that the sum of id times multiplier modulo 2^64 hashes a run.
_MULTIPLIERS = np.random.default_rng(1).integers(0, 2**63, STRETCH, dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)


class TextRuns:
    """All runs of so many subwords or words that a text has, 8 bytes each: read once, looked up for each system."""

    def __init__(self, text: np.ndarray, stretch: int = STRETCH) -> None:
        """Hash the runs of a text, the ids of all its sentences, [T]; it is read in blocks. At most `STRETCH` in a run."""
        starts, self.stretch = range(0, len(text), BLOCK), stretch
        self.blocks = [
            np.unique(_runs(text[start : start + BLOCK + stretch - 1], stretch)) for start in starts
        ]

    @classmethod
    def of(cls, parts: Parts, ensemble: RetrievalEnsemble | None) -> TextRuns | None:
        """Hash a datastore's target-language text; None if it has none in subwords."""
        if isinstance(text := parts.get("text"), TextDatastore):
            return cls(text.tokens)
        phrases = ensemble.find(PhraseMemory) if ensemble is not None else None
        if phrases is None or not isinstance(phrases.candidates, PhraseCandidates):
            return None
        written = phrases.candidates.written
        return cls(written.tokens) if written is not None else None

    def copied(self, translations: Sequence[np.ndarray]) -> float:
        """Compute the share of translations' subwords, 0 to 1, that stand in such runs; each is ids, int64 [n]."""
        copied = 0
        for one in filter(len, (_runs(each, self.stretch) for each in translations)):
            known = np.zeros(len(one), bool)
            for block in filter(len, self.blocks):
                known |= block[np.searchsorted(block, one).clip(max=len(block) - 1)] == one
            copied += int(np.convolve(known, np.ones(self.stretch, int)).astype(bool).sum())
        return copied / max(1, sum(map(len, translations)))


def _runs(ids: np.ndarray, stretch: int) -> np.ndarray:
    """Hash all runs of so many, uint64 [n - stretch + 1]."""
    if len(ids) < stretch:
        return np.zeros(0, np.uint64)
    windows = sliding_window_view(np.asarray(ids).astype(np.uint64), stretch)
    hashes: np.ndarray = windows @ _MULTIPLIERS[:stretch]
    return hashes
