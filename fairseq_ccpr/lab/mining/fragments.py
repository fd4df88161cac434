"""Sentences as the fragments they are compared by: sliding windows of words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.text.words import CHARACTER, has_letters, kinds_of, word_spans

WINDOW = 6  # words in a fragment
LETTERS, SIGNS = 4, 2  # characters of a word, in Thai, Lao, Burmese and Khmer, and in Chinese and Japanese
IDEOGRAPHS = 0x2E80  # where the latter begin


def fragments(text: str, window: int = WINDOW, stride: int = 1) -> list[str]:
    """Cut a sentence into fragments: runs of `window` words, in lower case and without punctuation.

    Every `stride` words one begins, and the last is that of the last words. Words are those of `word_spans`; in scripts
    without spaces so many characters count as one as words have there, on average. A shorter sentence is one fragment; one
    without any word has none.

    >>> fragments("Press Ctrl+C, then wait.", 3)
    ['press ctrl+c then', 'ctrl+c then wait']
    >>> fragments("東京、タワー", 6), fragments("Wait!"), fragments("... !")
    (['東京 タワー'], ['wait'], [])
    >>> fragments("a b c d e", 2, 2)
    ['a b', 'c d', 'd e']
    """
    spans = _join_characters(text, [(start, end) for start, end in word_spans(text) if has_letters(text[start:end])])
    if not spans:
        return []
    lowered = [text[start:end].lower() for start, end in spans]
    # Neighbouring characters of a script without spaces stay together.
    gaps = ["" if before[1] == after[0] else " " for before, after in itertools.pairwise(spans)]
    words = [*map("".join, zip(lowered, gaps)), lowered[-1]]
    last = max(0, len(words) - window)
    return ["".join(words[first : first + window]).rstrip() for first in (*range(0, last, stride), last)]


def _join_characters(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring characters of scripts without spaces to spans as long as words."""
    joined: list[tuple[int, int]] = []
    room = 0  # characters that the last span may still take in
    for start, end in spans:
        unspaced = kinds_of(text[start]) == CHARACTER
        if unspaced and room and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
            room -= 1
        else:
            joined.append((start, end))
            room = (LETTERS if ord(text[start]) < IDEOGRAPHS else SIGNS) - 1 if unspaced else 0
    return joined


@dataclass
class FragmentedText:
    """S sentences and their F fragments."""

    sentences: list[str]
    fragments: list[str]
    owners: np.ndarray  # int64 [F], the sentence of each fragment; ascending
    stride: int = 1  # words from one fragment to the next


def fragment_text(sentences: Iterable[str], window: int = WINDOW, stride: int = 1) -> FragmentedText:
    """Cut sentences into fragments; those without any word remain as sentences."""
    texts = list(sentences)
    parts = [fragments(text, window, stride) for text in texts]
    owners = np.repeat(np.arange(len(texts)), np.array([len(part) for part in parts], np.int64))
    return FragmentedText(texts, [fragment for part in parts for fragment in part], owners, stride)
