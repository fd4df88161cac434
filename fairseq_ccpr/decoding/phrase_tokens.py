"""Retrieved phrases as token ids of the decoder: from the files alongside the datastore, or out of their sentences."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from fairseq_ccpr.datastore.written_subwords import WrittenSubwords
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN
from fairseq_ccpr.storage.equal_strings import BASE
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords
from fairseq_ccpr.text.phrase_cuts import Cuts, SplitSentences, as_rows, cut_phrases

SENTENCES = 1 << 16  # whose subwords are kept where they are not written, about half a kB each


class PlacedPhrases(Protocol):
    """Phrases with their places in sentences: a datastore's, or those learnt alongside it."""

    @property
    def spans(self) -> np.ndarray:
        """int32 [N, 3]: sentence, start and end in characters."""
        ...

    def sentence(self, number: int) -> str:
        """Return the sentence that a span names."""
        ...


class TokenIds(NamedTuple):
    """R phrases as token ids, as the decoder would generate them, and what follows each in its sentence."""

    tokens: np.ndarray  # int32 [R, L], NO_TOKEN after the last
    lengths: np.ndarray  # int64 [R], of the phrase
    extents: np.ndarray  # int64 [R], with what follows it
    hashes: np.ndarray  # int64 [R], of the tokens; 0 where there are none, since the decoder cannot generate the phrase


Tokenise = Callable[[np.ndarray], TokenIds]  # from entries, int64 [R]


class WrittenTokens:
    """Reads the phrases of entries from where they are written; nothing is kept in memory.

    Args:
        written: all phrases of the datastore.
        reach: subwords that are given of what follows a phrase in its sentence.
    """

    def __init__(self, written: WrittenSubwords, reach: int) -> None:
        self.written, self.reach = written, reach

    def __call__(self, entries: np.ndarray) -> TokenIds:
        """Look up the phrases of entries, int64 [R]."""
        return lay_out(self.written.tokens, self.written.cuts(entries), self.reach)


class SplitTokens:
    """Cuts the phrases of entries out of their sentences, of which the `SENTENCES` split last are kept. Threads may share it.

    Args:
        phrases: whose entries they are.
        subwords: of the translation model.
        reach: subwords that are given of what follows a phrase in its sentence.
    """

    def __init__(self, phrases: PlacedPhrases, subwords: DecoderSubwords, reach: int) -> None:
        self.phrases, self.subwords, self.reach = phrases, subwords, reach
        self._split = lru_cache(SENTENCES)(lambda number: as_rows(subwords.split(phrases.sentence(number))))

    def __call__(self, entries: np.ndarray) -> TokenIds:
        """Look up the phrases of entries, int64 [R].

        Raises:
            ConfigurationError: see `DecoderSubwords.split`.
        """
        spans = self.phrases.spans[entries].astype(np.int64)
        numbers, spans[:, 0] = np.unique(spans[:, 0], return_inverse=True)
        split = SplitSentences.of([self._split(number) for number in numbers.tolist()])
        return lay_out(split.ids, cut_phrases(spans, split, self.subwords.dictionary.unk()), self.reach)


def merged(first: np.ndarray, one: TokenIds, two: TokenIds) -> TokenIds:
    """Merge two lists of phrases: bool [R] says which of them are of the first list; each stays in its order."""
    width = max(one.tokens.shape[1], two.tokens.shape[1])
    tokens = np.full((len(first), width), NO_TOKEN, np.int32)
    others = [np.empty(len(first), np.int64) for _ in TokenIds._fields[1:]]
    for rows, part in ((first, one), (~first, two)):
        tokens[rows, : part.tokens.shape[1]] = part.tokens
        for column, numbers in zip(others, part[1:]):
            column[rows] = numbers
    return TokenIds(tokens, *others)


def lay_out(tokens: np.ndarray, cuts: Cuts, reach: int) -> TokenIds:
    """Collect R phrases out of subwords [T]; one of more than MAX_SUBWORDS has no token ids."""
    lengths = np.where(cuts.lengths <= MAX_SUBWORDS, cuts.lengths, 0)
    extents = lengths + np.minimum(np.minimum(cuts.following, reach), MAX_SUBWORDS - lengths)
    extents[lengths == 0] = 0
    columns = np.arange(int(extents.max(initial=1)))
    inside = columns < extents[:, None]
    laid = np.full(inside.shape, NO_TOKEN, np.int32)
    laid[inside] = tokens[(cuts.first[:, None] + columns)[inside]]
    return TokenIds(laid, lengths, extents, _hashes(laid, lengths))


def _hashes(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash phrases: sum_i t_i b^i modulo 2^64 over their tokens t_0, t_1, ...; see `hash_strings`."""
    powers = np.cumprod(np.full(tokens.shape[1], BASE, np.uint64))
    phrases = tokens.astype(np.uint64) * (np.arange(tokens.shape[1]) < lengths[:, None])
    hashes = (phrases * powers).sum(axis=1, dtype=np.uint64)
    return np.where(lengths > 0, np.maximum(hashes, 1), 0).view(np.int64)
