"""Strings looked for in texts, and samples of the sentences that have them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import word_spans


@dataclass
class Beginning:
    """The strings that begin with the same word."""

    strings: set[str] = field(default_factory=set)
    longest: int = 0  # in characters


def by_first_word(strings: Iterable[str]) -> dict[str, Beginning]:
    """Group strings by the word they begin with, as `occurrences` wants them; what has no word is left out."""
    first_words: dict[str, Beginning] = {}
    for string in strings:
        if words := word_spans(string):
            beginning = first_words.setdefault(string[slice(*words[0])], Beginning())
            beginning.strings.add(string)
            beginning.longest = max(beginning.longest, len(string))
    return first_words


def occurrences(text: str, strings: dict[str, Beginning]) -> dict[str, list[tuple[int, int]]]:
    """Find the strings, by first word, that a text has as whole words, with all their places in characters.

    What it costs grows with the words of the text and the longest string, not with the number of strings.

    >>> occurrences("the sea, the season", by_first_word(["the", "sea", "the sea"]))
    {'the': [(0, 3), (9, 12)], 'the sea': [(0, 7)], 'sea': [(4, 7)]}
    """
    words = word_spans(text)
    found: dict[str, list[tuple[int, int]]] = {}
    for number, (start, first_end) in enumerate(words):
        if (beginning := strings.get(text[start:first_end])) is None:
            continue
        for _, end in islice(words, number, None):
            if end - start > beginning.longest:
                break
            if (string := text[start:end]) in beginning.strings:
                found.setdefault(string, []).append((start, end))
    return found


class Sample:
    """The `size` texts with the lowest digests of all those offered, each once; a smaller sample is a prefix of a larger one.

    >>> sample = Sample(2)
    >>> for text in ["a", "b", "a", "c", "d"]:
    ...     sample.offer(text)
    >>> sample.texts() == sorted("abcd", key=digest)[:2]
    True
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: dict[int, str] = {}
        self._highest: list[int] = []  # a heap of the digests, negated

    def offer(self, text: str) -> None:
        """Consider a text for the sample."""
        number = int.from_bytes(digest(text), "big")
        if number in self._kept or (len(self._kept) == self.size and number > -self._highest[0]):
            return
        self._kept[number] = text
        heapq.heappush(self._highest, -number)
        if len(self._kept) > self.size:
            del self._kept[-heapq.heappop(self._highest)]

    def texts(self) -> list[str]:
        """Return the sample, lowest digest first."""
        return [self._kept[number] for number in sorted(self._kept)]


def sample_sentences(paths: list[Path], size: int, excluded: Collection[str]) -> list[str]:
    """Sample at most `size` sentences, none of `excluded`, none empty."""
    sample = Sample(size)
    for line in _sentences(paths, excluded):
        sample.offer(line)
    return sample.texts()


def sample_occurrences(
    paths: list[Path], strings: Collection[str], size: int, excluded: Collection[str], longer_by: int = 0
) -> dict[str, list[tuple[str, int, int]]]:
    """Sample for each string at most `size` sentences that contain it as whole words, with its first place there.

    The texts, a sentence per line, are read once. A sentence that is `excluded`, or not `longer_by` as many
    characters than the string, does not count.
    """
    first_words = by_first_word(strings)
    samples: defaultdict[str, Sample] = defaultdict(lambda: Sample(size))
    for line in _sentences(paths, excluded):
        for string in occurrences(line, first_words):
            if len(line) >= len(string) + longer_by:
                samples[string].offer(line)
    found: dict[str, list[tuple[str, int, int]]] = {string: [] for string in strings}
    for string, sample in samples.items():
        found[string] = [(line, *occurrences(line, first_words)[string][0]) for line in sample.texts()]
    return found


def _sentences(paths: list[Path], excluded: Collection[str]) -> Iterator[str]:
    for path in paths:
        for line in read_lines(path):
            if line.strip() and line not in excluded:
                yield line
