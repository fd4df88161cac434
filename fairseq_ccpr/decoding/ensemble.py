"""The model (or ensemble) that fairseq's sequence generator sees: its probabilities mixed with retrieval.

fairseq's generators ask an `EnsembleModel` for log p(y_t | x, y_<t) and do all else themselves: beam, sampling and
diverse search, prefixes, length penalties, n-gram blocking. Mixing inside the ensemble leaves them as they are.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from fairseq.sequence_generator import EnsembleModelWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from fairseq_ccpr.decoding.distribution import Distribution
from fairseq_ccpr.decoding.glossary_memory import GlossaryBatch, GlossaryMemory
from fairseq_ccpr.decoding.interpolation import Vote, interpolate_, limit_weights, merge_equal
from fairseq_ccpr.decoding.memory import Batch, Neighbours
from fairseq_ccpr.decoding.options import MixtureSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseBatch, PhraseMemory
from fairseq_ccpr.decoding.phrase_votes import Consent, Proposals
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.trust import Trust, TrustStep
from fairseq_ccpr.decoding.trust_features import ModelEvidence, PhraseEvidence, TokenEvidence
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.translation_states import EncodedSources, TranslationStates
from fairseq_ccpr.settings import signed
from fairseq_ccpr.timing import DECODER, MERGE, phase


class EncodedBatch(list[Any]):
    """fairseq's encoder outputs, one a model, with what the memories retrieved for the batch.

    It travels where fairseq passes encoder outputs, from step to step of one beam search: so generators and threads
    that share an ensemble share no mutable state.

    Args:
        hypotheses: how many there are in the beams; None before there are any.
    """

    def __init__(
        self,
        outputs: list[Any],
        tokens: Batch | None,
        phrases: PhraseBatch | None,
        glossary: GlossaryBatch | None = None,
        hypotheses: int | None = None,
    ) -> None:
        super().__init__(outputs)
        self.tokens, self.phrases, self.glossary, self.hypotheses = tokens, phrases, glossary, hypotheses


@dataclass
class Forced:
    """What models and memories say at the N real tokens of given targets of B sentences."""

    real: Tensor  # bool [B, T], see `RetrievalEnsemble.real_tokens`
    log_probs: Tensor  # fp32 [B, T, V], log p_NMT
    attention: Tensor | None  # [B, T, S], the models' mean
    neighbours: Neighbours | None = None  # [N, k]
    token_vote: Vote | None = None  # [N, k]
    phrases: PhraseBatch | None = None
    proposals: tuple[Proposals, Consent, Tensor] | None = None  # [N, A] each, and the sentence of each token
    phrase_vote: Vote | None = None  # [N, A]
    votes: list[Vote] = field(
        default_factory=list
    )  # of the memories that there are, with the weights they have in the end


def step_of(model: ModelEvidence, token_vote: Vote | None, phrase_vote: Vote | None, votes: list[Vote]) -> TrustStep:
    """Collect what trust decides by: the evidence of model and memories, and the weights of their votes."""
    of_tokens = token_vote.evidence if token_vote is not None else None
    of_phrases = phrase_vote.evidence if phrase_vote is not None else None
    weights = torch.stack([vote.weight for vote in votes], dim=1)
    return TrustStep(model, cast("TokenEvidence | None", of_tokens), cast("PhraseEvidence | None", of_phrases), weights)


class RetrievalEnsemble(EnsembleModelWithAlignment):
    """An ensemble whose distribution is interpolated with those of a token and a phrase memory, or of one of them.

    p = (1 - Lambda) p_NMT + lambda_tok p_tok + lambda_phr p_phr, with Lambda the sum of both weights.

    Args:
        models: fairseq models; their mean is p_NMT.
        tokens: the token memory, where there is one.
        phrases: the phrase memory, where there is one.
        pad: id of the padding token.
        settings: Lambda_max, see `limit_weights`.
        trust: decides over the weights, where something was learned.
    """

    def __init__(
        self,
        models: list[Any],
        tokens: TokenMemory | None,
        phrases: PhraseMemory | None,
        pad: int,
        settings: MixtureSettings,
        trust: Trust | None = None,
    ) -> None:
        super().__init__(models)
        self.pad, self.settings, self.trust = pad, settings, trust
        self.temperature = 1.0  # of beam search, for what is force-decoded after it
        self.glossary: GlossaryMemory | None = None  # mixed with all else: its terms are wanted whatever is retrieved
        self.forced = 0  # target tokens at the beginning that are language tags; nothing is retrieved for them
        self.end: int | None = None  # the token that target sentences end with; </s> where None
        self.tokens = replace(tokens, trusted=trust is not None) if tokens is not None else None
        self.phrases = replace(phrases, trusted=trust is not None) if phrases is not None else None

    def with_memories(
        self, tokens: TokenMemory | None, phrases: PhraseMemory | None, trust: Trust | None
    ) -> RetrievalEnsemble:
        """Return the same models with other memories, and trust in them."""
        other = RetrievalEnsemble(list(self.models), tokens, phrases, self.pad, self.settings, trust)
        other.temperature, other.forced, other.end = self.temperature, self.forced, self.end
        other.glossary = self.glossary
        return other

    def now(self) -> RetrievalEnsemble:
        """Return a snapshot with the memories as they are now, unaffected by later learning."""
        return self.with_memories(*self._memories_now(), self.trust)

    def _memories_now(self) -> tuple[TokenMemory | None, PhraseMemory | None]:
        """Return the memories as they are at one moment, so that both know the same pairs."""
        if self.tokens is None or self.tokens.learnt is None:
            return self.tokens, self.phrases
        entries = self.tokens.learnt.entries
        return self.tokens.now(entries), self.phrases.now(entries) if self.phrases is not None else None

    def forward_encoder(self, net_input: dict[str, Tensor]) -> EncodedBatch:
        """Encode the sources, and retrieve the phrases of their sentences.

        Remote searches start before encoding; local ones run while a GPU encodes. A query head waits for the encoder, whose
        states it reads.
        """
        sources = net_input["src_tokens"]
        if self.phrases is not None or self.glossary is not None:
            sources = sources.cpu()  # before the GPU has anything else to do, which a copy would wait for
        tokens, phrases = self._memories_now()
        neighbours = tokens.start(sources) if tokens is not None else None
        reader = phrases.reads if phrases is not None else None
        candidates = phrases.start(sources) if phrases is not None and reader is None else None
        terms = self.glossary.start(sources) if self.glossary is not None else None
        outputs, states = self._encode(net_input, reader)
        if phrases is not None and reader is not None:
            candidates = phrases.start(
                sources, EncodedSources(sources, states, self.pad) if states is not None else None
            )
        return EncodedBatch(
            outputs,
            neighbours() if neighbours is not None else None,
            candidates() if candidates is not None else None,
            terms() if terms is not None else None,
        )

    def _encode(
        self, net_input: dict[str, Tensor], reader: TranslationStates | None
    ) -> tuple[list[Any], Tensor | None]:
        """Encode the sources with each model; returns the outputs, and the states that a query head reads of one of them."""
        own = next((at for at, model in enumerate(self.models) if reader is not None and reader.is_of(model)), None)
        if own is None or reader is None:
            return super().forward_encoder(net_input), None
        told = [{**net_input, "return_all_hiddens": True} if at == own else net_input for at in range(len(self.models))]
        outputs = [model.encoder.forward_torchscript(each) for model, each in zip(self.models, told)]
        states = reader.join(outputs[own])
        outputs[own]["encoder_states"] = []  # or fairseq would reorder them with the beam
        return outputs, states

    def reorder_encoder_out(self, encoder_outs: EncodedBatch, new_order: Tensor) -> EncodedBatch:
        """Follow the beam, and the batch as its sentences end.

        Hypotheses change places within their sentence only, and share its encoding: that is copied when sentences have ended.
        """
        same = len(new_order) == encoder_outs.hypotheses
        outputs = list(encoder_outs) if same else super().reorder_encoder_out(encoder_outs, new_order)
        tokens, phrases, terms = encoder_outs.tokens, encoder_outs.phrases, encoder_outs.glossary
        return EncodedBatch(
            outputs,
            tokens.reorder(new_order) if tokens is not None else None,
            phrases.reorder(new_order) if phrases is not None else None,
            terms.reorder(new_order) if terms is not None else None,
            len(new_order),
        )

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: EncodedBatch, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one step: log p [H, V] and the attention.

        1. p_NMT from the models, as without retrieval; memories listen, and the token memory searches as soon as the model
           of its datastore knows the queries: a GPU searches while the models project to the vocabulary;
        2. each memory votes;
        3. interpolate, and then with what the glossary wants.
        """
        batches = encoder_outs.tokens, encoder_outs.phrases
        if tokens.size(1) <= self.forced:
            log_probs, attention = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
            return log_probs.float(), attention
        with ExitStack() as listening:
            for batch in batches:
                if batch is not None:
                    listening.enter_context(batch.listening())
            with phase(DECODER):
                log_probs, attention = super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        log_probs = log_probs.float()
        written = tokens[:, self.forced :]
        model = Distribution(log_probs)
        votes = [batch.vote(written, model) if batch is not None else None for batch in batches]
        log_probs = self.mix(log_probs, self.decided(model, *votes))
        if encoder_outs.glossary is not None:
            log_probs = encoder_outs.glossary.apply(written, log_probs)
        return log_probs, attention

    @phase(MERGE)
    def mix(self, log_probs: Tensor, votes: list[Vote]) -> Tensor:
        """Interpolate log p_NMT [H, V] in place with the memories' votes, as `decided`."""
        return interpolate_(log_probs, *votes) if votes else log_probs

    @phase(MERGE)
    def decided(self, model: Distribution, token_vote: Vote | None, phrase_vote: Vote | None) -> list[Vote]:
        """Return the votes of the memories that there are, with the weights that they have in the end."""
        votes = self.limited(token_vote, phrase_vote)
        if self.trust is None or not votes:
            return votes
        decision = self.trust(step_of(model.likeliest, token_vote, phrase_vote, votes))
        votes = [vote._replace(weight=weight) for vote, weight in zip(votes, decision.weights.unbind(dim=1))]
        if decision.spread is not None:
            votes[0] = votes[0]._replace(log_probs=merge_equal(decision.spread, votes[0].values).log())
        return votes

    def limited(self, token_vote: Vote | None, phrase_vote: Vote | None) -> list[Vote]:
        """Return the votes of the memories that there are, with the weights that the settings give."""
        if phrase_vote is None:
            return [] if token_vote is None else [token_vote]
        alone = token_vote.weight if token_vote is not None else torch.zeros_like(phrase_vote.weight)
        token_weight, weight = limit_weights(alone, phrase_vote.weight, self.settings.lambda_max)
        limited = [token_vote._replace(weight=token_weight)] if token_vote is not None else []
        return [*limited, phrase_vote._replace(weight=weight)]

    def force_decode(self, sample: dict[str, Any], temperature: float | None = None) -> Forced:
        """Collect what models and memories say of every token of given targets, as in beam search after the same prefix.

        Args:
            temperature: of the models' distributions; None: that of beam search.

        Raises:
            ConfigurationError: there is a glossary.
        """
        if self.glossary is not None:
            raise ConfigurationError(
                "--glossary works in beam search alone, which is neither scored nor explained: leave it out"
            )
        log_probs, queries, attention = self.force_decode_models(sample, temperature)
        real = self.real_tokens(sample["target"])
        model = Distribution(log_probs[real])
        forced, (tokens, phrases) = Forced(real, log_probs, attention), self._memories_now()
        if tokens is not None:
            forced.neighbours, course = tokens.force_search(queries[real], tokens.settings.k, model, real)
            _, retrieved = tokens.weighed(forced.neighbours)
            forced.token_vote = tokens.vote(forced.neighbours, retrieved, model.at(forced.neighbours.values), course)
        if phrases is not None:
            forced.phrases = phrases.start(sample["net_input"]["src_tokens"])()
            proposals, sentences = self.force_proposals(forced.phrases, sample)
            view = model.at(proposals.values)
            forced.proposals = proposals, Consent.of(view), sentences
            forced.phrase_vote = forced.phrases.weigh(*forced.proposals, view)
        forced.votes = self.decided(model, forced.token_vote, forced.phrase_vote)
        return forced

    def real_tokens(self, targets: Tensor) -> Tensor:
        """Mark the tokens of targets [B, T] that memories may influence, bool [B, T]: neither padding nor forced tags."""
        real = targets.ne(self.pad)
        real[:, : self.forced] = False
        return real

    def force_proposals(self, phrases: PhraseBatch, sample: dict[str, Any]) -> tuple[Proposals, Tensor]:
        """Collect what phrases propose at the real tokens of given targets; see `PhraseBatch.force_proposals`."""
        after = slice(self.forced, None)
        return phrases.force_proposals(
            sample["net_input"]["prev_output_tokens"][:, after], self.real_tokens(sample["target"])[:, after]
        )

    def force_decode_models(
        self, sample: dict[str, Any], temperature: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Force-decode without retrieval: log p_NMT fp32 [B, T, V], queries [B, T, d], mean attention [B, T, S].

        Without a token memory d is 0.
        """
        outputs = [model(**sample["net_input"]) for model in self.models]
        heat = self.temperature if temperature is None else temperature
        if heat != 1:
            outputs = [(logits / heat, *others) for logits, *others in outputs]
        each = [m.get_normalized_probs(o, log_probs=True, sample=sample) for m, o in zip(self.models, outputs)]
        log_probs = torch.stack(each).float().logsumexp(dim=0) - math.log(len(each))
        attention = [o[1]["attn"][0] for o in outputs if o[1]["attn"][0] is not None]
        queries = self.tokens.capture.read() if self.tokens is not None else log_probs[:, :, :0]
        return log_probs, queries, torch.stack(attention).mean(dim=0) if attention else None

    def signature(self) -> str:
        """Return everything that decides what retrieval does to a translation, in one line."""
        parts = [self.tokens.signature()] if self.tokens is not None else []
        if self.phrases is not None:
            parts += [self.phrases.signature(), *(f"{name}:{value}" for name, value in signed(self.settings).items())]
        parts += [self.trust.signature()] if self.trust is not None else []
        parts += [self.glossary.signature()] if self.glossary is not None else []
        return " ".join(parts)


class _ScoredModel:
    """A `RetrievalEnsemble` in the shape of the single model that fairseq's scorer works with."""

    def __init__(self, ensemble: RetrievalEnsemble, sample: dict[str, Any]) -> None:
        self.ensemble, self.sample = ensemble, sample

    def eval(self) -> None:
        self.ensemble.eval()

    def __call__(self, **net_input: Tensor) -> tuple[Tensor, dict[str, Any]]:
        forced = self.ensemble.force_decode(self.sample, temperature=1.0)  # fairseq's scorer has none
        log_probs, real = forced.log_probs, forced.real
        log_probs[real] = self.ensemble.mix(log_probs[real], forced.votes)
        return log_probs, {"attn": [forced.attention]} if forced.attention is not None else {}

    def get_normalized_probs(self, output: tuple[Tensor, Any], log_probs: bool, sample: dict[str, Any]) -> Tensor:
        return output[0]


class RetrievalScorer(SequenceScorer):
    """fairseq's `--score-reference`, with retrieval."""

    def __init__(self, ensemble: RetrievalEnsemble, tgt_dict: Any, **kwargs: Any) -> None:
        super().__init__(tgt_dict, **kwargs)
        self.model = ensemble

    @torch.no_grad()
    def generate(self, models: list[Any], sample: dict[str, Any], **kwargs: Any) -> list[list[dict[str, Any]]]:
        """Score the targets of a batch."""
        return super().generate([_ScoredModel(self.model, sample)], sample)
