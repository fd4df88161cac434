"""Beam search over models and memories: the mixture of one step, and a search that reads the vocabulary once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from fairseq.search import BeamSearch
from fairseq.sequence_generator import EnsembleModelWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from fairseq_ccpr.decoding.forced import ForcedText, GivenText, Whole
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Step
from fairseq_ccpr.decoding.mixture import (
    Distribution,
    ModelEvidence,
    Vote,
    interpolate_,
    limit_weights,
    merge_equal,
)
from fairseq_ccpr.decoding.options import MixtureSettings
from fairseq_ccpr.decoding.trust import Trust, TrustStep
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.settings import signed
from fairseq_ccpr.timing import DECODER, MERGE, phase

TEXTS = "texts"  # of a batch: its source sentences as they were given, where they are known
RUN = 64  # neighbouring tokens that the likeliest of them stands for
SMALL = 1 << 17  # log-probabilities of a batch that are compared with one another

M = TypeVar("M", bound=Memory)


class RunwiseBeamSearch(BeamSearch):
    """Selects what fairseq's `BeamSearch` selects, but for the order of equal scores.

    The best continuations lie in the runs whose own best are best, and adding a hypothesis's score to all of
    a run leaves their order. So nothing as wide as the vocabulary is added up or sorted.
    """

    def step(
        self,
        step: int,
        lprobs: Tensor,
        scores: Tensor | None,
        prev_output_tokens: Tensor | None = None,
        original_batch_idxs: Tensor | None = None,
        candidate_multiple: int = 2,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select the best continuations of [B, beam, V], whose hypotheses have `scores` [B, beam, step] after each token."""
        sentences, beam, words = lprobs.shape
        count = candidate_multiple * beam
        if step == 0 or lprobs.numel() < SMALL or beam * (words // RUN) < count:
            selected: tuple[Tensor, Tensor, Tensor] = super().step(
                step, lprobs, scores, prev_output_tokens, original_batch_idxs, candidate_multiple
            )
            return selected
        assert scores is not None
        so_far = scores[:, :, step - 1]
        places = _best_runs(lprobs, so_far, count)
        likely = lprobs.view(sentences, -1).gather(1, places) + so_far.gather(1, places // words)
        best, chosen = likely.topk(count, dim=1)
        places = places.gather(1, chosen)
        return best, places % words, places // words


def _best_runs(lprobs: Tensor, so_far: Tensor, count: int) -> Tensor:
    """Find where the best `count` continuations of each sentence may be, int64 [B, C], as places in [beam * V]."""
    sentences, beam, words = lprobs.shape
    runs = words // RUN
    whole = runs * RUN
    likeliest = lprobs[:, :, :whole].unflatten(2, (runs, RUN)).amax(dim=3) + so_far.unsqueeze(2)
    best = likeliest.flatten(1).topk(count, dim=1).indices
    begins = best // runs * words + best % runs * RUN
    device = lprobs.device
    inside = (begins.unsqueeze(2) + torch.arange(RUN, device=device)).flatten(1)
    rest = torch.arange(beam, device=device).unsqueeze(1) * words + torch.arange(whole, words, device=device)
    return torch.cat([inside, rest.flatten().expand(sentences, -1)], dim=1)


class EncodedBatch(list[Any]):
    """fairseq's encoder outputs, one a model, with what the memories know of the batch.

    It travels where fairseq passes encoder outputs, from step to step of one beam search: so generators and
    threads that share an ensemble share no mutable state. `hypotheses` counts those in the beams, None before
    there are any.
    """

    def __init__(self, outputs: list[Any], batches: list[MemoryBatch], hypotheses: int | None = None) -> None:
        super().__init__(outputs)
        self.batches, self.hypotheses = batches, hypotheses


class RetrievalEnsemble(EnsembleModelWithAlignment):
    """An ensemble whose distribution is interpolated with those of memories.

    p = (1 - sum of lambda_m) p_NMT + sum of lambda_m p_m over the memories m that vote.

    Args:
        models: fairseq models; their mean is p_NMT.
        memories: in the order in which they act; see `Memory.acts_on`.
        settings: Lambda_max, see `limit_weights`.
    """

    def __init__(
        self,
        models: list[Any],
        memories: Sequence[Memory],
        pad: int,
        settings: MixtureSettings,
        trust: Trust | None = None,
    ) -> None:
        super().__init__(models)
        self.memories, self.pad, self.settings, self.trust = tuple(memories), pad, settings, trust
        self.voting = tuple(memory for memory in memories if memory.acts_on == "vote")
        self.temperature = 1.0  # of beam search, for what is force-decoded after it
        # target tokens at the beginning that are language tags; nothing is retrieved for them
        self.forced = 0
        self.end: int | None = None  # the token that target sentences end with; </s> where None
        self.identity = ""  # of the models, by their parameters as they were loaded

    def memory(self, name: str) -> Any:
        """Look up a memory; None if it is not among them."""
        return next((memory for memory in self.memories if memory.name == name), None)

    def find(self, kind: type[M]) -> M | None:
        """Look up the memory of a class; None if there is none."""
        return next((memory for memory in self.memories if isinstance(memory, kind)), None)

    def with_memories(self, memories: Sequence[Memory], trust: Trust | None) -> RetrievalEnsemble:
        """Return the same models with other memories, and trust in them."""
        other = RetrievalEnsemble(list(self.models), memories, self.pad, self.settings, trust)
        for name in ("temperature", "forced", "end", "identity"):
            setattr(other, name, getattr(self, name))
        return other

    def replacing(self, *memories: Memory, trust: Trust | None = None) -> RetrievalEnsemble:
        """Return the same models and memories, but these in the places of those with their names, and trust in them."""
        others = {memory.name: memory for memory in memories}
        return self.with_memories([others.get(memory.name, memory) for memory in self.memories], trust)

    def on(self, device: torch.device) -> RetrievalEnsemble:
        """Return the same with memories that compute votes of records on another device."""
        return self.with_memories([memory.on(device) for memory in self.memories], self.trust)

    def now(self) -> RetrievalEnsemble:
        """Return a snapshot with the memories as they are now, unaffected by later learning."""
        return self.with_memories(self._snapshots(), self.trust)

    def _snapshots(self) -> list[Memory]:
        """Return the memories as they are at one moment, so that all know the same pairs."""
        moment: dict[int, Any] = {}
        return [memory.now(moment) for memory in self.memories]

    def _begin(self, sources: Tensor, texts: Sequence[str] | None) -> list[MemoryBatch]:
        batches = [memory.begin(sources) for memory in self._snapshots()]
        for batch in batches:
            batch.begun(texts)
        return batches

    def forward_encoder(self, net_input: dict[str, Any]) -> EncodedBatch:
        """Encode the sources; memories begin before, and finish while a GPU encodes."""
        batches = self._begin(net_input["src_tokens"], net_input.get(TEXTS))
        outputs: list[Any] = super().forward_encoder(
            {name: x for name, x in net_input.items() if name != TEXTS}
        )
        for batch in batches:
            batch.encoded()
        return EncodedBatch(outputs, batches)

    def reorder_encoder_out(self, encoder_outs: EncodedBatch, new_order: Tensor) -> EncodedBatch:
        """Follow the beam, and the batch as its sentences end.

        Hypotheses change places within their sentence only, and share its encoding: that is copied when
        sentences have ended.
        """
        same = len(new_order) == encoder_outs.hypotheses
        outputs = list(encoder_outs) if same else super().reorder_encoder_out(encoder_outs, new_order)
        return EncodedBatch(
            outputs, [batch.reorder(new_order) for batch in encoder_outs.batches], len(new_order)
        )

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: EncodedBatch, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one step: log p [H, V] and the attention.

        1. p_NMT from the models, as without retrieval; memories listen, and the token memory searches as soon
           as the model of its datastore knows the queries: a GPU searches while the models project to the
           vocabulary;
        2. memories that act on the model's distribution change it, the others vote;
        3. interpolate, and let those that act on the mixture change it.
        """
        batches = encoder_outs.batches if tokens.size(1) > self.forced else []
        with ExitStack() as listening:
            for batch in batches:
                listening.enter_context(batch.listening())
            with phase(DECODER):
                log_probs, attention = super().forward_decoder(
                    tokens, encoder_outs, incremental_states, temperature
                )
        step = Step(tokens[:, self.forced :], Distribution(log_probs.float()), self.trust is not None)
        for batch in self._acting(batches, "model"):
            step.model = Distribution(batch.rescore(step))
        votes = [batch.vote(step) for batch in self._acting(batches, "vote")]
        step.model = Distribution(self.mix(step.model.log_probs, self.decided(step.model, votes)))
        for batch in self._acting(batches, "mixture"):
            step.model = Distribution(batch.rescore(step))
        return step.model.log_probs, attention

    @phase(MERGE)
    def mix(self, log_probs: Tensor, votes: list[Vote]) -> Tensor:
        """Interpolate log p_NMT [H, V] in place with votes, as `decided`."""
        return interpolate_(log_probs, votes)

    @phase(MERGE)
    def decided(self, model: Distribution | ForcedText, votes: list[Vote]) -> list[Vote]:
        """Return the votes with the weights that they have in the end."""
        votes = self.limited(votes)
        if self.trust is None or not votes:
            return votes
        decision = self.trust(trust_step(model.likeliest, votes))
        votes = [vote._replace(weight=weight) for vote, weight in zip(votes, decision.weights.unbind(dim=1))]
        if decision.spread is not None:
            votes[0] = votes[0]._replace(log_probs=merge_equal(decision.spread, votes[0].values).log())
        return votes

    def limited(self, votes: list[Vote]) -> list[Vote]:
        """Return the votes with the weights that the settings give."""
        bounded = [memory.bounded for memory in self.voting]
        weights = (
            limit_weights([vote.weight for vote in votes], bounded, self.settings.lambda_max) if votes else []
        )
        return [vote._replace(weight=weight) for vote, weight in zip(votes, weights)]

    def force_decode(self, sample: dict[str, Any], temperature: float | None = None) -> ForcedText:
        """Collect what models and memories say of every token of given targets, as in beam search after the same prefix.

        Raises:
            ConfigurationError: a memory works in beam search alone.
        """
        if refusal := next((memory.unscored for memory in self.memories if memory.unscored), None):
            raise ConfigurationError(refusal)
        net_input, target = sample["net_input"], sample["target"]
        batches = self._begin(net_input["src_tokens"], sample.get(TEXTS))
        for batch in batches:
            batch.encoded()
        log_probs, attention = self.force_models(sample, temperature)
        real = self.real_tokens(target)
        previous, after = net_input["prev_output_tokens"][:, self.forced :], log_probs[:, self.forced :]
        for batch in self._acting(batches, "model"):
            batch.rescore_given(previous, after)
        text = GivenText(previous, real[:, self.forced :], after, Distribution(log_probs[real]))
        records = {
            m.name: batch.force(text) for m, batch in zip(self.memories, batches) if m.acts_on == "vote"
        }
        (sentences, positions), targets = text.real.nonzero().unbind(dim=1), target[real]
        said = text.model.log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)
        whole = Whole(real, previous, log_probs, attention, self._acting(batches, "mixture"))
        return ForcedText(targets, sentences, positions, said, text.model.likeliest, records, whole)

    def mixed(self, whole: Whole, votes: list[Vote]) -> Tensor:
        """Mix the distributions of given targets in place with votes, as `decided`, as beam search does: [B, T, V]."""
        whole.log_probs[whole.real] = self.mix(whole.log_probs[whole.real], votes)
        for batch in whole.after:
            batch.rescore_given(whole.previous, whole.log_probs[:, self.forced :])
        return whole.log_probs

    def real_tokens(self, targets: Tensor) -> Tensor:
        """Mark the tokens of targets [B, T] that memories may influence, bool [B, T]: neither padding nor forced tags."""
        real = targets.ne(self.pad)
        real[:, : self.forced] = False
        return real

    def _acting(self, batches: Sequence[MemoryBatch], place: str) -> list[MemoryBatch]:
        return [batch for memory, batch in zip(self.memories, batches) if memory.acts_on == place]

    def force_models(
        self, sample: dict[str, Any], temperature: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Force-decode without retrieval: log p_NMT fp32 [B, T, V], mean attention [B, T, S]."""
        outputs = [model(**sample["net_input"]) for model in self.models]
        heat = self.temperature if temperature is None else temperature
        if heat != 1:
            outputs = [(logits / heat, *others) for logits, *others in outputs]
        each = [
            m.get_normalized_probs(o, log_probs=True, sample=sample) for m, o in zip(self.models, outputs)
        ]
        several = len(each) > 1  # a single model is its own mean, which would cost a pass over the vocabulary
        log_probs = (
            torch.stack(each).float().logsumexp(dim=0) - math.log(len(each)) if several else each[0].float()
        )
        attention = [o[1]["attn"][0] for o in outputs if o[1]["attn"][0] is not None]
        return log_probs, torch.stack(attention).mean(dim=0) if attention else None

    def votes(self, text: ForcedText) -> list[Vote]:
        """Vote at the tokens of given targets, as each memory's settings weigh it, with evidence where there is trust."""
        return [text.records[memory.name].vote(memory, self.trust is not None) for memory in self.voting]

    def signature(self) -> str:
        """Return everything that decides what memories do to a translation, in one line."""
        places, memories = ("model", "vote", "mixture"), self.memories
        parts = {place: [one.signature() for one in memories if one.acts_on == place] for place in places}
        if any(memory.bounded for memory in self.voting):
            parts["vote"] += [f"{name}:{value}" for name, value in signed(self.settings).items()]
        trust = [self.trust.signature()] if self.trust is not None else []
        return " ".join(filter(None, [*parts["model"], *parts["vote"], *trust, *parts["mixture"]]))


def trust_step(model: ModelEvidence, votes: list[Vote]) -> TrustStep:
    """Collect what trust decides by: votes with evidence, and the weights that the settings give them."""
    return TrustStep(model, votes, torch.stack([vote.weight for vote in votes], dim=1))


class _ScoredModel:
    """A `RetrievalEnsemble` in the shape of the single model that fairseq's scorer works with."""

    def __init__(self, ensemble: RetrievalEnsemble, sample: dict[str, Any]) -> None:
        self.ensemble, self.sample = ensemble, sample

    def eval(self) -> None:
        self.ensemble.eval()

    def __call__(self, **net_input: Tensor) -> tuple[Tensor, dict[str, Any]]:
        text = self.ensemble.force_decode(self.sample, temperature=1.0)  # fairseq's scorer has none
        whole = text.whole
        assert whole is not None  # nothing has been dropped
        mixed = self.ensemble.mixed(whole, self.ensemble.decided(text, self.ensemble.votes(text)))
        return mixed, {"attn": [whole.attention]} if whole.attention is not None else {}

    def get_normalized_probs(
        self, output: tuple[Tensor, Any], log_probs: bool, sample: dict[str, Any]
    ) -> Tensor:
        return output[0]


class RetrievalScorer(SequenceScorer):
    """fairseq's `--score-reference`, with retrieval."""

    def __init__(self, ensemble: RetrievalEnsemble, tgt_dict: Any, **kwargs: Any) -> None:
        super().__init__(tgt_dict, **kwargs)
        self.model = ensemble

    @torch.no_grad()
    def generate(
        self, models: list[Any], sample: dict[str, Any], **kwargs: Any
    ) -> list[list[dict[str, Any]]]:
        """Score the targets of a batch."""
        return super().generate([_ScoredModel(self.model, sample)], sample)
