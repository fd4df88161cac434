"""Sentence pairs as text: two files line by line, or a TSV, plain, `.gz` or `.xz`, with or without alignments.

Only a line feed ends a line, as in other tools for parallel text. What other readers take for a line end becomes a space.
What is no pair is left out and counted by reason, or else, where lines belong to those of another file, an error.

Raises:
    ConfigurationError: bytes that are not UTF-8 (by line), a line that is no pair, files of different lengths.
"""

from __future__ import annotations

import codecs
import gzip
import logging
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from fairseq_ccpr.errors import ConfigurationError

PACKED: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}  # by the ends of their names
LONGEST = 1 << 22  # bytes of a line
_SCORE = re.compile(r"-?\d+\.\d+")
_LINE_ENDS = re.compile("[\n\v\f\r\x1c-\x1f\x85\u2028\u2029]")

logger = logging.getLogger(__name__)


def one_line(text: str) -> str:
    """Replace each character that some reader takes for a line end by a space.

    >>> one_line("eins\\r\\nzwei\\u2028drei")
    'eins  zwei drei'
    """
    return _LINE_ENDS.sub(" ", text)


@contextmanager
def open_packed(path: Path) -> Iterator[Any]:
    """Open a file, compressed or not, for reading bytes; damage may show only while it is read."""
    with PACKED.get(path.suffix.lower(), open)(path, "rb") as stream:
        try:
            yield stream
        except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeError) as error:
            raise ConfigurationError(f"{path} is damaged, or not what its name says: {error}") from None


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a UTF-8 text without their ends."""
    return (line for line in _read(path, None) if line is not None)


def _read(path: Path, skipped: Counter[str] | None) -> Iterator[str | None]:
    with open_packed(path) as stream:
        yield from _decoded(stream, str(path), skipped)


def read_standard_input() -> Iterator[str]:
    """Read the lines of the standard input, as `read_lines` reads a file."""
    return (line for line in _decoded(sys.stdin.buffer, "the standard input") if line is not None)


def _decoded(stream: BinaryIO, name: str, skipped: Counter[str] | None = None) -> Iterator[str | None]:
    for number, line in enumerate(iter(partial(stream.readline, LONGEST), b""), 1):
        if len(line) == LONGEST and not line.endswith(b"\n"):
            fault = f"longer than {LONGEST:,} bytes, as no sentence is"
            if skipped is None:
                raise ConfigurationError(f"{name}, line {number} is {fault}: divide it")
            skipped[f"a line is {fault}"] += 1
            while (rest := stream.readline(LONGEST)) and not rest.endswith(b"\n"):
                pass
            yield None
            continue
        if number == 1 and (encoding := _wide_encoding(line)):
            raise ConfigurationError(f"{name} is {encoding.upper()}: convert it with iconv -f {encoding} -t utf-8")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            if skipped is None:
                raise ConfigurationError(
                    f"{name}, line {number}: the bytes are not UTF-8: convert the text, such as by iconv -f latin1 -t utf-8"
                ) from None
            skipped["a line is not UTF-8"] += 1
            yield None
        else:
            yield one_line(text)


def _wide_encoding(line: bytes) -> str | None:
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    for mark, encoding in marks.items():
        if line.startswith(mark):
            return encoding
    halves = {"utf-16le": line[1:200:2], "utf-16be": line[:200:2]}  # which are NUL in most scripts
    return next((name for name, half in halves.items() if len(half) > 1 and half.count(0) > len(half) / 2), None)


def read_pairs(path: Path, empty_lines: bool = False, skipped: Counter[str] | None = None) -> Iterator[tuple[str, str]]:
    """Read the sentence pairs of a TSV file: source, tab, target, and perhaps another tab and a score.

    Args:
        empty_lines: whether an empty line is a pair of empty texts.
        skipped: counts lines that are no pair, by reason, and leaves them out; without it the first is an error.
    """
    for number, line in enumerate(_read(path, skipped), 1):
        if line is None:
            continue
        columns = line.split("\t") if line.strip() or not empty_lines else ["", ""]
        if len(columns) == 3 and _SCORE.fullmatch(columns[2]):
            del columns[2]
        if len(columns) != 2 and skipped is not None:
            skipped[f"a line has {len(columns)} columns, and a pair has 2" if line.strip() else "a line is empty"] += 1
            continue
        if len(columns) != 2:
            raise ConfigurationError(
                f"{path}, line {number}: {len(columns)} column{'' if len(columns) == 1 else 's'}, and a pair has 2: source, "
                "tab, target"
            )
        yield columns[0], columns[1]


def reasons(skipped: Counter[str]) -> str:
    """List what was left out, by reason."""
    return "; ".join(f"{count:,}: {reason}" for reason, count in skipped.most_common())


def tell_skipped(where: object, skipped: Counter[str]) -> None:
    """Warn of what a text has besides pairs."""
    if skipped:
        logger.warning("%s: left out %s", where, reasons(skipped))


@dataclass(frozen=True)
class TextPairs:
    """Where sentence pairs are: either two files or one TSV, and perhaps their word alignments in Pharaoh format."""

    source: Path | None = None
    target: Path | None = None
    pairs: Path | None = None
    alignments: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All files, in a fixed order."""
        return [path for path in (self.source, self.target, self.pairs, self.alignments) if path is not None]

    def read(self, skipped: Counter[str]) -> Iterator[tuple[str, str, str | None]]:
        """Yield source, target and alignment, if any, of each line; lines may be empty.

        Lines that are no pair are counted in `skipped`; an error where there are alignments, which belong to lines.
        """
        if self.pairs is not None:
            rows: Iterator[tuple[str, ...]] = read_pairs(self.pairs, True, None if self.alignments else skipped)
        else:
            assert self.source is not None and self.target is not None
            rows = read_together(self.source, self.target, None if self.alignments else skipped)
        if self.alignments is None:
            yield from ((source, target, None) for source, target in rows)
            return
        text = self.pairs or self.source
        assert text is not None
        for row, line in zip_longest(rows, read_lines(self.alignments)):
            if row is None or line is None:
                shorter, longer = (text, self.alignments) if row is None else (self.alignments, text)
                raise ConfigurationError(
                    f"{shorter} has fewer lines than {longer}: give one alignment for each sentence pair, in their order"
                )
            yield row[0], row[1], line


def read_together(one: Path, two: Path, skipped: Counter[str] | None = None) -> Iterator[tuple[str, str]]:
    """Read the lines of two files side by side, which must be equally many; `skipped` as of `read_pairs`."""
    counts = [0, 0]
    for left, right in zip_longest(_read(one, skipped), _read(two, skipped), fillvalue="\n"):  # which no line has
        counts[0] += left != "\n"
        counts[1] += right != "\n"
        if left is not None and right is not None and "\n" not in (left, right):
            yield left, right
    if counts[0] != counts[1]:
        raise ConfigurationError(
            f"{one} has {counts[0]:,} lines and {two} has {counts[1]:,}: give files in which line n of the one "
            "translates line n of the other"
        )
