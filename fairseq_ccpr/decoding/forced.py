"""Forced decoding: what the model and each memory say at the tokens of given targets.

Scoring, tuning, logging and explaining read one record of it, `ForcedText`. Letters: B sentences, T target
positions, N tokens, C tokens that a memory names, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fairseq_ccpr.decoding.mixture import SILENT, Columns, Distribution, Mixture, ModelEvidence, Vote


@dataclass
class GivenText:
    """Given targets of B sentences: N tokens in all, at each of which a memory votes as it would in beam search."""

    previous: Tensor  # int64 [B, T], the decoder's input: y_<t, with the end of the sentence in front
    real: Tensor  # bool [B, T], the N tokens
    log_probs: Tensor  # fp32 [B, T, V], log p_NMT
    model: Distribution  # the same at the N tokens


class Record(Protocol):
    """What a memory saw at N tokens of given targets: enough to vote with any settings."""

    def vote(self, memory: Any, trusted: bool) -> Vote:
        """Vote as a memory does in beam search: the one that was asked, with other settings perhaps."""

    def select(self, rows: Tensor) -> Record: ...

    def cpu(self) -> Record: ...


class VoteRecord(NamedTuple):
    """The record of a memory whose votes no setting changes."""

    values: Tensor  # int64 [N, C]
    log_probs: Tensor  # fp32 [N, C]
    weight: Tensor  # fp32 [N]
    features: Tensor  # fp32 [N, F]

    def vote(self, memory: Any, trusted: bool) -> Vote:
        return Vote(self.values, self.log_probs, self.weight, Columns(self.features) if trusted else None)

    def select(self, rows: Tensor) -> VoteRecord:
        return VoteRecord(*(part[rows] for part in self))

    def cpu(self) -> VoteRecord:
        return VoteRecord(*(part.cpu() for part in self))


class Whole(NamedTuple):
    """The model's whole distributions."""

    real: Tensor  # bool [B, T], the N tokens: neither padding nor language tags
    previous: Tensor  # int64 [B, T], see `GivenText`, without language tags
    log_probs: Tensor  # fp32 [B, T, V], log p_NMT
    attention: Tensor | None  # [B, T, S], the models' mean
    after: list[Any]  # a `MemoryBatch` of each memory that acts on the mixture


@dataclass
class ForcedText:
    """N tokens of given targets, the ends of sentences too; sentence by sentence."""

    targets: Tensor  # int64 [N]
    sentences: Tensor  # int64 [N], their numbers
    positions: Tensor  # int64 [N], from 0
    log_probs: Tensor  # fp32 [N], log p_NMT of the targets
    likeliest: ModelEvidence  # of the model
    records: Mapping[str, Any]  # what each memory saw, a `Record`, by its name
    mixture: Mixture  # of what they say with the model
    whole: Whole | None = None  # where it is scored

    def said(self, votes: Sequence[Vote]) -> list[tuple[Tensor, Tensor]]:
        """Look up what votes say of the targets, and their weights, as `Mixture.of_targets` takes them."""
        return [(vote.log_prob(self.targets), vote.weight) for vote in votes]

    def mixed(self, votes: Sequence[Vote]) -> Tensor:
        """Mix log p of the targets with votes, fp32 [N]."""
        return self.mixture.of_targets(self.log_probs, self.said(votes))

    def kept(self, first: int) -> ForcedText:
        """Return what tuning keeps of it, on the CPU, its sentences numbered from `first`."""
        records = {name: record.cpu() for name, record in self.records.items()}
        kept = self._changed(lambda part: part.cpu(), records)
        kept.sentences = kept.sentences + first  # not in place: on a CPU it is the same tensor
        # of what the model rules out, which only memories name
        kept.log_probs = kept.log_probs.clamp_min(SILENT)
        return kept

    def select(self, rows: Tensor) -> ForcedText:
        records = {name: record.select(rows) for name, record in self.records.items()}
        return self._changed(lambda part: part[rows], records)

    def _changed(self, change: Callable[[Tensor], Tensor], records: Mapping[str, Any]) -> ForcedText:
        tokens = change(self.targets), change(self.sentences), change(self.positions), change(self.log_probs)
        return ForcedText(*tokens, ModelEvidence(*map(change, self.likeliest)), records, self.mixture)
