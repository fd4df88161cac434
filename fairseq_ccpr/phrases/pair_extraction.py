"""Phrase pairs from word alignments, and the filters of CCPR's appendix A.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairseq_ccpr.phrases.alignment import SentencePair


def edge_rule(settings: Mapping[str, Any]) -> str:
    """Name the rule by which words were barred from the edges of phrases.

    Args:
        settings: of an extraction, as its manifest has them; earlier versions had two more rules.

    >>> edge_rule({"max_edge_share": 0.003})
    'own>0.003'
    >>> edge_rule({"max_edge_share": 0.003, "frequent_in": "general", "frequent_may_begin": True})
    'general>0.003,begin'
    """
    begins = ",begin" if settings.get("frequent_may_begin") else ""
    return f"{settings.get('frequent_in', 'own')}>{settings['max_edge_share']:g}{begins}"


@dataclass
class FilterCounts:
    """Counts of the consistent pairs, by outcome."""

    consistent: int = 0
    edges: int = 0  # dropped: a very frequent word, or punctuation, at an edge
    wordless: int = 0  # dropped: digits and punctuation only
    kept: int = 0


class WordFilter:
    """Judges the words of one language, each kind once.

    Args:
        frequencies: how often each word, in lower case, occurs in the text.
        max_share: a word that makes up a larger fraction of all words of the text is too frequent for an edge.
        punctuation_edges: whether punctuation may stand at an edge.
    """

    def __init__(self, frequencies: Counter[str], max_share: float, punctuation_edges: bool) -> None:
        limit = max_share * sum(frequencies.values())
        self.frequent = {word for word, count in frequencies.items() if count > limit}
        self.punctuation_edges = punctuation_edges
        self._judged: dict[str, tuple[bool, bool]] = {}

    def judge(self, words: list[str]) -> np.ndarray:
        """Judge words, bool [W, 2]: whether one may stand at an edge of a phrase, and whether it has a letter."""
        return np.array([self._judged.get(word) or self._judge(word) for word in words], bool).reshape(-1, 2)

    def _judge(self, word: str) -> tuple[bool, bool]:
        letter = any(character.isalpha() for character in word)
        wordlike = self.punctuation_edges or letter or any(c.isnumeric() for c in word)
        self._judged[word] = judged = wordlike and word not in self.frequent, letter
        return judged


class PairFilter:
    """Drops phrase pairs if either side is not worth keeping."""

    def __init__(self, source: WordFilter, target: WordFilter) -> None:
        self.sides = source, target
        self.counts = FilterCounts()

    def __call__(self, sentences: list[SentencePair], pairs: np.ndarray) -> np.ndarray:
        """Return those of `pairs` [P, 5] (word spans, see `consistent_pairs`) that pass."""
        edges, lettered = np.ones(len(pairs), bool), np.ones(len(pairs), bool)
        words = [pair.words() for pair in sentences]
        for side, word_filter in enumerate(self.sides):
            texts = [both[side] for both in words]
            first = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
            judged = word_filter.judge([word for text in texts for word in text])
            letters = np.concatenate([[0], np.cumsum(judged[:, 1])])  # [W + 1]
            start = first[pairs[:, 0]] + pairs[:, 1 + 2 * side]
            end = first[pairs[:, 0]] + pairs[:, 2 + 2 * side]
            edges &= judged[start, 0] & judged[end - 1, 0]
            lettered &= letters[end] > letters[start]
        kept = pairs[edges & lettered]
        self.counts.consistent += len(pairs)
        self.counts.edges += int((~edges).sum())
        self.counts.wordless += int((edges & ~lettered).sum())
        self.counts.kept += len(kept)
        return kept


_NONE = np.iinfo(np.int32).max  # the first link of a run of words without any


def consistent_pairs(
    source_sizes: np.ndarray, target_sizes: np.ndarray, links: np.ndarray, max_words: int
) -> np.ndarray:
    """List all pairs of word spans with at least one link between them and none from inside to outside.

    Spans may overlap, and may begin and end with words that have no link.

    >>> consistent_pairs(np.array([2]), np.array([3]), np.array([[0, 0, 0], [0, 1, 2]]), 2).tolist()
    [[0, 0, 1, 0, 1], [0, 0, 1, 0, 2], [0, 1, 2, 1, 3], [0, 1, 2, 2, 3]]

    Args:
        source_sizes: int [S], source words of each sentence pair.
        target_sizes: int [S], target words.
        links: int [A, 3], (sentence, source word, target word).
        max_words: the most words a phrase may have on either side.

    Returns:
        int32 [P, 5], (sentence, source start, source end, target start, target end) in words of the sentence, ends
        exclusive, in ascending order.
    """
    # Words are numbered through all sentences. No span of source words crosses a sentence border, so neither do its links.
    source_first, target_first = _starts(source_sizes), _starts(target_sizes)
    source_links = links[:, 1] + source_first[links[:, 0]]
    target_links = links[:, 2] + target_first[links[:, 0]]
    source_range = _Ranges(source_links, target_links, int(source_sizes.sum()), max_words)
    target_range = _Ranges(target_links, source_links, int(target_sizes.sum()), max_words)
    source_sentence = np.repeat(np.arange(len(source_sizes)), source_sizes)
    target_sentence = np.repeat(np.arange(len(target_sizes)), target_sizes)
    free = _free_neighbours(target_links, target_sentence)
    boxes = [
        box
        for length in range(1, max_words + 1)
        for box in _extend(_tight_boxes(length, source_range, target_range, source_sentence), *free, max_words)
    ]
    source_start, source_end, target_start, target_end = np.concatenate(boxes, axis=1)  # [P] each
    sentence = source_sentence[source_start]
    source_start, source_end = source_start - source_first[sentence], source_end - source_first[sentence]
    target_start, target_end = target_start - target_first[sentence], target_end - target_first[sentence]
    pairs = np.stack([sentence, source_start, source_end, target_start, target_end], axis=1).astype(np.int32)
    return pairs[np.lexsort(pairs.T[::-1])]


def _tight_boxes(length: int, source: _Ranges, target: _Ranges, sentence: np.ndarray) -> np.ndarray:
    """List the pairs of spans of `length` source words whose target words begin and end with a link; int [4, n].

    Rows are source start, source end, target start, target end, in words numbered through all sentences.
    """
    start = np.arange(len(sentence) - length + 1)
    start = start[sentence[start] == sentence[start + length - 1]]
    low, high = source.low[length - 1, start], source.high[length - 1, start]
    fits = (low != _NONE) & (high - low < len(target.low))
    start, low, high = start[fits], low[fits], high[fits]
    # The other way: the links of the target words must come from inside the source words.
    inside = (target.low[high - low, low] >= start) & (target.high[high - low, low] < start + length)
    start, low, high = start[inside], low[inside], high[inside]
    return np.stack([start, start + length, low, high + 1])


def _extend(boxes: np.ndarray, free_before: np.ndarray, free_after: np.ndarray, max_words: int) -> Iterator[np.ndarray]:
    """Yield the boxes [4, n], and each extended by unlinked words before and after its target words."""
    _, _, first, end = boxes
    for before in range(max_words):
        for after in range(max_words - before):
            may = (free_before[first] >= before) & (free_after[end - 1] >= after)
            may &= end - first + before + after <= max_words
            yield boxes[:, may] + np.array([[0], [0], [-before], [after]])


def character_spans(words: list[list[tuple[int, int]]], sentence: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Convert spans in words to spans in characters.

    >>> character_spans([[(0, 3), (4, 9)]], np.array([0]), np.array([[0, 2]])).tolist()
    [[0, 9]]

    Args:
        words: character spans of the words of each sentence.
        sentence: int [P], the sentence of each span.
        spans: int [P, 2], (first word, end), ends exclusive.

    Returns:
        int [P, 2], (first character, end).
    """
    first = _starts(np.array([len(spans_of_words) for spans_of_words in words]))[sentence]
    characters = np.array([span for spans_of_words in words for span in spans_of_words])  # [W, 2]
    return np.column_stack([characters[first + spans[:, 0], 0], characters[first + spans[:, 1] - 1, 1]])


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Return where each sentence begins if words are numbered through all sentences, [S]."""
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


class _Ranges:
    """The words that runs of words are linked to: `low` and `high` [max_words, W], by length − 1 and first word.

    A run without links has low = _NONE and high = −1; one that would reach beyond the last word stops there.
    """

    def __init__(self, words: np.ndarray, linked: np.ndarray, size: int, max_words: int) -> None:
        self.low = np.full((max_words, size), _NONE, np.int64)
        self.high = np.full((max_words, size), -1, np.int64)
        np.minimum.at(self.low[0], words, linked)
        np.maximum.at(self.high[0], words, linked)
        for length in range(1, max_words):  # [W] words from each start: one more than before
            shifted = slice(length, None)
            self.low[length], self.high[length] = self.low[length - 1], self.high[length - 1]
            upto = max(size - length, 0)
            np.minimum(self.low[length, :upto], self.low[0, shifted], out=self.low[length, :upto])
            np.maximum(self.high[length, :upto], self.high[0, shifted], out=self.high[length, :upto])


def _free_neighbours(linked: np.ndarray, sentence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the unlinked words directly before and directly after each word in its sentence; two [W]."""
    size = len(sentence)
    free = np.ones(size, bool)
    free[linked] = False
    before, after = np.zeros(size, np.int64), np.zeros(size, np.int64)
    number = np.arange(size)
    new_sentence = np.ones(size + 1, bool)
    new_sentence[1:-1] = sentence[1:] != sentence[:-1]
    # The last word before each that ends a run: a linked one, or the last of the sentence before.
    barrier = np.maximum.accumulate(np.where(~free, number, np.where(new_sentence[:-1], number - 1, -1)))
    before[1:] = np.where(new_sentence[1:-1], 0, number[:-1] - barrier[:-1])
    barrier = np.minimum.accumulate(np.where(~free, number, np.where(new_sentence[1:], number + 1, size))[::-1])[::-1]
    after[:-1] = np.where(new_sentence[1:-1], 0, barrier[1:] - number[1:])
    return before, after
