"""The glossary inside beam search: terms of the source propose their translations, as retrieved phrases do.

A hypothesis that has not written a term of its source leaves some of each step's probability to the term's
first subword, more where the model finds it likelier; so those that write it where it fits win. A term that
has begun is followed to its end, and one that was written counts no more. Two costs keep the rest of beam
search from undoing that: of ending a sentence while terms are open, and of growing a word that ended a term.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_ccpr.decoding.learned_memory import LearnedPhrases
from fairseq_ccpr.decoding.memory import Begun, Memory, MemoryBatch, Snapshot, Step
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import Candidates, CandidateSource, SentencePhrases
from fairseq_ccpr.decoding.phrase_memory import PhraseBatch, PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import MAX_SUBWORDS, Consent, PhraseVotes, Proposals
from fairseq_ccpr.settings import signature
from fairseq_ccpr.storage.fingerprint import of_file, of_strings, short
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords
from fairseq_ccpr.text.glossary import Glossary

logger = logging.getLogger(__name__)

# What is taken from log p, in nats, so that terms are written, and as they are.
END_COST = 5.0  # of the end of the sentence, for each term that is open: none of its translations was written
# of an unknown token, where all that is unknown in the source is part of its terms, such as €
UNKNOWN_COST = 10.0
GROWTH_COST = 3.0  # of a token that grows the word with which a term has just ended, "ark" to "arked"


class GlossaryVotes(PhraseVotes):
    """How much a term counts, against 1 for all that the model says.

    A term that may begin has exp(b0 + c0 r), one that has begun exp(b1 + c1 r), where r is the log
    probability of its next subword to that of the likeliest; nothing once it was written.
    """

    MAY_BEGIN, BEGUN = (0.5, 0.6), (6.0, 0.6)  # b, c

    def __init__(self) -> None:
        super().__init__()
        states = torch.tensor([self.MAY_BEGIN, *[self.BEGUN] * (len(self.state) - 1)])
        self.state.data, self.consent.data = states.unbind(dim=1)
        for weights in (self.similarity, self.covered, self.model):
            nn.init.zeros_(weights)

    @property
    def covered_factor(self) -> Tensor:
        return torch.zeros_like(self.covered)

    def forward(self, proposals: Proposals, consent: Consent, prior: Tensor) -> Tensor:
        return super().forward(proposals, consent, prior.masked_fill(proposals.covered > 0, float("-inf")))


class GlossaryCandidates(CandidateSource):
    """The terms of a glossary in source sentences, as the decoder would generate their translations."""

    def __init__(
        self, glossary: Glossary, make_subwords: Callable[[], DecoderSubwords], source_dictionary: Any
    ) -> None:
        super().__init__(make_subwords, source_dictionary)
        self.glossary = glossary
        self._ids: dict[str, list[int]] = {}

    def start(
        self, src_tokens: Tensor, learned: LearnedPhrases | None = None, given: Sequence[str] | None = None
    ) -> Callable[[], list[SentencePhrases]]:
        texts = given if given is not None else self.recovered(src_tokens)
        return lambda: [
            SentencePhrases(self._terms_of(text), list, number) for number, text in enumerate(texts)
        ]

    def _terms_of(self, text: str) -> Candidates:
        variants = [
            (query, one) for query, (_, _, each) in enumerate(self.glossary.find(text)) for one in each
        ]
        found = [(query, ids) for query, one in variants if (ids := self._ids_of(one))]
        queries = np.array([query for query, _ in found], np.int64)
        ranks, scores = np.zeros(len(found), np.int64), np.ones(len(found), np.float32)
        return Candidates.of([ids for _, ids in found], queries, ranks, scores)

    def covers_unknown(self, text: str, source: Tensor) -> bool:
        """Tell whether a sentence, int64 [S], has unknown subwords, and all in its terms."""
        unknown = int((source == self.source_dictionary.unk()).sum())
        return (
            0
            < unknown
            <= sum(self._unknown_in(text[start:end]) for start, end, _ in self.glossary.find(text))
        )

    def _unknown_in(self, term: str) -> int:
        symbols = self.subwords.scheme.encode(term).split()
        return sum(symbol not in self.source_dictionary for symbol in symbols)

    def fault_of(self, term: str) -> str:
        """Say why a translation cannot be a term's; nothing where it can."""
        if len(ids := self.subwords.written(term)) > MAX_SUBWORDS:
            return f"'{term[:60]}' has {len(ids)} subwords, expected at most {MAX_SUBWORDS}"
        return "" if ids else f"'{term[:60]}' has characters that the model cannot write"

    def _ids_of(self, term: str) -> list[int]:
        if term not in self._ids:
            self.subwords.split(term)  # which refuses other subwords than the model's
            fault = self.fault_of(term)
            self._ids[term] = [] if fault else self.subwords.written(term)
            if fault:  # of a file: what a session cannot write is refused
                glossary = self.glossary.others or self.glossary
                logger.warning("%s: %s: the term is ignored", glossary.path, fault)
        return self._ids[term]


