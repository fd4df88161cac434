"""What was learnt, ready to be searched: its keys on the model's device, in a small exact segment beside the main index.

Letters: n entries that were learnt, N of the datastore itself, m that are gone, d width of keys, k neighbours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.learnt import LearntStore
from fairseq_ccpr.datastore.learnt_records import LearntPair, NewPair
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.exact import half_norms
from fairseq_ccpr.storage.fingerprint import of_strings, short

FIRST_ROWS = 4096  # that there is room for; then twice as many each time


@dataclass(frozen=True)
class LearntEntries:
    """What was learnt up to a moment, and does not change any more.

    Args:
        index: over keys fp16 [n, d].
        values: int32 [n], their tokens, on the device of the index.
        pairs: whose entries they are, one pair after the other.
        moved: pairs whose entries are the datastore's own.
        gone: int64 [m], entries of the datastore itself that were forgotten, ascending, on the same device.
        first: the first entry that was learnt, whether it has moved into the datastore or not; no entry from it on was not.
    """

    index: ExactIndex
    values: Tensor
    pairs: tuple[LearntPair, ...]
    moved: tuple[LearntPair, ...]
    gone: Tensor
    first: int

    @property
    def entries(self) -> LearntEntries:
        """Themselves, where a memory would tell what counts now."""
        return self

    @property
    def empty(self) -> bool:
        """Whether searching the datastore alone finds the same."""
        return not self.index.size and not len(self.gone)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([pair.tokens for pair in self.pairs])

    def place(self, row: int) -> tuple[LearntPair, int]:
        """Return the pair that a row stands in, and the position of its token."""
        at = int(np.searchsorted(self._ends, row, side="right"))
        return self.pairs[at], row - int(self._ends[at]) + self.pairs[at].tokens

    def moved_pair(self, entry: int) -> LearntPair | None:
        """Return the pair that an entry of the datastore itself was learnt from, if it was."""
        for pair in self.moved:
            if pair.first_entry is not None and pair.first_entry <= entry < pair.first_entry + pair.tokens:
                return pair
        return None

    def __str__(self) -> str:
        pairs = (*self.moved, *self.pairs)
        return f"{len(pairs)}-{short(of_strings(text for pair in pairs for text in (pair.source, pair.target)))}"


class LearntMemory:
    """The pairs beside a token datastore, where decoding searches them and a program adds to them and takes from them.

    Threads may share it; what was learnt or forgotten counts for whoever asks for `entries` after that.

    Args:
        datastore: an opened token datastore.
        device: the model's.

    Raises:
        DatastoreError: the journal belongs to something else, or is damaged from its beginning on.
    """

    def __init__(self, datastore: TokenDatastore, device: torch.device) -> None:
        self.store = LearntStore(datastore)
        self.device = device
        self._metric = datastore.section.index.metric
        self._lock = threading.Lock()
        self._forgotten = 0
        self._entries: LearntEntries
        self._clear()
        self._update()

    @property
    def entries(self) -> LearntEntries:
        """What counts now."""
        return self._entries

    def learn(self, pairs: Sequence[NewPair]) -> list[int]:
        """Learn pairs; see `LearntStore.learn`. They count when this returns."""
        with self._lock:
            ids = self.store.learn(pairs)
            self._update()
        return ids

    def forget(self, ids: Iterable[int]) -> None:
        """Forget pairs; see `LearntStore.forget`. They count no more when this returns."""
        with self._lock:
            self.store.forget(ids)
            self._update()

    def _clear(self) -> None:
        """Start over with an empty segment."""
        dimension = self.store.datastore.section.dimension
        self._size, self._there = 0, 0
        self._keys = torch.empty(0, dimension, dtype=torch.float16, device=self.device)
        self._norms = torch.empty(0, device=self.device)
        self._values = torch.empty(0, dtype=torch.int32, device=self.device)

    def _update(self) -> None:
        """Bring the segment to where the journal is: append what is new, or rewrite it without what was forgotten."""
        if self._forgotten != self.store.forgotten:
            self._clear()
            self._forgotten = self.store.forgotten
        new = list(self.store.entries.values())[self._there :]
        if new:
            self._append(*(np.concatenate(arrays) for arrays in zip(*new)))
            self._there += len(new)
        index = ExactIndex(self._keys[: self._size], self._metric)
        if self._metric == "l2":
            index.half_norms = self._norms[: self._size]
        pairs = self.store.pairs.values()
        rows = [np.arange(first, first + count) for first, count in self.store.gone]
        gone = torch.from_numpy(np.sort(np.concatenate([np.empty(0, np.int64), *rows]))).to(self.device)
        moved = tuple(pair for pair in pairs if pair.first_entry is not None)
        there = tuple(pair for pair in pairs if pair.first_entry is None)
        own = self.store.datastore.section.size
        first = min((pair.first_entry for pair in moved if pair.first_entry is not None), default=own)
        self._entries = LearntEntries(index, self._values[: self._size], there, moved, gone, first)

    def _append(self, values: np.ndarray, keys: np.ndarray) -> None:
        """Append entries. Who searches what was there before is not disturbed: its rows stay as they are."""
        size = self._size + len(values)
        if size > len(self._values):
            room = max(FIRST_ROWS, 2 * size)
            for name in ("_keys", "_norms", "_values"):
                old: Tensor = getattr(self, name)
                larger = old.new_empty(room, *old.shape[1:])
                larger[: self._size] = old[: self._size]
                setattr(self, name, larger)
        rows = slice(self._size, size)
        self._keys[rows] = torch.from_numpy(keys).to(self.device)
        self._values[rows] = torch.from_numpy(values).to(self.device)
        self._norms[rows] = half_norms(self._keys[rows])
        self._size = size
