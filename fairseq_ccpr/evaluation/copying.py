"""How much of translations is copied from the text of a datastore: it may say what the source does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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


def subwords_of_text(parts: Parts, ensemble: RetrievalEnsemble | None) -> np.ndarray | None:
    """Return the subwords of a datastore's target-language text, [T]; None if it has none in them."""
    if isinstance(text := parts.get("text"), TextDatastore):
        return text.tokens
    phrases = ensemble.find(PhraseMemory) if ensemble is not None else None
    if phrases is None or not isinstance(phrases.candidates, PhraseCandidates):
        return None
    written = phrases.candidates.written
    return written.tokens if written is not None else None


def copied(
    systems: Mapping[str, Sequence[np.ndarray]], text: np.ndarray, stretch: int = STRETCH
) -> dict[str, float]:
    """Compute the share of subwords or words, 0 to 1, that stand in runs of so many and more of the text.

    Args:
        systems: translations as ids, each int64 [n].
        text: ids of all sentences, [T]; it is read in blocks.
        stretch: how many; at most `STRETCH`.
    """
    found = {name: [_runs(one, stretch) for one in each] for name, each in systems.items()}
    wanted = np.unique(
        np.concatenate([np.zeros(0, np.uint64), *(one for each in found.values() for one in each)])
    )
    known = np.zeros(len(wanted), bool)
    for block in _blocks(text, stretch) if len(wanted) else ():  # all may be shorter than a run
        places = np.searchsorted(wanted, block).clip(max=max(0, len(wanted) - 1))
        known[places[wanted[places] == block]] = True
    return {name: _share(systems[name], each, wanted[known], stretch) for name, each in found.items()}


def _blocks(text: np.ndarray, stretch: int) -> Iterator[np.ndarray]:
    for start in range(0, len(text), BLOCK):
        yield np.unique(_runs(text[start : start + BLOCK + stretch - 1], stretch))


def _runs(ids: np.ndarray, stretch: int) -> np.ndarray:
    """Hash all runs of n subwords, uint64 [n - stretch + 1]."""
    if len(ids) < stretch:
        return np.zeros(0, np.uint64)
    hashes: np.ndarray = (
        sliding_window_view(np.asarray(ids).astype(np.uint64), stretch) @ _MULTIPLIERS[:stretch]
    )
    return hashes


def _share(
    translations: Sequence[np.ndarray], runs: Sequence[np.ndarray], known: np.ndarray, stretch: int
) -> float:
    copied = sum(
        int(np.convolve(np.isin(one, known), np.ones(stretch, int)).astype(bool).sum())
        for one in runs
        if len(one)
    )
    return copied / max(1, sum(map(len, translations)))
