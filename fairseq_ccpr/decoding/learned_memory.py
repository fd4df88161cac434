"""What was learned, ready to be searched: on the model's device, in segments alongside the indexes.

The segment of tokens is exact while it is small, on a GPU however large it is. On a CPU its entries go into
inverted lists that grow with it, all but the last ones. The segment of phrases is exact.
Letters: n rows of a segment, N entries of the datastore itself, m that are gone, d width of keys, of phrases
o.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.learned import (
    OWN_SENTENCE,
    Learned,
    LearnedPair,
    LearnedStore,
    NewPair,
    ReadAs,
    phrases_of_sentences,
)
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.source_index import SentenceMemory, SourceIndex
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.search import ExactIndex, Index
from fairseq_ccpr.search.exact import half_norms
from fairseq_ccpr.search.live import GrowingLists, JoinedIndex, Segment, can_grow
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.equal_strings import hash_strings
from fairseq_ccpr.storage.fingerprint import of_strings, short
from fairseq_ccpr.storage.text_lines import LinesInMemory

if TYPE_CHECKING:
    from fairseq_ccpr.decoding.token_retriever import LearningRetriever

FIRST_ROWS = 4096  # that there is room for; then twice as many each time
# Rows that are compared with one by one: of a segment without lists, and after those that are in lists. More
# of them cost more than lists do (scripts/recipes/learning_speed.py).
EXACT_ROWS, LAST_ROWS = 1024, 512


@dataclass(frozen=True)
class LearnedPhrases:
    """An immutable snapshot of what was learned; entries are numbered after the datastore's own.

    Args:
        index: over keys fp16 [n, o].
        spans: int32 [n, 3]: the place of the pair in `pairs`, and start and end in its target, in characters.
        hashes: uint64 [n], of the strings; see `hash_strings`.
        pairs: whose phrases they are, one pair after the other.
        moved: by sentence of the datastore itself that it has because it was learned: a pair of which it is
            the target.
        gone: int64 [m], entries of the datastore itself that do not count, ascending.
        superseded: see `LearnedEntries`.
        kept: targets of pairs whose phrases are those of the same sentence of the datastore itself.
    """

    datastore: PhraseDatastore
    index: ExactIndex
    spans: np.ndarray
    hashes: np.ndarray
    pairs: tuple[LearnedPair, ...]
    moved: Mapping[int, LearnedPair]
    gone: np.ndarray
    superseded: tuple[np.ndarray, ...] = ()
    kept: frozenset[str] = frozenset()

    @property
    def empty(self) -> bool:
        return not self.index.size and not len(self.gone)

    def without(self, targets: set[str]) -> LearnedPhrases:
        """Return the same without the phrases of these sentences of the datastore itself."""
        numbers = {self.datastore.number(target) for target in targets - self.kept}
        kept = sorted(number for number in numbers if number is not None and number not in self.moved)
        gone = np.union1d(self.gone, phrases_of_sentences(self.datastore, kept))
        return replace(self, gone=gone, superseded=())

    def joined(self, index: Index) -> Index | JoinedIndex:
        """Search an index over the datastore's own keys and what was learned as one."""
        return JoinedIndex(index, self.index) if self.index.size else index

    def stored(self, entries: np.ndarray) -> np.ndarray:
        """Tell which of entries are the datastore's own, [R] -> bool [R]."""
        return entries < self.datastore.section.size

    def string_hashes(self, entries: np.ndarray) -> np.ndarray:
        """Hash the strings of entries, the datastore's own or learned, int64 [R] -> uint64 [R]."""
        stored, hashes = self.stored(entries), np.empty(len(entries), np.uint64)
        hashes[stored] = self.datastore.hashes[entries[stored]]
        hashes[~stored] = self.hashes[entries[~stored] - self.datastore.section.size]
        return hashes

    def sentence(self, number: int) -> str:
        """Return the sentence that a span names: the target of a pair."""
        return self.pairs[number].target

    def phrase(self, entry: int) -> tuple[str, str, int, int]:
        """Return the string of an entry, its sentence, and the characters where it begins and ends."""
        if entry < self.datastore.section.size:
            return self.datastore.phrase(entry)
        number, start, end = self.spans[entry - self.datastore.section.size].tolist()
        return self.sentence(number)[start:end], self.sentence(number), start, end

    def pair(self, entry: int) -> LearnedPair | None:
        """Return the pair that an entry was learned from; None for one that the datastore was built with."""
        row = entry - self.datastore.section.size
        if row >= 0:
            return self.pairs[int(self.spans[row, 0])]
        return self.moved.get(int(self.datastore.spans[entry, 0])) if self.moved else None

    def __str__(self) -> str:
        targets = dict.fromkeys(pair.target for pair in (*self.moved.values(), *self.pairs))
        return f"{len(targets)}-{short(of_strings(targets))}"


