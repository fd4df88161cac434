"""How much of translations is copied from the text of a datastore: it may say what the source does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def subwords_of_text(parts: Parts, ensemble: RetrievalEnsemble) -> np.ndarray | None:
    """Return the subwords of a datastore's target-language text, [T]; None if it has none in them."""
    if isinstance(text := parts.get("text"), TextDatastore):
        return text.tokens
    phrases = ensemble.find(PhraseMemory)
    if phrases is None or not isinstance(phrases.candidates, PhraseCandidates):
        return None
    written = phrases.candidates.written
    return written.tokens if written is not None else None


def copied(
    systems: Mapping[str, Sequence[np.ndarray]], text: np.ndarray, stretch: int = STRETCH
) -> dict[str, float]:
    """Compute the share of subwords or words, 0 to 1, that stand in runs that the text has.

    Args:
        systems: translations as ids, each int64 [n].
        text: ids of all sentences, [T]; it is read once, in blocks.
        stretch: of so many and more are runs; at most `STRETCH`.
    """
    runs = {name: [_runs(one, stretch) for one in each] for name, each in systems.items()}
    none = np.zeros(0, np.uint64)
    wanted = np.unique(np.concatenate([none, *(one for each in runs.values() for one in each)]))
    known = np.zeros(len(wanted), bool)
    for start in range(0, len(text) if len(wanted) else 0, BLOCK):  # all may be shorter than a run
        block = np.unique(_runs(text[start : start + BLOCK + stretch - 1], stretch))
        places = np.searchsorted(wanted, block).clip(max=len(wanted) - 1)
        known[places[wanted[places] == block]] = True
    wanted = wanted[known]
    return {name: _share(systems[name], each, wanted, stretch) for name, each in runs.items()}


def _share(
    translations: Sequence[np.ndarray], runs: Sequence[np.ndarray], known: np.ndarray, stretch: int
) -> float:
    marked = (np.convolve(np.isin(one, known), np.ones(stretch, int)) for one in runs if len(one))
    return sum(int(np.count_nonzero(one)) for one in marked) / max(1, sum(map(len, translations)))


def _runs(ids: np.ndarray, stretch: int) -> np.ndarray:
    """Hash all runs of so many, uint64 [n - stretch + 1]."""
    if len(ids) < stretch:
        return np.zeros(0, np.uint64)
    windows = sliding_window_view(np.asarray(ids).astype(np.uint64), stretch)
    hashes: np.ndarray = windows @ _MULTIPLIERS[:stretch]
    return hashes
