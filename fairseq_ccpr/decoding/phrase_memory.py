"""The phrase memory: retrieval once per sentence, a vote for the next token each step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fairseq_ccpr.decoding.forced import GivenText, Record
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory, LearnedPhrases
from fairseq_ccpr.decoding.memory import Begun, Memory, MemoryBatch, Snapshot, Step, Variant
from fairseq_ccpr.decoding.mixture import (
    LookedUp,
    ModelEvidence,
    ModelView,
    NamedColumns,
    Vote,
    distrust,
    joined,
    names_in,
)
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import (
    CandidateSource,
    PhraseCandidates,
    RememberedCandidates,
    SentencePhrases,
    nothing_for,
)
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever
from fairseq_ccpr.decoding.phrase_votes import (
    Consent,
    PhraseState,
    PhraseTable,
    PhraseVotes,
    Proposals,
    looked_at,
)
from fairseq_ccpr.settings import signed
from fairseq_ccpr.timing import FINDING, PHRASES, phase

# What tuning compares.
PHRASE_LAMBDAS = (0.2, 0.4, 0.6, 0.8, 1.0)
HALF = 0.5  # of the weight
CONSENT = 3.0  # nats, the bound on votes


class PhraseEvidence(NamedTuple):
    """What the phrase memory saw at N tokens."""

    values: Tensor  # int64 [N, A]
    log_probs: Tensor  # fp32 [N, A], log p_phr
    model: Tensor  # fp32 [N, A], log p_NMT of `values`
    mass: Tensor  # fp32 [N], Z
    going: Tensor  # fp32 [N], the part of Z of phrases that have begun
    similarity: Tensor  # fp32 [N], the highest of the sentence

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Name the features."""
        one, many = torch.zeros(1), torch.zeros(1, 1)
        return names_in(cls(many.long(), many, many, one, one, one).columns(ModelEvidence(one, one.long())))

    def features(self, model: ModelEvidence) -> Tensor:
        return joined(self.columns(model))

    def columns(self, model: ModelEvidence) -> NamedColumns:
        """Compute what trust looks at; a feature of phrases is a line here, and nothing elsewhere."""
        highest, place = self.log_probs.max(dim=1, keepdim=True)
        some = self.mass.unsqueeze(1) > 0
        agreement = (self.values.gather(1, place) == model.favourite.unsqueeze(1)) & some
        return {
            ("mass",): self.mass.unsqueeze(1),
            ("going",): self.going.unsqueeze(1),
            ("highest p_phr",): highest.exp() * some,
            ("model of phrases' favourite",): distrust(model, self.model.gather(1, place), some),
            ("phrases' agreement",): agreement,
            ("best similarity",): self.similarity.unsqueeze(1),
        }


