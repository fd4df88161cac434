"""An append-only file of checked records: no kill loses what was acknowledged; damage costs what it hits."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.files import atomic_file, sync_directory, unfollowed

MARK = b"\xffCCPRJ3\n"  # each record begins with it; its first byte is in no text
_HEAD = struct.Struct("<8sII16s")  # the mark, number and length of the record, digest


class Journal:
    """A file of records.

        MARK, the record's number, counted from 0, its length (uint32 each), its digest (16 bytes), the record

    The digest is BLAKE2b of number, length and record: so a record can neither be changed nor moved
    unnoticed. After one that was, reading goes on at the next mark with a right digest; numbers tell how many
    are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = self.count = 0  # bytes, and records, up to the end of the last record that was read
        self.lost = 0  # records that are missing, as far as their numbers show
        self.damage: list[tuple[int, int]] = []  # where bytes that are no records begin and end

    @property
    def gaps(self) -> int:
        """How many records are missing, and places damaged, so far."""
        return self.lost + len(self.damage)

    def read(self, noted: int = 0) -> Iterator[bytes]:
        """Yield the records after those that were read before; as many as `noted` should be there."""
        with self.path.open("rb") as stream:
            first = stream.seek(self.end)
            data = stream.read()
        for number, start, end, record in _records(data):
            if number < self.count:
                continue  # a copy of one that was read
            if first + start > self.end:
                self.damage.append((self.end, first + start))
            self.lost += number - self.count
            self.end, self.count = first + end, number + 1
            yield record
        if self.end < first + len(data):
            self.damage.append((self.end, first + len(data)))
            self.lost += max(1, data.count(MARK, self.end - first))
        else:
            self.lost += max(0, noted - self.count)

    def append(self, records: Sequence[bytes]) -> None:
        """Append records, all or none, to a journal that was read to its end; they are on disk then."""
        frames, written = _frames(records, self.count), 0
        try:
            with open(self.path, "r+b", buffering=0, opener=unfollowed) as stream:
                stream.truncate(self.end)  # of an earlier try that could not be undone
                stream.seek(self.end)
                try:
                    while written < len(frames):
                        written += stream.write(frames[written:])
                    os.fsync(stream)
                except OSError:
                    stream.truncate(self.end)
                    os.fsync(stream)
                    raise
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise DatastoreError(
                f"{self.path} cannot be written ({reason}): nothing was added to it; free some space, or see "
                "to the disk"
            ) from None
        self.end += len(frames)
        self.count += len(records)

    def put_damage_aside(self) -> Path | None:
        """Copy what is damaged to a new file next to the journal; return its path, None without any."""
        data = self.path.read_bytes()
        content = b"".join(data[start:end] for start, end in self.damage)
        if not content:
            return None
        names = (f"{self.path.name}.damaged-{number}" for number in count(1))
        path = next(path for name in names if not os.path.lexists(path := self.path.with_name(name)))
        _write(path, content)
        return path


class WriterLock:
    """The right to write to a folder, of one object of one process at a time. A kill gives it back."""

    def __init__(self, path: Path) -> None:
        refuse_unusual(path)
        # Closed with this object, if not before.
        descriptor = unfollowed(str(path), os.O_RDWR | os.O_CREAT, permissions(path))
        self._stream = os.fdopen(descriptor, "r+b")
        file = self._stream.fileno()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode("utf-8", "replace").partition("\n")[0] or "another process"
            self.release()
            raise DatastoreError(
                f"{path.parent} is being written to by {holder}: end that process, or make the change there"
            ) from None
        self.note(read_note(path))

    def note(self, text: str) -> None:
        """Leave a line beside the name of the process for whoever comes next; none where the disk is full."""
        file = self._stream.fileno()
        with suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n{text}".encode(), 0)

    def release(self) -> None:
        self._stream.close()


def read_note(path: Path) -> str:
    """Return what the last to hold a `WriterLock` has noted; nothing where none has, or it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[2] if path.is_file() else ""
    except OSError:
        return ""


def refuse_unusual(path: Path, folder: bool = False, linked: bool = False) -> None:
    """Refuse what is there and is no file, or `folder`, of its own; what is only read may be `linked`."""
    if not (path.exists() or path.is_symlink()):
        return
    found, what = path.stat() if linked else path.lstat(), "folder" if folder else "file"
    if stat.S_ISLNK(found.st_mode) or (found.st_nlink > 1 and what == "file" and not linked):
        link = "symbolic link" if stat.S_ISLNK(found.st_mode) else "hard link"
        raise DatastoreError(
            f"{path} is a {link}, which nothing is written through: put a copy of the {what} in its place"
        )
    if stat.S_IFMT(found.st_mode) != (stat.S_IFDIR if folder else stat.S_IFREG):
        raise DatastoreError(f"{path} is no {what}, and one of that name is needed: move it away")


def create_journal(path: Path, records: Sequence[bytes]) -> None:
    """Write a journal with its first records, under its final name only when it is complete and on disk."""
    _write(path, _frames(records, 0))


def _write(path: Path, content: bytes) -> None:
    with atomic_file(path, permissions(path)) as partial:
        partial.write_bytes(content)
    sync_directory(path.parent)


def permissions(path: Path) -> int:
    """Return those of a file for whom its folder lets in: 0600 in a folder of 0700."""
    return path.parent.stat().st_mode & 0o666


def begins_as_journal(path: Path) -> bool:
    """Tell a journal by the bytes that it begins with."""
    with path.open("rb") as stream:
        return stream.read(len(MARK)) == MARK


def _digest(number: int, record: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<II", number, len(record)) + record, digest_size=16).digest()


def _frames(records: Sequence[bytes], first: int) -> bytes:
    frames = []
    for number, record in enumerate(records, first):
        if len(record) >= 2**32:
            raise DatastoreError(
                f"a record of {len(record):,} bytes is too long for a journal: divide the text"
            )
        frames += [_HEAD.pack(MARK, number, len(record), _digest(number, record)), record]
    return b"".join(frames)


def _records(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the records that are whole, each with its number, and where it begins and ends."""
    start = data.find(MARK)
    while 0 <= start <= len(data) - _HEAD.size:
        _, number, length, digest = _HEAD.unpack_from(data, start)
        end = start + _HEAD.size + length
        record = data[start + _HEAD.size : end]
        if whole := len(record) == length and _digest(number, record) == digest:
            yield number, start, end, record
        start = data.find(MARK, end if whole else start + 1)
