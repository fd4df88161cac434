"""An append-only file of checked records: what was acknowledged is there after any kill.

    MAGIC, then for each record its length (uint32), its checksum (16 bytes) and itself

The checksum is a BLAKE2b digest of the checksum before it, of the length and of the record: so no record can be changed,
left out or moved unnoticed. Reading ends at the first record that is incomplete or changed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.atomic import atomic_file, sync_directory

MAGIC = b"CCPRJNL1"
DAMAGED = ".damaged"  # what the name of a file of bytes that were no records ends in
_FRAME = struct.Struct("<I16s")
MOST_BYTES = 2**32 - 1  # of a record


def create_journal(path: Path, records: Sequence[bytes]) -> None:
    """Write a journal with its first records, under its final name only when it is complete and on disk.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_file(path) as partial:
        frames, _ = _frames(records, MAGIC)
        partial.write_bytes(MAGIC + frames)
    sync_directory(path.parent)


class JournalReader:
    """Reads the records of a journal, and later those that were appended since.

    Args:
        path: of the file.

    Attributes:
        end: bytes up to the end of the last record that was read.
        rest: bytes after it when it was read: damaged, or not completely written.
        digest: of the last record, which the next one's checksum is chained to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end, self.rest, self.digest = 0, 0, MAGIC

    def read(self) -> Iterator[bytes]:
        """Yield the records after those that were read before.

        Raises:
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not self.end and stream.read(len(MAGIC)) == MAGIC:
                self.end = len(MAGIC)
            stream.seek(self.end)
            while self.end and (record := self._next(stream.read(_FRAME.size), stream, size)) is not None:
                yield record
            self.rest = size - self.end

    def _next(self, head: bytes, stream: IO[bytes], size: int) -> bytes | None:
        """Return the next record, None where there is none that is whole."""
        if len(head) < _FRAME.size:
            return None
        length, checksum = _FRAME.unpack(head)
        if self.end + _FRAME.size + length > size:
            return None
        record = stream.read(length)
        if len(record) < length or _digest(self.digest, record) != checksum:
            return None
        self.end += _FRAME.size + length
        self.digest = checksum
        return record


class JournalWriter:
    """Appends to a journal that was read to its end.

    Anything at its end that is not a record is first set aside, in a file next to it whose name ends in `DAMAGED`.

    Args:
        reader: which then stands at the end of what was appended.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, reader: JournalReader) -> None:
        self.reader = reader
        self._stream = reader.path.open("r+b", buffering=0)
        self._file = self._stream.fileno()
        self._broken = False
        try:
            if reader.rest:
                self._put_aside()
        except BaseException:
            self.close()
            raise

    def append(self, records: Sequence[bytes]) -> None:
        """Append records, all or none, and return once they are on disk.

        Raises:
            DatastoreError: they were not written, as where the disk is full; the journal is as it was before.
        """
        if self._broken:
            raise DatastoreError(
                f"{self.reader.path} could not be written to before: close it, see to the disk, and open it again"
            )
        frames, digest = _frames(records, self.reader.digest)
        try:
            written = 0
            while written < len(frames):
                written += os.pwrite(self._file, frames[written:], self.reader.end + written)
            os.fsync(self._file)
        except OSError as error:
            self._undo()
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise DatastoreError(
                f"{self.reader.path} cannot be written ({reason}): nothing was added to it; free some space, or see to the "
                "disk"
            ) from None
        self.reader.end += len(frames)
        self.reader.digest = digest

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _undo(self) -> None:
        """Cut off what was written of records that are not acknowledged; without that nothing more may be appended."""
        try:
            os.ftruncate(self._file, self.reader.end)
            os.fsync(self._file)
        except OSError:
            self._broken = True

    def _put_aside(self) -> None:
        path = self.reader.path
        with atomic_file(path.with_name(path.name + DAMAGED)) as partial:
            partial.write_bytes(os.pread(self._file, self.reader.rest, self.reader.end))
        os.ftruncate(self._file, self.reader.end)
        os.fsync(self._file)
        self.reader.rest = 0


class WriterLock:
    """The right to write to a folder, which one process, and in it one object, has at a time. A kill gives it back.

    Args:
        path: of a file that names who has it.

    Raises:
        DatastoreError: another one has it; names it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a+b", buffering=0)  # closed with this object, if not before
        file = self._stream.fileno()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode("utf-8", "replace") or "another process"
            self.release()
            raise DatastoreError(
                f"{path.parent} is being written to by {holder}: end that process, or make the change there"
            ) from None
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Give it back."""
        self._stream.close()


def _frames(records: Sequence[bytes], digest: bytes) -> tuple[bytes, bytes]:
    """Frame records that follow one with a digest; returns the bytes, and the digest of the last."""
    frames = []
    for record in records:
        if len(record) > MOST_BYTES:
            raise DatastoreError(f"a record of {len(record):,} bytes is too long for a journal: divide the text")
        digest = _digest(digest, record)
        frames += [_FRAME.pack(len(record), digest), record]
    return b"".join(frames), digest


def _digest(before: bytes, record: bytes) -> bytes:
    digest = hashlib.blake2b(before + len(record).to_bytes(4, "little"), digest_size=16)
    digest.update(record)
    return digest.digest()