@dataclass(frozen=True)
class PhraseMemory(Memory):
    """A phrase datastore alongside the decoder.

    Args:
        learned: what is learned alongside the datastore, live or as a snapshot; None: nothing.
    """

    name = "phrases"
    features = PhraseEvidence.names()
    part = "phrase"
    tuned = ("lambda_", "consent")

    candidates: CandidateSource
    settings: PhraseSettings
    votes: PhraseVotes
    device: torch.device
    learned: LearnedMemory | LearnedEntries | None = None

    @phase(FINDING, whole=True)
    def begin(self, sources: Tensor, snapshot: Snapshot) -> Begun:
        """Begin a batch of sentences, int64 [B, S].

        Remote indexes search while the sources are encoded. A local one works when it is waited for, while a
        GPU encodes.
        """
        attentive = self.votes.attentive
        if not self.settings.lambda_:
            return Begun(lambda: self._laid_out(nothing_for(len(sources)), attentive))
        # Copied and asked before a GPU has anything else to do, which that would wait for.
        start = partial(self.candidates.start, sources.cpu(), _phrases(snapshot.learned), snapshot.texts)
        answer = start() if self.candidates.remote else lambda: start()()
        return Begun(lambda: self._lay_out(answer, attentive))

    def _lay_out(self, answer: Callable[[], list[SentencePhrases]], attentive: bool) -> PhraseBatch:
        with phase(FINDING, whole=True), _without_collections():
            phrases = answer()
            batch = self._laid_out(phrases, attentive)
        self.candidates.check(phrases)
        return batch

    def _laid_out(self, phrases: list[SentencePhrases], attentive: bool) -> PhraseBatch:
        return PhraseBatch(self, phrases, self.candidates.table(phrases).to(self.device), attentive)

    @property
    def retriever(self) -> PhraseRetriever:
        """What finds the phrases in a datastore; terms of a glossary have none."""
        assert isinstance(self.candidates, PhraseCandidates)
        return self.candidates.retriever

    def remembering(self) -> PhraseMemory:
        """Return the memory as it is now, which never retrieves twice for the same batch."""
        learned = self.learned.entries if self.learned is not None else None
        assert isinstance(self.candidates, PhraseCandidates)
        return replace(self, learned=learned, candidates=RememberedCandidates(self.candidates))

    def on(self, device: torch.device) -> PhraseMemory:
        return replace(self, votes=copy.deepcopy(self.votes).to(device), device=device)

    def weigh(self, proposals: Proposals, model: ModelView, prior: Tensor) -> Tensor:
        """Compute what each phrase gives to the token it proposes, fp32 [N, A], by `prior` [N, A].

        What the model rules out gets nothing: else beam search slides into sentences of the text that have
        nothing to do with the source, since a phrase that has begun wrongly makes its next token likely again
        and again.
        """
        consent = Consent.of(model)
        ruled_out = consent.ratios < -self.settings.consent
        votes: Tensor = self.votes(proposals, consent, prior.masked_fill(ruled_out, float("-inf")))
        return votes

    def trained(self) -> dict[str, Tensor]:
        return dict(self.votes.state_dict())

    def signature(self) -> str:
        counting = {**signed(self.settings), "votes": self.votes.digest()}
        learned = self.learned.entries if self.learned is not None else None
        return self.retriever.signature(counting, _phrases(learned))

    def widest(self) -> PhraseMemory:
        return self.changed(lambda_=1.0)

    def kind(self) -> str:
        return "lambda of phrases"

    def grid(
        self, options: Any, records: Sequence[PhraseRecord], targets: Tensor
    ) -> Iterator[tuple[PhraseSettings, Tensor, Tensor]]:
        full = self.changed(lambda_=1.0)
        votes = [record.vote(full, False) for record in records]
        parts = targets.split([len(vote.weight) for vote in votes])
        said = torch.cat([vote.log_prob(part) for vote, part in zip(votes, parts)])
        weight = torch.cat([vote.weight for vote in votes])
        for lambda_ in PHRASE_LAMBDAS:
            yield replace(self.settings, lambda_=lambda_), said, lambda_ * weight

    def trainable(self, records: Sequence[PhraseRecord]) -> tuple[PhraseMemory, PhraseVotes]:
        """Begin with the votes as they are."""
        votes = copy.deepcopy(self.votes).requires_grad_(True)
        return replace(self, votes=votes), votes

    def variants(self, options: Any) -> list[Variant]:
        """Weigh less, since after references a phrase is right more often than after hypotheses; bound the votes."""
        less = Variant(partial(PhraseMemory.scaled, factor=HALF))
        bound = Variant(partial(PhraseMemory.changed, consent=CONSENT), final=True)
        return [less, bound] if options.phrases_consent is None else [less]


