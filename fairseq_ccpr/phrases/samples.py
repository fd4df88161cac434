"""One-pass samples of text that depend neither on its order nor on repeated sentences."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import by_first_word, occurrences


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

    Args:
        paths: texts, a sentence per line; read once, whatever their size.
        strings: the strings to look for.
        size: sentences of each, at most.
        excluded: sentences that do not count.
        longer_by: the least number of characters by which a sentence must be longer than the string.

    Returns:
        By string: sentence, start and end in characters; none where a string does not occur.
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
