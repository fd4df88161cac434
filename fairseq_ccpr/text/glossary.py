"""A glossary: terms of the source language, each with the translations that are wanted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.pairs import read_lines

MAX_WORDS = 12  # of a source term

_WORD = re.compile(r"\w+|[^\w\s]")


class Glossary:
    """Terms of a TSV: a source term, and after tabs its translations, variants of which any will do, as on further lines.

    A term is found as whole words, whatever its capitals; of terms that overlap the longest counts, and of these the first.

    Raises:
        ConfigurationError: a line without a source term or without a translation, or no line at all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.variants: dict[tuple[str, ...], list[str]] = {}
        self.most_words = 0
        if not path.is_file():
            raise ConfigurationError(f"--glossary: there is no file {path}")
        for number, line in enumerate(read_lines(path), 1):
            if line.strip():
                self._add(line, number)
        if not self.variants:
            raise ConfigurationError(f"--glossary: {path} has no term: write source term, tab, target term")

    def _add(self, line: str, number: int) -> None:
        columns = [" ".join(column.split()) for column in line.split("\t")]
        where = f"--glossary: {self.path}, line {number}"
        source, *targets = columns
        targets = [target for target in targets if target]  # spreadsheets end short lines with empty cells
        if not source or not targets:
            missing = "target" if source else "source"
            raise ConfigurationError(f"{where} has no {missing} term: expected source term, tab, target term")
        words = _words(source)
        if not 0 < len(words) <= MAX_WORDS:
            raise ConfigurationError(f"{where}: the source term has {len(words)} words: expected 1 to {MAX_WORDS}")
        variants = self.variants.setdefault(words, [])
        variants += [target for target in dict.fromkeys(targets) if target not in variants]
        self.most_words = max(self.most_words, len(words))

    def find(self, sentence: str) -> Iterator[tuple[int, int, list[str]]]:
        """Find the terms of a sentence from left to right: start and end in characters, and the variants."""
        spans = [word.span() for word in _WORD.finditer(sentence)]
        words = _words(sentence)
        at = 0
        while at < len(words):
            for count in range(min(self.most_words, len(words) - at), 0, -1):
                variants = self.variants.get(words[at : at + count])
                if variants is not None:
                    yield spans[at][0], spans[at + count - 1][1], variants
                    at += count
                    break
            else:
                at += 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.casefold() for word in _WORD.findall(text))
