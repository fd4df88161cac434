"""Word alignment of sentence pairs: the interface of aligners, and alignments in Pharaoh format.

Links are int32 [A, 2], (source word, target word), counted from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.errors import ConfigurationError

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class SentencePair:
    """A sentence pair with the character spans of its words."""

    source: str
    target: str
    source_words: Spans
    target_words: Spans
    links: np.ndarray | None = None  # if given

    def words(self) -> tuple[list[str], list[str]]:
        """Return the words of both sides in lower case, as statistical aligners and frequencies count them."""
        return (
            [self.source[a:b].lower() for a, b in self.source_words],
            [self.target[a:b].lower() for a, b in self.target_words],
        )


@dataclass(frozen=True)
class AlignerOptions:
    """Options of all aligners; each reads the ones it needs."""

    symmetrization: str = "grow-diag-final-and"
    encoder: Path | None = None  # directory of a context encoder
    encoder_layer: int | None = None  # whose states are compared


class Aligner(ABC):
    """Finds the links between the words of sentence pairs.

    Args:
        symmetrization: how two directions become one alignment; if `directed`, it may be changed at any time.
    """

    directed = True  # whether it aligns in both directions and makes one of them

    def __init__(self, symmetrization: str) -> None:
        self.symmetrization = symmetrization

    def describe(self) -> dict[str, Any]:
        """Return the settings that a manifest records besides the name."""
        return {"symmetrization": self.symmetrization}

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints of its inputs, besides its training text."""
        return {}

    @abstractmethod
    def train(self, pairs: Iterable[SentencePair], show: bool) -> None:
        """Learn from sentence pairs, of which only the text is known; show a progress bar if `show`."""

    @abstractmethod
    def align(self, pairs: list[SentencePair]) -> list[np.ndarray]:
        """Align sentence pairs: links [A, 2] of each."""


def parse_links(text: str, source_size: int, target_size: int, where: str) -> np.ndarray:
    """Parse the links of one line in Pharaoh format, which counts words from 0.

    >>> parse_links("0-1 1-0", 2, 2, "").tolist()
    [[0, 1], [1, 0]]

    Raises:
        ConfigurationError: an invalid link, or one that points beyond a sentence; `where` names the line.
    """
    links = np.empty((len(words := text.split()), 2), np.int32)
    for row, word in enumerate(words):
        left, _, right = word.partition("-")
        if not (left.isdecimal() and right.isdecimal()):
            raise ConfigurationError(
                f"{where}: '{word}' is no link; write them as in '0-0 1-2', source word and target word counted from 0"
            )
        if int(left) >= source_size or int(right) >= target_size:
            raise ConfigurationError(
                f"{where}: the link {word} points beyond the sentence, which has {source_size} source and {target_size} "
                "target words (words are what stands between spaces, counted from 0)"
            )
        links[row] = int(left), int(right)
    return links
