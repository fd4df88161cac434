"""What was learned alongside a token datastore: sentence pairs with keys and values of their tokens, in a journal.

The datastore stays unchanged. `learnt/N.journal` belongs to its generation N, and to exactly its keys, model,
key layer and projection, as its first record says. Each other record is a pair that was learned, one that was
learned again, one that was forgotten, one that has moved into the datastore's own entries, or what the model
reads as a pair's source. Of the pairs of one source, the one that was learned last counts. Texts that the
model reads alike are one source. If the datastore has a phrase part, pairs have the phrases of their targets,
too, and a record before them says which encoder, segmentation and set of phrases these belong to. Both
records of what the others belong to are there twice: nothing can be read without them. Letters: n tokens of a
pair, d width of keys, P phrases of its target, o width of theirs.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairseq_ccpr.datastore.manifest import Manifest, PhraseSection, TokenSection
from fairseq_ccpr.datastore.parts import KEYS, PROJECTION_FILE
from fairseq_ccpr.datastore.source_index import hash_source
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import FULL, ConfigurationError, DatastoreError, NotWritableError
from fairseq_ccpr.storage.files import unfollowed
from fairseq_ccpr.storage.fingerprint import brief
from fairseq_ccpr.storage.journal import (
    Journal,
    WriterLock,
    begins_as_journal,
    create_journal,
    read_note,
    refuse_unusual,
)
from fairseq_ccpr.text.glossary import folded

LEARNED, LOCK = "learnt", "lock"  # the names on disk are older than the word
# 2 brought phrases, 3 records that are found and checked one by one, 4 hashes of sources, 5 their subwords.
FORMAT_VERSION = 5
OWN_SENTENCE = -1  # in place of the number of a sentence that the datastore was built with

# Numbers are little-endian, texts UTF-8, arrays NumPy's bytes.
(
    HEADER, PAIR, AGAIN, FORGOTTEN, MOVED, PAIR_WITH_PHRASES, PHRASES, PHRASE_IDENTITY, MOVED_WITH_PHRASES, HASHED, READ_AS,
) = range(11)  # fmt: skip
_ID = struct.Struct("<BQ")
_READ_AS = struct.Struct("<BQQ")  # kind, id, and the hash of `ReadAs`, before its ids
_PAIR = struct.Struct("<BQIIII")  # kind, id, count, bytes of source and target, tokens
_PHRASES = struct.Struct("<II")  # P and o
_INTEGER = np.dtype("<i4")
_KEY, _PHRASE_KEY = (np.dtype(kind.KEY_FORM.dtype) for kind in (TokenSection, PhraseSection))

FEW = 10  # pairs that a message names

# of the files that are written here
_NAME = re.compile(r"(0|[1-9]\d*)\.journal(\.damaged(-\d+)?|\.partial)?")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairPhrases:
    """The phrases of a sentence, in its order."""

    spans: np.ndarray  # int32 [P, 2]: start and end in characters
    keys: np.ndarray  # fp16 [P, o]


class ReadAs(NamedTuple):
    """What a model reads as a source."""

    subwords: int  # hash of them as text, uint64, never 0: sources with the same are one
    ids: tuple[int, ...]  # of subwords; the same for sources that differ in unknown ones alone


@dataclass(frozen=True)
class NewPair:
    """A sentence pair that is to be learned."""

    source: str
    target: str
    values: np.ndarray  # int32 [n]
    keys: np.ndarray  # fp16 [n, d]
    phrases: PairPhrases | None = None  # None: no phrase memory is there
    read_as: ReadAs | None = None  # None: not known


@dataclass(frozen=True)
class LearnedPair:
    """A sentence pair that was learned, as it was given."""

    id: int  # by which it can be forgotten; never reused
    source: str
    target: str
    count: int  # how often it was learned
    tokens: int  # of the target, the end of the sentence included
    # in the datastore itself, where its tokens have moved there; None: in the journal
    first_entry: int | None = None
    # Of its target in the datastore's phrase part, where its phrases have moved there; `OWN_SENTENCE` where
    # that sentence is there without it, too; None: its phrases are in the journal, or it has none.
    sentence: int | None = None
    replaced_by: int | None = None  # the pair of its source that counts; None: this one does
    read_as: ReadAs | None = None  # None: not known, as of pairs that earlier versions learned
    # When it was last learned: of one source, the pair with the highest counts.
    moment: int = field(default=0, compare=False)


class Learned(NamedTuple):
    """What learning a pair has done."""

    id: int
    new: bool  # or else it was there already, and is counted
    replaced: LearnedPair | None  # the pair of its source that counted until now


@dataclass
class KeptPair:
    """A pair that was learned and not forgotten, with the values, keys and phrases that are in the journal."""

    pair: LearnedPair
    # Values int32 [n] and keys fp16 [n, d]; None: they moved into the datastore.
    entries: tuple[np.ndarray, np.ndarray] | None = None
    phrases: PairPhrases | None = None


class LearnedStore:
    """The pairs learned alongside a datastore and not forgotten, by their ids.

    `pairs` are those that count, one of each source: the last that was learned. It has `replaced` the others,
    and one of these counts again once it is learned again, or all that were learned after it are forgotten.

    Any number may read; the first to learn or forget holds the right to write until it is closed. Threads may
    share it.
    """

    def __init__(self, datastore: TokenDatastore) -> None:
        self.datastore = datastore
        self.phrase_section = Manifest.read(datastore.directory).phrase
        self._lock = threading.RLock()
        self._right: WriterLock | None = None
        self._read: Callable[[str], ReadAs] | None = None  # hashes a source
        # the datastore's own entries by `hash_source`, of those looked up
        self._rows_of: dict[int, np.ndarray] = {}
        self.put_aside: Path | None = None  # where damaged bytes of the journal are, once it was repaired
        self._load()
        if self.damage:
            logger.warning("%s", self.damage)

    @property
    def folder(self) -> Path:
        """Where the journal is."""
        return self.datastore.directory / LEARNED

    @property
    def path(self) -> Path:
        """The journal's file."""
        return journal_path(self.datastore.directory, self.datastore.section.generation)

    @property
    def gone(self) -> list[tuple[int, int]]:
        """Entries of the datastore itself that do not count: the first, and how many."""
        places = ((kept.pair.first_entry, kept.pair.tokens) for kept in self.replaced.values())
        return self._forgotten + [(first, tokens) for first, tokens in places if first is not None]

    @property
    def gone_sentences(self) -> list[int]:
        """Sentences that the phrase part has only because they were learned, by pairs that do not count."""
        return sorted(self._sentences - {pair.sentence for pair in self.pairs.values()})

    @property
    def first_learned(self) -> int:
        """The first of the datastore's own entries that was learned, or was and is forgotten; their number where none was."""
        moved = (kept.pair.first_entry for kept in self._kept.values())
        firsts = [first for first in moved if first is not None] + [first for first, _ in self._forgotten]
        return min(firsts, default=self.datastore.section.size)

    @property
    def superseded(self) -> np.ndarray:
        """The entries that the datastore was built with whose source is that of a pair that counts, int64, ascending."""
        sources = {_hash_ids(pair.read_as.ids) for pair in self.pairs.values() if pair.read_as is not None}
        if new := sources - self._rows_of.keys():
            self._rows_of |= dict.fromkeys(new, np.empty(0, np.int64)) | self.datastore.rows_of_sources(new)
        rows = np.concatenate([np.empty(0, np.int64), *(self._rows_of[source] for source in sources)])
        return np.sort(rows[rows < self.first_learned])

    def learn(self, pairs: Sequence[NewPair]) -> list[Learned]:
        """Learn pairs, all or none; they are on disk when this returns. One that is there is counted, and keeps its id."""
        with self._lock:
            self.lock()
            done, records = list[tuple[int, bool, int | None]](), []
            known, new_id, counts = dict(self._ids), self.next_id, dict(self._counting)
            if not self._has_phrases and any(pair.phrases is not None for pair in pairs):
                records += [_json_record(PHRASE_IDENTITY, identity_of_phrases(self.phrase_section))] * 2
            for pair in pairs:
                if new := (number := known.get((pair.source, pair.target))) is None:
                    number = known[pair.source, pair.target] = new_id
                    made = LearnedPair(number, pair.source, pair.target, 1, len(pair.values))
                    records.append(learned_record(made, pair.values, pair.keys, pair.phrases))
                    new_id += 1
                elif (
                    pair.phrases is not None
                    and (kept := self._kept.get(number)) is not None  # None: it is being learned
                    and kept.pair.sentence is None
                    and kept.phrases is None
                ):
                    records.append(_ID.pack(PHRASES, number) + _phrase_bytes(pair.phrases))
                else:
                    records.append(_ID.pack(AGAIN, number))
                if pair.read_as is not None:
                    records.append(read_as_record(number, pair.read_as))
                last, counts[_identity(pair)] = counts.get(_identity(pair), number), number
                done.append((number, new, last if last != number else None))
            self._append(records)
            return [
                Learned(n, new, self._listed(last) if last is not None else None) for n, new, last in done
            ]

    def forget(self, ids: Iterable[int]) -> list[LearnedPair]:
        """Forget pairs, all or none; none of them is found any more when this returns.

        Returns:
            The pairs that they had replaced, and that count again.
        """
        with self._lock:
            self.lock()
            ids, counted = list(dict.fromkeys(ids)), dict[int | str, int]()
            for number in ids:
                if (kept := self._kept.get(number)) is None:
                    raise ConfigurationError(
                        f"there is no pair {number} among what was learned into {self.datastore.directory}: it was "
                        "forgotten, or never learned"
                    )
                counted[_identity(kept.pair)] = self._counting[_identity(kept.pair)]
            # Twice: where one of the records is damaged, the pair stays forgotten.
            self._append([_ID.pack(FORGOTTEN, number) for number in ids] * 2)
            now = {source: self._counting.get(source, last) for source, last in counted.items()}
            return [self.pairs[number] for source, number in now.items() if number != counted[source]]

    def counting(self, read_as: ReadAs) -> LearnedPair | None:
        """Return the pair that counts for a source; None where none does."""
        with self._lock:
            number = self._counting.get(read_as.subwords)
            return self.pairs[number] if number is not None else None

    def identify(self, read: Callable[[str], ReadAs]) -> None:
        """Hash the sources that the journal has no hash of as a model reads them; the next to write records the hashes."""
        with self._lock:
            self._read = read
            self._hash_sources()
            if self._right is not None:
                self._record_hashes()

    def _hash_sources(self) -> None:
        for number, kept in self._kept.items():
            if self._read is not None and kept.pair.read_as is None:
                read_as = self._read(kept.pair.source)
                kept.pair = replace(kept.pair, read_as=read_as)
                self._unrecorded.append(read_as_record(number, read_as))
        self._settle()

    def _record_hashes(self) -> None:
        self._append(self._unrecorded)
        self._unrecorded.clear()

    def find(self, query: str) -> list[LearnedPair]:
        """Return the pairs that have all words of a query in their source or target; newest first.

        Case, width and composition make no difference. Pairs that were replaced are among them.
        """
        words = [folded(word) for word in query.split()]
        with self._lock:
            pairs = [self._listed(number) for number in sorted(self._kept, reverse=True)]
        texts = ((pair, " ".join(map(folded, f"{pair.source} {pair.target}".split()))) for pair in pairs)
        return [pair for pair, text in texts if all(word in text for word in words)]

    def lock(self) -> None:
        """Take the right to write, read what others wrote before, and put aside what is damaged."""
        with self._lock:
            if self._right is not None:
                return
            try:
                refuse_unusual(self.folder, folder=True)
                refuse_unusual(self.path)
                # What is learned is for nobody else, unless its owner says so.
                self.folder.mkdir(mode=0o700, exist_ok=True)
                self._right = WriterLock(self.folder / LOCK)
                try:
                    self._begin_writing(self._right)
                except BaseException:
                    self.close()
                    raise
            except OSError as error:
                fault = f"{self.folder} cannot be written ({error.strerror})"
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    advice = f"nothing was changed; {'free some space' if error.errno in FULL else 'check the disk'}"
                    raise DatastoreError(f"{fault}: {advice}") from None
                raise NotWritableError(
                    f"{fault}, as learning requires: nothing was changed; check its permissions, or learn into a copy of the "
                    "datastore"
                ) from None

    def handed_on(self, datastore: TokenDatastore) -> LearnedStore:
        """Open the pairs of the datastore's next generation, and hand over this one's right to write to them."""
        other = LearnedStore(datastore)
        if self._read is not None:
            other.identify(self._read)
        with self._lock:
            other._right, self._right = self._right, None
        return other

    def close(self) -> None:
        """Give the right to write back."""
        with self._lock:
            if self._right is not None:
                self._right.release()
                self._right = None

    def _begin_writing(self, right: WriterLock) -> None:
        self._refuse_changed()
        if not self.path.exists():
            create_journal(self.path, first_records(self.datastore.section, self.next_id))
        open(self.path, "r+b", opener=unfollowed).close()
        self._load()
        if self.damage or self._journal.old:
            if self.damage:
                self.put_aside = self._journal.put_damage_aside()
                where = (
                    f"; the damaged bytes are in {self.put_aside} now" if self.put_aside is not None else ""
                )
                logger.warning("%s%s", self.damage, where)
            phrases = self.phrase_section if self._has_phrases else None
            records = first_records(self.datastore.section, self.next_id, phrases)
            records += [one for one in Journal(self.path).read() if one[0] not in (HEADER, PHRASE_IDENTITY)]
            right.note("")
            create_journal(self.path, records)
            self._load()
        self._note_end()
        self._record_hashes()

    def _note_end(self) -> None:
        """Note how many records there are: nothing in the journal shows that its last ones are missing."""
        if self._right is not None:
            self._right.note(f"{self.path.name} {self._journal.count}")

    def _noted_end(self) -> int:
        found = re.fullmatch(r"(\S+) (\d+)", read_note(self.folder / LOCK))
        return int(found[2]) if found and found[1] == self.path.name else 0

    def _append(self, records: list[bytes]) -> None:
        if records:
            self._journal.append(records)
        for record in records:
            self._apply(record)
        self._settle()
        self._note_end()

    def _load(self) -> None:
        """Another process may have written to the journal, or in place of it: it is read from its beginning."""
        self._kept: dict[int, KeptPair] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._forgotten: list[tuple[int, int]] = []  # entries of the datastore: the first, and how many
        self._sentences: set[int] = set()  # that the phrase part has, or had, only because they were learned
        self._moment = 0  # records that learned something
        self._unrecorded: list[bytes] = []  # records of hashes that were computed here
        self.forgotten, self.next_id = 0, 1  # how many pairs were forgotten so far
        self.damage = ""  # what is wrong with the journal, a sentence
        # pairs that count, or may again, unless a record of their forgetting is missing
        self.doubtful: list[int] = []
        self._settle()
        self._begun = self._has_phrases = False  # whether the journal says what it, and its phrases belong to
        self._journal = Journal(self.path)
        try:
            if not self.path.exists():
                self._refuse_changed()  # or else what was learned may have moved elsewhere
                return
            refuse_unusual(self.path, linked=True)
            before, end = 0, self._noted_end()
            for record in self._journal.read():
                if (gaps := self._journal.lost + len(self._journal.damage)) > before:
                    before, self.doubtful = gaps, list(self._kept)
                self._apply(record)
            if not (
                self._journal.old or any(start >= self._journal.end for start, _ in self._journal.damage)
            ):
                self._journal.lost += max(0, end - self._journal.count)
            if self._journal.lost + len(self._journal.damage) > before:
                self.doubtful = list(self._kept)
        except PermissionError:
            raise DatastoreError(
                f"{self.path} cannot be read, as it is another user's: ask for permission to read it and its folder, or copy "
                f"the datastore without {LEARNED}"
            ) from None
        self._hash_sources()
        if not self._begun:
            raise DatastoreError(
                f"{self.path} is damaged from its beginning on: move it away, and learn again"
            )
        if self._journal.damage or self._journal.lost:
            lost, size = self._journal.lost, sum(end - start for start, end in self._journal.damage)
            self.damage = (
                f"{self.path}: {lost:,} {'record is' if lost == 1 else 'records are'} missing, {size:,} bytes are damaged or "
                f"were not completely written; the {len(self.pairs):,} pairs of the other records count"
            )
            self.doubtful = sorted(number for number in self.doubtful if number in self._kept)
            if self.doubtful:
                few = ", ".join(map(str, self.doubtful[:FEW])) + (", ..." if len(self.doubtful) > FEW else "")
                self.damage += (
                    f"; a forgotten pair may count again: see {few}, learned before the damage, with fairseq-ccpr memory "
                    f"{self.datastore.directory}"
                )
            self.next_id += lost  # theirs may have been given

    def _apply(self, record: bytes) -> None:
        try:
            kind = record[0]
            if kind == HEADER:
                self._check(json.loads(record[1:]))
            elif kind == PHRASE_IDENTITY:
                self._refuse_others(json.loads(record[1:]), identity_of_phrases(self.phrase_section))
                self._has_phrases = True
            elif kind in (AGAIN, PHRASES, FORGOTTEN, READ_AS, HASHED):
                _, number = _ID.unpack_from(record)
                self.next_id = max(self.next_id, number + 1)
                if (kept := self._kept.get(number)) is None:
                    return  # it was forgotten, or was learned in a record that is lost
                if kind == FORGOTTEN:
                    self._drop(number)
                elif kind == READ_AS:
                    ids = np.frombuffer(record, _INTEGER, offset=_READ_AS.size)
                    read_as = ReadAs(_READ_AS.unpack_from(record)[2], tuple(ids.tolist()))
                    kept.pair = replace(kept.pair, read_as=read_as)
                elif kind != HASHED:  # of version 4: hashes alone, which are computed again
                    self._moment += 1
                    kept.pair = replace(kept.pair, count=kept.pair.count + 1, moment=self._moment)
                    if kind == PHRASES:
                        self._keep_phrases(kept, _read_phrases(record, _ID.size))
            elif kind in (PAIR, MOVED, PAIR_WITH_PHRASES, MOVED_WITH_PHRASES):
                self._keep(kind, record)
            else:
                raise ValueError(f"kind {kind}")
        except (struct.error, ValueError, TypeError, KeyError, IndexError) as error:
            raise DatastoreError(
                f"{self.path} has a record that cannot be read ({error}): upgrade fairseq-ccpr"
            ) from None

    def _keep(self, kind: int, record: bytes) -> None:
        _, number, times, source_bytes, target_bytes, tokens = _PAIR.unpack_from(record)
        middle = _PAIR.size + source_bytes
        end = middle + target_bytes
        source, target = record[_PAIR.size : middle].decode(), record[middle:end].decode()
        first_entry = sentence = None
        if kind == MOVED:
            (first_entry,) = struct.unpack("<q", record[end:])
        elif kind == MOVED_WITH_PHRASES:
            first_entry, sentence = struct.unpack("<qq", record[end:])
        pair = LearnedPair(number, source, target, times, tokens, first_entry, sentence)
        if (forgotten := self._ids.get((source, target))) is not None:
            # in a record that is missing: a pair that is there is not learned as a new one
            self._drop(forgotten)
        self._ids[source, target] = number
        self.next_id = max(self.next_id, number + 1)
        self._moment += 1
        kept = self._kept[number] = KeptPair(replace(pair, moment=self._moment))
        if sentence not in (None, OWN_SENTENCE):
            self._sentences.add(sentence)
        if first_entry is not None:
            return
        width = self.datastore.section.KEY_FORM.width(self.datastore.section.dimension)
        values = np.frombuffer(record, _INTEGER, tokens, end)  # which share the record's memory, as keys do
        keys = np.frombuffer(record, _KEY, tokens * width, end + values.nbytes).reshape(tokens, width)
        end += values.nbytes + keys.nbytes
        if kind == PAIR and end != len(record):
            raise ValueError("its length is not that of its parts")
        kept.entries = values, keys
        if kind == PAIR_WITH_PHRASES:
            self._keep_phrases(kept, _read_phrases(record, end))

    def _keep_phrases(self, kept: KeptPair, phrases: PairPhrases) -> None:
        section = self.phrase_section
        if not self._has_phrases:
            return  # what they belong to is lost, and they are until they are learned again
        if section is None or phrases.keys.shape[1] != section.KEY_FORM.width(section.dimension):
            raise DatastoreError(
                f"{self.path} has phrases that do not belong to {self.datastore.directory}: move it away, and learn again"
            )
        kept.phrases = phrases

    def _drop(self, number: int) -> None:
        pair = self._kept.pop(number).pair
        del self._ids[pair.source, pair.target]
        self.forgotten += 1
        if pair.first_entry is not None:
            self._forgotten.append((pair.first_entry, pair.tokens))

    def _settle(self) -> None:
        """Decide which pairs count: of each source the one that was learned last."""
        self._counting: dict[int | str, int] = {}
        for number, kept in sorted(self._kept.items(), key=lambda one: one[1].pair.moment):
            self._counting[_identity(kept.pair)] = number
        numbers = sorted(self._counting.values())
        counting, found = set(numbers), [(number, self._kept[number]) for number in numbers]
        self.pairs: dict[int, LearnedPair] = {number: kept.pair for number, kept in found}
        # Of those pairs whose have not moved into the datastore.
        self.entries = {number: kept.entries for number, kept in found if kept.entries is not None}
        self.phrases = {number: kept.phrases for number, kept in found if kept.phrases is not None}
        aside = [(number, kept) for number, kept in self._kept.items() if number not in counting]
        self.replaced = dict(sorted(aside, key=lambda one: one[1].pair.moment))

    def _listed(self, number: int) -> LearnedPair:
        pair = self._kept[number].pair
        last = self._counting[_identity(pair)]
        return pair if last == number else replace(pair, replaced_by=last)

    def _check(self, header: dict[str, Any]) -> None:
        if header["version"] > FORMAT_VERSION:
            raise DatastoreError(
                f"{self.path} has format version {header['version']}, and this fairseq-ccpr reads up to {FORMAT_VERSION}: "
                "upgrade fairseq-ccpr"
            )
        self._refuse_others(header["identity"], identity(self.datastore.section))
        self.next_id, self._begun = max(self.next_id, header["first_id"]), True

    def _refuse_others(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        for name in expected | found:
            if (before := found.get(name)) != (current := expected.get(name)):
                raise DatastoreError(
                    f"{self.path} was learned with another {name} than {self.datastore.directory} has ({brief(before)}, "
                    f"here {brief(current)}): move it away, or restore the datastore it belongs to"
                )

    def _refuse_changed(self) -> None:
        opened, section = self.datastore, Manifest.read(self.datastore.directory).token
        before = opened.section.generation, opened.keys_fingerprint
        if section is None or (section.generation, section.keys_fingerprint) != before:
            raise DatastoreError(
                f"{self.datastore.directory} was compacted or built again since it was opened: open it again"
            )


_hash_ids = lru_cache(1 << 17)(hash_source)


def first_records(section: TokenSection, first_id: int, phrases: PhraseSection | None = None) -> list[bytes]:
    """Make the records that a journal begins with, where ids below the first were given before."""
    header = {"version": FORMAT_VERSION, "identity": identity(section), "first_id": first_id}
    records = [_json_record(HEADER, header)] * 2
    return records + [_json_record(PHRASE_IDENTITY, identity_of_phrases(phrases))] * (
        2 if phrases is not None else 0
    )


def learned_record(
    pair: LearnedPair, values: np.ndarray, keys: np.ndarray, phrases: PairPhrases | None
) -> bytes:
    """Make the record of a pair whose entries are in the journal."""
    arrays = values.astype(_INTEGER).tobytes() + keys.astype(_KEY).tobytes()
    kind, last = (PAIR, b"") if phrases is None else (PAIR_WITH_PHRASES, _phrase_bytes(phrases))
    return _texts(kind, pair) + arrays + last


def read_as_record(number: int, read_as: ReadAs) -> bytes:
    """Make the record of what the model reads as the source of a pair."""
    return _READ_AS.pack(READ_AS, number, read_as.subwords) + np.array(read_as.ids, _INTEGER).tobytes()


def moved_record(pair: LearnedPair) -> bytes:
    """Make the record of a pair whose entries are the datastore's own."""
    places = [place for place in (pair.first_entry, pair.sentence) if place is not None]
    kind = MOVED if pair.sentence is None else MOVED_WITH_PHRASES
    return _texts(kind, pair) + struct.pack(f"<{len(places)}q", *places)


def journal_path(directory: Path, generation: int) -> Path:
    """Return where the journal of a generation of a datastore is."""
    return directory / LEARNED / f"{generation}.journal"


def remove_superseded(directory: Path, generation: int) -> None:
    """Remove the journals of a datastore's other generations, with what was put aside; files of others stay."""
    for path in (directory / LEARNED).glob("*"):
        found = _NAME.fullmatch(path.name)
        other = found and int(found[1]) != generation and path.is_file() and not path.is_symlink()
        if found and other and (found[2] or begins_as_journal(path)):
            path.unlink()


def identity(section: TokenSection) -> dict[str, Any]:
    """Describe what learned keys belong to, by name."""
    return {
        "model": section.fingerprints["model"],
        "target dictionary": section.fingerprints["target_dictionary"],
        "key layer": section.key_layer,
        "projection": section.digest(PROJECTION_FILE),
        "set of keys": section.keys_fingerprint,
        "width of keys": section.dimension,
    }


def identity_of_phrases(section: PhraseSection | None) -> dict[str, Any]:
    """Describe what learned phrases belong to, by name; empty without a phrase part."""
    if section is None:
        return {}
    return {
        "phrase encoder": section.fingerprints["encoder"],
        "segmentation of phrases": section.segmentation,
        "lexicon of phrases": section.fingerprints.get("lexicon"),
        "set of phrases": section.digest(f"{KEYS}.npy"),
    }


def _identity(pair: NewPair | LearnedPair) -> int | str:
    """Return what makes a source the same as another's: what the model reads, or the text where that is not known."""
    return pair.read_as.subwords if pair.read_as is not None else pair.source


def _json_record(kind: int, content: dict[str, Any]) -> bytes:
    return bytes([kind]) + json.dumps(content).encode()


def _texts(kind: int, pair: LearnedPair) -> bytes:
    source, target = pair.source.encode(), pair.target.encode()
    return _PAIR.pack(kind, pair.id, pair.count, len(source), len(target), pair.tokens) + source + target


def _phrase_bytes(phrases: PairPhrases) -> bytes:
    arrays = phrases.spans.astype(_INTEGER).tobytes() + phrases.keys.astype(_PHRASE_KEY).tobytes()
    return _PHRASES.pack(*phrases.keys.shape) + arrays


def _read_phrases(record: bytes, start: int) -> PairPhrases:
    size, width = _PHRASES.unpack_from(record, start)
    start += _PHRASES.size
    if len(record) != start + size * (2 * _INTEGER.itemsize + width * _PHRASE_KEY.itemsize):
        raise ValueError("its length is not that of its parts")
    spans = np.frombuffer(record, _INTEGER, 2 * size, start).reshape(size, 2)
    return PairPhrases(
        spans, np.frombuffer(record, _PHRASE_KEY, size * width, start + spans.nbytes).reshape(size, width)
    )
