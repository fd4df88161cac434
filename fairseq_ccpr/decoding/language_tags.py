"""The symbols that tell a multilingual model its source and target language; a bilingual one has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LanguageTags:
    """The symbols in a model's sentences that are not text.

    Attributes:
        symbols: all tags of its dictionaries, such as __de__ or [de_DE]. They are written to no text.
        added: how many the task adds to a source sentence.
        begin: the tag that decoding forces at the beginning of target sentences.
        end: the tag that ends target sentences in place of </s>, which stands before it in training.
        languages: "de-en", where one model knows several; a datastore is for one of them.
    """

    symbols: frozenset[str] = frozenset()
    added: int = 0
    begin: str | None = None
    end: str | None = None
    languages: str | None = None

    @property
    def forced(self) -> int:
        """Count the target tokens that decoding forces at the beginning: no keys, and nothing is searched for there."""
        return int(self.begin is not None)

    def ids(self, dictionary: Any) -> frozenset[int]:
        """Return those that a dictionary has."""
        return frozenset(dictionary.index(symbol) for symbol in self.symbols if symbol in dictionary)

    def end_of(self, dictionary: Any) -> int:
        """Return the token that ends target sentences."""
        return int(dictionary.eos() if self.end is None else dictionary.index(self.end))

    def tagged(self, tokens: Tensor, dictionary: Any) -> Tensor:
        """Return the tokens of a target sentence, int64 [L], with its tags, as the model was trained on them."""
        before, after = (
            tokens.new_tensor([dictionary.index(tag)] if tag is not None else []) for tag in (self.begin, self.end)
        )
        return torch.cat([before, tokens, after])
