"""Filters of phrase pairs (CCPR, appendix A.1): by the words at their edges, and by their letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
