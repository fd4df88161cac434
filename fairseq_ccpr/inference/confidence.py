"""Confidence in translations: how probable it is that a sentence, and each of its words, is right.

What beam search computed anyway decides, by logistic functions that `tune` fits to held-out text:

    sentence: mean log p of its tokens, and the logarithm of their number
    word:     log p of its tokens together, and mean log p of the sentence's

with p the mixture's probability, which holds already what memories and trust know: features of theirs were
tried beside it, and add little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.mixture import SILENT
from fairseq_ccpr.settings import signed
from fairseq_ccpr.text.words import has_letters, word_spans

ROUNDED_TO = 4  # of a confidence, after the point
# options of fairseq-generate that change probabilities, or which translation is chosen by them
GENERATION = (
    "beam", "lenpen", "unnormalized", "temperature", "sampling", "sampling_topk", "sampling_topp",
    "diverse_beam_groups",
)  # fmt: skip

Features = tuple[float, float]


class ScoredText(NamedTuple):
    """A translation, and what its tokens' probabilities say of it."""

    text: str
    sentence: Features
    # those with letters or digits, in their order; None of one that the tokens are not seen to write
    words: list[tuple[str, Features | None]]

    @classmethod
    def of(cls, text: str, ends: Sequence[int], scores: Sequence[float]) -> ScoredText:
        """Collect the features of a text.

        Args:
            ends: of T tokens, see `token_ends`.
            scores: log p of each, and of the end of the sentence: T + 1, at least one.
        """
        scores = [max(score, SILENT) if math.isfinite(score) else SILENT for score in scores]
        mean = math.fsum(scores) / len(scores)
        # a token that adds nothing yet, as the first byte of a character, is of the word that begins there
        tokens = [(first, max(past, first + 1), score) for first, past, score in zip(ends, ends[1:], scores)]
        words: list[tuple[str, Features | None]] = []
        for start, end in word_spans(text):
            if has_letters(word := text[start:end]):
                own = math.fsum(score for first, past, score in tokens if first < end and past > start)
                words.append((word, (own, mean) if end <= ends[-1] else None))
        return cls(text, (mean, math.log(len(scores))), words)


def common_prefix(one: str, two: str) -> int:
    """Count the characters with which two texts begin alike."""
    return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


def token_ends(to_text: Callable[[Tensor], str], tokens: Sequence[int], text: str) -> list[int]:
    """Return how many characters of a text the first n of T tokens write, for n from 0 to T, never falling.

    They may write another text, as where it was learned in another form: they end where it differs first.
    """
    parts = (torch.tensor(tokens[:n], dtype=torch.int64) for n in range(len(tokens), -1, -1))
    return [*accumulate((common_prefix(to_text(part), text) for part in parts), min)][::-1]


def conditions(ensemble: RetrievalEnsemble, generation: Any) -> dict[str, str]:
    """Tell what confidence is calibrated for, each by its name: models, trust, settings, and how is searched.

    It goes on to hold where something is learned, and for another index or precision, which change little.
    """
    weighing = [one for one in ensemble.memories if one.tuned and one.settings != one.scaled(0.0).settings]
    found: dict[str, object] = {
        "models": ensemble.identity,
        "trust": ensemble.trust.signature() if ensemble.trust is not None else "none",
        "memories": " and ".join(one.name for one in ensemble.memories if not one.tuned) or "none",
        **{
            f"{settings.PREFIX} {name}": value
            for settings in (*(one.settings for one in weighing), ensemble.mixture.settings)
            for name, value in signed(settings).items()
        },
        **{name: getattr(generation, name) for name in GENERATION},
    }
    return {name: str(value) for name, value in found.items()}


@dataclass(frozen=True)
class Confidence:
    """Calibrated confidence.

    Attributes:
        sentence: an intercept and a coefficient of each feature, for the probability that a translation has a
            chrF of `chrf` at least.
        word: the same for the probability that a word stands in the reference.
        chrf: the median of the text that it was calibrated on, 0 to 100.
        conditions: what it holds for, see `conditions`.
    """

    sentence: tuple[float, ...]
    word: tuple[float, ...]
    chrf: float
    conditions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, stored: Any) -> Confidence | None:
        """Read what `tune` stored; None where there is nothing, another version's, or none of ours."""
        if not isinstance(stored, Mapping) or set(stored) != {one.name for one in fields(cls)}:
            return None
        sentence, word = tuple(stored["sentence"]), tuple(stored["word"])
        whole = len(sentence) == len(word) == 3 and all(map(math.isfinite, (*sentence, *word)))
        return cls(sentence, word, stored["chrf"], stored["conditions"]) if whole else None

    def mismatch(self, found: Mapping[str, str]) -> str:
        """Tell the first condition that is not as found; nothing where all are."""
        for name in {**self.conditions, **found}:
            if (wanted := self.conditions.get(name, "no")) != (own := found.get(name, "no")):
                return (
                    f"it is for {name} {wanted}, and here is {name} {own}: leave that out, or tune again "
                    "with it"
                )
        return ""

    def of_sentence(self, scored: ScoredText) -> float:
        return _logistic(self.sentence, scored.sentence)

    def of_words(self, scored: ScoredText) -> tuple[tuple[str, float | None], ...]:
        return tuple((word, own and _logistic(self.word, own)) for word, own in scored.words)


def _logistic(coefficients: tuple[float, ...], features: Features) -> float:
    intercept, *slopes = coefficients
    odds = intercept + math.fsum(slope * feature for slope, feature in zip(slopes, features, strict=True))
    return round((1 + math.tanh(odds / 2)) / 2, ROUNDED_TO)
