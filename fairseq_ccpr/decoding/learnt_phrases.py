"""The phrases of what was learnt, ready to be searched together with those of a phrase datastore.

Letters: n phrases that were learnt, N of the datastore itself, m that are gone, o width of keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fairseq_ccpr.datastore.learnt import LearntStore
from fairseq_ccpr.datastore.learnt_records import OWN_SENTENCE, LearntPair
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.search import ExactIndex, Index
from fairseq_ccpr.search.growing import GrowingKeys
from fairseq_ccpr.search.joined import JoinedIndex
from fairseq_ccpr.storage.equal_strings import hash_strings
from fairseq_ccpr.storage.fingerprint import of_strings, short
from fairseq_ccpr.storage.text_lines import LinesInMemory


@dataclass(frozen=True)
class LearntPhrases:
    """An immutable snapshot of what was learnt; entries are numbered after the datastore's own.

    Args:
        datastore: the datastore that they were learnt alongside.
        index: over keys fp16 [n, o].
        spans: int32 [n, 3]: the place of the pair in `pairs`, and start and end in its target, in characters.
        hashes: uint64 [n], of the strings; see `hash_strings`.
        pairs: whose phrases they are, one pair after the other.
        moved: by sentence of the datastore itself that it has because it was learnt: a pair of which it is the target.
        gone: int64 [m], entries of the datastore itself that were forgotten, ascending.
    """

    datastore: PhraseDatastore
    index: ExactIndex
    spans: np.ndarray
    hashes: np.ndarray
    pairs: tuple[LearntPair, ...]
    moved: Mapping[int, LearntPair]
    gone: np.ndarray

    @property
    def empty(self) -> bool:
        """Whether searching the datastore alone finds the same."""
        return not self.index.size and not len(self.gone)

    def joined(self, index: Index) -> Index | JoinedIndex:
        """Search an index over the datastore's own keys and what was learnt as one."""
        return JoinedIndex(index, self.index) if self.index.size else index

    def own(self, entries: np.ndarray) -> np.ndarray:
        """Tell which of entries are the datastore's own, [R] -> bool [R]."""
        return entries < self.datastore.section.size

    def string_hashes(self, entries: np.ndarray) -> np.ndarray:
        """Hash the strings of entries, the datastore's own or learnt, int64 [R] -> uint64 [R]."""
        own, hashes = self.own(entries), np.empty(len(entries), np.uint64)
        hashes[own] = self.datastore.string_hashes(entries[own])
        hashes[~own] = self.hashes[entries[~own] - self.datastore.section.size]
        return hashes

    def sentence(self, number: int) -> str:
        """Return the sentence that a span names: the target of a pair."""
        return self.pairs[number].target

    def phrase(self, entry: int) -> tuple[str, str, int, int]:
        """Return the string of an entry, own or learnt, its sentence, and the characters where it begins and ends."""
        if entry < self.datastore.section.size:
            return self.datastore.phrase(entry)
        number, start, end = self.spans[entry - self.datastore.section.size].tolist()
        sentence = self.sentence(number)
        return sentence[start:end], sentence, start, end

    def pair(self, entry: int) -> LearntPair | None:
        """Return the pair that an entry was learnt from; None for one that the datastore was built with."""
        row = entry - self.datastore.section.size
        if row >= 0:
            return self.pairs[int(self.spans[row, 0])]
        return self.moved.get(int(self.datastore.spans[entry, 0])) if self.moved else None

    def __str__(self) -> str:
        targets = dict.fromkeys(pair.target for pair in (*self.moved.values(), *self.pairs))
        return f"{len(targets)}-{short(of_strings(targets))}"


class PhraseSegment:
    """The phrases of a journal's pairs, in a small exact segment alongside the index of a phrase datastore.

    Args:
        store: the journal's pairs.
        datastore: the phrase part that they were learnt alongside.
        device: the model's.
    """

    def __init__(self, store: LearntStore, datastore: PhraseDatastore, device: torch.device) -> None:
        self.store, self.datastore, self.device = store, datastore, device
        self._forgotten = store.forgotten
        self._clear()

    def _clear(self) -> None:
        self._keys = GrowingKeys(self.datastore.section.dimension, self.device)
        self._spans = [np.empty((0, 3), np.int32)]  # of each time that some were learnt
        self._hashes = [np.empty(0, np.uint64)]
        self._ids: list[int] = []

    def update(self) -> LearntPhrases:
        """Bring the segment up to date with the journal, and return what counts from now on."""
        store = self.store
        if self._forgotten != store.forgotten:  # the places of those that stay are others
            self._clear()
            self._forgotten = store.forgotten
        if new := list(store.phrases)[len(self._ids) :]:
            self._append(new)
        moved = {
            pair.sentence: pair
            for pair in store.pairs.values()
            if pair.sentence is not None and pair.sentence != OWN_SENTENCE
        }
        return LearntPhrases(
            self.datastore, ExactIndex(self._keys.rows, "ip"), np.concatenate(self._spans), np.concatenate(self._hashes),
            tuple(store.pairs[number] for number in self._ids), moved, entries_of(self.datastore, store.gone_sentences),
        )  # fmt: skip

    def _append(self, new: list[int]) -> None:
        """Append the phrases of pairs, by their ids."""
        found, first = [self.store.phrases[number] for number in new], len(self._ids)
        places = np.repeat(np.arange(len(new), dtype=np.int32), [len(one.spans) for one in found])
        spans = np.column_stack([places, np.concatenate([one.spans for one in found])])
        self._hashes.append(hash_strings(spans, LinesInMemory([self.store.pairs[number].target for number in new])))
        self._keys.append(np.concatenate([one.keys for one in found]))
        self._spans.append(spans + np.array([first, 0, 0], np.int32))
        self._ids += new


def entries_of(datastore: PhraseDatastore, sentences: list[int]) -> np.ndarray:
    """List the entries of sentences, int64 ascending; those of a datastore stand sentence by sentence."""
    numbers = datastore.spans[:, 0]  # which bisect reads some of, and NumPy would copy
    rows = [np.arange(bisect_left(numbers, n), bisect_right(numbers, n)) for n in sorted(sentences)]
    return np.concatenate([np.empty(0, np.int64), *rows])
