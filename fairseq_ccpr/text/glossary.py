"""A glossary: terms of the source language, each with the translations that are wanted."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import regex

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.languages import NAMES, language_code
from fairseq_ccpr.text.pairs import read_lines, read_rows, reasons

MAX_WORDS = 12  # of a source term, as spaces part them

# Soft hyphens, joiners and other characters that are not seen, and the Arabic letter that makes words longer.
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}\u0640]+")
_APOSTROPHES, _HYPHENS = "‘’‛ʼʹ′׳", "‐‒–−"
_SEPARATORS = dict.fromkeys(range(0x1C, 0x20), " ")  # spaces for Python, and not for Unicode, which `regex` goes by
_ALIKE = str.maketrans(dict.fromkeys(_APOSTROPHES, "'") | dict.fromkeys(_HYPHENS, "-"))
# A space counts between letters and digits of scripts that part words by spaces.
_SPACE_COUNTS = regex.compile(
    r"(?V1)[[\w\p{M}]--[\p{Han}\p{Hiragana}\p{scx=Katakana}\p{Line_Break=Complex_Context}]]{2}"
)
# Edges of words (UAX #29); in most scripts without spaces each character has them. Beside these a term may begin and end at
# an apostrophe, for elision (l'accord), between katakana, which UAX #29 leaves together, and where Hangul meets another
# script. It may end inside Hangul: particles are written to the word before them.
_EDGE = regex.compile(r"\b", regex.WORD)
_APART = regex.compile(rf"\s+|['＇{_APOSTROPHES}\p{{scx=Katakana}}]")
_HANGUL = regex.compile(r"\p{Hangul}+")
# What people see as one character is not divided; most texts have none of several.
_CHARACTER, _RUN = regex.compile(r"\X"), regex.compile(r"\s+|\S+")
_OF_SEVERAL = regex.compile(r"[^\p{GCB=Other}\p{GCB=LV}\p{GCB=LVT}\p{GCB=Control}\p{GCB=CR}\p{GCB=LF}]")


class Glossary:
    """Terms of a TSV: a source term, and after tabs its translations, variants of which any will do, as on further lines.

    Cells may be quoted; columns that DeepL and memoQ write besides terms are passed over.
    A term is found as whole words, in scripts without spaces anywhere, however it is composed, capitalised or hyphenated; of
    terms that overlap the longest counts, and of these the first. `searched` and `found` count sentences and terms.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.variants: dict[str, list[str]] = {}  # of what `_read` makes of the terms
        self.longest: dict[str, int] = {}  # of the terms that begin with a character
        self.searched = self.found = 0
        if not path.is_file():
            raise ConfigurationError(f"--glossary: there is no file {path}")
        skipped = Counter[str]()
        rows = [[" ".join(cell.split()) for cell in row] for row in read_rows(read_lines(path), skipped, enough=1)]
        if skipped:
            raise ConfigurationError(f"--glossary: {path} cannot be read ({reasons(skipped)}): save it without quotes")
        for number, row in enumerate(_terms(rows), 1):
            if any(row):
                self._add(row, number)
        if not self.variants:
            raise ConfigurationError(f"--glossary: {path} has no term: write source term, tab, target term")

    def _add(self, row: list[str], number: int) -> None:
        where = f"--glossary: {self.path}, line {number}"
        source, *targets = row
        targets = [one for one in targets if _UNSEEN.sub("", one)]  # spreadsheets end short lines with empty cells
        term = _read(source)[0]
        if not term or not targets:
            missing = "target" if term else "source"
            raise ConfigurationError(f"{where} has no {missing} term: expected source term, tab, target term")
        if (words := len(source.split())) > MAX_WORDS:
            raise ConfigurationError(f"{where}: the source term has {words} words: expected 1 to {MAX_WORDS}")
        variants = self.variants.setdefault(term, [])
        variants += [target for target in dict.fromkeys(targets) if target not in variants]
        self.longest[term[0]] = max(self.longest.get(term[0], 0), len(term))

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


def _terms(rows: list[list[str]]) -> Iterator[list[str]]:
    """Leave out columns that are no terms: DeepL's codes of both languages, and the fields of memoQ, which its header names.

    Of memoQ's languages the first is the source; a row may have several terms of it, each of which has all the others.
    """
    codes = {tuple(row[2:]) for row in rows if len(row) > 2}
    of_deepl = len(codes) == 1 and len(both := [language_code(one) for one in next(iter(codes))]) == 2
    if of_deepl and NAMES.keys() >= set(both) and both[0] != both[1]:
        yield from (row[:2] for row in rows)
    elif rows and any(cell.startswith("Entry_") for cell in rows[0]):
        fields = [(at, name) for at, name in enumerate(rows[0]) if not name.startswith(("Entry_", "Term_"))]
        columns = [(at, name) for at, name in fields if name and not name.endswith("_Def")]
        yield []
        for row in rows[1:]:
            terms = [(name == columns[0][1], row[at]) for at, name in columns if at < len(row) and row[at]]
            targets = [term for is_source, term in terms if not is_source]
            yield from ([term, *targets] for is_source, term in terms if is_source)
    else:
        yield from rows


def _read(text: str) -> tuple[str, dict[int, int], dict[int, int]]:
    """Write a text as terms are compared, and tell where in it terms may begin and end, and where that is in the text."""
    text = text.translate(_SEPARATORS)
    may_begin = {0, len(text), *(edge.start() for edge in _EDGE.finditer(text))}
    may_begin.update(at for found in _APART.finditer(text) for at in found.span())
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
    """Return what is compared of a word: neither case, width nor composition; a dotted capital I is i, too."""
    folded = normalize("NFKC", normalize("NFKC", word).casefold()).replace("i\u0307", "i")
    return _UNSEEN.sub("", folded).translate(_ALIKE)
