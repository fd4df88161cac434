"""What was learnt alongside a token datastore: sentence pairs with keys and values of their tokens, in a journal.

The datastore stays unchanged. `learnt/N.journal` belongs to its generation N, and to exactly its keys, model, key layer and
projection. Its first record says so; each other one is a pair that was learnt, one that was learnt again, one that was
forgotten, or one that has moved into the datastore's own entries. Where the datastore has a phrase part, pairs have the
phrases of their targets, too, and a record before them says which encoder, segmentation and set of phrases these belong to.
Letters: n tokens of a pair, d width of keys.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.datastore import learnt_records as records
from fairseq_ccpr.datastore.learnt_records import LearntPair, NewPair
from fairseq_ccpr.datastore.manifest import Manifest, TokenSection
from fairseq_ccpr.datastore.pair_phrases import PairPhrases, identity_of_phrases
from fairseq_ccpr.datastore.token import KEYS, PROJECTION, TokenDatastore
from fairseq_ccpr.errors import ConfigurationError, DatastoreError, NotWritableError
from fairseq_ccpr.storage.fingerprint import short
from fairseq_ccpr.storage.journal import JournalReader, JournalWriter, WriterLock, create_journal

LEARNT, LOCK = "learnt", "lock"
FORMAT_VERSION = 2  # 2 brought phrases
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)

logger = logging.getLogger(__name__)


class LearntStore:
    """The pairs learnt alongside a datastore and not forgotten, in the order in which they were learnt.

    Any number may read; the first to learn or forget holds the right to write until it is closed. Threads may share it.

    Args:
        datastore: an opened token datastore.

    Attributes:
        pairs: by id.
        entries: values int32 [n] and keys fp16 [n, d] of those pairs that have not moved into the datastore.
        phrases: of those pairs whose phrases have not moved into the datastore.
        phrase_section: the manifest's, of the phrase part in the same folder; None: there is none.
        forgotten: how many pairs were forgotten so far.
        gone: entries of the datastore itself that were forgotten: the first of each pair, and how many.
        gone_sentences: sentences that the phrase part has because they were learnt, and that were forgotten.
        next_id: of the next pair.
        damage: what is wrong with the journal, a sentence; empty where nothing is.

    Raises:
        DatastoreError: the journal belongs to something else, or is damaged from the start.
    """

    def __init__(self, datastore: TokenDatastore) -> None:
        self.datastore = datastore
        self.pairs: dict[int, LearntPair] = {}
        self.entries: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.phrases: dict[int, PairPhrases] = {}
        self.phrase_section = Manifest.read(datastore.directory).phrase
        self.forgotten, self.damage = 0, ""
        self.gone: list[tuple[int, int]] = []
        self.gone_sentences: list[int] = []
        self._has_phrases = False  # whether the journal says what its phrases belong to
        self._pairs_of: Counter[int] = Counter()  # by sentence of the phrase part
        self._ids: dict[tuple[str, str], int] = {}
        self.next_id, self._begun = 1, False
        self._lock = threading.RLock()
        self._reader: JournalReader | None = None
        self._writing: tuple[WriterLock, JournalWriter] | None = None
        self._read()

    @property
    def folder(self) -> Path:
        """Where the journal is."""
        return self.datastore.directory / LEARNT

    @property
    def path(self) -> Path:
        """The journal's file."""
        return journal_path(self.datastore.directory, self.datastore.section.generation)

    def learn(self, pairs: Sequence[NewPair]) -> list[int]:
        """Learn pairs, all or none; they are on disk when this returns.

        Returns:
            Their ids. A pair that is there already keeps its id, and is counted; it has phrases from then on.

        Raises:
            DatastoreError: another process writes, or the journal cannot be written.
        """
        with self._lock:
            writer = self._writer()
            ids, changes = [], []
            known, number = dict(self._ids), self.next_id
            if not self._has_phrases and any(pair.phrases is not None for pair in pairs):
                changes.append(records.phrases_of(identity_of_phrases(self.phrase_section)))
            for pair in pairs:
                if (found := known.get((pair.source, pair.target))) is None:
                    found = known[pair.source, pair.target] = number
                    changes.append(records.learnt(found, pair))
                    number += 1
                elif pair.phrases is not None and self._lacks_phrases(found):
                    changes.append(records.phrases(found, pair.phrases))
                else:
                    changes.append(records.again(found))
                ids.append(found)
            self._append(writer, changes)
            return ids

    def _lacks_phrases(self, number: int) -> bool:
        """Tell whether a pair was learnt when there was no phrase part."""
        pair = self.pairs.get(number)  # None: it is being learnt
        return pair is not None and pair.sentence is None and number not in self.phrases

    def forget(self, ids: Iterable[int]) -> None:
        """Forget pairs, all or none; none of them is found any more when this returns.

        Raises:
            ConfigurationError: there is no such pair.
            DatastoreError: another process writes, or the journal cannot be written.
        """
        with self._lock:
            writer, ids = self._writer(), list(dict.fromkeys(ids))
            for number in ids:
                if number not in self.pairs:
                    raise ConfigurationError(
                        f"there is no pair {number} among what was learnt into {self.datastore.directory}: it was "
                        "forgotten, or never learnt"
                    )
            self._append(writer, [records.forgotten(number) for number in ids])

    def find(self, query: str) -> list[LearntPair]:
        """Return the pairs that have all words of a query in their source or target, whatever their case; newest first."""
        words = query.casefold().split()
        with self._lock:
            pairs = list(reversed(self.pairs.values()))
        texts = ((pair, f"{pair.source}\n{pair.target}".casefold()) for pair in pairs)
        return [pair for pair, text in texts if all(word in text for word in words)]

    def lock(self) -> None:
        """Take the right to write, and read what others wrote before.

        Raises:
            DatastoreError: another one has it.
            NotWritableError: the folder cannot be written.
        """
        with self._lock:
            self._writer()

    def handed_on(self, datastore: TokenDatastore) -> LearntStore:
        """Open the pairs of the datastore's next generation, and hand over this one's right to write to them.

        Raises:
            DatastoreError: see the class.
        """
        other = LearntStore(datastore)
        with self._lock:
            assert self._writing is not None and other._reader is not None
            lock, writer = self._writing
            self._writing = None
            writer.close()
            other._writing = lock, JournalWriter(other._reader)
        return other

    def close(self) -> None:
        """Give the right to write back."""
        with self._lock:
            if self._writing is not None:
                lock, writer = self._writing
                self._writing = None
                writer.close()
                lock.release()

    def _append(self, writer: JournalWriter, changes: list[bytes]) -> None:
        if changes:
            writer.append(changes)
        for change in changes:
            self._apply(change)

    def _read(self) -> None:
        """Read what the journal has, or has more than before."""
        if self._reader is None:
            if not self.path.exists():
                self._refuse_changed()  # or else what was learnt may have moved elsewhere
                return
            self._reader = JournalReader(self.path)
        for record in self._reader.read():
            self._apply(record)
        if not self._begun:
            raise DatastoreError(f"{self.path} is damaged from its beginning on: move it away, and learn again")
        self.damage = ""
        if self._reader.rest:
            self.damage = (
                f"{self.path}: {self._reader.rest:,} bytes at its end are damaged or were not completely written; the "
                f"{len(self.pairs):,} pairs before them count"
            )
            logger.warning("%s", self.damage)

    def _apply(self, record: bytes) -> None:
        """Do what a record says."""
        try:
            change = records.read(record, self.datastore.section.dimension)
        except ValueError as error:
            raise DatastoreError(
                f"{self.path} has a record that cannot be read ({error}): upgrade fairseq-ccpr"
            ) from None
        if isinstance(change, records.Header) != (not self._begun):
            raise DatastoreError(f"{self.path} does not begin as a journal does: move it away, and learn again")
        if isinstance(change, records.Header):
            self._check(change)
            self.next_id, self._begun = change.first_id, True
        elif isinstance(change, records.Learnt):
            self._keep(change.pair)
            if change.values is not None and change.keys is not None:
                self.entries[change.pair.id] = change.values, change.keys
            if change.phrases is not None:
                self._keep_phrases(change.pair.id, change.phrases)
        elif isinstance(change, records.PhrasesOf):
            self._refuse_others(change.identity, identity_of_phrases(self.phrase_section))
            self._has_phrases = True
        elif isinstance(change, (records.Again, records.Phrases)):
            pair = self.pairs[change.id]
            self.pairs[change.id] = replace(pair, count=pair.count + 1)
            if isinstance(change, records.Phrases):
                self._keep_phrases(change.id, change.phrases)
        else:
            self._drop(self.pairs.pop(change.id))

    def _keep(self, pair: LearntPair) -> None:
        self.pairs[pair.id] = pair
        self._ids[pair.source, pair.target] = pair.id
        self.next_id = max(self.next_id, pair.id + 1)
        if pair.sentence is not None:
            self._pairs_of[pair.sentence] += 1

    def _keep_phrases(self, number: int, phrases: PairPhrases) -> None:
        section = self.phrase_section
        if not self._has_phrases or section is None or phrases.keys.shape[1] != section.dimension:
            raise DatastoreError(
                f"{self.path} has phrases that do not belong to {self.datastore.directory}: move it away, and learn again"
            )
        self.phrases[number] = phrases

    def _drop(self, pair: LearntPair) -> None:
        del self._ids[pair.source, pair.target]
        self.entries.pop(pair.id, None)
        self.phrases.pop(pair.id, None)
        self.forgotten += 1
        if pair.first_entry is not None:
            self.gone.append((pair.first_entry, pair.tokens))
        if pair.sentence is not None:
            self._pairs_of[pair.sentence] -= 1
            if pair.sentence != records.OWN_SENTENCE and not self._pairs_of[pair.sentence]:
                self.gone_sentences.append(pair.sentence)

    def _check(self, header: records.Header) -> None:
        """Refuse a journal of another format, or one that belongs to something else."""
        if header.version > FORMAT_VERSION:
            raise DatastoreError(
                f"{self.path} has format version {header.version}, and this fairseq-ccpr reads up to {FORMAT_VERSION}: "
                "upgrade fairseq-ccpr"
            )
        self._refuse_others(header.identity, identity(self.datastore.section))

    def _refuse_others(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Refuse what belongs to something else."""
        for name in wanted | found:
            there, here = found.get(name), wanted.get(name)
            if there != here:
                raise DatastoreError(
                    f"{self.path} was learnt with another {name} than {self.datastore.directory} has ({_brief(there)}, here "
                    f"{_brief(here)}): move it away, or restore the datastore it belongs to"
                )

    def _writer(self) -> JournalWriter:
        """Return the writer, taking the right to write if necessary."""
        if self._writing is not None:
            return self._writing[1]
        try:
            self.folder.mkdir(exist_ok=True)
            lock = WriterLock(self.folder / LOCK)
            try:
                self._refuse_changed()
                if not self.path.exists():
                    create_journal(self.path, [header_of(self.datastore.section, self.next_id)])
                self._read()
                assert self._reader is not None
                self._writing = lock, JournalWriter(self._reader)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            if error.errno not in NOT_WRITABLE:
                raise DatastoreError(
                    f"{self.folder} cannot be written ({error.strerror}): nothing was changed; free some space, or check "
                    "the disk"
                ) from None
            raise NotWritableError(
                f"{self.folder} cannot be written ({error.strerror}), as learning requires: nothing was changed; check its "
                "permissions, or learn into a copy of the datastore"
            ) from None
        return self._writing[1]

    def _refuse_changed(self) -> None:
        """Refuse to write if the datastore is no longer the one that was opened."""
        section, own = Manifest.read(self.datastore.directory).token, self.datastore
        as_before = section is not None and section.generation == own.section.generation
        if section is None or not as_before or section.digest(f"{KEYS}.npy") != own.keys_fingerprint:
            raise DatastoreError(
                f"{self.datastore.directory} was compacted or built again since it was opened: open it again"
            )


def journal_path(directory: Path, generation: int) -> Path:
    """Return where the journal of a generation of a datastore is."""
    return directory / LEARNT / f"{generation}.journal"


def identity(section: TokenSection) -> dict[str, Any]:
    """Describe what learnt keys belong to, by name."""
    return {
        "model": section.fingerprints["model"],
        "target dictionary": section.fingerprints["target_dictionary"],
        "key layer": section.key_layer,
        "projection": section.digest(PROJECTION),
        "set of keys": section.digest(f"{KEYS}.npy"),
        "width of keys": section.dimension,
    }


def header_of(section: TokenSection, first_id: int) -> bytes:
    """Make the first record of a datastore's journal."""
    return records.header(records.Header(FORMAT_VERSION, identity(section), first_id))


def _brief(value: Any) -> str:
    return short(value) if isinstance(value, str) and len(value) == 64 else str(value)
