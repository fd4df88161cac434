"""The sentences of a monolingual text: each once, without empty lines, and a random fraction of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq_ccpr.building.corpus import SEED
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.arrays import GrowingArray
from fairseq_ccpr.storage.equal_strings import BLOCK, first_of_equals
from fairseq_ccpr.text.pairs import read_lines


@dataclass
class TextCounts:
    """How many lines of a text were read."""

    sentences: int = 0  # different ones
    empty: int = 0
    repeated: int = 0


class TextSentences:
    """A text, and the chosen lines of it.

    Args:
        files: one sentence per line.
        fraction: of the sentences, drawn at random.
        folder: where `lines.npy` keeps which lines are wanted.
    """

    def __init__(self, files: list[Path], fraction: float, folder: Path) -> None:
        self.files, self.fraction, self.folder = files, fraction, folder

    def read(self) -> TextCounts:
        """Read the whole text once and choose its lines, so that an unreadable line is reported now, not after hours.

        Raises:
            ConfigurationError: a line that is not UTF-8, or nothing but empty ones.
        """
        counts, draw = TextCounts(), random.Random(SEED)
        first = first_of_equals(self._lines(counts), self.folder)
        wanted = GrowingArray(self.folder / "lines.npy", (), "bool")
        for start in range(0, len(first), BLOCK):
            numbers = first[start : start + BLOCK]
            block = numbers == np.arange(start, start + len(numbers))
            counts.repeated += int((~block).sum())
            block[block] = [draw.random() < self.fraction for _ in range(block.sum())]
            counts.sentences += int(block.sum())
            wanted.append(block)
        wanted.close()
        if not counts.sentences:
            names = ", ".join(map(str, self.files))
            raise ConfigurationError(f"{names}: there is no text in it; give files of one sentence per line")
        return counts

    def __len__(self) -> int:
        return int(self._wanted().sum())

    def __iter__(self) -> Iterator[str]:
        for line, wanted in zip(self._lines(TextCounts()), self._wanted()):
            if wanted:
                yield line

    def _wanted(self) -> np.ndarray:
        return np.load(self.folder / "lines.npy", mmap_mode="r", allow_pickle=False)

    def _lines(self, counts: TextCounts) -> Iterator[str]:
        """Iterate over the lines that are not empty, and count the others."""
        for path in self.files:
            for line in read_lines(path):
                if line.strip():
                    yield line
                else:
                    counts.empty += 1
