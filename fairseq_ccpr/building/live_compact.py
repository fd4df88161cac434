"""Compacting while a memory is in use: translation and learning continue.

1. Copy the token part as links to its files, with the journal as it is now.
2. Compact the copy in a separate process; see `compact`. Pairs may be learned and forgotten meanwhile.
3. Block learning and forgetting. The copy's part and journal become the datastore's next generation, what was
   learned and forgotten meanwhile is appended to that journal, and the manifest that names them replaces the
   old one. Batches that have begun finish with the files they began with, which the system keeps until then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fairseq_ccpr.building.compact import SCRATCH, disk_faults_named, refuse_elsewhere, remove_others
from fairseq_ccpr.child_process import ending_with_us
from fairseq_ccpr.datastore.learned import LEARNED, journal_path
from fairseq_ccpr.datastore.manifest import Manifest, TokenSection
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.learned_memory import LearnedMemory
from fairseq_ccpr.decoding.token_retriever import LearningRetriever
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.storage.files import MANIFEST, only_writer, scratch_directory
from fairseq_ccpr.storage.journal import Journal, create_journal


class LiveCompaction:
    """One compaction of a memory's datastore; nobody else may have the right to write."""

    def __init__(
        self, memory: LearnedMemory, open_retriever: Callable[[TokenDatastore], LearningRetriever]
    ) -> None:
        self.memory, self.open_retriever = memory, open_retriever
        self.directory = memory.store.datastore.directory
        _ = memory.store.datastore.keys  # refused where a database has them
        if Manifest.read(self.directory).phrase is not None:
            raise ConfigurationError(
                f"{self.directory} has phrases as well, and can be compacted while nothing uses it to learn: "
                "end the programs that do, and run fairseq-ccpr compact"
            )
        self._process: subprocess.Popen[str] | None = None
        self._cancelled, self._ended = threading.Event(), threading.Event()

    def run(self) -> bool:
        """Compact; returns whether it was done, not cancelled. After a DatastoreError nothing has changed."""
        try:
            with disk_faults_named(self.directory):
                self.memory.lock()
                refuse_elsewhere(self.directory)
                with scratch_directory(self.directory / SCRATCH) as scratch:
                    copy = scratch / self.directory.resolve().name  # which what was learned is named by
                    before, reader = self._link(copy)
                    if not self._compact(copy):
                        return False
                    with self.memory.paused():
                        self._adopt(copy, before, reader)
            return True
        finally:
            self._ended.set()

    def cancel(self) -> None:
        """Cancel and wait; the copy may already have become the datastore's next generation."""
        self._cancelled.set()
        if self._process is not None:
            self._process.terminate()
        self._ended.wait()

    def _link(self, copy: Path) -> tuple[TokenSection, Journal]:
        """Make the copy; returns what it is of, and a reader that has read as much as the copy has."""
        with only_writer(self.directory / MANIFEST):  # an index that is replaced is removed
            section, opened = Manifest.read(self.directory).token, self.memory.store.datastore
            if section is None or section.keys_fingerprint != opened.keys_fingerprint:
                raise DatastoreError(
                    f"{self.directory} was compacted or built again: start the programs that use it again"
                )
            (copy / section.folder).mkdir(parents=True)
            for name in section.files:
                os.link(self.directory / name, copy / name)
        Manifest(section).write(copy)
        reader = Journal(self.memory.store.path)
        for _ in reader.read():
            pass
        # since it was opened: the copy would go on without, and nobody would know
        if reader.damage or reader.lost:
            raise DatastoreError(
                f"{reader.path} is damaged: end the programs that learn, and run fairseq-ccpr compact"
            )
        (copy / LEARNED).mkdir(mode=0o700)
        with reader.path.open("rb") as journal, (copy / LEARNED / reader.path.name).open("wb") as copied:
            copied.write(journal.read(reader.end))
        return section, reader

    def _compact(self, copy: Path) -> bool:
        # Translation takes priority.
        words = ["nice", "-n", "10", sys.executable, "-m", "fairseq_ccpr", "compact", str(copy), "--quiet"]
        words += ["--cpu"] if self.memory.device.type == "cpu" else []
        self._process = subprocess.Popen(
            ending_with_us(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._cancelled.is_set():
            self._process.terminate()
        message = self._process.communicate()[1].strip()[-500:]
        if self._process.returncode and not self._cancelled.is_set():
            raise DatastoreError(f"{self.directory} could not be compacted, and is as it was: {message}")
        return not self._cancelled.is_set()

    def _adopt(self, copy: Path, before: TokenSection, reader: Journal) -> None:
        section = TokenDatastore(copy).section
        if section.generation == before.generation:
            return  # there was nothing to compact
        shutil.rmtree(self.directory / section.folder, ignore_errors=True)  # left by a run that was killed
        (copy / section.folder).rename(self.directory / section.folder)
        moved = Journal(journal_path(copy, section.generation))
        create_journal(journal_path(self.directory, section.generation), [*moved.read(), *reader.read()])
        Manifest.update(self.directory, [(before, section)])
        try:
            datastore = TokenDatastore(self.directory)
            retriever = self.open_retriever(datastore)
        except Exception:  # what is learned from now on would not be found beside the new part
            Manifest.update(self.directory, [(section, before)])
            raise
        self.memory.go_on_beside(datastore, retriever)
        remove_others(self.directory)
