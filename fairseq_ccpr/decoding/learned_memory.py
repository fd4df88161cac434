"""What was learned, ready to be searched: its keys on the model's device, in segments alongside the indexes of a datastore.

The segment of tokens is exact while it is small, on a GPU however large it is. On a CPU its entries go into
inverted lists that grow with it, all but the last ones. The segment of phrases is exact.
Letters: n rows of a segment, N entries of the datastore itself, m that are gone, d width of keys, of phrases
o.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.learned import OWN_SENTENCE, Learned, LearnedPair, LearnedStore, NewPair, ReadAs
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.source_index import SentenceMemory, SourceIndex, ranges
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
# of them cost more than lists do (scripts/recipes/segment_search.py).
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
        """Whether searching the datastore alone finds the same."""
        return not self.index.size and not len(self.gone)

    def without(self, targets: set[str]) -> LearnedPhrases:
        """Return the same without the phrases of these sentences of the datastore itself."""
        numbers = {self.datastore.number(target) for target in targets - self.kept}
        kept = sorted(number for number in numbers if number is not None and number not in self.moved)
        return replace(self, gone=np.union1d(self.gone, entries_of(self.datastore, kept)), superseded=())

    def joined(self, index: Index) -> Index | JoinedIndex:
        """Search an index over the datastore's own keys and what was learned as one."""
        return JoinedIndex(index, self.index) if self.index.size else index

    def stored(self, entries: np.ndarray) -> np.ndarray:
        """Tell which of entries are the datastore's own, [R] -> bool [R]."""
        return entries < self.datastore.section.size

    def string_hashes(self, entries: np.ndarray) -> np.ndarray:
        """Hash the strings of entries, the datastore's own or learned, int64 [R] -> uint64 [R]."""
        stored, hashes = self.stored(entries), np.empty(len(entries), np.uint64)
        hashes[stored] = self.datastore.string_hashes(entries[stored])
        hashes[~stored] = self.hashes[entries[~stored] - self.datastore.section.size]
        return hashes

    def sentence(self, number: int) -> str:
        """Return the sentence that a span names: the target of a pair."""
        return self.pairs[number].target

    def phrase(self, entry: int) -> tuple[str, str, int, int]:
        """Return the string of an entry, own or learned, its sentence, and the characters where it begins and ends."""
        if entry < self.datastore.section.size:
            return self.datastore.phrase(entry)
        number, start, end = self.spans[entry - self.datastore.section.size].tolist()
        sentence = self.sentence(number)
        return sentence[start:end], sentence, start, end

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
        retriever: of the datastore that they were learned alongside, if it was compacted since the system was
            loaded.
        phrases: of the same pairs, where a phrase memory learns.
        stored: values of the datastore that `moved` are in.
        superseded: targets of the datastore's own sentences whose source is that of a learned pair, int32 [L]
            each.
        source_index: of the datastore's own source sentences; None where it was built without.
        stored_sentences: the sentence of each of the datastore's own entries, int32 [N], on the device.
    """

    index: Segment
    values: Tensor
    pairs: tuple[LearnedPair, ...]
    moved: tuple[LearnedPair, ...]
    gone: Tensor
    first: int
    rows: np.ndarray
    retriever: LearningRetriever | None = None
    phrases: LearnedPhrases | None = None
    stored: np.ndarray | None = None
    superseded: tuple[np.ndarray, ...] = ()
    source_index: SourceIndex | None = None
    stored_sentences: Tensor | None = None

    @classmethod
    def none(cls, datastore: TokenDatastore, sentences: Tensor, device: torch.device) -> LearnedEntries:
        """Make a snapshot in which nothing was learned, of a datastore whose entries are of these sentences, int32 [N]."""
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        keys = datastore.section.KEY_FORM.none(datastore.section.dimension, device)
        segment = Segment(keys, nothing.float(), datastore.section.index.metric)
        empty = cls(segment, nothing.int(), (), (), nothing, len(sentences), np.empty(0, np.int64))
        return replace(empty, source_index=datastore.source_index, stored_sentences=sentences)

    @cached_property
    def sentences(self) -> SentenceMemory | None:
        """The source sentences: the datastore's own, less those that are gone, then those of `pairs`; None: not known."""
        if self.source_index is None:
            return None
        learned = [
            np.array(pair.read_as.ids if pair.read_as is not None else (), np.int64) for pair in self.pairs
        ]
        return SentenceMemory(self.source_index, learned, self._sentences_gone)

    @cached_property
    def _sentences_gone(self) -> np.ndarray:
        assert self.stored_sentences is not None
        return self.stored_sentences[self.gone].unique().cpu().numpy()

    @cached_property
    def _sizes(self) -> np.ndarray:
        """How many entries each sentence has, int64 [S']; 0 where they do not count."""
        assert self.source_index is not None
        learned = np.array([pair.tokens for pair in self.pairs], np.int64)
        sizes = np.concatenate([np.diff(self.source_index.sentences[:, 0]), learned])
        sizes[self._sentences_gone] = 0
        return sizes

    def most_alike(self, sims: np.ndarray, count: int) -> np.ndarray:
        """List the entries of the sentences with the highest likeness, [S'], until they are `count`: int64 [n].

        They are none where nothing is like the source at all.
        """
        if not sims.max(initial=0.0):
            return np.empty(0, np.int64)
        assert self.source_index is not None and self.stored_sentences is not None
        there = np.flatnonzero(self._sizes)
        near = there[np.argpartition(-sims[there], min(count, len(there)) - 1)[:count]]
        near = near[np.lexsort((-near, -sims[near]))]  # of equal ones the newest first
        near = near[: int(np.searchsorted(np.cumsum(self._sizes[near]), count)) + 1]
        own = self.source_index.described.sentences
        stored, learned = near[near < own], near[near >= own]
        first = self.rows[learned - own] + len(self.stored_sentences)
        return np.concatenate(
            [self.source_index.entries(stored), ranges(first, first + self._sizes[learned])]
        )

    @cached_property
    def _first_rows(self) -> Tensor:
        return torch.from_numpy(self.rows).to(self.values.device)

    def sentences_of(self, entries: Tensor) -> Tensor:
        """Return the sentences of entries as `sentences` numbers them, int64 [N, k]; any for one that is missing."""
        stored = self.stored_sentences
        assert stored is not None and self.source_index is not None
        own, size = self.source_index.described.sentences, len(stored)
        numbers = stored[entries.clamp(0, size - 1)].long() if size else torch.zeros_like(entries)
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
        """Whether searching the datastore alone finds the same."""
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
        if pair.first_entry is not None:
            assert self.stored is not None
            return self.stored[pair.first_entry :][: pair.tokens]
        row = int(self.rows[self._numbers[pair.id]])
        return self.values[row : row + pair.tokens].cpu().numpy()

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {pair.id: number for number, pair in enumerate(self.pairs)}

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
    """The pairs learned alongside a token datastore: decoding searches them, while a program adds and removes some.

    Threads may share it; what was learned or forgotten counts for whoever asks for `entries` after that.
    """

    def __init__(
        self, datastore: TokenDatastore, device: torch.device, phrases: PhraseDatastore | None = None
    ) -> None:
        self.store = LearnedStore(datastore)
        self._phrases = PhraseSegment(self.store, phrases, device) if phrases is not None else None
        self.device = device
        self._metric = datastore.section.index.metric
        self._lock = threading.Lock()
        self._retriever: LearningRetriever | None = None
        self._identified = False
        self._lists_help = device.type == "cpu" and can_grow()
        self.entries: LearnedEntries  # what counts
        self._open(datastore)
        self._clear()
        self._update()

    def lock(self) -> None:
        """Take the right to write before there is anything to write; see `LearnedStore.lock`. What others wrote counts."""
        with self._lock:
            self.store.lock()
            self._update()

    def identify(self, read: Callable[[str], ReadAs]) -> None:
        """Hash the sources of pairs that an earlier version learned; see `LearnedStore.identify`."""
        if not self._identified:
            with self._lock:
                self.store.identify(read)
                self._update()
                self._identified = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Block learning and forgetting."""
        with self._lock:
            yield

    def go_on_beside(self, datastore: TokenDatastore, retriever: LearningRetriever) -> None:
        """Continue with the datastore's next generation, which a retriever searches; the memory must be `paused`."""
        self.store, self._retriever = self.store.handed_on(datastore), retriever
        self._open(datastore)
        self._clear()
        self._update()

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

    def _clear(self) -> None:
        section = self.store.datastore.section
        # of each pair, by its id: the first, and the one after its last
        self._rows: dict[int, tuple[int, int]] = {}
        self._keys = GrowingRows(section.KEY_FORM.none(section.dimension, self.device))
        self._norms = GrowingRows(torch.empty(0, device=self.device))
        self._values = GrowingRows(torch.empty(0, dtype=torch.int32, device=self.device))
        self._lists: GrowingLists | None = None
        self._listed = 0  # rows that are in lists, or were
        self._gone: list[tuple[int, int]] = []  # the rows after those that are gone, as of `_rows`

    def _open(self, datastore: TokenDatastore) -> None:
        self._stored_sentences = as_tensor(datastore.provenance)[:, 0].to(self.device)

    def _update(self) -> None:
        kept = self.store.entries
        if lost := [number for number in self._rows if number not in kept]:
            self._drop(lost)
        if new := [number for number in kept if number not in self._rows]:
            ends = self._keys.size + np.cumsum([len(kept[number][0]) for number in new])
            self._rows |= {
                number: (int(end) - len(kept[number][0]), int(end)) for number, end in zip(new, ends)
            }
            values, keys = (np.concatenate(arrays) for arrays in zip(*(kept[number] for number in new)))
            first = self._keys.size
            self._keys.append(torch.from_numpy(self.store.datastore.section.KEY_FORM.decode(keys)))
            self._values.append(torch.from_numpy(values))
            self._norms.append(half_norms(self._keys.rows[first:]))
        if self._lists_help and self._keys.size - self._listed > (
            EXACT_ROWS if self._lists is None else LAST_ROWS
        ):
            self._grow()
        self.entries = self._snapshot()

    def _snapshot(self) -> LearnedEntries:
        last = _numbers(self._gone) - self._listed
        without = torch.from_numpy(last).to(self.device) if len(last) else None
        index = Segment(self._keys.rows, self._norms.rows, self._metric, self._lists, self._listed, without)
        moved = tuple(pair for pair in self.store.pairs.values() if pair.first_entry is not None)
        in_segment = tuple(self.store.pairs[number] for number in self._rows)
        datastore = self.store.datastore
        first = self.store.first_learned
        forgotten = _numbers((begin, begin + count) for begin, count in self.store.gone)
        rows = self.store.superseded
        gone = torch.from_numpy(np.union1d(forgotten, rows)).to(self.device)
        ends = np.flatnonzero(np.diff(datastore.provenance[rows, 0])) + 1
        superseded = tuple(np.split(datastore.values[rows], ends)) if len(rows) else ()
        starts = np.array([start for start, _ in self._rows.values()], np.int64)
        phrases = self._phrases.update(superseded) if self._phrases is not None else None
        return LearnedEntries(
            index,
            self._values.rows,
            in_segment,
            moved,
            gone,
            first,
            starts,
            self._retriever,
            phrases,
            datastore.values,
            superseded,
            datastore.source_index,
            self._stored_sentences,
        )

    def _drop(self, lost: list[int]) -> None:
        """Take pairs out. Where there are no lists, or most rows are gone, the others are written again instead."""
        dropped = [self._rows.pop(number) for number in lost]
        if (
            self._lists is None
            or 2 * sum(end - start for start, end in self._rows.values()) <= self._keys.size
        ):
            self._clear()
            return
        if listed := [one for one in dropped if one[0] < self._listed]:
            self._lists = self._lists.without(listed, self._keys.rows)
        self._gone += [one for one in dropped if one[0] >= self._listed]

    def _grow(self) -> None:
        again = self._lists is None or self._lists.outgrown
        rows = _numbers(one for one in self._rows.values() if again or one[0] >= self._listed)
        keys = self._keys.rows[torch.from_numpy(rows)]
        if self._lists is None or again:
            self._lists = GrowingLists.of(keys, rows, self._metric)
        else:
            self._lists = self._lists.with_more(keys, rows)
        self._listed, self._gone = self._keys.size, []


