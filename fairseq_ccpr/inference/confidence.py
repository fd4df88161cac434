"""Confidence in translations: how probable it is that a sentence, and each of its words, is right.

What beam search computed anyway decides, by logistic functions that `tune` fits to held-out text:

    sentence: mean log p of its tokens, and the logarithm of their number
    word:     log p of its tokens together, and mean log p of the sentence's

with p the mixture's probability, which holds already what memories and trust know: features of theirs were
tried beside it, and add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.mixture import SILENT
from fairseq_ccpr.text.words import has_letters, word_spans

ROUNDED_TO = 4  # of a confidence, after the point

Features = tuple[float, float]


class ScoredText(NamedTuple):
    """A translation, and what its tokens' probabilities say of it."""

    text: str
    sentence: Features
    words: list[tuple[str, Features]]  # those with letters or digits, in their order

    @classmethod
    def of(cls, text: str, ends: Sequence[int], scores: Sequence[float]) -> ScoredText:
        """Collect the features of a text.

        Args:
            ends: of T tokens, see `token_ends`.
            scores: log p of each, and of the end of the sentence: T + 1, at least one.
        """
        scores = [max(score, SILENT) for score in scores]
        mean = math.fsum(scores) / len(scores)
        tokens = list(zip(ends, ends[1:], scores))
        words = []
        for start, end in word_spans(text):
            if has_letters(word := text[start:end]):
                own = math.fsum(score for first, past, score in tokens if first < end and past > start)
                words.append((word, (own, mean)))
        return cls(text, (mean, math.log(len(scores))), words)


def token_ends(to_text: Callable[[Tensor], str], tokens: Sequence[int]) -> list[int]:
    """Return where the text of the first n of T tokens ends, in characters, for n from 0 to T."""
    return [len(to_text(torch.tensor(tokens[:n], dtype=torch.int64))) for n in range(len(tokens) + 1)]


@dataclass(frozen=True)
class Confidence:
    """Calibrated confidence.

    Attributes:
        sentence: an intercept and a coefficient of each feature, for the probability that a translation has a
            chrF of `chrf` at least.
        word: the same for the probability that a word stands in the reference.
        chrf: the median of the text that it was calibrated on, 0 to 100.
    """

    sentence: tuple[float, ...]
    word: tuple[float, ...]
    chrf: float

    @classmethod
    def read(cls, stored: Mapping[str, Any] | None) -> Confidence | None:
        """Read what `tune` stored; None where there is nothing, or another version's."""
        if stored is None or set(stored) != {one.name for one in fields(cls)}:
            return None
        return cls(tuple(stored["sentence"]), tuple(stored["word"]), stored["chrf"])

    def of_sentence(self, scored: ScoredText) -> float:
        return _logistic(self.sentence, scored.sentence)

    def of_words(self, scored: ScoredText) -> tuple[tuple[str, float], ...]:
        return tuple((word, _logistic(self.word, features)) for word, features in scored.words)


def _logistic(coefficients: tuple[float, ...], features: Features) -> float:
    intercept, *slopes = coefficients
    odds = intercept + math.fsum(slope * feature for slope, feature in zip(slopes, features))
    return round((1 + math.tanh(odds / 2)) / 2, ROUNDED_TO)