@dataclass(frozen=True)
class LearnedEntries:
    """An immutable snapshot of what was learned.

    Args:
        index: over n rows; those of pairs that were forgotten may still be there, and are not found.
        values: int32 [n], their tokens, on the device of the index.
        pairs: whose entries they are, in the order of their rows.
        moved: pairs whose entries are the datastore's own.
        gone: int64 [m], entries of the datastore itself that do not count, ascending, on the same device:
            they were forgotten, or their source is that of a learned pair.
        first: the first learned entry, moved into the datastore or not; all entries from it on were learned.
        rows: int64, the first row of each of `pairs`.
        stored: values of the datastore that `moved` are in, int32 [N].
        stored_sentences: the sentence of each of the datastore's own entries, int32 [N], on the device.
        retriever: of the datastore that they were learned alongside, if it was compacted since the system was
            loaded.
        phrases: of the same pairs, where a phrase memory learns.
        superseded: targets of the datastore's own sentences whose source is that of a learned pair, int32 [L]
            each.
        source_index: of the datastore's own source sentences.
    """

    index: Segment
    values: Tensor
    pairs: tuple[LearnedPair, ...]
    moved: tuple[LearnedPair, ...]
    gone: Tensor
    first: int
    rows: np.ndarray
    stored: np.ndarray
    stored_sentences: Tensor
    source_index: SourceIndex
    retriever: LearningRetriever | None = None
    phrases: LearnedPhrases | None = None
    superseded: tuple[np.ndarray, ...] = ()

    @cached_property
    def sentences(self) -> SentenceMemory:
        """Source sentences: the datastore's own, less those gone, then those of `pairs`."""
        learned = [
            np.array(pair.read_as.ids if pair.read_as is not None else (), np.int64) for pair in self.pairs
        ]
        return SentenceMemory(self.source_index, learned, self._sentences_gone)

    @cached_property
    def _sentences_gone(self) -> np.ndarray:
        return self.stored_sentences[self.gone].unique().cpu().numpy()

    @cached_property
    def _first_rows(self) -> Tensor:
        return torch.from_numpy(self.rows).to(self.values.device)

    def sentences_of(self, entries: Tensor) -> Tensor:
        """Number the sentences of entries as `sentences` does, int64 [N, k]; any for one that is missing."""
        own, size = self.source_index.described.sentences, len(self.stored_sentences)
        numbers = (
            self.stored_sentences[entries.clamp(0, size - 1)].long() if size else torch.zeros_like(entries)
        )
        if not len(self.rows):
            return numbers
        learned = torch.searchsorted(self._first_rows, entries - size, right=True) - 1
        return torch.where(entries >= size, own + learned, numbers)

    @property
    def entries(self) -> LearnedEntries:
        """Themselves, as a snapshot of them."""
        return self

    @property
    def empty(self) -> bool:
        return not self.index.size and not len(self.gone)

    def place(self, row: int) -> tuple[LearnedPair, int]:
        """Return the pair that a row stands in, and the position of its token."""
        number = int(np.searchsorted(self.rows, row, side="right")) - 1
        return self.pairs[number], row - int(self.rows[number])

    @cached_property
    def by_source(self) -> dict[tuple[int, ...], list[LearnedPair]]:
        """The pairs by `ReadAs.ids` of their sources, the one that was learned last at the end."""
        found: dict[tuple[int, ...], list[LearnedPair]] = {}
        for pair in sorted((*self.moved, *self.pairs), key=lambda pair: pair.moment):
            if pair.read_as is not None:
                found.setdefault(pair.read_as.ids, []).append(pair)
        return found

    def target(self, pair: LearnedPair) -> np.ndarray:
        """Return the target tokens of a pair, with their end, [L]."""
        return self.stored[pair.first_entry :][: pair.tokens] if pair.entries is None else pair.entries[0]

    def moved_pair(self, entry: int) -> LearnedPair | None:
        """Return the pair that an entry of the datastore itself was learned from, if it was."""
        spans = ((pair, pair.first_entry) for pair in self.moved if pair.first_entry is not None)
        return next((pair for pair, first in spans if first <= entry < first + pair.tokens), None)

    def __str__(self) -> str:
        pairs = sorted((*self.moved, *self.pairs), key=lambda pair: pair.id)
        return (
            f"{len(pairs)}-{short(of_strings(text for pair in pairs for text in (pair.source, pair.target)))}"
        )


