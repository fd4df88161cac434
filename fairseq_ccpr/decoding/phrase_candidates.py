"""From source sentences to tables of phrases in the decoder's own token ids, once a batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.decoding.learnt_phrases import LearntPhrases
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN, PhraseTable
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase, RetrievedEntries
from fairseq_ccpr.search.distinct_strings import unique_mask
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords


class PlacedPhrases(Protocol):
    """Phrases with their places in sentences: a datastore's, or those that were learnt beside it."""

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


class TokenisationCache:
    """Cut entries out of their own sentences' subwords, once each.

    A phrase has no token ids where its border falls inside a subword, or where it is longer than MAX_SUBWORDS. Memory grows
    with the entries that were looked up, some 120 bytes each. Threads may share it.

    Args:
        phrases: whose entries they are.
        subwords: of the translation model.
        reach: subwords that are kept of what follows a phrase in its sentence.
    """

    def __init__(self, phrases: PlacedPhrases, subwords: DecoderSubwords, reach: int) -> None:
        self.phrases, self.subwords, self.reach = phrases, subwords, reach
        self._lock = Lock()
        self._entries = np.empty(0, np.int64)  # those known, in order
        self._rows = np.empty(0, np.int64)  # of each, in the arrays below
        self._hashes = array("q")
        self._lengths = array("q")  # of each phrase
        self._tokens = array("i", [NO_TOKEN])  # of all rows, one after another
        self._bounds = array("q", [1])  # where the tokens of each row begin, and at last where those of the last end

    def __call__(self, entries: np.ndarray) -> TokenIds:
        """Look up the phrases of entries, int64 [R].

        Raises:
            ConfigurationError: see `DecoderSubwords.split`.
        """
        with self._lock:  # numpy views of an array keep it from growing
            return self._look_up(entries)

    def _look_up(self, entries: np.ndarray) -> TokenIds:
        wanted, which = np.unique(entries, return_inverse=True)
        positions = np.searchsorted(self._entries, wanted)
        known = np.append(self._entries, -1)[positions] == wanted
        if not known.all():
            self._add(wanted[~known])
        rows = self._rows[np.searchsorted(self._entries, wanted)[which]]
        bounds = np.frombuffer(self._bounds, np.int64)
        extents = bounds[rows + 1] - bounds[rows]
        columns = np.arange(int(extents.max(initial=1)))
        at = (bounds[rows][:, None] + columns) * (columns < extents[:, None])  # 0 after the end
        lengths, hashes = (
            np.frombuffer(part, np.int64)[rows] if len(rows) else np.empty(0, np.int64)
            for part in (self._lengths, self._hashes)
        )
        return TokenIds(np.frombuffer(self._tokens, np.int32)[at], lengths, extents, hashes)

    def _add(self, entries: np.ndarray) -> None:
        """Tokenise entries that are not known, int64 [n] in order."""
        first = len(self._hashes)
        for number, start, end in self.phrases.spans[entries].tolist():
            pieces = self.subwords.split(self.phrases.sentence(number))
            ids = self.subwords.slice(pieces, start, end) or []
            tokens = tuple(ids) if len(ids) <= MAX_SUBWORDS else ()
            self._hashes.append(hash(tokens) if tokens else 0)
            self._lengths.append(len(tokens))
            self._tokens.extend(tokens)
            if tokens:
                self._tokens.extend(self.subwords.following(pieces, end, min(self.reach, MAX_SUBWORDS - len(tokens))))
            self._bounds.append(len(self._tokens))
        known, rows = np.concatenate([self._entries, entries]), np.arange(first, len(self._hashes))
        order = known.argsort(kind="stable")
        self._entries, self._rows = known[order], np.concatenate([self._rows, rows])[order]


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


