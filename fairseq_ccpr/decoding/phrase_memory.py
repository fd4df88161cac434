"""The phrase memory: retrieval once per sentence, a vote for the next token each step."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from fairseq_ccpr.decoding.distribution import Distribution
from fairseq_ccpr.decoding.interpolation import Vote
from fairseq_ccpr.decoding.learnt_memory import LearntEntries, LearntMemory
from fairseq_ccpr.decoding.learnt_phrases import LearntPhrases
from fairseq_ccpr.decoding.memory import ModelView
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates, RememberedCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_votes import Consent, PhraseState, PhraseTable, PhraseVotes, Proposals
from fairseq_ccpr.decoding.trust_features import PhraseEvidence
from fairseq_ccpr.models.translation_states import EncodedSources, TranslationStates
from fairseq_ccpr.settings import signed
from fairseq_ccpr.timing import FINDING, PHRASES, phase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhraseMemory:
    """A phrase datastore alongside the decoder.

    Args:
        candidates: phrases of source sentences.
        settings: how they are retrieved, and the most that they may weigh.
        votes: how much each counts.
        device: of the translation model.
        trusted: whether learned trust decides the weight, and so needs evidence.
        learnt: what is learnt alongside the datastore, live or as a snapshot; None: nothing.
    """

    candidates: PhraseCandidates
    settings: PhraseSettings
    votes: PhraseVotes
    device: torch.device
    trusted: bool = False
    learnt: LearntMemory | LearntEntries | None = None

    def now(self, entries: LearntEntries | None = None) -> PhraseMemory:
        """Return a snapshot of the memory, unaffected by later learning and forgetting.

        Args:
            entries: what counts now, where another memory has looked before; both are then of the same moment.
        """
        return self if self.learnt is None else replace(self, learnt=entries or self.learnt.entries)

    @property
    def _learnt(self) -> LearntPhrases | None:
        """The phrases of what was learnt up to now; None where nothing was."""
        phrases = self.learnt.entries.phrases if self.learnt is not None else None
        return phrases if phrases is not None and (phrases.pairs or phrases.moved or len(phrases.gone)) else None

    @phase(FINDING, whole=True)
    def start(self, sources: Tensor, encoded: EncodedSources | None = None) -> Callable[[], PhraseBatch]:
        """Start retrieval for the sentences of a batch, int64 [B, S]; returns a function that waits for the result.

        A remote index searches meanwhile; a local one works when it is waited for, while a GPU encodes. What is learnt
        meanwhile counts for the next batch.

        Args:
            encoded: the sentences as the translation model has encoded them, for a query head.
        """
        begin = partial(self.candidates.start, sources, self._learnt, encoded)
        wait = begin() if self.candidates.retriever.index.remote else lambda: begin()()
        return lambda: self._batch(wait)

    @phase(FINDING, whole=True)
    def _batch(self, answer: Callable[[], list[SentencePhrases]]) -> PhraseBatch:
        with _without_collections():
            phrases = answer()
            table = self.candidates.table(phrases)
        _warn_of_nothing(self.candidates, phrases)
        return PhraseBatch.of(phrases, table.to(self.device), self)

    @property
    def reads(self) -> TranslationStates | None:
        """The translation model's encoder, where a query head reads its states."""
        return self.candidates.retriever.finder.reads

    def remembering(self) -> PhraseMemory:
        """Return the memory as it is now, which never retrieves twice for the same batch."""
        return replace(self.now(), candidates=RememberedCandidates(self.candidates))

    def on(self, device: torch.device) -> PhraseMemory:
        """Return a memory that computes votes on another device."""
        return replace(self, votes=copy.deepcopy(self.votes).to(device), device=device)

    def signature(self) -> str:
        """Return everything that decides what is retrieved and how it counts, as one line to print with results."""
        counting = {**signed(self.settings), "votes": self.votes.digest()}
        return self.candidates.retriever.signature(counting, self._learnt)


