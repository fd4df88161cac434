"""From source sentences to tables of phrases in the decoder's own subwords, once a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.decoding.phrase_continuation import NO_TOKEN, PhraseTable
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase, Retrieved
from fairseq_ccpr.decoding.written_phrases import WrittenPhrases
from fairseq_ccpr.search.distinct_strings import first_of_each
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords


class Candidates(NamedTuple):
    """C retrieved phrases as the decoder would write them."""

    tokens: np.ndarray  # int32 [C, L], NO_TOKEN after a phrase's end
    lengths: np.ndarray  # int64 [C]
    queries: np.ndarray  # int64 [C], which of the sentence's `queries` each was retrieved for
    ranks: np.ndarray  # int64 [C], which of that query's `retrieved` it is
    scores: np.ndarray  # fp32 [C]


@dataclass(frozen=True)
class SentencePhrases:
    """What was retrieved for a source sentence."""

    candidates: Candidates
    attended: np.ndarray  # int64 [Q, 2], subwords of each query, end exclusive; (0, 0): unknown
    length: int  # subwords of the sentence, its end marker too
    read: Callable[[], list[list[QueryPhrase]]]  # of all sentences of the batch
    number: int  # of this one in the batch

    @property
    def queries(self) -> list[QueryPhrase]:
        """The same with all strings."""
        return self.read()[self.number]


class PhraseCandidates:
    """Retrieves for source sentences, and writes what was retrieved as the decoder would; see `WrittenPhrases`.

    A phrase that cannot be written is left out. Of equal subwords for the same source phrase the most similar stands for all.

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

    @cached_property
    def _write(self) -> WrittenPhrases:
        return WrittenPhrases(self.retriever.datastore, self.subwords)

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
        return lambda: self._of_sentences(texts, [len(row) for row in rows], answer())

    def _of_sentences(self, texts: list[str], lengths: list[int], retrieved: Retrieved) -> list[SentencePhrases]:
        read = cache(lambda: self.retriever.read(texts, retrieved))
        first = np.searchsorted(retrieved.spans[:, 0], np.arange(len(texts) + 1))  # phrase of each sentence
        candidates = self._candidates(retrieved)
        bounds = np.searchsorted(candidates.queries, first)
        found = []
        for number, (text, length) in enumerate(zip(texts, lengths)):
            own = Candidates(*(part[bounds[number] : bounds[number + 1]] for part in candidates))
            own = own._replace(queries=own.queries - first[number])
            spans = retrieved.spans[first[number] : first[number + 1], 1:]
            starts = self.subwords.starts(text)
            attended = np.searchsorted(starts, spans) if len(starts) == length - 1 else np.zeros_like(spans, np.int64)
            found.append(SentencePhrases(own, attended, length, read, number))
        return found

    def _candidates(self, retrieved: Retrieved) -> Candidates:
        """Those of all sentences, by query, of all P, and then by rank."""
        there = retrieved.entries >= 0
        written = self._write(retrieved.entries[there])
        hashes = np.zeros(there.shape, np.int64)
        hashes[there] = written.hashes
        kept = first_of_each(hashes, hashes != 0)
        of_kept = kept[there]
        queries, ranks = kept.nonzero()
        scores = retrieved.scores[kept].astype(np.float32)
        return Candidates(written.tokens[of_kept], written.lengths[of_kept], queries, ranks, scores)

    def table(self, batch: list[SentencePhrases], source_length: int) -> PhraseTable:
        """The batch as tensors on the CPU.

        Args:
            source_length: S, with the padding on the left.
        """
        counts = np.array([len(found.candidates.lengths) for found in batch])
        size, phrases = len(batch), max(1, int(counts.max()))
        rows = np.repeat(np.arange(size), counts)  # [C], the sentence of each candidate
        lanes = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        lengths, queries, ranks, scores = map(np.concatenate, zip(*(found.candidates[1:] for found in batch)))
        tokens = np.full((len(rows), int(lengths.max(initial=1))), NO_TOKEN, np.int32)  # [C, L]
        written = [found.candidates.tokens for found in batch]
        tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = np.concatenate([t[t != NO_TOKEN] for t in written])
        letters = self._has_letter[tokens] & (tokens != NO_TOKEN)
        entered = np.where(letters.any(axis=1), letters.argmax(axis=1) + 1, lengths)
        attended = np.zeros((size, max(1, *(len(found.attended) for found in batch)), source_length), bool)
        for row, found in enumerate(batch):
            place = np.arange(found.length - source_length, found.length)  # below 0 in the padding
            first, end = found.attended.T[:, :, None]
            attended[row, : len(found.attended)] = (first <= place) & (place < end)

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
