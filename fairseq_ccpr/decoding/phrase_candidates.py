"""From source sentences to tables of phrases in the decoder's own token ids, once per batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fairseq_ccpr.datastore.written_subwords import open_or_write
from fairseq_ccpr.decoding.learned_memory import LearnedPhrases
from fairseq_ccpr.decoding.phrase_continuation import NO_TOKEN, FlatPhrases, PhraseTable
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase, RetrievedEntries
from fairseq_ccpr.decoding.phrase_tokens import SplitTokens, TokenIds, Tokenise, WrittenTokens, merged
from fairseq_ccpr.decoding.phrase_variants import PhraseVariants
from fairseq_ccpr.models.translation_states import EncodedSources, TranslationStates
from fairseq_ccpr.search.distinct_strings import unique_mask
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords, after_sign


class Candidates(NamedTuple):
    """C retrieved phrases as the decoder would generate them."""

    tokens: np.ndarray  # int32 [C, L], NO_TOKEN after the last
    lengths: np.ndarray  # int64 [C], of the phrase
    extents: np.ndarray  # int64 [C], with what follows it in its sentence
    queries: np.ndarray  # int64 [C], the query of the sentence it was retrieved for
    ranks: np.ndarray  # int64 [C], which of that query's `retrieved` it is
    scores: np.ndarray  # fp32 [C]

    def with_variants(self, rows: np.ndarray, written: list[tuple[list[int], list[int]]]) -> Candidates:
        """Add other ways to write some of them, int64 [n] in order, each after its own: token ids, and what follows."""
        if not written:
            return self
        lengths, extents = np.array([(len(ids), len(ids) + len(following)) for ids, following in written]).T
        width = max(self.tokens.shape[1], int(extents.max()))
        tokens = np.full((len(self.tokens) + len(rows), width), NO_TOKEN, np.int32)
        tokens[: len(self.tokens), : self.tokens.shape[1]] = self.tokens
        tokens[len(self.tokens) :][np.arange(width) < extents[:, None]] = [
            token for ids, following in written for token in ids + following
        ]
        others = lengths, extents, self.queries[rows], self.ranks[rows], self.scores[rows]
        order = np.concatenate([np.arange(len(self.tokens)), rows]).argsort(kind="stable")
        return Candidates(tokens[order], *(np.concatenate(both)[order] for both in zip(self[1:], others)))


@dataclass(frozen=True)
class SentencePhrases:
    """What was retrieved for a source sentence."""

    candidates: Candidates
    read: Callable[[], list[list[QueryPhrase]]]  # of all sentences of the batch
    number: int  # of this one in the batch

    @property
    def queries(self) -> list[QueryPhrase]:
        """The same with all strings."""
        return self.read()[self.number]


class PhraseCandidates:
    """Retrieve for source sentences, and tokenise what was retrieved as the decoder would; see `phrase_tokens`.

    A phrase may be two candidates, see `PhraseVariants`.
    A phrase without token ids is left out. Of equal token ids for the same source phrase the most similar stands for all.

    Args:
        retriever: phrases of source text.
        make_subwords: called at the first sentence.
        source_dictionary: of the translation model.
        reach: subwords that are kept of what follows a phrase in its sentence.
    """

    def __init__(
        self,
        retriever: PhraseRetriever,
        make_subwords: Callable[[], DecoderSubwords],
        source_dictionary: Any,
        reach: int,
    ) -> None:
        self.retriever, self.make_subwords, self.source_dictionary = retriever, make_subwords, source_dictionary
        self.reach = reach
        self.checked = False  # whether a first batch was seen to have phrases, or was warned of
        self._of_learnt: tuple[LearnedPhrases, Tokenise] | None = None  # of what was learnt when it last changed

    @property
    def reads(self) -> TranslationStates | None:
        """The translation model's encoder, where a query head reads its states."""
        return self.retriever.finder.reads

    @property
    def remote(self) -> bool:
        """Whether another machine searches, while this one goes on."""
        return self.retriever.index.remote

    @cached_property
    def subwords(self) -> DecoderSubwords:
        """The translation model's own subwords."""
        return self.make_subwords()

    @cached_property
    def _tokenise_own(self) -> Tokenise:
        datastore, model = self.retriever.datastore, self.subwords.model
        written = open_or_write(datastore, self.subwords, model) if model is not None else None
        if written is not None:
            return WrittenTokens(written, self.reach)
        return SplitTokens(datastore, self.subwords, self.reach)

    @cached_property
    def _variants(self) -> PhraseVariants:
        return PhraseVariants(self.subwords, self.reach)

    def _tokenise_learnt(self, learnt: LearnedPhrases) -> Tokenise:
        """Return a cache that lives as long as its snapshot: forgetting renumbers the entries."""
        known = self._of_learnt
        if known is None or known[0] is not learnt:
            known = self._of_learnt = learnt, SplitTokens(learnt, self.subwords, self.reach)
        return known[1]

    def _tokenise(self, entries: np.ndarray, learnt: LearnedPhrases | None) -> TokenIds:
        """Look up the phrases of entries, int64 [R], the datastore's own or learnt."""
        if learnt is None or (own := learnt.own(entries)).all():
            return self._tokenise_own(entries)
        rows = entries[~own] - learnt.datastore.section.size
        return merged(own, self._tokenise_own(entries[own]), self._tokenise_learnt(learnt)(rows))

    def start(
        self, src_tokens: Tensor, learnt: LearnedPhrases | None = None, encoded: EncodedSources | None = None
    ) -> Callable[[], list[SentencePhrases]]:
        """Start retrieval for sentences, int64 [B, S] with fairseq's padding on the left; returns a function that waits.

        Args:
            learnt: phrases learnt alongside the datastore, which are searched together with it.
            encoded: see `PhraseFinder.find`.

        Raises:
            ConfigurationError: the sentences cannot be recovered from their subwords, or those of the datastore cannot be
                made of the dictionary's.
        """
        texts = [self.subwords.recover(self.source_dictionary, row) for row in src_tokens.cpu()]
        answer = self.retriever.start(texts, learnt, encoded)
        return lambda: self._of_sentences(texts, answer(), learnt)

    def _of_sentences(
        self, texts: list[str], retrieved: RetrievedEntries, learnt: LearnedPhrases | None
    ) -> list[SentencePhrases]:
        read = cache(lambda: self.retriever.read(texts, retrieved, learnt))
        first = np.searchsorted(retrieved.spans[:, 0], np.arange(len(texts) + 1))  # phrase of each sentence
        candidates = self._with_variants(self._candidates(retrieved, learnt), texts, retrieved, learnt)
        bounds = np.searchsorted(candidates.queries, first)
        found = []
        for number in range(len(texts)):
            own = Candidates(*(part[bounds[number] : bounds[number + 1]] for part in candidates))
            found.append(SentencePhrases(own._replace(queries=own.queries - first[number]), read, number))
        return found

    def _candidates(self, retrieved: RetrievedEntries, learnt: LearnedPhrases | None) -> Candidates:
        """Make the candidates of all sentences, by query, of all P, and then by rank."""
        mask = retrieved.entries >= 0
        ids = self._tokenise(retrieved.entries[mask], learnt)
        hashes = np.zeros(mask.shape, np.int64)
        hashes[mask] = ids.hashes
        unique = unique_mask(hashes, hashes != 0)
        rows = unique[mask]
        queries, ranks = unique.nonzero()
        scores = retrieved.scores[unique].astype(np.float32)
        return Candidates(ids.tokens[rows], ids.lengths[rows], ids.extents[rows], queries, ranks, scores)

    def _with_variants(
        self, candidates: Candidates, texts: list[str], retrieved: RetrievedEntries, learnt: LearnedPhrases | None
    ) -> Candidates:
        """Add the variants of candidates, each after what it is a variant of."""
        if not len(candidates.tokens):
            return candidates
        place = self.retriever.datastore.phrase if learnt is None else learnt.phrase
        signs = np.array([after_sign(texts[number], start) for number, start, _ in retrieved.spans.tolist()])
        rows = self._variants.needed(candidates.tokens[:, 0], signs[candidates.queries]).nonzero()[0]
        entries = retrieved.entries[candidates.queries[rows], candidates.ranks[rows]]
        each = zip(entries.tolist(), candidates.tokens[rows].tolist(), candidates.lengths[rows].tolist())
        written = [self._variants(place(entry)[1:], tuple(tokens[:length])) for entry, tokens, length in each]
        found = np.array([bool(ids) for ids, _ in written], bool)
        return candidates.with_variants(rows[found], [one for one in written if one[0]])

    def table(self, batch: list[SentencePhrases]) -> PhraseTable:
        """Lay a batch out as tensors on the CPU."""
        counts = np.array([len(sentence.candidates.lengths) for sentence in batch])
        lengths, extents, queries, _, scores = map(
            np.concatenate, zip(*(sentence.candidates[1:] for sentence in batch))
        )
        each = [sentence.candidates.tokens for sentence in batch]
        tokens = np.concatenate([t[t != NO_TOKEN] for t in each])
        prefixes = _prefixes(self._has_letter[tokens], lengths, extents)
        phrases = FlatPhrases(tokens, extents, lengths, prefixes, queries, scores)
        return PhraseTable.of(counts, phrases, self.subwords.borders)

    @cached_property
    def _has_letter(self) -> np.ndarray:
        """Of each token, bool [V]: whether it has a letter or digit."""
        return np.array([any(map(str.isalnum, symbol)) for symbol in self.subwords.dictionary.symbols])