@dataclass(frozen=True)
class GlossaryMemory(Memory):
    """A glossary alongside the decoder; it needs neither datastore nor encoder.

    It acts on the mixture of all else: its terms are meant to be written whatever is retrieved.
    """

    name = "glossary"
    acts_on = "mixture"

    phrases: PhraseMemory
    end_token: int
    unknown_token: int

    @classmethod
    def build(
        cls, candidates: GlossaryCandidates, end_token: int, unknown_token: int, device: torch.device
    ) -> GlossaryMemory:
        votes = GlossaryVotes().requires_grad_(False).to(device)
        return cls(PhraseMemory(candidates, PhraseSettings(), votes, device), end_token, unknown_token)

    @property
    def unscored(self) -> str:
        given = (
            "--glossary" if self.candidates.glossary.path is not None else "a session, which may have terms,"
        )
        return f"{given} works in beam search alone, which is neither scored nor explained: leave it out"

    @property
    def candidates(self) -> GlossaryCandidates:
        candidates = self.phrases.candidates
        assert isinstance(candidates, GlossaryCandidates)  # see `build`
        return candidates

    @cached_property
    def growing(self) -> Tensor:
        """1 for tokens that grow the word before them, fp32 [V]; known once the subwords are."""
        growing = self.candidates.subwords.growing()
        return torch.tensor(growing, dtype=torch.float32, device=self.phrases.device)

    def begin(self, sources: Tensor, snapshot: Snapshot) -> Begun:
        if not self.candidates.glossary.variants:
            return Begun(MemoryBatch)
        phrases, sources = self.phrases.begin(sources, snapshot), sources.cpu()

        def lay_out() -> MemoryBatch:
            batch = phrases.encoded()
            assert isinstance(batch, PhraseBatch)
            terms = [len(set(sentence.candidates.queries.tolist())) for sentence in batch.phrases]
            unknown = [self.candidates.covers_unknown(*both) for both in zip(snapshot.texts or (), sources)]
            if not any(terms) and not any(unknown):
                return MemoryBatch()
            made = batch.similarity.new_tensor
            return GlossaryBatch(self, batch, made(terms), UNKNOWN_COST * made(unknown or [0] * len(terms)))

        return Begun(lay_out)

    def signature(self) -> str:
        counting = {
            "votes": self.phrases.votes.digest(), "end": END_COST, "growth": GROWTH_COST, "unknown": UNKNOWN_COST
        }  # fmt: skip
        glossary = self.candidates.glossary
        terms = (text for term, targets in glossary.variants.items() for text in (term, *targets, ""))
        digest = of_file(glossary.path) if glossary.path is not None else of_strings(terms)
        return signature({"glossary": short(digest), **counting})


@dataclass
class GlossaryBatch(MemoryBatch):
    """The terms of a batch of sentences, and how far its hypotheses are in them."""

    memory: GlossaryMemory
    phrases: PhraseBatch
    terms: Tensor  # fp32 [B], how many each sentence has
    unknown_cost: Tensor  # fp32 [B], of an unknown token

    def rescore(self, step: Step) -> Tensor:
        mixed, state = step.mix([self.phrases.vote(step)]), self.phrases.state
        open_terms = self.terms.index_select(0, state.rows) - state.covered.sum(dim=1)
        mixed.addr_(state.ended().float(), self.memory.growing, alpha=-GROWTH_COST)
        mixed[:, self.memory.end_token] -= END_COST * open_terms
        mixed[:, self.memory.unknown_token] -= self.unknown_cost.index_select(0, state.rows)
        return mixed

    def reorder(self, order: Tensor) -> Self:
        return replace(self, phrases=self.phrases.reorder(order))
