"""Sentences as the fragments they are compared by: sliding windows of words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.text.words import has_letters, word_spans

WINDOW = 6  # words in a fragment


def fragments(text: str, window: int = WINDOW, stride: int = 1) -> list[str]:
    """Cut a sentence into fragments: runs of `window` words, in lower case and without punctuation.

    Every `stride` words one begins, and the last is that of the last words. Words are those of `word_spans`, so in scripts
    without spaces characters count as words. A shorter sentence is one fragment; one without any word has none.

    >>> fragments("Press Ctrl+C, then wait.", 3)
    ['press ctrl+c then', 'ctrl+c then wait']
    >>> fragments("東京、タワー", 6), fragments("Wait!"), fragments("... !")
    (['東京 タワー'], ['wait'], [])
    >>> fragments("a b c d e", 2, 2)
    ['a b', 'c d', 'd e']
    """
    spans = [(start, end) for start, end in word_spans(text) if has_letters(text[start:end])]
    if not spans:
        return []
    lowered = [text[start:end].lower() for start, end in spans]
    # Neighbouring characters of a script without spaces stay together.
    gaps = ["" if before[1] == after[0] else " " for before, after in itertools.pairwise(spans)]
    words = [*map("".join, zip(lowered, gaps)), lowered[-1]]
    last = max(0, len(words) - window)
    return ["".join(words[first : first + window]).rstrip() for first in (*range(0, last, stride), last)]


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
