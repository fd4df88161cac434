"""Where tokens stand in text: in a translation, and in the sentences that a token datastore was built from."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.storage.data_bin import corpus_fingerprint, has_subset
from fairseq_ccpr.storage.fingerprint import short

Place = tuple[str, int, int]  # a sentence, and where a token begins and ends in it, in characters
SENTENCES = 65536  # remembered as text


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
    """The target sentences that a token datastore was built from.

    Args:
        task: fairseq's translation task over the data folder; it loads the datastore's subsets.
        datastore: its provenance counts sentences through its subsets.
        to_text: from tokens of the target language to text.
    """

    def __init__(self, task: Any, datastore: TokenDatastore, to_text: Callable[[Tensor], str]) -> None:
        self.provenance, self.to_text = datastore.provenance, to_text
        self.subsets = []
        for subset, size in datastore.section.subsets.items():
            task.load_dataset(subset)
            self.subsets.append((task.dataset(subset).tgt, size))
        self._text_once = lru_cache(SENTENCES)(lambda sentence: to_text(self._tokens(sentence)))

    def place(self, entry: int) -> Place:
        """Return the sentence that an entry of the datastore stands in, and where."""
        sentence, position = self.provenance[entry].tolist()
        text = self._text_once(sentence)
        return text, *place(self._tokens(sentence), position, text, self.to_text)

    def _tokens(self, sentence: int) -> Tensor:
        for dataset, size in self.subsets:
            if sentence < size:
                return dataset[sentence]
            sentence -= size
        raise IndexError(sentence)


def why_not_the_corpus(task: Any, datastore: TokenDatastore) -> str | None:
    """Explain why the data folder of a task is not what a token datastore was built from; None where it is."""
    subsets = datastore.section.subsets
    missing = [subset for subset in subsets if not has_subset(task, subset)]
    if missing:
        return (
            f"The data folder has no subset {', '.join(missing)}, and the token datastore was built from "
            f"{', '.join(subsets)}: its neighbours are shown without their sentences."
        )
    expected, found = datastore.section.fingerprints["corpus"], corpus_fingerprint(task, subsets)
    if found != expected:
        return (
            f"The token datastore was built from other text than {', '.join(subsets)} of the data folder "
            f"({short(expected)} there, {short(found)} here): its neighbours are shown without their sentences."
        )
    return None
