"""The interface that decoding is written against: a memory alongside the decoder.

Letters: B sentences, S source subwords, H hypotheses, T target positions, N tokens, C tokens that a memory
names, V target vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fairseq_ccpr.decoding.forced import GivenText, Record, VoteRecord
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.mixture import Distribution, Mixture, Vote
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.settings import as_options


@dataclass(frozen=True)
class Snapshot:
    """What counts for a batch beside its sources, the same for all memories."""

    learned: LearnedEntries | None = None  # up to this moment; None: nothing is learned alongside
    texts: Sequence[str] | None = None  # the sources as they were given, where that is known


@dataclass
class Step:
    """One step of beam search at H hypotheses."""

    tokens: Tensor  # int64 [H, t], the hypotheses so far, with the end of the sentence in front
    model: Distribution  # what the model says, and what memories before have made of it
    trusted: bool = False  # whether trust decides the weights, and so needs evidence
    mixture: Mixture = field(default_factory=Mixture)
    # fp32 [H, S], what its last layer attends to, the mean of heads and models; None: that is not known
    attention: Tensor | None = None

    def mix(self, votes: Sequence[Vote]) -> Tensor:
        return self.mixture.mix(self.model, votes).log_probs


class MemoryBatch:
    """A memory during one batch, while its hypotheses grow. A memory of your own defines `vote` or `rescore`.

    It begins with one hypothesis a sentence; `reorder` makes more of them. Nothing of it outlives the batch.
    """

    def encoded(self) -> MemoryBatch:
        """Finish beginning while a GPU encodes the sources; returns the batch to go on with."""
        return self

    def listening(self, given: bool = False) -> AbstractContextManager[MemoryBatch]:
        """Open a context in which the models compute a step, and what their layers say may be read.

        It gives what then votes or rescores: the batch itself, or what has heard something.

        Args:
            given: the step is all of given targets, see `force`.
        """
        return nullcontext(self)

    def rescore(self, step: Step) -> Tensor | None:
        """Change the distribution of a step, in place or not: log p, fp32 [H, V]; None: it stays as it is."""
        return None

    def vote(self, step: Step) -> Vote:
        """Vote for the next token, once a step. For memories that vote."""
        raise ConfigurationError(
            f"{type(self).__name__} has no vote: define it, or let its memory act on the model or the "
            "mixture (acts_on)"
        )

    def reorder(self, order: Tensor) -> Self:
        """Follow the beam: hypothesis i continues what hypothesis order[i] was, int64 [H']."""
        return self

    def rescore_given(self, previous: Tensor, log_probs: Tensor, mixture: Mixture) -> None:
        """Change the distributions of given targets, fp32 [B, T, V], in place and position by position.

        Args:
            previous: int64 [B, T], see `GivenText`.
        """
        for position in range(previous.size(1)):
            model = Distribution(log_probs[:, position])
            step = Step(previous[:, : position + 1], model, mixture=mixture)
            if (rescored := self.rescore(step)) is not None:
                log_probs[:, position] = rescored

    def force(self, text: GivenText) -> Record:
        """Vote at each token of given targets, position by position."""
        steps: list[tuple[Tensor, ...]] = []
        for position in range(text.previous.size(1)):
            model = Distribution(text.log_probs[:, position])
            attention = text.attention[:, position] if text.attention is not None else None
            vote = self.vote(Step(text.previous[:, : position + 1], model, trusted=True, attention=attention))
            none = vote.weight.new_empty(len(vote.weight), 0)
            features = vote.evidence.features(model.likeliest) if vote.evidence is not None else none
            steps.append((vote.values, vote.log_probs, vote.weight, features))
        most = max(values.size(1) for values, *_ in steps)
        for i, (values, log_probs, *others) in enumerate(steps):
            missing = 0, most - values.size(1)
            steps[i] = pad(values, missing), pad(log_probs, missing, value=float("-inf")), *others
        return VoteRecord(*(torch.stack(column, dim=1)[text.real] for column in zip(*steps)))


@dataclass
class Begun(MemoryBatch):
    """A batch that a memory has not finished yet."""

    finish: Callable[[], MemoryBatch]

    def encoded(self) -> MemoryBatch:
        return self.finish()


@dataclass(frozen=True)
class Variant:
    """A change of a memory's settings that tuning decodes with, and keeps where translations are better."""

    change: Callable[[Any], Memory]
    otherwise: bool = False  # tried only where no variant before it was kept
    # leaves the memory out: tried where one before `otherwise` was kept, or for speed
    leaves_out: bool = False
    final: bool = False  # of what is best without it: decoded with on all of the held-out text


class RescoringRecord(Protocol):
    """What a memory that acts on the model makes of N reference tokens, with any settings."""

    @property
    def model(self) -> Tensor:
        """log p_NMT, fp32 [N]."""

    def weight(self, memory: Any) -> Tensor:
        """Compute how much the memory counts, fp32 [N]."""

    def log_likelihood(self, memory: Any) -> Tensor:
        """Compute log p of the references, fp32 [N]; it can be differentiated."""


class Memory(ABC):
    """What stands alongside the decoder, with the settings that decide how it counts. Immutable.

    Attributes:
        name: one word, for trust, tables and explanations.
        acts_on: what its batches change: the `model`'s distribution before any memory votes, the mixture by a
            `vote`, or the `mixture` after all have voted.
        bounded: whether --retrieval-lambda-max bounds its weight, see `Mixture.limit`.
        features: the names of what its evidence shows trust.
        part: its part of a datastore.
        tuned: fields of its `settings` that tuning chooses; empty: it has none.
        scale: the one of them that its weight is proportional to.
        quick: whether tuning asks it about all held-out tokens, and not about a sample.
    """

    name: ClassVar[str]
    acts_on: ClassVar[Literal["model", "vote", "mixture"]] = "vote"
    bounded: ClassVar[bool] = True
    features: ClassVar[tuple[str, ...]] = ()
    part: ClassVar[str] = ""
    tuned: ClassVar[tuple[str, ...]] = ()
    scale: ClassVar[str] = "lambda_"
    quick: ClassVar[bool] = False
    settings: Any

    # What is learned alongside the datastore, live or as of a snapshot; None: nothing.
    learned: LearnedMemory | LearnedEntries | None = None

    @property
    def unscored(self) -> str:
        """Why given targets cannot be scored with it; empty: they can."""
        return ""

    @abstractmethod
    def begin(self, sources: Tensor, snapshot: Snapshot) -> MemoryBatch:
        """Begin a batch of sentences, int64 [B, S]. What is learned later counts for later ones."""

    @abstractmethod
    def signature(self) -> str:
        """Return all that decides what is retrieved and how it counts, in one line."""

    def at(self, snapshot: Snapshot) -> Self:
        """Return the memory as of a snapshot, unaffected by later learning and forgetting."""
        if self.learned is None:
            return self
        learning: Any = self  # a dataclass
        pinned: Self = replace(learning, learned=snapshot.learned)
        return pinned

    def on(self, device: torch.device) -> Memory:
        """Return a memory that computes votes of records on another device."""
        return self

    def trained(self) -> dict[str, Tensor]:
        """Return what tuning trained of it besides trust, which is kept in trust's file."""
        return {}

    # What tuning asks: a memory of your own has nothing that is tuned besides trust, unless it says so.

    def remembering(self) -> Memory:
        """Return the memory as it is now, which may be asked about the same batch again and again."""
        return self

    def widest(self) -> Memory:
        """Return it with settings under which its records serve all of its grid."""
        return self

    def changed(self, **settings: Any) -> Self:
        """Return it with other values of these settings."""
        return replace(self, settings=replace(self.settings, **settings))  # type: ignore[type-var]

    def scaled(self, factor: float) -> Self:
        """Return it weighing so many times as much; with 0 it is silent."""
        return (
            self.changed(**{self.scale: factor * getattr(self.settings, self.scale)}) if self.tuned else self
        )

    def written(self) -> str:
        """Write the options that give its settings."""
        return as_options(self.settings, self.tuned) if self.tuned else ""

    def kind(self) -> str:
        """Name what decides its weight, for tables."""
        return self.name

    def grid(
        self, options: Any, records: Sequence[Any], targets: Tensor
    ) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """Yield the settings to choose among by likelihood, and with each log p_r and weight at N tokens, fp32 [N].

        Args:
            options: of the task; what was given is not varied.
            records: of held-out batches.
            targets: int64 [N], the reference tokens of them all.
        """
        return iter(())

    def starts(self, grid: Mapping[Any, float], parts: Mapping[str, Any]) -> list[Any]:
        """Pick settings of its grid that trust is trained on top of, each apart; none: they are as they are."""
        return []

    def trainable(self, records: Sequence[Any]) -> tuple[Memory, nn.Module] | None:
        """Return a memory whose votes are to be trained on what it recorded, and the module of it that is."""
        return None

    def alternatives(self) -> list[Memory]:
        """Return it with settings to choose among by likelihood. For memories that act on the model."""
        return []

    def recorded(self, steps: Iterable[tuple[Step, Tensor]]) -> RescoringRecord:
        """Record what it makes of steps and their targets, int64 [H]. For memories that have alternatives."""
        raise NotImplementedError

    def variants(self, options: Any) -> list[Variant]:
        """Return what to decode with besides what likelihood has chosen, in this order."""
        return []
