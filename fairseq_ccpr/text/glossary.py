"""A glossary: terms of the source language, each with the translations that are wanted."""

from __future__ import annotations

import csv
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise, zip_longest
from pathlib import Path
from unicodedata import normalize

import regex

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.languages import NAMES, language_code
from fairseq_ccpr.text.pairs import read_lines, read_rows, reasons

MAX_TERM_WORDS = 12  # of a source term, as spaces part them
_HEADING = regex.compile(
    r"(source|target|src|tgt)([ _-]?(term|text|lang|language))?|term|translation", regex.I
)
logger = logging.getLogger(__name__)

# Soft hyphens, joiners and other characters that are not seen, and the Arabic letter that makes words longer.
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}\u0640]+")
_APOSTROPHES, _HYPHENS = "‘’‛ʼʹ′׳", "‐‒–−"
# spaces for Python, and not for Unicode, which `regex` goes by
_SEPARATORS = dict.fromkeys(range(0x1C, 0x20), " ")
_ALIKE = str.maketrans(dict.fromkeys(_APOSTROPHES, "'") | dict.fromkeys(_HYPHENS, "-"))
# A space counts between letters and digits of scripts that part words by spaces.
_SPACE_COUNTS = regex.compile(
    r"(?V1)[[\w\p{M}]--[\p{Han}\p{Hiragana}\p{scx=Katakana}\p{Line_Break=Complex_Context}]]{2}"
)
# Edges of words (UAX #29); in most scripts without spaces each character has them. Beside these a term may
# begin and end at an apostrophe, for elision (l'accord), between katakana, which UAX #29 leaves together, and
# where Hangul meets another script. It may end inside Hangul: particles are written to the word before them.
_EDGE = regex.compile(r"\b", regex.WORD)
_BETWEEN_WORDS = regex.compile(rf"\s+|['＇{_APOSTROPHES}\p{{scx=Katakana}}]")
_HANGUL = regex.compile(r"\p{Hangul}+")
# What people see as one character is not divided; most texts have none of several.
_CHARACTER, _RUN = regex.compile(r"\X"), regex.compile(r"\s+|\S+")
_OF_SEVERAL = regex.compile(r"[^\p{GCB=Other}\p{GCB=LV}\p{GCB=LVT}\p{GCB=Control}\p{GCB=CR}\p{GCB=LF}]")


