"""The phrase memory: retrieval once per sentence, a vote for the next token each step."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fairseq_ccpr.decoding.forced import GivenText
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory, LearnedPhrases
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Step, Variant
from fairseq_ccpr.decoding.mixture import LookedUp, ModelEvidence, ModelView, Vote, distrust
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates, RememberedCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_votes import Consent, PhraseState, PhraseTable, PhraseVotes, Proposals
from fairseq_ccpr.settings import signed
from fairseq_ccpr.timing import FINDING, PHRASES, phase

logger = logging.getLogger(__name__)

PHRASE_FEATURES = (
    "mass",
    "going",
    "highest p_phr",
    "model of phrases' favourite",
    "phrases' agreement",
    "best similarity",
)
# What tuning compares.
PHRASE_LAMBDAS = (0.2, 0.4, 0.6, 0.8, 1.0)
HALF = 0.5  # of the weight
CONSENT = 3.0  # nats, the bound on votes
# BLEU or chrF given up for that bound: without it translations say what the source does not.
CONSENT_LOSS = 0.3


class PhraseEvidence(NamedTuple):
    """What the phrase memory saw at N tokens."""

    values: Tensor  # int64 [N, A]
    log_probs: Tensor  # fp32 [N, A], log p_phr
    model: Tensor  # fp32 [N, A], log p_NMT of `values`
    mass: Tensor  # fp32 [N], Z
    going: Tensor  # fp32 [N], the part of Z of phrases that have begun
    similarity: Tensor  # fp32 [N], the highest of the sentence

    def features(self, model: ModelEvidence) -> Tensor:
        """Compute `PHRASE_FEATURES`, fp32 [N, F]."""
        highest, place = self.log_probs.max(dim=1, keepdim=True)
        some = self.mass.unsqueeze(1) > 0
        agreement = (self.values.gather(1, place) == model.favourite.unsqueeze(1)) & some
        columns = self.mass, self.going, self.similarity
        mass, going, similarity = (column.unsqueeze(1) for column in columns)
        below = distrust(model, self.model.gather(1, place), some)
        return torch.cat([mass, going, highest.exp() * some, below, agreement, similarity], dim=1)


@dataclass(frozen=True)
class PhraseMemory(Memory):
    """A phrase datastore alongside the decoder.

    Args:
        learned: what is learned alongside the datastore, live or as a snapshot; None: nothing.
    """

    name = "phrases"
    features = PHRASE_FEATURES
    part = "phrase"
    tuned = ("lambda_", "consent")

    candidates: PhraseCandidates
    settings: PhraseSettings
    votes: PhraseVotes
    device: torch.device
    learned: LearnedMemory | LearnedEntries | None = None

    def now(self, moment: dict[int, Any]) -> PhraseMemory:
        """Return a snapshot of the memory, unaffected by later learning and forgetting."""
        if self.learned is None:
            return self
        return replace(self, learned=moment.setdefault(id(self.learned), self.learned.entries))

    @property
    def _learned(self) -> LearnedPhrases | None:
        phrases = self.learned.entries.phrases if self.learned is not None else None
        return (
            phrases if phrases is not None and (phrases.pairs or phrases.moved or len(phrases.gone)) else None
        )

    @phase(FINDING, whole=True)
    def begin(self, sources: Tensor) -> PhraseBatch:
        """Begin a batch of sentences, int64 [B, S]. What is learned meanwhile counts for the next one."""
        # Copied before a GPU has anything else to do, which a copy would wait for.
        return PhraseBatch(self, sources.cpu(), self._learned)

    def remembering(self) -> PhraseMemory:
        """Return the memory as it is now, which never retrieves twice for the same batch."""
        return replace(self.now({}), candidates=RememberedCandidates(self.candidates))

    def on(self, device: torch.device) -> PhraseMemory:
        """Return a memory that computes votes on another device."""
        return replace(self, votes=copy.deepcopy(self.votes).to(device), device=device)

    def weigh(self, proposals: Proposals, model: ModelView, prior: Tensor) -> Tensor:
        """Compute what each phrase gives to the token it proposes, fp32 [N, A], with a row of `prior` for each of N tokens.

        What the model rules out gets nothing: else beam search slides into sentences of the text that have
        nothing to do with the source, since a phrase that has begun wrongly makes its next token likely again
        and again.
        """
        consent = Consent.of(model)
        ruled_out = consent.ratios < -self.settings.consent
        votes: Tensor = self.votes(proposals, consent, prior.masked_fill(ruled_out, float("-inf")))
        return votes

    def trained(self) -> dict[str, Tensor]:
        """Return the weights of the votes."""
        return dict(self.votes.state_dict())

    def signature(self) -> str:
        """Return everything that decides what is retrieved and how it counts, as one line to print with results."""
        counting = {**signed(self.settings), "votes": self.votes.digest()}
        return self.candidates.retriever.signature(counting, self._learned)

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

    def training(self, records: Sequence[PhraseRecord]) -> tuple[PhraseMemory, PhraseVotes]:
        """Begin with the votes as they are."""
        votes = copy.deepcopy(self.votes).requires_grad_(True)
        return replace(self, votes=votes), votes

    def variants(self, options: Any) -> list[Variant]:
        """Weigh less, since after references a phrase is right more often than after hypotheses; bound the votes."""
        less = Variant(partial(PhraseMemory.scaled, factor=HALF))
        bound = Variant(partial(PhraseMemory.changed, consent=CONSENT), loss=CONSENT_LOSS)
        return [less, bound] if options.phrase_consent is None else [less]


@dataclass
class PhraseBatch(MemoryBatch):
    """The phrases of a batch of sentences, and how far its hypotheses are in them."""

    memory: PhraseMemory
    sources: Tensor  # int64 [B, S], on the CPU
    learned: LearnedPhrases | None = None
    texts: Sequence[str] | None = None  # as they were given, where they are known
    answer: Callable[[], list[SentencePhrases]] | None = None  # of a search that was started
    phrases: list[SentencePhrases] = field(init=False)
    table: PhraseTable = field(init=False)
    state: PhraseState = field(init=False)
    prior: Tensor = field(init=False)  # fp32 [B, A], see `PhraseVotes.prior`
    similarity: Tensor = field(init=False)  # fp32 [B], the highest of each sentence

    def begun(self, texts: Sequence[str] | None) -> None:
        """Take the texts, and let remote indexes search while the sources are encoded.

        A local one works when it is waited for, while a GPU encodes.
        """
        self.texts = texts
        if self.memory.candidates.remote:
            self.answer = self.start()

    def encoded(self) -> None:
        """Wait for the phrases: one empty hypothesis a sentence."""
        candidates = self.memory.candidates
        with phase(FINDING, whole=True), _without_collections():
            phrases = (self.answer or self.start())()
            table = candidates.table(phrases)
        found = candidates.checked or any(len(sentence.candidates.lengths) for sentence in phrases)
        if not found and not candidates.retriever.remote.skipped:  # which was said
            logger.warning(
                "no phrase was retrieved for the first %d sentences: they are translated without the phrase datastore; lower "
                "--phrase-min-similarity, or see with fairseq-ccpr retrieve what is found",
                len(phrases),
            )
        candidates.checked = True
        self.lay_out(phrases, table.to(self.memory.device))

    def start(self) -> Callable[[], list[SentencePhrases]]:
        """Start retrieval; returns a function that waits."""
        return self.memory.candidates.start(self.sources, self.learned, self.texts)

    def lay_out(self, phrases: list[SentencePhrases], table: PhraseTable) -> None:
        """Begin with these phrases, a table on the memory's device: one empty hypothesis a sentence."""
        self.phrases, self.table = phrases, table
        self.state = PhraseState(table, torch.arange(len(table.lengths), device=table.lengths.device))
        self.prior = self.memory.votes.prior(table)
        self.similarity = (table.scores * (table.lengths > 0)).amax(dim=1)

    @phase(PHRASES, whole=True)
    def reorder(self, order: Tensor) -> Self:
        """Follow the beam; hypotheses change places within their sentence only, unless sentences have ended."""
        other = copy.copy(self)
        other.state = self.state.reorder(order, len(order) == len(self.state.rows))
        return other

    @phase(PHRASES, whole=True)
    def vote(self, step: Step) -> Vote:
        """Vote for the next token of each hypothesis."""
        if step.tokens.size(1) > 1:
            self.state.advance(step.tokens[:, -1])
        proposals, prior = self.state.merged(self.prior, self.memory.votes.covered_factor)
        view = step.model.view(proposals.values)
        votes = self.memory.weigh(proposals, view, prior)
        return self.merged(proposals, votes, self.state.rows, view, step.trusted)

    def merged(
        self, proposals: Proposals, votes: Tensor, sentences: Tensor, model: ModelView, trusted: bool
    ) -> Vote:
        """Merge the votes of phrases at N tokens of sentences of the batch, fp32 [N, A] and int64 [N], to one vote."""
        values, log_probs, mass, going = proposals.continuation(votes, self.table.most_distinct)
        evidence = None
        if trusted:
            similarity = self.similarity.index_select(0, sentences)
            evidence = PhraseEvidence(values, log_probs, model.neighbours, mass, going, similarity)
        return Vote(values, log_probs, self.memory.settings.lambda_ * mass, evidence)

    def force(self, text: GivenText) -> PhraseRecord:
        """Collect the proposals at the tokens of given targets."""
        state = PhraseState(self.table, torch.arange(len(text.previous), device=text.previous.device))
        steps = []
        for position in range(text.previous.size(1)):
            if position:
                state.advance(text.previous[:, position])
            steps.append(state.proposals())
        proposals = Proposals(*(torch.stack(parts, dim=1)[text.real] for parts in zip(*steps)))
        view = text.model.view(proposals.values)
        looked_up = LookedUp(view.neighbours, view.best, view.favourite)
        return PhraseRecord(self, proposals, text.real.nonzero()[:, 0], looked_up)

    def votes(self, record: PhraseRecord) -> Tensor:
        """Compute what each phrase gives to the token it proposed, fp32 [N, A]."""
        prior = self.prior.index_select(0, record.sentences)
        return self.memory.weigh(record.proposals, record.model, prior)

    def weighed_by(self, memory: PhraseMemory) -> PhraseBatch:
        """Return the same phrases as another memory weighs them, on its device."""
        other, same = copy.copy(self), memory.device == self.table.lengths.device
        other.memory = memory
        other.lay_out(self.phrases, self.table if same else self.table.to(memory.device))
        return other