class LearnedMemory:
    """The pairs learned alongside a token datastore, which decoding searches while they change.

    Threads may share it; what was learned or forgotten counts for whoever asks for `entries` after that.
    """

    def __init__(
        self, datastore: TokenDatastore, device: torch.device, phrases: PhraseDatastore | None = None
    ) -> None:
        self.store = LearnedStore(datastore)
        self._phrases = PhraseSegment(self.store, phrases, device) if phrases is not None else None
        self.device = device
        self._lock = threading.Lock()
        self._retriever: LearningRetriever | None = None
        self._lists_help = device.type == "cpu" and can_grow()
        self._open(datastore)

    def lock(self) -> None:
        """Take the right to write before it is needed; see `LearnedStore.lock`. What others wrote counts."""
        with self._lock:
            self.store.lock()
            self._update()

    def identify(self, read: Callable[[str], ReadAs]) -> None:
        """Hash the sources of pairs that an earlier version learned; see `LearnedStore.identify`."""
        with self._lock:
            self.store.identify(read)
            self._update()

    def paused(self) -> AbstractContextManager[object]:
        """Open a context in which nothing is learned or forgotten."""
        return self._lock

    def go_on_beside(self, datastore: TokenDatastore, retriever: LearningRetriever) -> None:
        """Continue with the datastore's next generation, which a retriever searches; must be `paused`."""
        self.store, self._retriever = self.store.handed_on(datastore), retriever
        self._open(datastore)

    def learn(self, pairs: Sequence[NewPair]) -> list[Learned]:
        """Learn pairs; see `LearnedStore.learn`. They count when this returns."""
        with self._lock:
            learned = self.store.learn(pairs)
            self._update()
        return learned

    def forget(self, ids: Iterable[int]) -> list[LearnedPair]:
        """Forget pairs; see `LearnedStore.forget`. They count no more when this returns."""
        with self._lock:
            restored = self.store.forget(ids)
            self._update()
        return restored

    def _open(self, datastore: TokenDatastore) -> None:
        self._stored_sentences = as_tensor(datastore.provenance)[:, 0].to(self.device)
        self._clear()
        self._update()

    def _clear(self) -> None:
        section = self.store.datastore.section
        keys = section.KEY_FORM.none(section.dimension, self.device)
        values = torch.empty(0, dtype=torch.int32, device=self.device)
        self._grown = GrowingRows(keys, half_norms(keys), values)
        # of each pair, by its id: the first, and the one after its last
        self._rows: dict[int, tuple[int, int]] = {}
        self._lists: GrowingLists | None = None
        self._listed = 0  # rows that are in lists, or were

    def _update(self) -> None:
        """Bring the segment up to date with the pairs that count.

        Where there are no lists, or most rows are gone, those that stay are written again.
        """
        kept = self.store.entries
        lost = [rows for number, rows in self._rows.items() if number not in kept]
        self._rows = {number: rows for number, rows in self._rows.items() if number in kept}
        left = sum(end - start for start, end in self._rows.values())
        if lost and (self._lists is None or 2 * left <= self._grown.size):
            self._clear()
        elif self._lists is not None and (listed := [one for one in lost if one[0] < self._listed]):
            self._lists = self._lists.without(listed, self._grown.rows[0])
        if new := [number for number in kept if number not in self._rows]:
            ends = self._grown.size + np.cumsum([len(kept[number][0]) for number in new])
            self._rows |= zip(new, pairwise([self._grown.size, *ends.tolist()]))
            values, rows = (np.concatenate(arrays) for arrays in zip(*(kept[n] for n in new)))
            form = self.store.datastore.section.KEY_FORM
            keys = torch.from_numpy(form.decode(rows)).to(self.device)
            self._grown.append(keys, half_norms(keys), torch.from_numpy(values))
        most = EXACT_ROWS if self._lists is None else LAST_ROWS
        if self._lists_help and self._grown.size - self._listed > most:
            self._grow()
        self.entries: LearnedEntries = self._snapshot()  # what counts

    def _grow(self) -> None:
        keys, again = self._grown.rows[0], self._lists is None or self._lists.outgrown
        rows = _numbers(one for one in self._rows.values() if again or one[0] >= self._listed)
        some = keys[torch.from_numpy(rows)]
        if self._lists is None or again:
            self._lists = GrowingLists.of(some, rows, self.store.datastore.section.index.metric)
        else:
            self._lists = self._lists.with_more(some, rows)
        self._listed = self._grown.size

    def _snapshot(self) -> LearnedEntries:
        store, datastore = self.store, self.store.datastore
        keys, norms, values = self._grown.rows
        without = np.empty(0, np.int64)
        if self._lists is not None:
            last = _numbers(one for one in self._rows.values() if one[0] >= self._listed)
            without = np.setdiff1d(np.arange(self._listed, len(keys)), last) - self._listed
        rows = store.superseded
        ends = np.flatnonzero(np.diff(datastore.provenance[rows, 0])) + 1
        superseded = tuple(np.split(datastore.values[rows], ends)) if len(rows) else ()
        gone = np.union1d(_numbers((first, first + count) for first, count in store.gone), rows)
        return LearnedEntries(
            index=Segment(
                keys,
                norms,
                datastore.section.index.metric,
                self._lists,
                self._listed,
                torch.from_numpy(without).to(self.device) if len(without) else None,
            ),
            values=values,
            pairs=tuple(store.pairs[number] for number in self._rows),
            moved=tuple(pair for pair in store.pairs.values() if pair.first_entry is not None),
            gone=torch.from_numpy(gone).to(self.device),
            first=store.first_learned,
            rows=np.array([start for start, _ in self._rows.values()], np.int64),
            stored=datastore.values,
            stored_sentences=self._stored_sentences,
            retriever=self._retriever,
            phrases=self._phrases.update(superseded) if self._phrases is not None else None,
            superseded=superseded,
            source_index=datastore.source_index,
        )