class Glossary:
    """Terms of a TSV: a source term, and after tabs its translations, of which any will do.

    Cells may be quoted; columns that DeepL and memoQ write besides terms are passed over. A table without
    tabs may have commas or semicolons instead, if one of them divides all lines into equally many cells.
    A term is found as whole words, in scripts without spaces anywhere, however it is composed, capitalised or
    hyphenated; of terms that overlap the longest counts, and of these the first. `searched` and `found` count
    sentences and terms.

    Args:
        path: left out, its own terms come by `become`, besides those of another glossary.
    """

    def __init__(self, path: Path | None = None, others: Glossary | None = None) -> None:
        self.path, self.others = path, others
        self.variants: dict[str, list[str]] = {}  # of what `_read` makes of the terms
        self.longest: dict[str, int] = {}  # of the terms that begin with a character
        self.searched = self.found = 0
        if path is not None:
            self._read_file(path)
        else:
            self.become(())

    def _read_file(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigurationError(f"--glossary: there is no file {path}")
        skipped, lines = Counter[str](), list(read_lines(path))
        table = read_rows(lines, skipped, enough=1) if "\t" in "".join(lines) else _divided(path, lines)
        rows = [[" ".join(cell.split()) for cell in row] for row in table]
        if skipped:
            raise ConfigurationError(
                f"--glossary: {path} cannot be read ({reasons(skipped)}): save it without quotes"
            )
        for number, row in enumerate(_terms(path, rows), 1):
            if any(row):
                self._add(row, number)
        if not self.variants:
            raise ConfigurationError(f"--glossary: {path} has no term: write source term, tab, target term")

    def _add(self, row: list[str], number: int) -> None:
        where = f"--glossary: {self.path}, line {number}"
        source, *targets = row
        # spreadsheets end short lines with empty cells
        targets = [one for one in targets if _UNSEEN.sub("", one)]
        term = _read(source)[0]
        if not term or not targets:
            missing = "target" if term else "source"
            raise ConfigurationError(f"{where} has no {missing} term: expected source term, tab, target term")
        if (words := len(source.split())) > MAX_TERM_WORDS:
            raise ConfigurationError(
                f"{where}: the source term has {words} words: expected 1 to {MAX_TERM_WORDS}"
            )
        variants = self.variants.setdefault(term, [])
        variants += [target for target in dict.fromkeys(targets) if target not in variants]
        self.longest[term[0]] = max(self.longest.get(term[0], 0), len(term))

    def become(self, terms: Iterable[tuple[str, str]]) -> None:
        """Have these terms with a translation each, and those of the other glossary that are not among them."""
        own = {term: [target] for source, target in terms if (term := _read(source)[0])}
        variants, longest = (self.others.variants if self.others is not None else {}) | own, dict[str, int]()
        for term in variants:
            longest[term[0]] = max(longest.get(term[0], 0), len(term))
        self.variants, self.longest = variants, longest

    def find(self, sentence: str) -> Iterator[tuple[int, int, list[str]]]:
        """Find the terms of a sentence from left to right: start and end in characters, and the variants."""
        text, begins, ends = _read(sentence)
        stops, past = list(ends), 0
        self.searched += 1
        for at, start in begins.items():
            if at < past:
                continue
            most = at + self.longest.get(text[at], 0)
            for stop in reversed(stops[bisect_right(stops, at) : bisect_right(stops, most)]):
                variants = self.variants.get(text[at:stop])
                if variants is not None:
                    self.found += 1
                    past = stop
                    yield start, ends[stop], variants
                    break


def _divided(path: Path, lines: list[str]) -> list[list[str]]:
    """Divide the lines of a table without tabs at commas or semicolons; refuse it if that is not sure."""
    tables, found = [], [one for one in ",;" if one in "".join(lines)]
    for separator in found:
        with suppress(csv.Error):
            table = list(csv.reader((f"{line}\n" for line in lines), delimiter=separator, strict=True))
            in_prose = any(cell.startswith(" ") for row in table for cell in row)
            if not in_prose and len(widths := {len(row) for row in table if row}) == 1 and widths != {1}:
                tables.append(table)
    if found and len(tables) != 1:
        raise ConfigurationError(
            f"--glossary: {path} has no tabs, and {' or '.join(found)} may "
            "be part of terms: save it with tabs"
        )
    return tables[0] if found else [[line] for line in lines]


@lru_cache(1 << 12)
def _language(cell: str) -> str:
    """Return the code of a language that is named by its code or English name; otherwise nothing."""
    code = next(
        (code for code, name in NAMES.items() if name.casefold() == cell.casefold()), language_code(cell)
    )
    return code if code in NAMES else ""


def _terms(path: Path, rows: list[list[str]]) -> Iterator[list[str]]:
    """Leave out a header, columns of language codes (DeepL), and fields that memoQ's header names.

    Of memoQ's languages the first is the source; a row may have several terms of it, each of which has all
    the others.
    """
    head = [cell for cell in rows[0] if cell] if rows else []
    if any(cell.startswith("Entry_") for cell in head):
        fields = [(at, name) for at, name in enumerate(rows[0]) if not name.startswith(("Entry_", "Term_"))]
        named = [(at, name) for at, name in fields if name and not name.endswith("_Def")]
        yield []
        for row in rows[1:]:
            terms = [(name == named[0][1], row[at]) for at, name in named if at < len(row) and row[at]]
            targets = [term for is_source, term in terms if not is_source]
            yield from ([term, *targets] for is_source, term in terms if is_source)
        return
    of_targets: list[list[str]] = []
    if 1 < len(head) == len(set(head)) and all(_HEADING.fullmatch(cell) or _language(cell) for cell in head):
        logger.warning("--glossary: %s: line 1 names the columns (%s), and is no term", path, ", ".join(head))
        of_targets, rows = [[*filter(None, map(_language, head[1:]))]], [[], *rows[1:]]
    columns = [[cell for cell in column if cell] for column in zip_longest(*rows, fillvalue="")]
    beside = [column for column in columns[2:] if column]
    may_be_codes = len(beside) == 2 or (len(beside) == 1 and len(beside[0]) == sum(map(any, rows)) > 1)
    of_codes = may_be_codes and all(_language(cell) for column in beside for cell in column)
    codes = [[_language(cell) for cell in column] for column in beside] if of_codes else []
    if len(codes) == 2 and codes[0] == codes[1]:
        codes = []
    for several in (sorted(set(one)) for one in codes + of_targets if len(set(one)) > 1):
        raise ConfigurationError(
            f"--glossary: {path} has terms of several languages "
            f"({', '.join(several)}): keep those of one pair"
        )
    yield from (row[:2] if codes else row for row in rows)


def _read(text: str) -> tuple[str, dict[int, int], dict[int, int]]:
    """Write a text as terms are compared; tell where terms may begin and end in it, and in the text."""
    text = text.translate(_SEPARATORS)
    may_begin = {0, len(text), *(edge.start() for edge in _EDGE.finditer(text))}
    may_begin.update(at for found in _BETWEEN_WORDS.finditer(text) for at in found.span())
    may_end = set(may_begin)
    for found in _HANGUL.finditer(text):
        may_begin.update(found.span())
        may_end.update(range(found.start(), found.end() + 1))
    if _OF_SEVERAL.search(text):
        runs = (_CHARACTER.finditer(text, *run.span()) for run in _RUN.finditer(text))
        whole = {len(text), *(character.start() for run in runs for character in run)}
        may_begin, may_end = may_begin & whole, may_end & whole
    written, space = "", False
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for start, end in pairwise(sorted(may_begin | may_end)):
        seen = folded(text[start:end])
        if seen.isspace():
            space = True
            continue
        if seen:
            written += " " * bool(space and _SPACE_COUNTS.fullmatch(written[-1:] + seen[0]))
            space = False
            if start in may_begin:
                begins[len(written)] = start
        elif start in may_begin:
            may_begin.add(end)
        written += seen
        if end in may_end and not space:
            ends[len(written)] = end
    return written, begins, ends


@lru_cache(1 << 16)
def folded(word: str) -> str:
    """Return what is compared of a word: not case, width or composition; a dotted I is i, too."""
    folded = normalize("NFKC", normalize("NFKC", word).casefold()).replace("i\u0307", "i")
    return _UNSEEN.sub("", folded).translate(_ALIKE)
