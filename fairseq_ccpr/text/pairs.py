"""Sentence pairs as text: two files line by line, or a TSV, plain or packed, with or without alignments.

Only a line feed ends a line, as in other tools for parallel text. What other readers take for a line end
becomes a space. What is no pair is left out and counted by reason, or else, where lines belong to those of
another file, an error. Cells of a TSV may be quoted, as spreadsheets save them.

Raises:
    ConfigurationError: bytes that are not UTF-8 (by line), a line that is no pair, files of different
    lengths.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import logging
import lzma
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from fairseq_ccpr.errors import ConfigurationError

PACKED_NAMES = (".gz", ".xz", ".bz2")
UNPACKED_BYTES = 1 << 16  # bytes that are unpacked at a time
LONGEST_LINE = 1 << 22  # bytes of a line
SAMPLED_ROWS = 1000  # rows of a table by which it is decided whether its cells are quoted
MOSTLY = 0.9  # of the cells with quotation marks
ENOUGH_QUOTED = 3  # quoted cells with commas, which tell of a spreadsheet that quotes all of them
BROKEN = "a quoted cell does not end, or ends in the middle"
MOST_LINES = 100  # of a quoted cell
BYTE_ORDER_MARK = "\ufeff"  # is no text: it stands inside where files were joined
PACKED: dict[bytes, Any] = {  # by the bytes that they begin with, whatever their names
    rb"\xfd7zXZ\0": lzma.open, rb"\x1f\x8b": gzip.open, rb"BZh[1-9]1AY&SY": bz2.open,
}  # fmt: skip
Watch = Callable[[int], None]  # is called with the bytes that were unpacked so far, and raises to stop
# By their byte order marks; that of UTF-16 begins as one of UTF-32 does.
WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SCORE = re.compile(r"-?\d+\.\d+")
_QUOTED = re.compile(r'"(?:[^"\t]|"")*+"')
_ROW = re.compile(rf"(?:(?:{_QUOTED.pattern}|[^\"\t]*+)(?:\t|$))*")
_LINE_ENDS = re.compile("[\n\v\f\r\x1c-\x1f\x85\u2028\u2029]")

logger = logging.getLogger(__name__)


_SPACE = re.compile(r"[^\S\u00a0\u2007\u202f]+")  # but for what does not break a line


def one_line(text: str) -> str:
    """Replace each character that some reader takes for a line end by a space.

    >>> one_line("eins\\r\\nzwei\\u2028drei")
    'eins  zwei drei'
    """
    return _LINE_ENDS.sub(" ", text)


class _Watched(io.RawIOBase):
    """A stream that tells how many bytes were read, and gives those before damage before it raises."""

    def __init__(self, stream: Any, watch: Watch | None) -> None:
        self.stream, self.watch, self.count = stream, watch, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read1(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        if self.watch is not None:
            self.watch(self.count)
        return len(data)


def tidy(text: str) -> str:
    """Make one line of a text: white space becomes single spaces, none at its ends; no-break spaces stay.

    >>> tidy(" Guten\\n Morgen. ")
    'Guten Morgen.'
    """
    return _SPACE.sub(" ", text).strip()


@contextmanager
def open_packed(path: Path, watch: Watch | None = None) -> Iterator[io.BufferedReader]:
    """Open a file, packed or not by its first bytes; damage may show only while it is read."""
    with path.open("rb") as file:
        head = file.peek(10)
        if head.startswith(b"PK\3\4"):
            raise ConfigurationError(f"{path} is a ZIP archive: unpack it, and give the file that is in it")
        unpack = next(
            (unpack for magic, unpack in PACKED.items() if re.match(magic, head)), lambda plain: plain
        )
        try:
            yield io.BufferedReader(_Watched(unpack(file), watch), UNPACKED_BYTES)
        except (lzma.LZMAError, zlib.error, EOFError, OSError, UnicodeError) as error:
            raise ConfigurationError(f"{path} is damaged: {error}") from None


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a UTF-8 text without their ends."""
    return (line for line in _read(path, None) if line is not None)


def _read(path: Path, skipped: Counter[str] | None, watch: Watch | None = None) -> Iterator[str | None]:
    with open_packed(path, watch) as stream:
        yield from _decoded(stream, str(path), skipped)


