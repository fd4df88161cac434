"""From source sentences to tables of phrases in the decoder's own subwords, once a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN, PhraseTable
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase
from fairseq_ccpr.phrases.decoder_subwords import DecoderSubwords


class Candidate(NamedTuple):
    """A retrieved phrase as the decoder would write it."""

    tokens: list[int]
    query: int  # which of the sentence's `queries` it was retrieved for
    rank: int  # which of that query's `retrieved` it is


@dataclass
class SentencePhrases:
    """What was retrieved for a source sentence."""

    queries: list[QueryPhrase] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    attended: list[tuple[int, int]] = field(
        default_factory=list
    )  # subwords of each query, end exclusive; (0, 0): unknown
    length: int = 0  # subwords of the sentence, its end marker too


class PhraseCandidates:
    """Retrieves for source sentences, and slices what was retrieved out of its own sentences' subwords.

    A phrase is left out where its border falls inside a subword, since the decoder cannot write it, or where it is longer
    than MAX_SUBWORDS. Of equal subwords for the same source phrase the most similar stands for all.

    Args:
        retriever: phrases of source text.
        make_subwords: called at the first sentence.
        source_dictionary: of the translation model.
    """

    def __init__(
        self, retriever: PhraseRetriever, make_subwords: Callable[[], DecoderSubwords], source_dictionary: Any
    ) -> None:
        self.retriever, self.make_subwords, self.source_dictionary = retriever, make_subwords, source_dictionary

    @cached_property
    def subwords(self) -> DecoderSubwords:
        """The translation model's own subwords."""
        return self.make_subwords()

    def __call__(self, src_tokens: Tensor) -> list[SentencePhrases]:
        """For each sentence, int64 [B, S] with fairseq's padding on the left; see `ask`."""
        return self.ask(src_tokens)()

    def ask(self, src_tokens: Tensor) -> Callable[[], list[SentencePhrases]]:
        """Begin to retrieve for sentences, int64 [B, S] with fairseq's padding on the left; what is called for the answer.

        Raises:
            ConfigurationError: the sentences cannot be recovered from their subwords, or those of the datastore cannot be
                made of the dictionary's.
        """
        pad = self.source_dictionary.pad()
        rows = [row[row != pad] for row in src_tokens.cpu()]
        texts = [self.subwords.recover(self.source_dictionary, row) for row in rows]
        answer = self.retriever.ask(texts)
        return lambda: [self._of_sentence(text, len(row), queries) for text, row, queries in zip(texts, rows, answer())]

    def _of_sentence(self, text: str, length: int, queries: list[QueryPhrase]) -> SentencePhrases:
        found = SentencePhrases(queries, length=length)
        starts = self.subwords.starts(text)
        placed = len(starts) == length - 1
        for number, query in enumerate(queries):
            first, end = (bisect_left(starts, place) if placed else 0 for place in (query.start, query.end))
            found.attended.append((first, end))
            seen: set[tuple[int, ...]] = set()
            for rank, phrase in enumerate(query.retrieved):
                tokens = self.subwords.slice(self.subwords.split(phrase.sentence), phrase.start, phrase.end)
                if tokens is not None and len(tokens) <= MAX_SUBWORDS and (written := tuple(tokens)) not in seen:
                    seen.add(written)
                    found.candidates.append(Candidate(tokens, number, rank))
        return found

    def table(self, batch: list[SentencePhrases], source_length: int) -> PhraseTable:
        """The batch as tensors on the CPU.

        Args:
            source_length: S, with the padding on the left.
        """
        candidates = [candidate for found in batch for candidate in found.candidates]  # C of all sentences
        counts = np.array([len(found.candidates) for found in batch])
        size, phrases = len(batch), max(1, int(counts.max()))
        rows = np.repeat(np.arange(size), counts)  # [C], the sentence of each
        lanes = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        lengths = np.array([len(candidate.tokens) for candidate in candidates], np.int64)
        tokens = np.full((len(rows), int(lengths.max(initial=1))), NO_TOKEN, np.int32)  # [C, L]
        tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = [
            t for candidate in candidates for t in candidate.tokens
        ]
        letters = self._has_letter[tokens] & (tokens != NO_TOKEN)
        entered = np.where(letters.any(axis=1), letters.argmax(axis=1) + 1, lengths)
        queries = np.array([candidate.query for candidate in candidates], np.int64)
        ranks = np.array([candidate.rank for candidate in candidates], np.int64)
        scores = np.array([f.queries[c.query].retrieved[c.rank].score for f in batch for c in f.candidates], np.float32)
        attended = np.zeros((size, max(1, *(len(found.queries) for found in batch)), source_length), bool)
        for row, found in enumerate(batch):
            offset = source_length - found.length
            for query, (first, end) in enumerate(found.attended):
                attended[row, query, offset + first : offset + end] = True

        def by_lane(of_candidates: np.ndarray, nothing: int = 0) -> Tensor:
            """[C, ...] -> [B, A, ...]"""
            placed = np.full((size, phrases, *of_candidates.shape[1:]), nothing, of_candidates.dtype)
            placed[rows, lanes] = of_candidates
            return torch.from_numpy(placed)

        return PhraseTable.of(
            by_lane(tokens, NO_TOKEN), by_lane(lengths), by_lane(entered), by_lane(queries), by_lane(scores),
            by_lane(ranks), torch.from_numpy(attended),
        )  # fmt: skip

    @cached_property
    def _has_letter(self) -> np.ndarray:
        """Of each token, bool [V]: whether it has a letter or digit."""
        return np.array([any(map(str.isalnum, symbol)) for symbol in self.subwords.dictionary.symbols])