def _prefixes(letters: np.ndarray, lengths: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Count the subwords of phrases up to and with the first that has a letter, int64 [C]; all where none has.

    Args:
        letters: bool [N], which of their subwords have.
        lengths: int64 [C], of the phrases.
        extents: int64 [C], of the phrases in `letters`.
    """
    first = extents.cumsum() - extents
    places = np.append(letters.nonzero()[0], len(letters))
    before = places[np.searchsorted(places, first)] - first
    return np.where(before < lengths, before + 1, lengths)


class RememberedCandidates(PhraseCandidates):
    """The same candidates, but retrieval runs only once per batch: settings tried in turn share a search.

    Args:
        candidates: where they come from.
    """

    def __init__(self, candidates: PhraseCandidates) -> None:
        given = candidates
        super().__init__(given.retriever, lambda: given.subwords, given.source_dictionary, given.reach)
        self._given = given
        self._known: dict[tuple[tuple[int, ...], bytes], list[SentencePhrases]] = {}

    @cached_property
    def _tokenise_own(self) -> Tokenise:
        return self._given._tokenise_own

    def start(
        self, src_tokens: Tensor, learnt: LearnedPhrases | None = None, encoded: EncodedSources | None = None
    ) -> Callable[[], list[SentencePhrases]]:
        """Retrieve for sentences, int64 [B, S], or return what an earlier call, with as much learnt, retrieved for them."""
        key = tuple(src_tokens.shape), src_tokens.cpu().numpy().tobytes()
        if key not in self._known:
            self._known[key] = super().start(src_tokens, learnt, encoded)()
        return lambda: self._known[key]
