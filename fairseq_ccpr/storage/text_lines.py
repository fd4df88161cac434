"""Random access to lines of UTF-8 text on disk, through an array of the bytes at which they begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import naming
from fairseq_ccpr.storage.arrays import GrowingArray, bring_to_disk, open_array


class TextLines:
    """S lines, memory-mapped.

    Args:
        text: the file, which ends each line with a line feed.
        offsets: `.npy`, int64 [S + 1], the byte at which each line begins; the last is the file's size.
        count: S.

    Raises:
        DatastoreError: the offsets are damaged, or belong to another number of lines.
    """

    def __init__(self, text: Path, offsets: Path, count: int) -> None:
        # Not as `np.memmap`, each slice of which costs as much as the line.
        self.offsets = np.asarray(open_array(offsets, (count + 1,), "int64"))
        # An empty file cannot be mapped.
        self._bytes = (np.memmap(text, np.uint8, "r") if count else np.empty(0, np.uint8)).data

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return bytes(self._bytes[self.offsets[number] : self.offsets[number + 1] - 1]).decode("utf-8")

    def characters(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the characters of n lines with their line feeds, uint32 [C], and where each line begins, int64 [n]."""
        first, lengths = self.offsets[numbers], self.offsets[numbers + 1] - self.offsets[numbers]
        begins = np.cumsum(lengths) - lengths  # in bytes
        bytes_read = np.frombuffer(self._bytes, np.uint8)[np.repeat(first - begins, lengths) + np.arange(lengths.sum())]
        so_far = np.cumsum((bytes_read & 0xC0) != 0x80)  # the first bytes of characters
        return np.frombuffer(bytes_read.tobytes().decode("utf-8").encode("utf-32-le"), np.uint32), so_far[begins] - 1


class LinesInMemory:
    """Lines that are searched as `TextLines` are, without a file."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def characters(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Do what `TextLines.characters` does."""
        lines = [f"{self._lines[number]}\n" for number in numbers.tolist()]
        lengths = np.array([len(line) for line in lines], np.int64)
        return np.frombuffer("".join(lines).encode("utf-32-le"), np.uint32), np.cumsum(lengths) - lengths


class LineWriter:
    """Writes what `TextLines` reads, line by line."""

    def __init__(self, text: Path, offsets: Path) -> None:
        self._stream, self._offsets = text.open("wb"), GrowingArray(offsets, (), "int64")

    def add(self, line: str) -> None:
        """Append a line without a line feed in it."""
        self._offsets.append(np.array([self._stream.tell()]))
        with naming(self._stream.name):
            self._stream.write(line.encode("utf-8") + b"\n")

    def close(self) -> None:
        """Complete both files and bring them to disk."""
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