class PhraseRecord(NamedTuple):
    """What phrases proposed at N tokens of given targets; the A candidates are those of the token's sentence."""

    batch: PhraseBatch
    proposals: Proposals  # [N, A]
    sentences: Tensor  # int64 [N], of each token in the batch
    model: LookedUp  # what the model says of the proposals

    def vote(self, memory: PhraseMemory, trusted: bool) -> Vote:
        """Vote as the decoder does with this memory."""
        batch = self.batch.weighed_by(memory)
        return batch.merged(self.proposals, batch.votes(self), self.sentences, self.model, trusted)

    def votes(self, memory: PhraseMemory) -> Tensor:
        """Compute what each candidate phrase gives to the token it proposes, fp32 [N, A]."""
        return self.batch.weighed_by(memory).votes(self)

    def select(self, rows: Tensor) -> PhraseRecord:
        """Select some of the tokens."""
        return self._apply(lambda part: part[rows])

    def cpu(self) -> PhraseRecord:
        """Move to the CPU."""
        batch = self.batch.weighed_by(self.batch.memory.on(torch.device("cpu")))
        return self._replace(batch=batch)._apply(lambda part: part.cpu())

    def _apply(self, change: Callable[[Tensor], Tensor]) -> PhraseRecord:
        proposals, model = Proposals(*map(change, self.proposals)), LookedUp(*map(change, self.model))
        return PhraseRecord(self.batch, proposals, change(self.sentences), model)


@contextmanager
def _without_collections() -> Iterator[None]:
    # Allocation bursts trigger the cyclic garbage collector, which has nothing to free, and walks all that is
    # loaded.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
