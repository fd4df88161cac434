"""One step of models and memories, and all tokens of given targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from fairseq.sequence_generator import EnsembleModelWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from fairseq_ccpr.decoding.forced import ForcedText, GivenText, Whole
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Snapshot, Step
from fairseq_ccpr.decoding.mixture import Distribution, Mixture, ModelEvidence, Vote, merge_equal
from fairseq_ccpr.decoding.options import MixtureSettings
from fairseq_ccpr.decoding.trust import Trust, TrustStep
from fairseq_ccpr.device import BF16, FP32
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.step_decoder import StepDecoder
from fairseq_ccpr.settings import signed
from fairseq_ccpr.timing import DECODER, MERGE, phase

WORTH_CASTING = 128  # source tokens, of which on casting an encoder's weights costs less than it saves
TEXTS = "texts"  # of a batch: its source sentences as they were given, where they are known
M = TypeVar("M", bound=Memory)


class EncodedBatch(list[Any]):
    """What each model encoded, with what the memories know of the batch.

    It travels where fairseq passes encoder outputs, from step to step of one beam search: so generators and
    threads that share an ensemble share no mutable state. `hypotheses` counts those in the beams, None before
    there are any.

    Args:
        outputs: fairseq's encoder outputs, one a model.
        decoders: that compute its steps, one a model; None: the models do.
    """

    def __init__(
        self,
        outputs: list[Any],
        batches: list[MemoryBatch],
        hypotheses: int | None = None,
        decoders: list[StepDecoder] | None = None,
    ) -> None:
        super().__init__(outputs)
        self.batches, self.hypotheses, self.decoders = batches, hypotheses, decoders


class RetrievalEnsemble(EnsembleModelWithAlignment):
    """An ensemble whose distribution is mixed with what memories say, as its `Mixture` does.

    Args:
        models: fairseq models; their mean is p_NMT.
        memories: in the order in which they act; see `Memory.acts_on`.
        settings: of the mixture.
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
        self.memories, self.pad, self.trust = tuple(memories), pad, trust
        self.trusted = trust is not None  # whether trust decides weights, and so needs evidence
        self.voting = tuple(memory for memory in memories if memory.acts_on == "vote")
        self.mixture = Mixture(settings, tuple(memory.bounded for memory in self.voting))
        self.temperature = 1.0  # of beam search, for what is force-decoded after it
        # target tokens at the beginning that are language tags; nothing is retrieved for them
        self.forced = 0
        self.end: int | None = None  # the token that target sentences end with; </s> where None
        self.precision = FP32  # of beam search; a model on a GPU is in it already
        self.identity = ""  # of the models, by their parameters as they were loaded

    def find(self, kind: type[M]) -> M | None:
        return next((memory for memory in self.memories if isinstance(memory, kind)), None)

    def with_memories(self, memories: Sequence[Memory], trust: Trust | None) -> RetrievalEnsemble:
        other = RetrievalEnsemble(list(self.models), memories, self.pad, self.mixture.settings, trust)
        other.mixture = replace(self.mixture, bounded=other.mixture.bounded)
        for name in ("temperature", "forced", "end", "precision", "identity"):
            setattr(other, name, getattr(self, name))
        return other

    def replacing(self, *memories: Memory, trust: Trust | None = None) -> RetrievalEnsemble:
        """Return the same with these memories in the places of those with their names, and trust in them."""
        others = {memory.name: memory for memory in memories}
        return self.with_memories([others.get(memory.name, memory) for memory in self.memories], trust)

    def silencing(
        self, kinds: tuple[type[Memory], ...], members: Sequence[RetrievalEnsemble]
    ) -> RetrievalEnsemble:
        """Return the same with memories of some kinds silent, those of these members if it has several."""
        silent = [one.scaled(0.0) for one in self.memories if isinstance(one, kinds)]
        return self.replacing(*silent, trust=self.trust)

    def on(self, device: torch.device) -> RetrievalEnsemble:
        return self.with_memories([memory.on(device) for memory in self.memories], self.trust)

    def snapshot(self, texts: Sequence[str] | None = None) -> Snapshot:
        """Take what counts for a batch that begins now; `texts` are its sources as they were given."""
        learned = next((one.learned for one in self.memories if one.learned is not None), None)
        return Snapshot(learned.entries if learned is not None else None, texts)

    def now(self) -> RetrievalEnsemble:
        """Return the same with memories as they are now, unaffected by later learning."""
        snapshot = self.snapshot()
        return self.with_memories([memory.at(snapshot) for memory in self.memories], self.trust)

    def begun(self, sources: Tensor, texts: Sequence[str] | None) -> list[MemoryBatch]:
        """Begin a batch of sentences, int64 [B, S], with each memory."""
        snapshot = self.snapshot(texts)
        return [memory.begin(sources, snapshot) for memory in self.memories]

    def forward_encoder(self, net_input: dict[str, Any]) -> EncodedBatch:
        """Encode the sources; memories begin before, and finish while a GPU encodes."""
        batches = self.begun(net_input["src_tokens"], net_input.get(TEXTS))
        given = {name: x for name, x in net_input.items() if name != TEXTS}
        sources = net_input["src_tokens"]
        low = self.precision == BF16 and sources.is_cpu
        with torch.autocast("cpu", torch.bfloat16, enabled=low and sources.numel() >= WORTH_CASTING):
            outputs: list[Any] = super().forward_encoder(given)
        decoders = [decoder for model in self.models if (decoder := StepDecoder.of(model, low)) is not None]
        if len(decoders) < len(outputs):
            return EncodedBatch(outputs, [batch.encoded() for batch in batches])
        outputs = [decoder.begin(output) for decoder, output in zip(decoders, outputs)]
        return EncodedBatch(outputs, [batch.encoded() for batch in batches], decoders=decoders)

    def reorder_encoder_out(self, encoder_outs: EncodedBatch, new_order: Tensor) -> EncodedBatch:
        """Follow the beam, and the batch as its sentences end.

        Hypotheses change places within their sentence only, and share its encoding: that is copied when
        sentences have ended.
        """
        outputs = list(encoder_outs)
        if encoder_outs.decoders is not None:
            for state in outputs:
                state.reorder(new_order)
        elif len(new_order) != encoder_outs.hypotheses:
            outputs = super().reorder_encoder_out(encoder_outs, new_order)
        batches = [batch.reorder(new_order) for batch in encoder_outs.batches]
        return EncodedBatch(outputs, batches, len(new_order), encoder_outs.decoders)

    def reorder_incremental_state(self, incremental_states: list[Any], new_order: Tensor) -> None:
        if any(incremental_states):
            super().reorder_incremental_state(incremental_states, new_order)

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: EncodedBatch, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one step as fairseq's generators ask for it: log p [H, V] and the attention."""
        model, attention = self.step(tokens, encoder_outs, incremental_states, temperature)
        return model.log_probs, attention

    def step(
        self, tokens: Tensor, encoded: EncodedBatch, incremental_states: Any, temperature: float = 1.0
    ) -> tuple[Distribution, Tensor | None]:
        """Compute one step: the distribution and the attention, fp32 [H, S].

        1. p_NMT from the models, as without retrieval; memories listen, and the token memory searches as soon
           as the model of its datastore knows the queries: a GPU searches while the models project to the
           vocabulary;
        2. memories that act on the model's distribution change it, the others vote;
        3. mix, and let those that act on the mixture change it.
        """
        batches = encoded.batches if tokens.size(1) > self.forced else []
        with self._listening(batches) as heard, phase(DECODER):
            if encoded.decoders is None:
                log_probs, attention = super().forward_decoder(
                    tokens, encoded, incremental_states, temperature
                )
            else:
                log_probs, attention = self._decoded(tokens, encoded, encoded.decoders, temperature)
        model = Distribution(log_probs.float())
        attention = attention.float() if attention is not None else None
        step = Step(tokens[:, self.forced :], model, self.trusted, self.mixture, attention)
        self._rescore(step, heard["model"])
        votes = [batch.vote(step) for batch in heard["vote"]]
        step.model = self.mixture.mix(step.model, self.decided(step.model, votes))
        self._rescore(step, heard["mixture"])
        return step.model, attention

    @staticmethod
    def _rescore(step: Step, batches: Sequence[MemoryBatch]) -> None:
        for batch in batches:
            if (rescored := batch.rescore(step)) is not None:
                step.model = Distribution(rescored)

    @staticmethod
    def _decoded(
        tokens: Tensor, encoded: EncodedBatch, decoders: list[StepDecoder], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Average the models' p_NMT, and their attention."""
        each, attentions = zip(*(one.step(tokens, state) for one, state in zip(decoders, encoded)))
        heated = each if temperature == 1 else tuple(logits / temperature for logits in each)
        log_probs = [torch.log_softmax(logits, dim=1, dtype=torch.float32) for logits in heated]
        if len(log_probs) == 1:
            return log_probs[0], attentions[0]
        mean = torch.stack(log_probs).logsumexp(dim=0) - math.log(len(log_probs))
        return mean, torch.stack(attentions).mean(dim=0)

    @contextmanager
    def _listening(
        self, batches: Sequence[MemoryBatch], given: bool = False
    ) -> Iterator[dict[str, list[MemoryBatch]]]:
        """Let memories listen to the models; gives what then acts, by `Memory.acts_on`."""
        heard: dict[str, list[MemoryBatch]] = {"model": [], "vote": [], "mixture": []}
        with ExitStack() as contexts:
            for memory, batch in zip(self.memories, batches):
                heard[memory.acts_on].append(contexts.enter_context(batch.listening(given)))
            yield heard

    @phase(MERGE)
    def decided(self, model: Distribution | ForcedText, votes: list[Vote]) -> list[Vote]:
        """Return the votes with the weights that they have in the end."""
        votes = self.mixture.limited(votes)
        if self.trust is None or not votes:
            return votes
        decision = self.trust(trust_step(model.likeliest, votes))
        votes = [vote._replace(weight=weight) for vote, weight in zip(votes, decision.weights.unbind(dim=1))]
        if decision.spread is not None:
            votes[0] = votes[0]._replace(log_probs=merge_equal(decision.spread, votes[0].values).log())
        return votes

    def force_decode(self, sample: dict[str, Any], temperature: float | None = None) -> ForcedText:
        """Collect what models and memories say of each token of given targets, as in beam search.

        Raises:
            ConfigurationError: a memory works in beam search alone.
        """
        if refusal := next((memory.unscored for memory in self.memories if memory.unscored), None):
            raise ConfigurationError(refusal)
        net_input, target = sample["net_input"], sample["target"]
        batches = self.begun(net_input["src_tokens"], sample.get(TEXTS))
        with self._listening([batch.encoded() for batch in batches], given=True) as heard:
            log_probs, attention = self.force_models(sample, temperature)
        real = self.real_tokens(target)
        previous, after = net_input["prev_output_tokens"][:, self.forced :], log_probs[:, self.forced :]
        for batch in heard["model"]:
            batch.rescore_given(previous, after, self.mixture)
        looked = attention[:, self.forced :].float() if attention is not None else None
        text = GivenText(previous, real[:, self.forced :], after, Distribution(log_probs[real]), looked)
        records = {memory.name: one.force(text) for memory, one in zip(self.voting, heard["vote"])}
        (sentences, positions), targets = text.real.nonzero().unbind(dim=1), target[real]
        said = text.model.log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)
        whole = Whole(real, previous, log_probs, attention, heard["mixture"])
        likeliest = text.model.likeliest
        return ForcedText(targets, sentences, positions, said, likeliest, records, self.mixture, whole)

    def mixed(self, whole: Whole, votes: list[Vote]) -> Tensor:
        """Mix the distributions of given targets in place with votes, as beam search does: [B, T, V]."""
        whole.log_probs[whole.real] = self.mixture.mix(
            Distribution(whole.log_probs[whole.real]), votes
        ).log_probs
        for batch in whole.after:
            batch.rescore_given(whole.previous, whole.log_probs[:, self.forced :], self.mixture)
        return whole.log_probs

    def real_tokens(self, targets: Tensor) -> Tensor:
        """Mark tokens of targets [B, T] that memories may influence: neither padding nor forced tags."""
        real = targets.ne(self.pad)
        real[:, : self.forced] = False
        return real

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
        """Vote at the tokens of given targets, with evidence where there is trust."""
        return [text.records[memory.name].vote(memory, self.trusted) for memory in self.voting]

    def signature(self) -> str:
        places, memories = ("model", "vote", "mixture"), self.memories
        parts = {place: [one.signature() for one in memories if one.acts_on == place] for place in places}
        if any(memory.bounded for memory in self.voting):
            parts["vote"] += [f"{name}:{value}" for name, value in signed(self.mixture.settings).items()]
        trust = [self.trust.signature()] if self.trust is not None else []
        precision = f"precision:{self.precision}"
        return " ".join(filter(None, [*parts["model"], *parts["vote"], *trust, *parts["mixture"], precision]))


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
        return super().generate([_ScoredModel(self.model, sample)], sample)
