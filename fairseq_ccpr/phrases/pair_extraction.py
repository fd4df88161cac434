"""Phrase pairs that agree with a word alignment (Koehn, Och and Marcu, 2003; CCPR, section 4), many sentences at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

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
