"""The phrase memory: retrieval once a sentence, a vote for the next token each step."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fairseq_ccpr.decoding.interpolation import Vote
from fairseq_ccpr.decoding.memory import ModelView
from fairseq_ccpr.decoding.options import ATTENTION_GATE, PhraseSettings
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates, RememberedCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_continuation import PhraseState, PhraseTable, Proposals, Weights
from fairseq_ccpr.decoding.token_memory import DistributionView
from fairseq_ccpr.decoding.trust_features import PhraseEvidence
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.settings import signed
from fairseq_ccpr.timing import FINDING, PHRASES, phase

logger = logging.getLogger(__name__)


def phrase_weight(mass: Tensor, settings: PhraseSettings) -> Tensor:
    """Compute lambda_phr* = lambda_p min(1, Z), fp32 [N], the weight of the phrase memory at N tokens; 0 with rewards.

    Args:
        mass: Z, fp32 [N]; see `Continuation`.
    """
    return torch.zeros_like(mass) if settings.reward else settings.lambda_ * mass.clamp_max(1.0)


@dataclass(frozen=True)
class PhraseMemory:
    """A phrase datastore beside the decoder.

    Args:
        candidates: phrases of source sentences.
        settings: how they count.
        device: of the translation model.
        trusted: whether learned trust decides over the weight, which then wants evidence.
    """

    candidates: PhraseCandidates
    settings: PhraseSettings
    device: torch.device
    trusted: bool = False

    @phase(FINDING, whole=True)
    def start(self, sources: Tensor) -> Callable[[], PhraseBatch]:
        """Start retrieval for the sentences of a batch, int64 [B, S]; returns a function that waits for the result.

        A remote index searches meanwhile; a local one works when it is waited for, while a GPU encodes.
        """
        begin = partial(self.candidates.start, sources, self.settings.k)
        wait = begin() if self.candidates.retriever.index.remote else lambda: begin()()
        return lambda: self._batch(wait, sources.size(1))

    @phase(FINDING, whole=True)
    def _batch(self, answer: Callable[[], list[SentencePhrases]], source_length: int) -> PhraseBatch:
        with _without_collections():
            phrases = answer()
            table = self.candidates.table(phrases, source_length)
        _warn_of_nothing(self.candidates, phrases)
        return PhraseBatch.of(phrases, table.to(self.device), self.settings, self.trusted)

    def remembering(self, k: int) -> PhraseMemory:
        """Return a memory that retrieves k phrases for each source phrase, and never twice for the same batch."""
        return replace(self, candidates=RememberedCandidates(self.candidates, k))

    def signature(self) -> str:
        """Name all that decides what is retrieved and how it counts, in one line to be printed with results."""
        return self.candidates.retriever.signature(signed(self.settings))


@dataclass
class PhraseBatch:
    """The phrases of a batch of sentences, and how far its hypotheses are in them."""

    phrases: list[SentencePhrases]
    table: PhraseTable
    weights: Weights
    settings: PhraseSettings
    state: PhraseState
    trusted: bool = False

    @classmethod
    def of(
        cls, phrases: list[SentencePhrases], table: PhraseTable, settings: PhraseSettings, trusted: bool = False
    ) -> PhraseBatch:
        """Begin a batch: one empty hypothesis a sentence."""
        weights = table.weights(settings.k, settings.temperature, settings.min_similarity)
        rows = torch.arange(len(table.lengths), device=table.lengths.device)
        return cls(phrases, table, weights, settings, PhraseState(table, rows, settings.coverage), trusted)

    def listening(self) -> AbstractContextManager[None]:
        """Need nothing of the model's layers."""
        return nullcontext()

    @phase(PHRASES, whole=True)
    def reorder(self, order: Tensor) -> PhraseBatch:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was."""
        return replace(self, state=self.state.reorder(order))

    @phase(PHRASES, whole=True)
    def vote(self, tokens: Tensor, log_probs: Tensor, attention: Tensor | None) -> Vote:
        """Vote for the next token of each hypothesis.

        Raises:
            ConfigurationError: the gate is attention, but the model tells none.
        """
        if tokens.size(1) > 1:
            self.state.advance(tokens[:, -1])
        proposals = self._proposals(self.state, log_probs, attention)
        return self.weigh(proposals, self.state.rows, DistributionView(log_probs, proposals.values))

    def force_proposals(
        self, previous: Tensor, log_probs: Tensor, attention: Tensor | None, real: Tensor
    ) -> tuple[Proposals, Tensor]:
        """Collect the proposals at N tokens of given targets, and the sentences int64 [N] they are of.

        Args:
            previous: int64 [B, T], the decoder's input: y_<t, with the end of the sentence in front.
            log_probs: fp32 [B, T, V].
            attention: fp32 [B, T, S], or None.
            real: bool [B, T], which positions are wanted.
        """
        state = PhraseState(self.table, torch.arange(len(previous), device=previous.device), self.settings.coverage)
        steps = []
        for position in range(previous.size(1)):
            if position:
                state.advance(previous[:, position])
            at = attention[:, position] if attention is not None else None
            steps.append(self._proposals(state, log_probs[:, position], at))
        return Proposals(*(torch.stack(parts, dim=1)[real] for parts in zip(*steps))), real.nonzero()[:, 0]

    def weigh(self, proposals: Proposals, sentences: Tensor, model: ModelView) -> Vote:
        """Vote at N tokens.

        Args:
            sentences: int64 [N], which one of the batch each is of.
            model: what it says of the proposals' tokens.
        """
        settings = self.settings
        values, log_probs, mass, going = proposals.continuation(
            self.table, sentences, self.weights, settings.enter, settings.k
        )
        rewards = settings.reward * mass.unsqueeze(1) * log_probs.exp() if settings.reward else None
        evidence = None
        if self.trusted:
            similarity = self.weights.confidence.index_select(0, sentences)
            evidence = PhraseEvidence(values, log_probs, model.neighbours, mass, going, similarity)
        return Vote(values, log_probs, phrase_weight(mass, settings), rewards, evidence)

    def with_settings(self, settings: PhraseSettings, trusted: bool) -> PhraseBatch:
        """Return the same phrases weighed by other settings."""
        weights = self.table.weights(settings.k, settings.temperature, settings.min_similarity)
        return replace(self, weights=weights, settings=settings, trusted=trusted)

    def votes(self, proposals: Proposals, sentences: Tensor) -> Tensor:
        """Compute what each candidate phrase gave to the token it proposed, fp32 [N, A]."""
        return proposals.votes(self.table, sentences, self.weights, self.settings.enter, self.settings.k)

    def _proposals(self, state: PhraseState, log_probs: Tensor, attention: Tensor | None) -> Proposals:
        by_attention = self.settings.gate == ATTENTION_GATE
        if by_attention and attention is None:
            raise ConfigurationError("--phrase-gate attention: the model gives no attention; use --phrase-gate consent")
        return state.proposals(log_probs, attention if by_attention else None)


def _warn_of_nothing(candidates: PhraseCandidates, phrases: list[SentencePhrases]) -> None:
    """Say once, of the first batch, that nothing was retrieved."""
    if not candidates.checked and not any(len(sentence.candidates.lengths) for sentence in phrases):
        logger.warning(
            "no phrase was retrieved for the first %d sentences: they are translated as without the phrase memory; lower "
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