class PhraseSegment:
    """The phrases of a journal's pairs, in a small exact segment alongside the index of a phrase datastore."""

    def __init__(self, store: LearnedStore, datastore: PhraseDatastore, device: torch.device) -> None:
        self.store, self.datastore, self.device = store, datastore, device
        self._clear()

    def _clear(self) -> None:
        section = self.datastore.section
        self._keys = GrowingRows(section.KEY_FORM.none(section.dimension, self.device))
        self._spans = [np.empty((0, 3), np.int32)]  # of each time that some were learned
        self._hashes = [np.empty(0, np.uint64)]
        self._ids: list[int] = []

    def update(self, superseded: tuple[np.ndarray, ...] = ()) -> LearnedPhrases:
        """Bring the segment up to date with the journal, and return what counts from now on."""
        store = self.store
        ids = list(store.phrases)
        # some were forgotten, and the places of those that stay are others
        if self._ids != ids[: len(self._ids)]:
            self._clear()
        if new := ids[len(self._ids) :]:
            found, targets = (
                [store.phrases[number] for number in new],
                [store.pairs[number].target for number in new],
            )
            places = np.repeat(np.arange(len(new), dtype=np.int32), [len(one.spans) for one in found])
            spans = np.column_stack([places, np.concatenate([one.spans for one in found])])
            self._hashes.append(hash_strings(spans, LinesInMemory(targets)))
            keys = np.concatenate([one.keys for one in found])
            self._keys.append(torch.from_numpy(self.datastore.section.KEY_FORM.decode(keys)))
            self._spans.append(spans + np.array([len(self._ids), 0, 0], np.int32))
            self._ids += new
        moved = {
            pair.sentence: pair for pair in store.pairs.values() if pair.sentence not in (None, OWN_SENTENCE)
        }
        return LearnedPhrases(
            self.datastore,
            ExactIndex(self._keys.rows, "ip"),
            np.concatenate(self._spans),
            np.concatenate(self._hashes),
            tuple(store.pairs[number] for number in self._ids),
            moved,
            entries_of(self.datastore, store.gone_sentences),
            superseded,
            frozenset(pair.target for pair in store.pairs.values() if pair.sentence == OWN_SENTENCE),
        )


class GrowingRows:
    """Rows on a device, as of `empty` [0, ...], that more are appended to. What `rows` returned before stays as it is."""

    def __init__(self, empty: Tensor) -> None:
        self._room, self.size = empty, 0

    @property
    def rows(self) -> Tensor:
        """All of them."""
        return self._room[: self.size]

    def append(self, new: Tensor) -> None:
        """Append rows, from any device."""
        size = self.size + len(new)
        if size > len(self._room):
            larger = self._room.new_empty(max(FIRST_ROWS, 2 * size), *self._room.shape[1:])
            larger[: self.size] = self.rows
            self._room = larger
        self._room[self.size : size] = new
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


def entries_of(datastore: PhraseDatastore, sentences: list[int]) -> np.ndarray:
    """List the entries of sentences, int64 ascending; those of a datastore stand sentence by sentence."""
    numbers = datastore.spans[:, 0]  # which bisect reads some of, and NumPy would copy
    rows = [np.arange(bisect_left(numbers, n), bisect_right(numbers, n)) for n in sorted(sentences)]
    return np.concatenate([np.empty(0, np.int64), *rows])


def _numbers(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.sort(np.concatenate([np.empty(0, np.int64), *(np.arange(*one) for one in ranges)]))
