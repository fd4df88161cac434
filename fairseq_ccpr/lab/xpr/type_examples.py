"""Phrases with example sentences, tokenised and batched for an encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ccpr.lab.xpr.lexicon_store import PhraseTypes, Place
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, batches_of_like_length, collate, subword_bounds


@dataclass(frozen=True)
class TypeExample:
    """A phrase in a sentence."""

    phrase: int  # its number among those of a batch
    place: int  # of the sentence among the phrase's examples, from 0
    subwords: Subwords
    first: int  # subwords of the phrase, both inclusive
    last: int


def usable_examples(
    tokenizer: SubwordTokenizer, phrase: int, string: str, places: Iterable[Place], most: int, max_subwords: int
) -> list[TypeExample]:
    """Return the first `most` examples that the encoder can handle.

    Sentences are cut to `max_subwords` around the phrase; one whose phrase is longer than that, or does not consist of whole
    subwords, is skipped. If no sentence is left, the phrase itself serves as one.

    Args:
        tokenizer: the encoder's.
        phrase: the number that the examples get.
        string: the phrase.
        places: its examples, in order of preference.
        most: how many; 0: the phrase itself.
        max_subwords: without the markers.
    """
    found: list[TypeExample] = []
    for text, start, end in places:
        if len(found) == most:
            break
        whole = tokenizer.encode(text)
        bounds = subword_bounds(whole, start, end)
        if bounds is None or bounds[1] + 1 - bounds[0] > max_subwords:
            continue
        subwords, before = whole.around(*bounds, max_subwords)
        first, last = (bound - before for bound in bounds)
        found.append(TypeExample(phrase, len(found), subwords, first, last))
    if found:
        return found
    subwords = tokenizer.encode(string).cut(max_subwords)
    return [TypeExample(phrase, 0, subwords, 1, max(1, len(subwords.ids) - 2))]


def stored_examples(
    tokenizer: SubwordTokenizer, types: PhraseTypes, most: int, max_subwords: int
) -> Iterator[list[TypeExample]]:
    """Yield the examples of all phrases of a side, phrase by phrase, in the order in which they are stored."""
    for number in range(len(types)):
        places = (types.example(number, place) for place in range(int(types.counts[number])))
        yield usable_examples(tokenizer, number, types.phrases[number], places, most, max_subwords)


def as_tables(examples: list[TypeExample], pad: int) -> list[dict[str, Tensor]]:
    """Batch sentences of similar length, each with one phrase.

    Returns:
        Tables of tokens int64 [S, L], spans int64 [S, 3] (sentence, first and last subword), phrases int64 [S] and places
        int64 [S].
    """
    tables = []
    for batch in batches_of_like_length(list(range(len(examples))), [example.subwords for example in examples]):
        rows = [examples[number] for number in batch]
        spans = [(number, row.first, row.last) for number, row in enumerate(rows)]
        tables.append(
            {
                "tokens": collate([row.subwords for row in rows], pad),
                "spans": torch.tensor(spans),
                "phrases": torch.tensor([row.phrase for row in rows]),
                "places": torch.tensor([row.place for row in rows]),
            }
        )
    return tables
