"""Random sentence pairs of a toy language, and an encoder that understands it."""

from __future__ import annotations

import re

import numpy as np

WORDS = [f"{first}{second}o" for first in "bcdfghklmnprstvw" for second in ("a", "e", "i", "u", "ei", "ou")]


class ToyEncoder:
    """Texts are their words' random vectors; the source language writes an x before each word, and means the same."""

    fingerprint, dimension = "toy", 24

    def __init__(self) -> None:
        vectors = np.random.default_rng(5).normal(size=(len(WORDS), self.dimension))
        self.vectors = dict(zip(WORDS, vectors))

    def encode(self, texts: list[str]) -> np.ndarray:
        found = np.zeros((len(texts), self.dimension))
        for row, text in zip(found, texts):
            for word in re.findall(r"\w+", text.lower()):
                row += self.vectors.get(word.removeprefix("x"), 0.05)
        return (found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)).astype(np.float32)


def random_pairs(rng: np.random.Generator, count: int, longest: int = 14) -> list[tuple[str, str]]:
    """Pairs of random sentences; of the source a tenth of the words is lost, so that pairs are not all alike."""
    pairs = []
    for _ in range(count):
        words = rng.choice(WORDS, rng.integers(2, longest))
        kept = [f"x{word}" for word in words if rng.random() < 0.9] or ["x" + words[0]]
        pairs.append((" ".join(kept).capitalize() + ".", ", ".join(words)))
    return pairs
