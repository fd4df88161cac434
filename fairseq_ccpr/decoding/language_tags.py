"""The symbols by which a multilingual model is told source and target language; a bilingual one has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LanguageTags:
    """What is no text in the sentences of a model.

    Attributes:
        symbols: all tags of its dictionaries, such as __de__ or [de_DE]. They are written to no text.
        added: how many the task adds to a source sentence.
        forced: how many target tokens decoding forces at the beginning: these are no keys, and nothing is searched for there.
        end: the tag that ends target sentences in place of </s>.
        languages: "de-en", where one model knows several; a datastore is for one of them.
    """

    symbols: frozenset[str] = frozenset()
    added: int = 0
    forced: int = 0
    end: str | None = None
    languages: str | None = None

    def ids(self, dictionary: Any) -> frozenset[int]:
        """Return those that a dictionary has."""
        return frozenset(dictionary.index(symbol) for symbol in self.symbols if symbol in dictionary)

    def end_of(self, dictionary: Any) -> int:
        """Return the token that ends target sentences."""
        return int(dictionary.eos() if self.end is None else dictionary.index(self.end))