def read_standard_input() -> Iterator[str]:
    """Read the lines of the standard input, as `read_lines` reads a file."""
    return (line for line in _decoded(sys.stdin.buffer, "the standard input") if line is not None)


def _decoded(stream: BinaryIO, name: str, skipped: Counter[str] | None = None) -> Iterator[str | None]:
    for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), 1):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            fault = f"longer than {LONGEST_LINE:,} bytes, as no sentence is"
            _leave_out(skipped, f"a line is {fault}", f"{name}, line {number} is {fault}: divide it")
            while (rest := stream.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            yield None
            continue
        if number == 1 and (encoding := _wide_encoding(line)):
            raise ConfigurationError(
                f"{name} is {encoding.upper()}: convert it with iconv -f {encoding} -t utf-8"
            )
        try:
            text = line.decode("utf-8").replace(BYTE_ORDER_MARK, "").rstrip("\r\n")
        except UnicodeDecodeError:
            cure = "the bytes are not UTF-8: convert the text, such as by iconv -f latin1 -t utf-8"
            _leave_out(skipped, "a line is not UTF-8", f"{name}, line {number}: {cure}")
            yield None
        else:
            yield one_line(text)


def _leave_out(skipped: Counter[str] | None, reason: str, refusal: str) -> None:
    """Count what is left out by its reason; where nothing may be left out, refuse it."""
    if skipped is None:
        raise ConfigurationError(refusal) from None
    skipped[reason] += 1


def _wide_encoding(line: bytes) -> str | None:
    for mark, encoding in WIDE.items():
        if line.startswith(mark):
            return encoding
    halves = {"utf-16le": line[1:200:2], "utf-16be": line[:200:2]}  # which are NUL in most scripts
    return next(
        (name for name, half in halves.items() if len(half) > 1 and half.count(0) > len(half) / 2), None
    )


def read_pairs(
    path: Path, empty_lines: bool = False, skipped: Counter[str] | None = None, watch: Watch | None = None
) -> Iterator[tuple[str, str]]:
    """Read the sentence pairs of a TSV file: source, tab, target, and perhaps another tab and a score.

    Args:
        empty_lines: whether an empty line is a pair of empty texts.
        skipped: counts lines that are no pair, by reason, and leaves them out; without it the first is an
            error, and no cell is quoted.
        watch: sees how much was read, and may stop it.
    """
    lines = _read(path, skipped, watch)
    rows = (
        read_rows(lines, skipped)
        if skipped is not None
        else (line.split("\t") for line in lines if line is not None)
    )
    for number, columns in enumerate(rows, 1):
        empty = not any(map(str.strip, columns))
        if empty and empty_lines:
            columns = ["", ""]
        if len(columns) == 3 and _SCORE.fullmatch(columns[2]):
            del columns[2]
        if len(columns) != 2:
            reason = "a line is empty" if empty else f"a line has {len(columns)} columns, and a pair has 2"
            found = f"{len(columns)} column{'' if len(columns) == 1 else 's'}"
            refusal = f"{path}, line {number}: {found}, and a pair has 2: source, tab, target"
            _leave_out(skipped, reason, refusal)
            continue
        yield columns[0], columns[1]


def read_rows(
    lines: Iterable[str | None], skipped: Counter[str], enough: int = ENOUGH_QUOTED
) -> Iterator[list[str]]:
    """Read the rows of a table, their cells as they were before a spreadsheet quoted them.

    A table is quoted if nearly all cells with marks are, of which some have doubled marks or several lines,
    or there are no other cells; or if those with commas (or with semicolons) are quoted, `enough` of them,
    and no others. Otherwise marks are text, but in rows with doubled marks or several lines. Lines of a cell
    become one. Rows whose quoted cells do not end are left out and counted.
    """
    rows, fault = _whole_rows((line for line in lines if line is not None), skipped), None
    sample: list[tuple[list[str], int]] = []
    try:
        for one in islice(rows, SAMPLED_ROWS):
            sample.append(one)
    except ConfigurationError as error:  # the file is damaged from there on
        fault = error
    cells = [cell for row, _ in sample for cell in row if cell]
    marked = [cell for cell in cells if '"' in cell]
    sure = (
        any(count > 1 for _, count in sample) or any('""' in cell[1:-1] for cell in marked) or marked == cells
    )
    sure = sure or any(
        len(marked) >= enough and marked == [cell for cell in cells if mark in cell] for mark in ",;"
    )
    quoted = sure and sum(map(bool, map(_QUOTED.fullmatch, marked))) >= MOSTLY * len(marked)
    for row, count in chain(sample, rows):
        whole = [_QUOTED.fullmatch(cell) for cell in row]
        if quoted and any(cell.startswith('"') and not found for cell, found in zip(row, whole)):
            skipped[BROKEN] += 1
            continue
        unquoted = quoted or count > 1 or any(found and '""' in found[0][1:-1] for found in whole)
        yield [
            cell[1:-1].replace('""', '"') if found and unquoted else cell for cell, found in zip(row, whole)
        ]
    if fault is not None:
        raise fault


def _whole_rows(lines: Iterator[str], skipped: Counter[str]) -> Iterator[tuple[list[str], int]]:
    """Join the lines of each row, and count them.

    In prose too a cell may begin with a mark that it does not end with. But each of its lines has a tab: so
    only a line without one is continued by a line with one, and those after that have none.
    """
    waiting: list[str] = []
    while (line := waiting.pop(0) if waiting else next(lines, None)) is not None:
        row, more = line, list[str]()
        while _begins_quoted(row) and len(more) < MOST_LINES and len(row) < LONGEST_LINE:
            following = waiting.pop(0) if waiting else next(lines, None)
            if following is None:
                break
            if "\t" in following and ("\t" in row or '"' not in following):
                waiting.insert(0, following)
                break
            more.append(following)
            row = f"{row} {following}"
        if not more or _ROW.fullmatch(row):
            yield row.split("\t"), 1 + len(more)
        elif '"' in "".join(more):
            skipped[BROKEN] += 1 + len(more)
        else:
            waiting = more + waiting
            yield line.split("\t"), 1


def _begins_quoted(row: str) -> bool:
    """Tell whether the last cell begins with a mark, and does not end as a quoted one."""
    last = row.rpartition("\t")[2]
    return last.startswith('"') and not _QUOTED.fullmatch(last)


def reasons(skipped: Counter[str]) -> str:
    """List what was left out, by reason."""
    return "; ".join(f"{count:,}: {reason}" for reason, count in skipped.most_common())


def tell_skipped(where: object, skipped: Counter[str]) -> None:
    """Warn of what a text has besides pairs."""
    if skipped:
        logger.warning("%s: left out %s", where, reasons(skipped))


@dataclass(frozen=True)
class TextPairs:
    """Where sentence pairs are: two files or one TSV, and perhaps alignments in Pharaoh format."""

    source: Path | None = None
    target: Path | None = None
    pairs: Path | None = None
    alignments: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.source, self.target, self.pairs, self.alignments) if path is not None]

    def read(self, skipped: Counter[str]) -> Iterator[tuple[str, str, str | None]]:
        """Yield source, target and alignment, if any, of each line; lines may be empty.

        Lines that are no pair are counted in `skipped`; an error where there are alignments, which belong to
        lines.
        """
        if self.pairs is not None:
            rows: Iterator[tuple[str, ...]] = read_pairs(
                self.pairs, True, None if self.alignments else skipped
            )
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
                    f"{shorter} has fewer lines than {longer}: give one alignment for "
                    "each sentence pair, in their order"
                )
            yield row[0], row[1], line


def read_together(one: Path, two: Path, skipped: Counter[str] | None = None) -> Iterator[tuple[str, str]]:
    """Read the lines of two files side by side, which must be equally many; `skipped` as of `read_pairs`."""
    counts = [0, 0]
    # which no line has
    for left, right in zip_longest(_read(one, skipped), _read(two, skipped), fillvalue="\n"):
        counts[0] += left != "\n"
        counts[1] += right != "\n"
        if left is not None and right is not None and "\n" not in (left, right):
            yield left, right
    if counts[0] != counts[1]:
        raise ConfigurationError(
            f"{one} has {counts[0]:,} lines and {two} has {counts[1]:,}: give files in which line n of the "
            "one translates line n of the other"
        )
