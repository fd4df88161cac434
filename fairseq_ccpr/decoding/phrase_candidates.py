"""From source sentences to tables of phrases in the decoder's own token ids, once per batch.

The subwords of a phrase are cut out of those of its sentence, which are written once alongside the datastore
or split as needed. SentencePiece writes a word that follows a space with another piece than one that follows
a sign such as an opening quote. So a phrase that stands after a sign in its own sentence gets a variant for
after a space; any other gets one for after a sign where its source phrase stands after one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.written_subwords import WrittenSubwords, open_or_write
from fairseq_ccpr.decoding.learned_memory import LearnedPhrases
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase, RetrievedEntries
from fairseq_ccpr.decoding.phrase_votes import MAX_SUBWORDS, NO_TOKEN, Candidates, PhraseTable
from fairseq_ccpr.search.distinct_strings import unique_mask
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.equal_strings import BASE
from fairseq_ccpr.text.decoder_subwords import (
    SIGN,
    Cuts,
    DecoderSubwords,
    SplitSentences,
    after_sign,
    as_rows,
    cut_phrases,
)

logger = logging.getLogger(__name__)

KEPT_SENTENCES = 1 << 16  # whose subwords are kept where they are not written, about half a kB each
KEPT_VARIANTS = 1 << 16  # of phrases, that are kept
SPACES = re.compile(r"\s")

# From entries [R]: subwords, and where the phrases are in them.
CutEntries = Callable[[np.ndarray], tuple[np.ndarray, Cuts]]


@dataclass(frozen=True)
class SentencePhrases:
    """What was retrieved for a source sentence."""

    candidates: Candidates
    read: Callable[[], list[list[QueryPhrase]]]  # of all sentences of the batch
    number: int  # of this one in the batch
    # Which of S source subwords are words' (padding and markers are not), and which are of each of Q source
    # phrases, bool [1 + Q, S]; all of each where that is not known.
    covering: np.ndarray | None = None

    @property
    def queries(self) -> list[QueryPhrase]:
        return self.read()[self.number]


def nothing_for(sentences: int) -> list[SentencePhrases]:
    """Return what a source that has no phrase finds for so many sentences."""
    none = Candidates.of([], np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    return [SentencePhrases(none, lambda: [[] for _ in range(sentences)], row) for row in range(sentences)]


class CandidateSource:
    """What finds phrases for source sentences, and writes them as the decoder would.

    Args:
        make_subwords: called at the first sentence.
    """

    def __init__(self, make_subwords: Callable[[], DecoderSubwords], source_dictionary: Any) -> None:
        self.make_subwords, self.source_dictionary = make_subwords, source_dictionary

    def start(
        self, src_tokens: Tensor, learned: LearnedPhrases | None = None, given: Sequence[str] | None = None
    ) -> Callable[[], list[SentencePhrases]]:
        """Start to find phrases of sentences, int64 [B, S] with fairseq's padding on the left; returns a function that waits.

        Args:
            given: their texts, where they are known.
        """
        raise NotImplementedError

    @property
    def remote(self) -> bool:
        """Whether another machine searches, while this one goes on."""
        return False

    def check(self, batch: list[SentencePhrases]) -> None:
        """See what was found for a batch."""

    @cached_property
    def subwords(self) -> DecoderSubwords:
        """The translation model's own subwords."""
        return self.make_subwords()

    def recovered(self, src_tokens: Tensor) -> list[str]:
        """Recover the text of sentences, int64 [B, S], from their subwords."""
        return [self.subwords.recover(self.source_dictionary, row) for row in src_tokens.cpu()]

    def table(self, batch: list[SentencePhrases]) -> PhraseTable:
        """Lay a batch out as tensors on the CPU."""
        table = PhraseTable.of(
            [sentence.candidates for sentence in batch], self._letters, self.subwords.borders
        )
        return table.covering_sources([sentence.covering for sentence in batch])

    @cached_property
    def _letters(self) -> np.ndarray:
        texts = map(self.subwords.scheme.text_of, self.subwords.dictionary.symbols)
        return np.array([any(map(str.isalnum, text)) for text in texts])


