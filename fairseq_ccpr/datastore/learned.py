"""What was learned alongside a token datastore: sentence pairs with the keys and values of their tokens.

The datastore stays unchanged. `learnt/N.journal` belongs to its generation N, and to exactly its keys, model,
key layer and projection, as its first record says. Each other record is a pair that was learned, one that was
learned again, one that was forgotten, one that has moved into the datastore's own entries, what the model
reads as a pair's source, or when and by whom a pair was learned, or made according to its file. Of the pairs
of one source, the one that was learned last counts. Texts that the model reads alike are one source. If the
datastore has a phrase part, pairs have the phrases of their targets, too, and a record before them says which
encoder, segmentation and set of phrases these belong to. Both records of what the others belong to are there
twice: nothing can be read without them. Letters: n tokens of a pair, d width of keys, P phrases of its
target, o width of theirs.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import struct
import threading
from bisect import bisect_left, bisect_right
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairseq_ccpr.datastore.manifest import Manifest, PhraseSection, TokenSection
from fairseq_ccpr.datastore.parts import KEYS, PROJECTION_FILE
from fairseq_ccpr.datastore.phrase import PhraseDatastore
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
JOURNAL_VERSION, DATELESS = 6, 5  # the only ones that are read; the former has dates and authors
OWN_SENTENCE = -1  # in place of the number of a sentence that the datastore was built with

# Of records. Numbers are little-endian, texts UTF-8, arrays NumPy's bytes.
Kind = IntEnum(
    "Kind",
    "HEADER PAIR AGAIN FORGOTTEN MOVED PAIR_WITH_PHRASES PHRASES PHRASE_IDENTITY MOVED_WITH_PHRASES "
    "UNUSED READ_AS SIGNED",
    start=0,
)
_ID = struct.Struct("<BQ")
_READ_AS = struct.Struct("<BQQ")  # kind, id, and the hash of `ReadAs`, before its ids
_SIGNED = struct.Struct("<BQQ")  # kind, id, and seconds since 1970, before who has learned it
_PAIR = struct.Struct("<BQIIII")  # kind, id, count, bytes of source and target, tokens
_PLACES = {
    Kind.MOVED: struct.Struct("<q"),
    Kind.MOVED_WITH_PHRASES: struct.Struct("<qq"),
}  # first entry and sentence
_PHRASES = struct.Struct("<II")  # P and o
_INTEGER = np.dtype("<i4")
_KEY, _PHRASE_KEY = (
    np.dtype(kind.KEY_FORM.dtype).newbyteorder("<") for kind in (TokenSection, PhraseSection)
)

FROM_OLDER = "export the pairs with the version that learned them, move the file away, and learn them again"
NAMED_PAIRS = 10  # that a message names

# of the files that are written here
_NAME = re.compile(r"(0|[1-9]\d*)\.journal((?:\.damaged(?:-\d+)?)?(?:\.partial)?)")

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
    # seconds since 1970, at which it is learned, or was made according to its file; 0: not known
    time: int = 0
    author: str = ""


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
    # when and by whom it was learned last, or made according to its file, as of `NewPair`
    time: int = field(default=0, compare=False)
    author: str = field(default="", compare=False)
    # When it was last learned: of one source, the pair with the highest counts.
    moment: int = field(default=0, compare=False)
    # What is in the journal, and not in the datastore: values int32 [n] and keys fp16 [n, d]; phrases.
    entries: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False, repr=False)
    phrases: PairPhrases | None = field(default=None, compare=False, repr=False)
    forgotten: int = field(default=0, compare=False, repr=False)  # what is left of its texts: their hash


class Learned(NamedTuple):
    """What learning a pair has done."""

    id: int
    new: bool  # or else it was there already, and is counted
    replaced: LearnedPair | None  # the pair of its source that counted until now


class LearnedStore:
    """The pairs learned alongside a datastore and not forgotten, by their ids.

    `pairs` are those that count, one of each source: the last that was learned. It has `replaced` the others,
    and one of these counts again once it is learned again, or all that were learned after it are forgotten.
    `_settle` alone decides that, from the one list of all pairs that the journal has, forgotten ones too.

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
        return self.datastore.directory / LEARNED

    @property
    def path(self) -> Path:
        return journal_path(self.datastore.directory, self.datastore.section.generation)

    @property
    def entries(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Values and keys of the pairs that count, and that have not moved into the datastore."""
        return {n: pair.entries for n, pair in self.pairs.items() if pair.entries is not None}

    @property
    def phrases(self) -> dict[int, PairPhrases]:
        """Phrases of the pairs that count, where these have not moved into the datastore."""
        return {n: pair.phrases for n, pair in self.pairs.items() if pair.phrases is not None}

    @property
    def gone(self) -> list[tuple[int, int]]:
        """Entries of the datastore itself that do not count: the first, and how many; ascending."""
        moved = ((pair.first_entry, pair) for pair in self._all.values() if pair.id not in self.pairs)
        return sorted((first, pair.tokens) for first, pair in moved if first is not None and pair.tokens)

    @property
    def gone_sentences(self) -> list[int]:
        """Sentences that the phrase part has only because they were learned, by pairs that do not count."""
        learned = {pair.sentence for pair in self._all.values() if pair.sentence is not None}
        return sorted(learned - {OWN_SENTENCE} - {pair.sentence for pair in self.pairs.values()})

    @property
    def first_learned(self) -> int:
        """The first of the datastore's entries that was learned, forgotten or not; their number without."""
        firsts = (pair.first_entry for pair in self._all.values() if pair.first_entry is not None)
        return min(firsts, default=self.datastore.section.size)

    @property
    def superseded(self) -> np.ndarray:
        """Entries the datastore was built with whose source a pair that counts has, int64, ascending."""
        sources = {_hash_ids(pair.read_as.ids) for pair in self.pairs.values() if pair.read_as is not None}
        if new := sources - self._rows_of.keys():
            self._rows_of |= dict.fromkeys(new, np.empty(0, np.int64)) | self.datastore.rows_of_sources(new)
        rows = np.concatenate([np.empty(0, np.int64), *(self._rows_of[source] for source in sources)])
        return np.sort(rows[rows < self.first_learned])

    def learn(self, pairs: Sequence[NewPair]) -> list[Learned]:
        """Learn pairs, all or none, on disk when this returns. One that is there is counted, with its id."""
        with self._lock:
            self.lock()
            done, records = list[tuple[int, bool, int]](), list[bytes]()
            known, counting, new_id = ChainMap({}, self._known), ChainMap({}, self._counting), self.next_id
            if not self._has_phrases and any(pair.phrases is not None for pair in pairs):
                records += _phrase_identity(self.phrase_section)
            for pair in pairs:
                there = known.get((pair.source, pair.target))
                if there is None:
                    entries = pair.values, pair.keys
                    learned = LearnedPair(
                        new_id,
                        pair.source,
                        pair.target,
                        1,
                        len(pair.values),
                        entries=entries,
                        phrases=pair.phrases,
                    )
                    known[pair.source, pair.target], new_id = learned, new_id + 1
                    records.append(pair_record(learned))
                else:
                    learned, more = there, pair.phrases
                    if more is not None and there.sentence is None and there.phrases is None:
                        records.append(_ID.pack(Kind.PHRASES, there.id) + _phrase_bytes(more))
                    else:
                        records.append(_ID.pack(Kind.AGAIN, there.id))
                if pair.read_as is not None:
                    records.append(read_as_record(learned.id, pair.read_as))
                if pair.time:
                    records.append(signed_record(learned.id, pair.time, pair.author))
                done.append((learned.id, there is None, counting.get(_source(pair), learned).id))
                counting[_source(pair)] = learned
            self._append(records)
            return [Learned(n, new, self._listed(last) if last != n else None) for n, new, last in done]

    def forget(self, ids: Iterable[int]) -> list[LearnedPair]:
        """Forget pairs, all or none; none of them is found any more when this returns.

        Returns:
            The pairs that they had replaced, and that count again.
        """
        with self._lock:
            self.lock()
            ids, before = list(dict.fromkeys(ids)), self._counting
            if lacking := [number for number in ids if number not in self._kept]:
                raise ConfigurationError(
                    f"there is no pair {lacking[0]} among what was learned into {self.datastore.directory}: "
                    "it was forgotten, or never learned"
                )
            sources = dict.fromkeys(_source(self._kept[number]) for number in ids)
            # Twice: where one of the records is damaged, the pair stays forgotten.
            self._append([_ID.pack(Kind.FORGOTTEN, number) for number in ids] * 2)
            now = [self._counting[source] for source in sources if source in self._counting]
            return [pair for pair in now if pair.id != before[_source(pair)].id]

    def counting(self, read_as: ReadAs) -> LearnedPair | None:
        """Return the pair that counts for a source; None where none does."""
        return self._counting.get(read_as.subwords)

    def identify(self, read: Callable[[str], ReadAs]) -> None:
        """Hash sources as a model reads them where the journal has no hash; the next to write adds it."""
        with self._lock:
            self._read = read
            self._hash_sources()
            if self._right is not None:
                self._append([])

    def _hash_sources(self) -> None:
        if self._read is not None:
            kept = (pair for number, pair in self._all.items() if number in self._kept)
            unknown = [pair for pair in kept if pair.read_as is None]
            self._unrecorded += [read_as_record(pair.id, self._read(pair.source)) for pair in unknown]
            self._apply(self._unrecorded)

    def find(self, query: str, counting: bool = False) -> list[LearnedPair]:
        """Return the pairs that have all words of a query in their source or target; newest first.

        Case, width and composition make no difference. Pairs that were replaced are among them, unless only
        those are wanted that count.
        """
        words = [folded(word) for word in query.split()]
        with self._lock:
            pairs = [self._listed(number) for number in sorted(self._kept, reverse=True)]
        pairs = [pair for pair in pairs if pair.replaced_by is None] if counting else pairs
        texts = ((pair, " ".join(map(folded, f"{pair.source} {pair.target}".split()))) for pair in pairs)
        return [pair for pair, text in texts if all(word in text for word in words)]

    def _listed(self, number: int) -> LearnedPair:
        pair = self._kept[number]
        last = self._counting[_source(pair)].id
        return replace(pair, replaced_by=None if last == number else last, entries=None, phrases=None)

    def records_after_compaction(
        self, token: TokenSection, phrase: PhraseSection | None, moved: Sequence[LearnedPair]
    ) -> list[bytes]:
        """Make the next generation's journal, where the pairs that count have moved into the datastore.

        What the datastore has of those that were replaced goes back into the journal.
        """
        pairs = [*map(self._taken_back, self.replaced.values()), *moved]
        records = [pair_record(pair) for pair in pairs]
        has_phrases = any(
            record[0] in (Kind.PAIR_WITH_PHRASES, Kind.MOVED_WITH_PHRASES) for record in records
        )
        records += [read_as_record(pair.id, pair.read_as) for pair in pairs if pair.read_as is not None]
        records += [signed_record(pair.id, pair.time, pair.author) for pair in pairs if pair.time]
        return [*first_records(token, self.next_id, phrase if has_phrases else None), *records]

    def _taken_back(self, pair: LearnedPair) -> LearnedPair:
        entries, phrases = pair.entries, pair.phrases
        if pair.first_entry is not None:
            rows = slice(pair.first_entry, pair.first_entry + pair.tokens)
            entries = self.datastore.values[rows], self.datastore.arrays[KEYS][rows]
        if pair.sentence is not None and pair.sentence != OWN_SENTENCE:
            stored = PhraseDatastore(self.datastore.directory)
            places = phrases_of_sentences(stored, [pair.sentence])
            phrases = PairPhrases(stored.spans[places, 1:], stored.arrays[KEYS][places])
        return replace(pair, first_entry=None, sentence=None, entries=entries, phrases=phrases)

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
                    advice = "free some space" if error.errno in FULL else "check the disk"
                    raise DatastoreError(f"{fault}: nothing was changed; {advice}") from None
                raise NotWritableError(
                    f"{fault}, as learning requires: nothing was changed; check its permissions, or learn "
                    "into a copy of the datastore"
                ) from None

    def handed_on(self, datastore: TokenDatastore) -> LearnedStore:
        """Open the pairs of the datastore's next generation, and hand over the right to write to them."""
        other = LearnedStore(datastore)
        if self._read is not None:
            other.identify(self._read)
        with self._lock:
            other._right, self._right = self._right, None
        return other

    def close(self) -> None:
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
        if self.damage:
            self.put_aside = self._journal.put_damage_aside()
            where = f"; the damaged bytes are in {self.put_aside} now" if self.put_aside is not None else ""
            logger.warning("%s%s", self.damage, where)
            phrases = self.phrase_section if self._has_phrases else None
            records = first_records(self.datastore.section, self.next_id, phrases)
            records += [
                one for one in Journal(self.path).read() if one[0] not in (Kind.HEADER, Kind.PHRASE_IDENTITY)
            ]
            right.note("")
            create_journal(self.path, records)
            self._load()
        self._append([])

    def _append(self, records: Sequence[bytes]) -> None:
        """Write records, after those of hashes that nobody has written yet, and note how many there are.

        Nothing in the journal itself shows that its last ones are missing.
        """
        records = [*self._unrecorded, *records]
        if records:
            self._journal.append(records)
        self._unrecorded.clear()
        self._apply(records)
        if self._right is not None:
            self._right.note(f"{self.path.name} {self._journal.count}")

    def _load(self) -> None:
        """Read the journal from its beginning: another process may have written to it, or in place of it."""
        self._all: dict[int, LearnedPair] = {}  # that the journal has, forgotten ones too, by their ids
        self._moments = count(1)
        self._unrecorded: list[bytes] = []  # records of hashes that were computed here
        self.next_id = 1
        self.damage = ""  # what is wrong with the journal, a sentence
        # pairs that count, or may again, unless a record of their forgetting is missing
        self.doubtful: list[int] = []
        self._begun = self._has_phrases = False  # whether the journal says what it, and its phrases belong to
        self._journal = Journal(self.path)
        self._settle()
        try:
            if not self.path.exists():
                self._refuse_changed()  # or else what was learned may have moved elsewhere
                return
            refuse_unusual(self.path, linked=True)
            self._read_journal(self._journal)
        except PermissionError:
            raise DatastoreError(
                f"{self.path} cannot be read, as it is another user's: ask for permission to read it and its "
                f"folder, or copy the datastore without {LEARNED}"
            ) from None
        self._settle()
        self._hash_sources()
        if not self._begun:
            raise DatastoreError(
                f"{self.path} is damaged from its beginning on, or has format version 1 or 2, and this "
                f"fairseq-ccpr reads {DATELESS} and {JOURNAL_VERSION}: move it away, and learn again"
            )
        if self._journal.gaps:
            self._tell_damage(self._journal)

    def _read_journal(self, journal: Journal) -> None:
        note = re.fullmatch(r"(\S+) (\d+)", read_note(self.folder / LOCK))
        gaps = 0
        for record in journal.read(int(note[2]) if note and note[1] == self.path.name else 0):
            if journal.gaps > gaps:
                gaps, self.doubtful = journal.gaps, list(self._all)
            self._apply_one(record)
        if journal.gaps > gaps:
            self.doubtful = list(self._all)

    def _tell_damage(self, journal: Journal) -> None:
        lost, size = journal.lost, sum(end - start for start, end in journal.damage)
        self.damage = (
            f"{self.path}: {lost:,} {'record is' if lost == 1 else 'records are'} missing, {size:,} bytes "
            f"are damaged or were not completely written; the {len(self.pairs):,} pairs of the other records "
            "count"
        )
        self.doubtful = sorted(number for number in self.doubtful if number in self._kept)
        if self.doubtful:
            more = ", ..." if len(self.doubtful) > NAMED_PAIRS else ""
            self.damage += (
                "; a forgotten pair may count again: see "
                f"{', '.join(map(str, self.doubtful[:NAMED_PAIRS]))}{more}, learned before the damage, with "
                f"fairseq-ccpr memory {self.datastore.directory}"
            )
        self.next_id += lost  # theirs may have been given

    def _apply(self, records: Iterable[bytes]) -> None:
        for record in records:
            self._apply_one(record)
        self._settle()

    def _apply_one(self, record: bytes) -> None:
        try:
            kind = record[0]
            if kind == Kind.HEADER:
                header = json.loads(record[1:])
                if (version := header["version"]) not in (JOURNAL_VERSION, DATELESS):
                    raise DatastoreError(
                        f"{self.path} has format version {version}, and this fairseq-ccpr reads "
                        f"{DATELESS} and {JOURNAL_VERSION}: "
                        + ("upgrade fairseq-ccpr" if version > JOURNAL_VERSION else FROM_OLDER)
                    )
                self._refuse_others(header["identity"], identity(self.datastore.section))
                self.next_id, self._begun = max(self.next_id, header["first_id"]), True
            elif kind == Kind.PHRASE_IDENTITY:
                self._refuse_others(json.loads(record[1:]), identity_of_phrases(self.phrase_section))
                self._has_phrases = True
            elif kind in (Kind.PAIR, Kind.MOVED, Kind.PAIR_WITH_PHRASES, Kind.MOVED_WITH_PHRASES):
                section = self.datastore.section
                pair = _read_pair(record, section.KEY_FORM.width(section.dimension))
                self.next_id = max(self.next_id, pair.id + 1)
                phrases = self._belonging(pair.phrases)
                self._all[pair.id] = replace(pair, moment=next(self._moments), phrases=phrases)
            elif kind in (Kind.AGAIN, Kind.PHRASES, Kind.FORGOTTEN, Kind.READ_AS, Kind.SIGNED):
                self._change(kind, _ID.unpack_from(record)[1], record)
            else:
                raise ValueError(f"kind {kind}")
        except (struct.error, ValueError, TypeError, KeyError, IndexError) as error:
            raise DatastoreError(
                f"{self.path} has a record that cannot be read ({error}): upgrade fairseq-ccpr"
            ) from None

    def _change(self, kind: int, number: int, record: bytes) -> None:
        self.next_id = max(self.next_id, number + 1)
        if (pair := self._all.get(number)) is None or pair.forgotten:
            return  # it was learned in a record that is lost
        if kind == Kind.FORGOTTEN:
            texts = _texts_of(pair)
            pair = replace(
                pair,
                source="",
                target="",
                author="",
                read_as=None,
                entries=None,
                phrases=None,
                forgotten=texts,
            )
        elif kind == Kind.READ_AS:
            ids = np.frombuffer(record, _INTEGER, offset=_READ_AS.size)
            pair = replace(pair, read_as=ReadAs(_READ_AS.unpack_from(record)[2], tuple(ids.tolist())))
        elif kind == Kind.SIGNED:
            author = record[_SIGNED.size :].decode()
            pair = replace(pair, time=_SIGNED.unpack_from(record)[2], author=author)
        else:
            pair = replace(pair, count=pair.count + 1, moment=next(self._moments))
        if kind == Kind.PHRASES:
            pair = replace(pair, phrases=self._belonging(_read_phrases(record, _ID.size)))
        self._all[number] = pair

    def _belonging(self, phrases: PairPhrases | None) -> PairPhrases | None:
        """Check the width of phrases; None if what they belong to is lost, until they are learned again."""
        section = self.phrase_section
        if phrases is None or not self._has_phrases:
            return None
        if section is None or phrases.keys.shape[1] != section.KEY_FORM.width(section.dimension):
            raise DatastoreError(
                f"{self.path} has phrases that do not belong to {self.datastore.directory}: move it away, "
                "and learn again"
            )
        return phrases

    def _settle(self) -> None:
        """Decide which pairs are kept, and which of these count: of each source the last that was learned.

        Of pairs with the same texts the last is meant, forgotten or not: that the others were forgotten is
        in a record that is missing, as a pair that is there is not learned as a new one.
        """
        moment = attrgetter("moment")
        last = {_texts_of(pair): pair for pair in sorted(self._all.values(), key=moment)}
        kept = [pair for pair in last.values() if not pair.forgotten]
        kept.sort(key=moment)
        self._known = {(pair.source, pair.target): pair for pair in kept}
        self._kept = {pair.id: pair for pair in kept}
        self._counting = {_source(pair): pair for pair in kept}
        self.pairs = {pair.id: pair for pair in sorted(self._counting.values(), key=attrgetter("id"))}
        self.replaced = {pair.id: pair for pair in kept if pair.id not in self.pairs}
        self.forgotten = len(self._all) - len(kept)  # how many were so far

    def _refuse_others(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        for name in expected | found:
            if (before := found.get(name)) != (current := expected.get(name)):
                raise DatastoreError(
                    f"{self.path} was learned with another {name} than {self.datastore.directory} has "
                    f"({brief(before)}, here {brief(current)}): move it away, or restore the datastore it "
                    "belongs to"
                )

    def _refuse_changed(self) -> None:
        opened, section = self.datastore, Manifest.read(self.datastore.directory).token
        before = opened.section.generation, opened.keys_fingerprint
        if section is None or (section.generation, section.keys_fingerprint) != before:
            raise DatastoreError(
                f"{self.datastore.directory} was compacted or built again since it was opened: open it again"
            )


_hash_ids = lru_cache(1 << 17)(hash_source)


def _texts_of(pair: LearnedPair) -> int:
    """Identify the texts of a pair in this process, not 0; a forgotten pair has them no longer."""
    return pair.forgotten or hash((pair.source, pair.target)) or 1


def first_records(section: TokenSection, first_id: int, phrases: PhraseSection | None = None) -> list[bytes]:
    """Make the records that a journal begins with, where ids below the first were given before."""
    header = {"version": JOURNAL_VERSION, "identity": identity(section), "first_id": first_id}
    return [_json_record(Kind.HEADER, header)] * 2 + (
        _phrase_identity(phrases) if phrases is not None else []
    )


def pair_record(pair: LearnedPair) -> bytes:
    """Make the record of a pair: with its values, keys and phrases, or where it has moved."""
    source, target = pair.source.encode(), pair.target.encode()
    if pair.entries is not None:
        values, keys = pair.entries
        kind, rest = Kind.PAIR, values.astype(_INTEGER).tobytes() + keys.astype(_KEY).tobytes()
        if pair.phrases is not None:
            kind, rest = Kind.PAIR_WITH_PHRASES, rest + _phrase_bytes(pair.phrases)
    else:
        kind = Kind.MOVED if pair.sentence is None else Kind.MOVED_WITH_PHRASES
        rest = _PLACES[kind].pack(*(one for one in (pair.first_entry, pair.sentence) if one is not None))
    texts = _PAIR.pack(kind, pair.id, pair.count, len(source), len(target), pair.tokens) + source + target
    return texts + rest


def _read_pair(record: bytes, width: int) -> LearnedPair:
    kind, number, times, source_bytes, target_bytes, tokens = _PAIR.unpack_from(record)
    middle = _PAIR.size + source_bytes
    end = middle + target_bytes
    pair = LearnedPair(
        number, record[_PAIR.size : middle].decode(), record[middle:end].decode(), times, tokens
    )
    if kind in _PLACES:
        return replace(pair, **dict(zip(("first_entry", "sentence"), _PLACES[kind].unpack(record[end:]))))
    values = np.frombuffer(record, _INTEGER, tokens, end)  # which share the record's memory, as keys do
    keys = np.frombuffer(record, _KEY, tokens * width, end + values.nbytes).reshape(tokens, width)
    end += values.nbytes + keys.nbytes
    if kind == Kind.PAIR and end != len(record):
        raise ValueError("its length is not that of its parts")
    phrases = _read_phrases(record, end) if kind == Kind.PAIR_WITH_PHRASES else None
    return replace(pair, entries=(values, keys), phrases=phrases)


def read_as_record(number: int, read_as: ReadAs) -> bytes:
    """Make the record of what the model reads as the source of a pair."""
    return _READ_AS.pack(Kind.READ_AS, number, read_as.subwords) + np.array(read_as.ids, _INTEGER).tobytes()


def signed_record(number: int, time: int, author: str) -> bytes:
    """Make the record of when a pair was learned, or made according to its file, and by whom."""
    return _SIGNED.pack(Kind.SIGNED, number, time) + author.encode()


def journal_path(directory: Path, generation: int) -> Path:
    """Return where the journal of a generation of a datastore is."""
    return directory / LEARNED / f"{generation}.journal"


def remove_superseded(directory: Path, generation: int) -> None:
    """Remove the journals of a datastore's other generations, with what was put aside; other files stay."""
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


def _source(pair: NewPair | LearnedPair) -> int | str:
    """Return what makes a source the same as another's: what the model reads, or the text if not known."""
    return pair.read_as.subwords if pair.read_as is not None else pair.source


def _json_record(kind: int, content: dict[str, Any]) -> bytes:
    return bytes([kind]) + json.dumps(content).encode()


def _phrase_identity(section: PhraseSection | None) -> list[bytes]:
    return [_json_record(Kind.PHRASE_IDENTITY, identity_of_phrases(section))] * 2


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


def phrases_of_sentences(datastore: PhraseDatastore, sentences: Iterable[int]) -> np.ndarray:
    """List the entries of sentences, int64 ascending; those of a datastore stand sentence by sentence."""
    numbers = datastore.spans[:, 0]  # which bisect reads some of, and NumPy would copy
    rows = [np.arange(bisect_left(numbers, n), bisect_right(numbers, n)) for n in sorted(sentences)]
    return np.concatenate([np.empty(0, np.int64), *rows])
