"""Subwords of a text, each with the characters of the text it stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.text.words import has_letters

DICTIONARY = "dict.txt"
BATCH_TOKENS = 4000  # padding included
MASK = "<mask>"  # the last symbol, as in fairseq's masked_lm; dict.txt does not name it


@dataclass(frozen=True)
class Subwords:
    """The n subwords of a text between the markers <s> and </s>.

    `starts` and `ends` [n + 2] are characters of the text as it was given, end exclusive, and neither ever
    falls. A subword that stands for space alone is empty, at the start of what follows; the markers are empty
    at the ends of the text.
    """

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]

    @property
    def count(self) -> int:
        return len(self.ids) - 2

    def cut(self, limit: int) -> Subwords:
        """Keep the first `limit` subwords and the markers."""
        return self if self.count <= limit else self._keep(slice(1, limit + 1))

    def around(self, first: int, last: int, limit: int) -> tuple[Subwords, int]:
        """Keep `limit` subwords around ids[first : last + 1], as many before as after if possible.

        Returns:
            The subwords with the markers, and how many were taken away before.
        """
        before = max(0, min(first - 1 - (limit - (last + 1 - first)) // 2, self.count - limit))
        return self._keep(slice(1 + before, min(1 + before + limit, self.count + 1))), before

    def _keep(self, kept: slice) -> Subwords:
        columns = self.ids, self.starts, self.ends
        return Subwords(self.text, *([one[0], *one[kept], one[-1]] for one in columns))


class SubwordTokenizer(ABC):
    """From text to the ids of an encoder's dictionary: <s> <pad> </s> <unk>, the pieces, <mask>."""

    filename: str  # of the file that makes a directory one of this tokenizer

    def __init__(self, symbols: Sequence[str]) -> None:
        self.dictionary = Dictionary()
        for symbol in (*symbols, MASK):
            self.dictionary.add_symbol(symbol)

    @property
    def symbols(self) -> list[str]:
        """The pieces, without the specials."""
        return self.dictionary.symbols[self.dictionary.nspecial : -1]

    @property
    def pad(self) -> int:
        return self.dictionary.pad()

    def encode(self, text: str) -> Subwords:
        """Split a text of any length into subwords, with the markers."""
        index, unknown = self.dictionary.indices, self.dictionary.unk()
        pieces = [*self.split(text)]
        ids = [index.get(piece, unknown) for piece, _, _ in pieces]
        ids = [self.dictionary.bos(), *ids, self.dictionary.eos()]
        starts = [*accumulate((0, *(start for _, start, _ in pieces)), max), len(text)]
        ends = [*accumulate((0, *(end for _, _, end in pieces)), max), len(text)]
        return Subwords(text, ids, starts, ends)

    @abstractmethod
    def split(self, text: str) -> Iterable[tuple[str, int, int]]:
        """Split a text into pieces, with the characters each stands for, spaces around it left out."""

    @abstractmethod
    def restrict(self, kept: Collection[str]) -> SubwordTokenizer:
        """Make a tokenizer of fewer pieces that splits alike whatever splits into pieces that are kept."""

    @property
    @abstractmethod
    def content(self) -> bytes:
        """What the file `filename` has."""

    @classmethod
    @abstractmethod
    def load(cls, directory: Path) -> SubwordTokenizer:
        """Read a directory that has `filename` and a dictionary; CheckpointError where one is damaged."""

    def save(self, directory: Path) -> None:
        lines = "".join(f"{symbol} 1\n" for symbol in self.symbols)
        (directory / DICTIONARY).write_text(lines, encoding="utf-8")
        (directory / self.filename).write_bytes(self.content)


def read_symbols(path: Path) -> list[str]:
    """Read the pieces of a dict.txt."""
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no {path.name}: an encoder's folder names its subwords there"
        )
    try:
        dictionary = Dictionary.load(str(path))
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is no dictionary of fairseq ({error})") from None
    symbols = dictionary.symbols[dictionary.nspecial :]
    return symbols[:-1] if symbols and symbols[-1] == MASK else symbols


def collate(batch: Sequence[Subwords], pad: int) -> Tensor:
    """Collate the ids of several texts into one tensor, int64 [B, L], filled up with `pad` on the right."""
    tokens = torch.full((len(batch), max((len(s.ids) for s in batch), default=0)), pad, dtype=torch.long)
    for row, subwords in zip(tokens, batch):
        row[: len(subwords.ids)] = torch.tensor(subwords.ids)
    return tokens


def batches_of_like_length(numbers: list[int], encoded: list[Subwords]) -> Iterator[list[int]]:
    """Batch texts of like length, about BATCH_TOKENS subwords with their padding."""
    batch: list[int] = []
    for number in sorted(numbers, key=lambda n: len(encoded[n].ids)):
        if batch and (len(batch) + 1) * len(encoded[number].ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def subword_bounds(subwords: Subwords, start: int, end: int) -> tuple[int, int] | None:
    """Find the indices in `subwords.ids` of the first and the last subword of text[start:end], whole words.

    A piece that begins with a space belongs to the word after it; one that is space alone, to none. Where one
    piece holds a word and adjacent punctuation, the word has the piece, and the punctuation alone has none.
    None where a piece at a border holds letters of a neighbouring word too (two Chinese characters in one
    piece), or where the text was cut.
    """
    stop = len(subwords.ids) - 1
    first = bisect_right(subwords.ends, start, 1, stop)
    last = bisect_left(subwords.starts, end, first, stop) - 1
    if first > last:
        return None
    outside = subwords.text[subwords.starts[first] : start] + subwords.text[end : subwords.ends[last]]
    missing = subwords.text[subwords.ends[last] : end]
    return None if has_letters(outside + missing) else (first, last)