@dataclass
class PhraseBatch(MemoryBatch):
    """The phrases of a batch of sentences, and how far its hypotheses are in them."""

    memory: PhraseMemory
    phrases: list[SentencePhrases]
    table: PhraseTable  # on the memory's device
    attentive: bool = False  # whether the attention counts in beam search

    def __post_init__(self) -> None:
        table = self.table
        self.state = PhraseState(table, torch.arange(len(table.lengths), device=table.lengths.device))
        self.prior = self.memory.votes.prior(table)  # fp32 [B, A]
        # fp32 [B], the highest of each sentence
        self.similarity = (table.scores * (table.lengths > 0)).amax(dim=1)

    @phase(PHRASES, whole=True)
    def reorder(self, order: Tensor) -> Self:
        other = copy.copy(self)
        other.state = self.state.reorder(order, len(order) == len(self.state.rows))
        return other

    @phase(PHRASES, whole=True)
    def vote(self, step: Step) -> Vote:
        if step.tokens.size(1) > 1:
            self.state.advance(step.tokens[:, -1])
        attention = step.attention if self.attentive else None
        proposals, prior = self.state.merged(self.prior, self.memory.votes, self.state.looked(attention))
        view = step.model.view(proposals.values)
        votes = self.memory.weigh(proposals, view, prior)
        return self.merged(proposals, votes, self.state.rows, view, step.trusted)

    def merged(
        self, proposals: Proposals, votes: Tensor, sentences: Tensor, model: ModelView, trusted: bool
    ) -> Vote:
        """Merge the votes of phrases, fp32 [N, A], at tokens of these sentences, int64 [N], to one vote."""
        values, log_probs, mass, going = proposals.continuation(votes, self.table.most_distinct)
        evidence = None
        if trusted:
            similarity = self.similarity.index_select(0, sentences)
            evidence = PhraseEvidence(values, log_probs, model.neighbours, mass, going, similarity)
        return Vote(values, log_probs, self.memory.settings.lambda_ * mass, evidence)

    def force(self, text: GivenText) -> PhraseRecord:
        state = PhraseState(self.table, torch.arange(len(text.previous), device=text.previous.device))
        steps = []
        for position in range(text.previous.size(1)):
            if position:
                state.advance(text.previous[:, position])
            steps.append(state.proposals())
        *each, _ = zip(*steps)
        proposals = Proposals(*(torch.stack(parts, dim=1)[text.real] for parts in each))
        looked = looked_at(self.table.covering, text.attention)  # [B, T, Q]
        if looked is not None:
            queries = self.table.queries.index_select(0, text.real.nonzero()[:, 0])
            proposals = proposals._replace(looked=looked[text.real].gather(1, queries))
        view = text.model.view(proposals.values)
        looked_up = LookedUp(view.neighbours, view.best, view.favourite)
        return PhraseRecord(self, proposals, text.real.nonzero()[:, 0], looked_up)

    def votes(self, record: PhraseRecord) -> Tensor:
        prior = self.prior.index_select(0, record.sentences)
        return self.memory.weigh(record.proposals, record.model, prior)

    def weighed_by(self, memory: PhraseMemory) -> PhraseBatch:
        """Return the same phrases as another memory weighs them, on its device."""
        same = memory.device == self.table.lengths.device
        return PhraseBatch(memory, self.phrases, self.table if same else self.table.to(memory.device))


@dataclass
class PhraseRecord(Record):
    """What the A phrases of a token's sentence proposed, at N tokens of given targets."""

    batch: PhraseBatch
    proposals: Proposals  # [N, A]
    sentences: Tensor  # int64 [N], of each token in the batch
    model: LookedUp  # what the model says of the proposals

    def vote(self, memory: PhraseMemory, trusted: bool) -> Vote:
        batch = self.batch.weighed_by(memory)
        return batch.merged(self.proposals, batch.votes(self), self.sentences, self.model, trusted)

    def votes(self, memory: PhraseMemory) -> Tensor:
        return self.batch.weighed_by(memory).votes(self)

    def cpu(self) -> Self:
        batch = self.batch.weighed_by(self.batch.memory.on(torch.device("cpu")))
        return replace(super().cpu(), batch=batch)


def _phrases(learned: LearnedEntries | None) -> LearnedPhrases | None:
    phrases = learned.phrases if learned is not None else None
    counts = phrases is not None and (phrases.pairs or phrases.moved or len(phrases.gone))
    return phrases if counts else None


@contextmanager
def _without_collections() -> Iterator[None]:
    # Allocation bursts trigger the cyclic garbage collector, which has nothing to free, and walks all that is
    # loaded.
    if enabled := gc.isenabled():  # or another thread enables it again
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