@dataclass
class PhraseBatch:
    """The phrases of a batch of sentences, and how far its hypotheses are in them."""

    phrases: list[SentencePhrases]
    table: PhraseTable
    prior: Tensor  # fp32 [B, A], see `PhraseVotes.prior`
    similarity: Tensor  # fp32 [B], the highest of each sentence
    memory: PhraseMemory
    state: PhraseState

    @classmethod
    def of(cls, phrases: list[SentencePhrases], table: PhraseTable, memory: PhraseMemory) -> PhraseBatch:
        """Begin a batch: one empty hypothesis a sentence."""
        rows = torch.arange(len(table.lengths), device=table.lengths.device)
        similarity = (table.scores * (table.lengths > 0)).amax(dim=1)
        return cls(phrases, table, memory.votes.prior(table), similarity, memory, PhraseState(table, rows))

    def listening(self) -> AbstractContextManager[None]:
        """Need nothing of the model's layers."""
        return nullcontext()

    @phase(PHRASES, whole=True)
    def reorder(self, order: Tensor) -> Self:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was.

        Hypotheses change places within their sentence only, unless sentences have ended.
        """
        same = len(order) == len(self.state.rows)
        return replace(self, state=self.state.reorder(order, same))

    @phase(PHRASES, whole=True)
    def vote(self, tokens: Tensor, model: Distribution) -> Vote:
        """Vote for the next token of each hypothesis."""
        if tokens.size(1) > 1:
            self.state.advance(tokens[:, -1])
        proposals, prior = self.state.merged(self.prior, self.memory.votes.covered_factor)
        view = model.at(proposals.values)
        votes = self.memory.votes(proposals, Consent.of(view), prior)
        return self._vote(proposals, votes, self.state.rows, view)

    def force_proposals(self, previous: Tensor, real: Tensor) -> tuple[Proposals, Tensor]:
        """Collect the proposals at N tokens of given targets, and the sentences int64 [N] they are of.

        Args:
            previous: int64 [B, T], the decoder's input: y_<t, with the end of the sentence in front.
            real: bool [B, T], which positions are wanted.
        """
        state = PhraseState(self.table, torch.arange(len(previous), device=previous.device))
        steps = []
        for position in range(previous.size(1)):
            if position:
                state.advance(previous[:, position])
            steps.append(state.proposals())
        return Proposals(*(torch.stack(parts, dim=1)[real] for parts in zip(*steps))), real.nonzero()[:, 0]

    def weigh(self, proposals: Proposals, consent: Consent, sentences: Tensor, model: ModelView) -> Vote:
        """Vote at N tokens.

        Args:
            sentences: int64 [N], which one of the batch each is of.
            model: what it says of the proposals' tokens.
        """
        return self._vote(proposals, self.votes(proposals, consent, sentences), sentences, model)

    def _vote(self, proposals: Proposals, votes: Tensor, sentences: Tensor, model: ModelView) -> Vote:
        values, log_probs, mass, going = proposals.continuation(votes, self.table.most_distinct)
        evidence = None
        if self.memory.trusted:
            similarity = self.similarity.index_select(0, sentences)
            evidence = PhraseEvidence(values, log_probs, model.neighbours, mass, going, similarity)
        return Vote(values, log_probs, self.memory.settings.lambda_ * mass, evidence)

    def to(self, device: torch.device) -> PhraseBatch:
        """Begin the batch again on another device."""
        return PhraseBatch.of(self.phrases, self.table.to(device), self.memory.on(device))

    def of_memory(self, memory: PhraseMemory) -> PhraseBatch:
        """Return the same phrases as another memory weighs them."""
        return replace(self, prior=memory.votes.prior(self.table), memory=memory)

    def votes(self, proposals: Proposals, consent: Consent, sentences: Tensor) -> Tensor:
        """Compute what each candidate phrase gave to the token it proposed, fp32 [N, A]."""
        votes: Tensor = self.memory.votes(proposals, consent, self.prior.index_select(0, sentences))
        return votes


def _warn_of_nothing(candidates: PhraseCandidates, phrases: list[SentencePhrases]) -> None:
    """Warn once, about the first batch, that nothing was retrieved."""
    if not candidates.checked and not any(len(sentence.candidates.lengths) for sentence in phrases):
        logger.warning(
            "no phrase was retrieved for the first %d sentences: they are translated without the phrase datastore; lower "
            "--phrase-min-similarity, or see with fairseq-ccpr retrieve what is found", len(phrases),
        )  # fmt: skip
    candidates.checked = True


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable the cyclic garbage collector: allocation bursts trigger it, and there is nothing to free.

    A full collection walks all that is loaded, models and libraries too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
