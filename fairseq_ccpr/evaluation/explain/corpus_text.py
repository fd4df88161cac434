"""Where tokens stand in text: in a translation, and in the sentences that a token datastore was built from."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.learned import LearnedPair
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.learned_memory import LearnedEntries

Place = tuple[str, int, int]  # a sentence, and where a token begins and ends in it, in characters
SENTENCES = 65536  # remembered as text
LONGEST = 4096  # tokens of a sentence that are shown


def place(tokens: Tensor, position: int, text: str, to_text: Callable[[Tensor], str]) -> tuple[int, int]:
    """Return the characters of a sentence that one of its tokens stands for, without the space before it.

    They are what the token adds to the text of those before it, whatever joins subwords and tokens to text. A token that
    adds nothing, as the end of the sentence does, has an empty place.

    Args:
        tokens: the sentence.
        position: of the token.
        text: of the sentence.
        to_text: from tokens to text.
    """
    start, end = (_common_prefix(to_text(tokens[:count]), text) for count in (position, position + 1))
    while start < end and text[start].isspace():
        start += 1
    return start, max(start, end)


def _common_prefix(one: str, two: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


class CorpusText:
    """The target sentences that a token datastore was built from, read from its own values.

    Args:
        datastore: the entries of a sentence follow each other, token by token.
        to_text: from tokens of the target language to text.
        learned: the pairs learned alongside it, whose entries are numbered after its own.
    """

    def __init__(
        self, datastore: TokenDatastore, to_text: Callable[[Tensor], str], learned: LearnedEntries | None = None
    ) -> None:
        self.datastore, self.to_text, self.learned = datastore, to_text, learned
        self._text_once = lru_cache(SENTENCES)(lambda first: to_text(self._tokens(first)))

    def place(self, entry: int) -> Place:
        """Return the sentence that an entry belongs to, of the datastore or learned, and its place there."""
        if (row := entry - self.datastore.section.size) >= 0:
            assert self.learned is not None
            pair, position = self.learned.place(row)
            tokens = self.learned.values[row - position : row - position + pair.tokens].long().cpu()
            text = self.to_text(tokens)
            return text, *place(tokens, position, text, self.to_text)
        position = int(self.datastore.provenance[entry, 1])
        first = entry - position
        text = self._text_once(first)
        return text, *place(self._tokens(first), position, text, self.to_text)

    def learned_pair(self, entry: int) -> LearnedPair | None:
        """Return the pair that an entry was learned from; None for one that the datastore was built with."""
        if self.learned is None:
            return None
        row = entry - self.datastore.section.size
        return self.learned.place(row)[0] if row >= 0 else self.learned.moved_pair(entry)

    def _tokens(self, first: int) -> Tensor:
        """Return the sentence whose first entry is given."""
        rows = slice(first, first + LONGEST)
        sentence, position = np.asarray(self.datastore.provenance[rows]).T
        same = (sentence == sentence[0]) & (position == np.arange(len(position)))
        length = len(same) if same.all() else int(same.argmin())
        return torch.from_numpy(np.asarray(self.datastore.values[rows][:length], dtype=np.int64))