class PhraseCandidates(CandidateSource):
    """Retrieve for source sentences, and tokenise what was retrieved as the decoder would.

    A phrase that the decoder cannot write, or only in more than MAX_SUBWORDS, is left out. Of equal token ids
    for the same source phrase the most similar stands for all.
    """

    def __init__(
        self, retriever: PhraseRetriever, make_subwords: Callable[[], DecoderSubwords], source_dictionary: Any
    ) -> None:
        super().__init__(make_subwords, source_dictionary)
        self.retriever = retriever
        self._checked = False  # whether a first batch was seen to have phrases, or was warned of
        # As it was when it last changed: without what it supersedes, and cut.
        self._current: tuple[LearnedPhrases, LearnedPhrases] | None = None
        self._learned: tuple[LearnedPhrases, CutEntries] | None = None
        self._write_variant = lru_cache(KEPT_VARIANTS)(self._write)

    @property
    def remote(self) -> bool:
        return self.retriever.index.remote

    def check(self, batch: list[SentencePhrases]) -> None:
        """Warn where nothing was found for the first one."""
        found = self._checked or any(len(sentence.candidates.lengths) for sentence in batch)
        if not found and not self.retriever.remote.skipped:  # which was said
            logger.warning(
                "no phrase was retrieved for the first %d sentences: they are translated without the phrase datastore; lower "
                "--phrases-min-similarity, or see with fairseq-ccpr retrieve what is found",
                len(batch),
            )
        self._checked = True

    @cached_property
    def written(self) -> WrittenSubwords | None:
        """The datastore's phrases in the model's subwords, on disk; None where that is impossible."""
        model = self.subwords.model
        return open_or_write(self.retriever.datastore, self.subwords, model) if model is not None else None

    @cached_property
    def _cut_stored(self) -> CutEntries:
        if (written := self.written) is None:
            return split_entries(self.retriever.datastore, self.subwords)
        return lambda entries: (written.tokens, written.cuts(entries))

    def start(
        self, src_tokens: Tensor, learned: LearnedPhrases | None = None, given: Sequence[str] | None = None
    ) -> Callable[[], list[SentencePhrases]]:
        learned = self._superseding(learned)
        texts = [*given] if given is not None else self.recovered(src_tokens)
        answer = self.retriever.start(texts, learned)

        def wait() -> list[SentencePhrases]:
            retrieved = answer()
            read = cache(lambda: self.retriever.read(texts, retrieved, learned))
            candidates = self._candidates(texts, retrieved, learned)
            # query of each sentence
            first = np.searchsorted(retrieved.spans[:, 0], np.arange(len(texts) + 1))
            bounds = np.searchsorted(candidates.queries, first)
            parts = [Candidates(*(column[i:j] for column in candidates)) for i, j in pairwise(bounds)]
            each = (part._replace(queries=part.queries - begin) for part, begin in zip(parts, first))
            spans = [retrieved.spans[i:j, 1:] for i, j in pairwise(first)]
            covering = map(self._covering, src_tokens.tolist(), texts, spans)
            return [
                SentencePhrases(part, read, number, covers)
                for number, (part, covers) in enumerate(zip(each, covering))
            ]

        return wait

    def _covering(self, source: list[int], text: str, spans: np.ndarray) -> np.ndarray:
        """See `SentencePhrases.covering`, of source phrases from character to character, int32 [Q, 2]."""
        placed = self.subwords.place_source(self.source_dictionary, source, text)
        if placed is None:
            return np.ones((1 + len(spans), len(source)), bool)
        columns, starts, ends = np.array(placed, np.int64).reshape(-1, 3).T
        covering = np.zeros((1 + len(spans), len(source)), bool)
        covering[0, columns] = True
        covering[1:, columns] = (starts < spans[:, 1:]) & (ends > spans[:, :1]) & (starts < ends)
        return covering

    def _superseding(self, learned: LearnedPhrases | None) -> LearnedPhrases | None:
        """Return what was learned, without the phrases of the datastore's sentences that it supersedes."""
        if learned is None or not learned.superseded:
            return learned
        if self._current is None or self._current[0] is not learned:
            dictionary = self.subwords.dictionary
            targets = {self.subwords.recover(dictionary, as_tensor(ids)) for ids in learned.superseded}
            self._current = learned, learned.without(targets)
        return self._current[1]

    def _candidates(
        self, texts: list[str], retrieved: RetrievedEntries, learned: LearnedPhrases | None
    ) -> Candidates:
        """Make the candidates of all sentences, by query, of all P, then by rank; variants follow their own."""
        found = retrieved.entries >= 0
        tokens, lengths = self._tokenise(retrieved.entries[found], learned)
        hashes = np.zeros(found.shape, np.int64)
        hashes[found] = hash_tokens(tokens, lengths)
        unique = unique_mask(hashes, hashes != 0)
        rows, (queries, ranks) = unique[found], unique.nonzero()
        scores = retrieved.scores[unique].astype(np.float32)
        candidates = Candidates(tokens[rows], lengths[rows], queries, ranks, scores)
        if not self.subwords.scheme.marks_beginnings:
            return candidates
        signs = np.array(
            [after_sign(texts[number], start) for number, start, _ in retrieved.spans.tolist()], bool
        )
        phrases = self.retriever.datastore if learned is None else learned
        return self.with_variants(
            candidates, signs, lambda q, rank: phrases.phrase(int(retrieved.entries[q, rank]))[1:]
        )

    def _tokenise(self, entries: np.ndarray, learned: LearnedPhrases | None) -> tuple[np.ndarray, np.ndarray]:
        if learned is None or (stored := learned.stored(entries)).all():
            return lay_out(np.ones((1, len(entries)), bool), [self._cut_stored(entries)])
        # A cache that lives as long as its snapshot: forgetting renumbers the entries.
        known = self._learned
        if known is None or known[0] is not learned:
            known = self._learned = learned, split_entries(learned, self.subwords)
        found = self._cut_stored(entries[stored]), known[1](entries[~stored] - learned.datastore.section.size)
        return lay_out(np.stack([stored, ~stored]), found)

    def with_variants(
        self, candidates: Candidates, signs: np.ndarray, place: Callable[[int, int], tuple[str, int, int]]
    ) -> Candidates:
        """Add the variants of candidates, each after what it is a variant of.

        Args:
            signs: bool [Q], whether each source phrase stands after a sign.
            place: from query and rank to a sentence, and where the phrase starts and ends in it, in
                characters.
        """
        signed = self.subwords.borders.going_on[candidates.tokens[:, 0]]
        rows, written = [], []
        for row in (signed | signs[candidates.queries]).nonzero()[0].tolist():
            text, start, end = place(int(candidates.queries[row]), int(candidates.ranks[row]))
            words = text[start:end] + SPACES.split(text[end:], 1)[0]
            ids = self._write_variant(words, end - start, bool(signed[row]))
            known = candidates.tokens[row, : candidates.lengths[row]].tolist()
            if 0 < len(ids) <= MAX_SUBWORDS and ids != known:
                rows.append(row)
                written.append(ids)
        if not written:
            return candidates
        both = candidates, Candidates.of(written, *(column[rows] for column in candidates[2:]))
        order = np.concatenate([np.arange(len(candidates.lengths)), rows]).argsort(kind="stable")
        width = max(one.tokens.shape[1] for one in both)
        tokens = [np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=NO_TOKEN) for t, *_ in both]
        return Candidates(*(np.concatenate(pair)[order] for pair in (tokens, *zip(both[0][1:], both[1][1:]))))

    def _write(self, words: str, length: int, signed: bool) -> list[int]:
        """Write the first characters of words after a space, if they were `signed`, or else after a sign."""
        before = "" if signed else SIGN
        pieces = self.subwords.split_unchecked(before + words)  # the sign may well be unknown
        return self.subwords.slice(pieces, len(before), len(before) + length) or []


