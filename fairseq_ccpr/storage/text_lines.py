"""Random access to lines of UTF-8 text on disk, and the manifest of a text that was kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fairseq_ccpr.errors import DatastoreError, naming
from fairseq_ccpr.storage.arrays import GrowingArray, bring_to_disk, open_array
from fairseq_ccpr.storage.files import MANIFEST, PARTIAL, check_checksums, partial_path, read_versioned

M = TypeVar("M")


class TextLines:
    """`count` lines, memory-mapped, each ending with a line feed.

    Args:
        offsets: `.npy`, int64 [count + 1], the byte at which each line begins; the last is the file's size.
    """

    def __init__(self, text: Path, offsets: Path, count: int) -> None:
        # Not as `np.memmap`, each slice of which costs as much as the line.
        self.offsets = np.asarray(open_array(offsets, (count + 1,), "int64"))
        self._bytes: mmap | bytes = b""  # an empty file cannot be mapped
        if count:
            with text.open("rb") as stream:
                self._bytes = mmap(stream.fileno(), 0, access=ACCESS_READ)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._bytes[self.offsets[number] : self.offsets[number + 1] - 1].decode("utf-8")

    def find(self, line: str) -> int | None:
        """Find the first line that is equal to this; None if there is none."""
        wanted, place = line.encode() + b"\n", -1
        while (place := self._bytes.find(wanted, place + 1)) >= 0:
            number = int(np.searchsorted(self.offsets, place))
            if self.offsets[number] == place:
                return number
        return None

    def characters(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the characters of n lines with line feeds, uint32 [C], and where each begins, int64 [n]."""
        first, lengths = self.offsets[numbers], self.offsets[numbers + 1] - self.offsets[numbers]
        begins = np.cumsum(lengths) - lengths  # in bytes
        bytes_read = np.frombuffer(self._bytes, np.uint8)[
            np.repeat(first - begins, lengths) + np.arange(lengths.sum())
        ]
        so_far = np.cumsum((bytes_read & 0xC0) != 0x80)  # the first bytes of characters
        return np.frombuffer(bytes_read.tobytes().decode("utf-8").encode("utf-32-le"), np.uint32), so_far[
            begins
        ] - 1


class LinesInMemory(TextLines):
    """The same without a file."""

    def __init__(self, lines: Iterable[str]) -> None:
        encoded = [f"{line}\n".encode() for line in lines]
        self._bytes, self.offsets = b"".join(encoded), np.cumsum([0, *map(len, encoded)])


class LineWriter:
    """Writes what `TextLines` reads, line by line."""

    def __init__(self, text: Path, offsets: Path) -> None:
        self._stream, self._offsets = text.open("wb"), GrowingArray(offsets, (), "int64")

    def add(self, line: str) -> None:
        self._offsets.append(np.array([self._stream.tell()]))
        with naming(self._stream.name):
            self._stream.write(line.encode("utf-8") + b"\n")

    def close(self) -> None:
        self._offsets.append(np.array([self._stream.tell()]))
        self._offsets.close()
        bring_to_disk(self._stream)
        self._stream.close()


def write_lines(text: Path, offsets: Path, lines: Iterable[str]) -> None:
    """Write all lines of a text."""
    writer = LineWriter(text, offsets)
    for line in lines:
        writer.add(line)
    writer.close()


@dataclass(frozen=True)
class TextFormat:
    """What distinguishes one kind of folder from others."""

    kind: str  # as the manifest has it
    version: int  # the only one that is read
    what: str  # what it holds, in the plural, as messages have it
    files: tuple[str, ...]
    again: str  # what to do about a damaged one


def read_text_manifest(directory: Path, make: type[M], of: TextFormat) -> M:
    """Read and check the manifest of a folder, which `make` is the dataclass of."""
    if not (directory / MANIFEST).is_file():
        if partial_path(directory).exists() or directory.suffix == PARTIAL:
            raise DatastoreError(f"the {of.what} {directory} are unfinished: {of.again}")
        inside = (
            " (give one of its folders, such as train)" if (directory / "train" / MANIFEST).exists() else ""
        )
        raise DatastoreError(f"there are no {of.what} at {directory}: it has no {MANIFEST}{inside}")

    def check(data: dict[str, Any]) -> M:
        if set(data["files"]) != set(of.files):
            raise ValueError(f"it names other files than {', '.join(of.files)}")
        return make(**data)

    return read_versioned(
        directory, of.what, of.version, of.again, lambda data: data.get("kind") == of.kind, check
    )


def check_every_byte(directory: Path, files: dict[str, dict[str, Any]], of: TextFormat) -> None:
    """Read every byte of the files that a manifest names, and compare their checksums."""
    if faults := check_checksums(directory, files):
        raise DatastoreError(f"{directory} is damaged ({faults[0]}): {of.again}")