class Candidates(NamedTuple):
    """C retrieved phrases as the decoder would generate them."""

    tokens: np.ndarray  # int32 [C, L], NO_TOKEN after the last
    lengths: np.ndarray  # int64 [C], of the phrase
    extents: np.ndarray  # int64 [C], with what follows it in its sentence
    queries: np.ndarray  # int64 [C], the query of the sentence it was retrieved for
    ranks: np.ndarray  # int64 [C], which of that query's `retrieved` it is
    scores: np.ndarray  # fp32 [C]


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
    """Retrieve for source sentences, and tokenise what was retrieved as the decoder would; see `TokenisationCache`.

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
        self._of_learnt: tuple[LearntPhrases, TokenisationCache] | None = (
            None  # of what was learnt when it last changed
        )

    @cached_property
    def subwords(self) -> DecoderSubwords:
        """The translation model's own subwords."""
        return self.make_subwords()

    @cached_property
    def _tokenise_own(self) -> TokenisationCache:
        return TokenisationCache(self.retriever.datastore, self.subwords, self.reach)

    def _tokenise_learnt(self, learnt: LearntPhrases) -> TokenisationCache:
        """Return a cache that ends with what it is of, whose entries have other numbers when something was forgotten."""
        known = self._of_learnt
        if known is None or known[0] is not learnt:
            known = self._of_learnt = learnt, TokenisationCache(learnt, self.subwords, self.reach)
        return known[1]

    def _tokenise(self, entries: np.ndarray, learnt: LearntPhrases | None) -> TokenIds:
        """Look up the phrases of entries, int64 [R], the datastore's own or learnt."""
        if learnt is None or (own := learnt.own(entries)).all():
            return self._tokenise_own(entries)
        rows = entries[~own] - learnt.datastore.section.size
        return merged(own, self._tokenise_own(entries[own]), self._tokenise_learnt(learnt)(rows))

    def start(self, src_tokens: Tensor, learnt: LearntPhrases | None = None) -> Callable[[], list[SentencePhrases]]:
        """Start retrieval for sentences, int64 [B, S] with fairseq's padding on the left; returns a function that waits.

        Args:
            learnt: what was learnt beside the datastore, which is searched together with it.

        Raises:
            ConfigurationError: the sentences cannot be recovered from their subwords, or those of the datastore cannot be
                made of the dictionary's.
        """
        texts = [self.subwords.recover(self.source_dictionary, row) for row in src_tokens.cpu()]
        answer = self.retriever.start(texts, learnt)
        return lambda: self._of_sentences(texts, answer(), learnt)

    def _of_sentences(
        self, texts: list[str], retrieved: RetrievedEntries, learnt: LearntPhrases | None
    ) -> list[SentencePhrases]:
        read = cache(lambda: self.retriever.read(texts, retrieved, learnt))
        first = np.searchsorted(retrieved.spans[:, 0], np.arange(len(texts) + 1))  # phrase of each sentence
        candidates = self._candidates(retrieved, learnt)
        bounds = np.searchsorted(candidates.queries, first)
        found = []
        for number in range(len(texts)):
            own = Candidates(*(part[bounds[number] : bounds[number + 1]] for part in candidates))
            found.append(SentencePhrases(own._replace(queries=own.queries - first[number]), read, number))
        return found

    def _candidates(self, retrieved: RetrievedEntries, learnt: LearntPhrases | None) -> Candidates:
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

    def table(self, batch: list[SentencePhrases]) -> PhraseTable:
        """Lay a batch out as tensors on the CPU."""
        counts = np.array([len(sentence.candidates.lengths) for sentence in batch])
        size, phrases = len(batch), max(1, int(counts.max()))
        rows = np.repeat(np.arange(size), counts)  # [C], the sentence of each candidate
        slots = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        lengths, extents, queries, _, scores = map(
            np.concatenate, zip(*(sentence.candidates[1:] for sentence in batch))
        )
        tokens = np.full((len(rows), int(extents.max(initial=1))), NO_TOKEN, np.int32)  # [C, L]
        columns = np.arange(tokens.shape[1])
        each = [sentence.candidates.tokens for sentence in batch]
        tokens[columns < extents[:, None]] = np.concatenate([t[t != NO_TOKEN] for t in each])
        letters = self._has_letter[tokens] & (columns < lengths[:, None])
        prefixes = np.where(letters.any(axis=1), letters.argmax(axis=1) + 1, lengths)

        def by_slot(of_candidates: np.ndarray, fill: int = 0) -> Tensor:
            """[C, ...] -> [B, A, ...]"""
            placed = np.full((size, phrases, *of_candidates.shape[1:]), fill, of_candidates.dtype)
            placed[rows, slots] = of_candidates
            return torch.from_numpy(placed)

        return PhraseTable.of(
            by_slot(tokens, NO_TOKEN), by_slot(lengths), by_slot(prefixes), by_slot(queries), by_slot(scores)
        )

    @cached_property
    def _has_letter(self) -> np.ndarray:
        """Of each token, bool [V]: whether it has a letter or digit."""
        return np.array([any(map(str.isalnum, symbol)) for symbol in self.subwords.dictionary.symbols])


class RememberedCandidates(PhraseCandidates):
    """The same candidates, but no batch is retrieved for twice: what is tried in turn shares a search.

    Args:
        candidates: where they come from.
    """

    def __init__(self, candidates: PhraseCandidates) -> None:
        given = candidates
        super().__init__(given.retriever, lambda: given.subwords, given.source_dictionary, given.reach)
        self._known: dict[bytes, list[SentencePhrases]] = {}

    def start(self, src_tokens: Tensor, learnt: LearntPhrases | None = None) -> Callable[[], list[SentencePhrases]]:
        """Retrieve for sentences, int64 [B, S], or return what an earlier call, with as much learnt, retrieved for them."""
        key = src_tokens.cpu().numpy().tobytes()
        if key not in self._known:
            self._known[key] = super().start(src_tokens, learnt)()
        return lambda: self._known[key]