class PhraseSegment:
    """The phrases of a journal's pairs, in an exact segment alongside the index of a phrase datastore."""

    def __init__(self, store: LearnedStore, datastore: PhraseDatastore, device: torch.device) -> None:
        self.store, self.datastore, self.device = store, datastore, device
        self._clear()

    def _clear(self) -> None:
        section = self.datastore.section
        self._grown = GrowingRows(section.KEY_FORM.none(section.dimension, self.device))
        self._spans, self._hashes = np.empty((0, 3), np.int32), np.empty(0, np.uint64)
        self._ids: list[int] = []

    def update(self, superseded: tuple[np.ndarray, ...] = ()) -> LearnedPhrases:
        """Bring the segment up to date with the journal, and return what counts from now on."""
        pairs, phrases = self.store.pairs, self.store.phrases
        ids = list(phrases)
        # some were forgotten, and the places of those that stay are others
        if self._ids != ids[: len(self._ids)]:
            self._clear()
        if new := ids[len(self._ids) :]:
            found = [phrases[number] for number in new]
            places = np.repeat(np.arange(len(new), dtype=np.int32), [len(one.spans) for one in found])
            spans = np.column_stack([places, np.concatenate([one.spans for one in found])])
            hashes = hash_strings(spans, LinesInMemory([pairs[number].target for number in new]))
            self._hashes = np.concatenate([self._hashes, hashes])
            self._spans = np.concatenate([self._spans, spans + np.array([len(self._ids), 0, 0], np.int32)])
            keys = self.datastore.section.KEY_FORM.decode(np.concatenate([one.keys for one in found]))
            self._grown.append(torch.from_numpy(keys))
            self._ids = ids
        moved = {pair.sentence: pair for pair in pairs.values() if pair.sentence is not None}
        own = frozenset(pair.target for pair in pairs.values() if pair.sentence == OWN_SENTENCE)
        return LearnedPhrases(
            self.datastore,
            ExactIndex(self._grown.rows[0], "ip"),
            self._spans,
            self._hashes,
            tuple(pairs[number] for number in ids),
            {number: pair for number, pair in moved.items() if number != OWN_SENTENCE},
            phrases_of_sentences(self.datastore, self.store.gone_sentences),
            superseded,
            own,
        )


class GrowingRows:
    """Rows of arrays on a device, `empty` [0, ...] at first, that grow. Earlier `rows` stay as they are."""

    def __init__(self, *empty: Tensor) -> None:
        self._room, self.size = empty, 0

    @property
    def rows(self) -> tuple[Tensor, ...]:
        return tuple(room[: self.size] for room in self._room)

    def append(self, *new: Tensor) -> None:
        """Append rows of each array, from any device."""
        size = self.size + len(new[0])
        if size > len(self._room[0]):
            before, most = self.rows, max(FIRST_ROWS, 2 * size)
            self._room = tuple(room.new_empty(most, *room.shape[1:]) for room in self._room)
            for room, rows in zip(self._room, before):
                room[: self.size] = rows
        for room, rows in zip(self._room, new):
            room[self.size : size] = rows
        self.size = size


def why_not_learned(directory: Path, phrases: PhraseDatastore) -> str:
    """Say why phrases are not learned together with the tokens of a datastore; nothing where they are."""
    section = phrases.section
    if directory.resolve() != phrases.directory.resolve():
        return f"they are in {phrases.directory}, and what is learned is kept with the tokens, in {directory}"
    if section.pooled:
        return "they are one entry a string, the mean over its places in one text (XPR)"
    if section.store is not None:
        return f"their keys are in {section.store}, and only those in a folder can grow"
    return ""


def _numbers(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.sort(np.concatenate([np.empty(0, np.int64), *(np.arange(*one) for one in ranges)]))