class RememberedCandidates(PhraseCandidates):
    """The same candidates, but retrieval runs only once per batch: settings tried in turn share a search."""

    def __init__(self, candidates: PhraseCandidates) -> None:
        super().__init__(candidates.retriever, lambda: candidates.subwords, candidates.source_dictionary)
        self._given = candidates
        self._known: dict[tuple[object, ...], list[SentencePhrases]] = {}

    def start(
        self, src_tokens: Tensor, learned: LearnedPhrases | None = None, given: Sequence[str] | None = None
    ) -> Callable[[], list[SentencePhrases]]:
        """Retrieve for sentences, int64 [B, S], or return what an earlier call retrieved for them."""
        key = tuple(src_tokens.shape), src_tokens.cpu().numpy().tobytes(), tuple(given or ())
        if key not in self._known:
            self._known[key] = self._given.start(src_tokens, learned, given)()
        return lambda: self._known[key]


def split_entries(phrases: PhraseDatastore | LearnedPhrases, subwords: DecoderSubwords) -> CutEntries:
    """Cut the phrases of entries out of their sentences; those split last are kept, for all threads."""
    split_once = lru_cache(KEPT_SENTENCES)(lambda number: as_rows(subwords.split(phrases.sentence(number))))

    def cut(entries: np.ndarray) -> tuple[np.ndarray, Cuts]:
        spans = phrases.spans[entries].astype(np.int64)
        numbers, spans[:, 0] = np.unique(spans[:, 0], return_inverse=True)
        split = SplitSentences.of([split_once(number) for number in numbers.tolist()])
        return split.ids, cut_phrases(spans, split, subwords.dictionary.unk())

    return cut


def lay_out(rows: np.ndarray, sources: Sequence[tuple[np.ndarray, Cuts]]) -> tuple[np.ndarray, np.ndarray]:
    """Collect tokens and lengths of R phrases, as in `Candidates`, of the subwords of S sources.

    Args:
        rows: bool [S, R], which phrases are of each source, where they are in their order.
    """
    first, lengths = np.zeros((2, rows.shape[1]), np.int64)
    for mask, (_, cuts) in zip(rows, sources):
        first[mask], lengths[mask] = cuts
    lengths[lengths > MAX_SUBWORDS] = 0
    columns = np.arange(int(lengths.max(initial=1)))
    tokens = np.full((len(lengths), len(columns)), NO_TOKEN, np.int32)
    for mask, (subwords, _) in zip(rows, sources):
        inside = (columns < lengths[:, None]) & mask[:, None]
        tokens[inside] = subwords[(first[:, None] + columns)[inside]]
    return tokens, lengths


def hash_tokens(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Hash the tokens of R phrases, int32 [R, L]: sum_i t_i b^i modulo 2^64, int64 [R]; 0 without any."""
    powers = np.cumprod(np.full(tokens.shape[1], BASE, np.uint64))
    phrases = tokens.astype(np.uint64) * (np.arange(tokens.shape[1]) < lengths[:, None])
    hashes = (phrases * powers).sum(axis=1, dtype=np.uint64)
    return np.where(lengths > 0, np.maximum(hashes, 1), 0).view(np.int64)
