"""What was learnt, ready to be searched: its keys on the model's device, in a segment alongside the main index.

The segment is exact while it is small, on a GPU however large it is. On a CPU its entries go into inverted lists that grow
with it, all but the last ones. Letters: n rows of the segment, N entries of the datastore itself, m that are gone, d width of
keys.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.learnt import LearntStore
from fairseq_ccpr.datastore.learnt_records import LearntPair, NewPair
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.learnt_phrases import LearntPhrases, PhraseSegment
from fairseq_ccpr.search.exact import half_norms
from fairseq_ccpr.search.growing_lists import GrowingLists, can_grow
from fairseq_ccpr.search.segment import Segment
from fairseq_ccpr.storage.fingerprint import of_strings, short

if TYPE_CHECKING:
    from fairseq_ccpr.decoding.token_retriever import LearningRetriever

FIRST_ROWS = 4096  # that there is room for; then twice as many each time
# Rows that are compared with one by one: of a segment without lists, and after those that are in lists. More of them cost
# more than lists do (scripts/recipes/segment_search.py).
EXACT_ROWS, LAST_ROWS = 1024, 512


@dataclass(frozen=True)
class LearntEntries:
    """An immutable snapshot of what was learnt.

    Args:
        index: over n rows; those of pairs that were forgotten may still be there, and are not found.
        values: int32 [n], their tokens, on the device of the index.
        pairs: whose entries they are, in the order of their rows.
        moved: pairs whose entries are the datastore's own.
        gone: int64 [m], entries of the datastore itself that were forgotten, ascending, on the same device.
        first: the first learnt entry, moved into the datastore or not; all entries from it on were learnt.
        rows: int64, the first row of each of `pairs`.
        retriever: of the datastore that they were learnt alongside, if it was compacted since the system was loaded.
        phrases: of the same pairs, where a phrase memory learns.
    """

    index: Segment
    values: Tensor
    pairs: tuple[LearntPair, ...]
    moved: tuple[LearntPair, ...]
    gone: Tensor
    first: int
    rows: np.ndarray
    retriever: LearningRetriever | None = None
    phrases: LearntPhrases | None = None

    @property
    def entries(self) -> LearntEntries:
        """Themselves, where a memory would tell what counts now."""
        return self

    @property
    def empty(self) -> bool:
        """Whether searching the datastore alone finds the same."""
        return not self.index.size and not len(self.gone)

    def place(self, row: int) -> tuple[LearntPair, int]:
        """Return the pair that a row stands in, and the position of its token."""
        at = int(np.searchsorted(self.rows, row, side="right")) - 1
        return self.pairs[at], row - int(self.rows[at])

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
    """The pairs learnt alongside a token datastore: decoding searches them, while a program adds and removes some.

    Threads may share it; what was learnt or forgotten counts for whoever asks for `entries` after that.

    Args:
        datastore: an opened token datastore.
        device: the model's.
        phrases: the phrase part in the same folder, where it learns.

    Raises:
        DatastoreError: the journal belongs to something else, or is damaged from its beginning on.
    """

    def __init__(self, datastore: TokenDatastore, device: torch.device, phrases: PhraseDatastore | None = None) -> None:
        self.store = LearntStore(datastore)
        self._phrases = PhraseSegment(self.store, phrases, device) if phrases is not None else None
        self.device = device
        self._metric = datastore.section.index.metric
        self._lock = threading.Lock()
        self._retriever: LearningRetriever | None = None
        self._lists_help = device.type == "cpu" and can_grow()
        self._entries: LearntEntries
        self._clear()
        self._update()

    @property
    def entries(self) -> LearntEntries:
        """What counts now."""
        return self._entries

    def lock(self) -> None:
        """Take the right to write before there is anything to write; see `LearntStore.lock`. What others wrote counts now."""
        with self._lock:
            self.store.lock()
            self._update()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Block learning and forgetting."""
        with self._lock:
            yield

    def go_on_beside(self, datastore: TokenDatastore, retriever: LearningRetriever) -> None:
        """Continue with the datastore's next generation, which a retriever searches; the memory must be `paused`."""
        self.store, self._retriever = self.store.handed_on(datastore), retriever
        self._clear()
        self._update()

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
        self._size = 0
        self._rows: dict[int, tuple[int, int]] = {}  # of each pair, by its id: the first, and the one after its last
        self._keys = torch.empty(0, dimension, dtype=torch.float16, device=self.device)
        self._norms = torch.empty(0, device=self.device)
        self._values = torch.empty(0, dtype=torch.int32, device=self.device)
        self._lists: GrowingLists | None = None
        self._listed = 0  # rows that are in lists, or were
        self._gone: list[tuple[int, int]] = []  # the rows after those that are gone, as of `_rows`

    def _update(self) -> None:
        """Bring the segment up to date with the journal: remove what was forgotten, append what is new."""
        there = self.store.entries
        if lost := [number for number in self._rows if number not in there]:
            self._drop(lost)
        if new := [number for number in there if number not in self._rows]:
            self._append(*(np.concatenate(arrays) for arrays in zip(*(there[number] for number in new))))
            ends = self._size - sum(len(there[n][0]) for n in new) + np.cumsum([len(there[n][0]) for n in new])
            self._rows |= {n: (int(end) - len(there[n][0]), int(end)) for n, end in zip(new, ends)}
        if self._lists_help and self._size - self._listed > (EXACT_ROWS if self._lists is None else LAST_ROWS):
            self._grow()
        self._entries = self._now()

    def _now(self) -> LearntEntries:
        """Return what counts now."""
        last = _numbers(self._gone) - self._listed
        index = Segment(
            self._keys[: self._size], self._norms[: self._size], self._metric, self._lists, self._listed,
            torch.from_numpy(last).to(self.device) if len(last) else None,
        )  # fmt: skip
        pairs = self.store.pairs.values()
        moved = tuple(pair for pair in pairs if pair.first_entry is not None)
        there = tuple(pair for pair in pairs if pair.first_entry is None)
        gone = torch.from_numpy(_numbers((first, first + count) for first, count in self.store.gone)).to(self.device)
        own = self.store.datastore.section.size
        first = min((pair.first_entry for pair in moved if pair.first_entry is not None), default=own)
        rows = np.array([self._rows[pair.id][0] for pair in there], np.int64)
        values = self._values[: self._size]
        phrases = self._phrases.update() if self._phrases is not None else None
        return LearntEntries(index, values, there, moved, gone, first, rows, self._retriever, phrases)

    def _drop(self, lost: list[int]) -> None:
        """Take pairs out. Where there are no lists, or most rows are gone, the others are written again instead."""
        dropped = [self._rows.pop(number) for number in lost]
        if self._lists is None or 2 * sum(end - start for start, end in self._rows.values()) <= self._size:
            self._clear()
            return
        if listed := [one for one in dropped if one[0] < self._listed]:
            self._lists = self._lists.without(listed)
        self._gone += [one for one in dropped if one[0] >= self._listed]

    def _grow(self) -> None:
        """Put all rows into lists."""
        again = self._lists is None or self._lists.outgrown
        rows = _numbers(one for one in self._rows.values() if again or one[0] >= self._listed)
        keys = self._keys[torch.from_numpy(rows)]
        if self._lists is None or again:
            self._lists = GrowingLists.of(keys, rows, self._metric)
        else:
            self._lists = self._lists.with_more(keys, rows)
        self._listed, self._gone = self._size, []

    def _append(self, values: np.ndarray, keys: np.ndarray) -> None:
        """Append entries. Searches of earlier snapshots are not disturbed: their rows stay unchanged."""
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


def _numbers(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return the numbers in ranges, each from its first to before its last, int64, ascending."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *(np.arange(*one) for one in ranges)]))
