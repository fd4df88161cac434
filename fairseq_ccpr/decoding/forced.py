"""Forced decoding: what the model and each memory say at the tokens of given targets.

Scoring, tuning, logging and explaining read one record of it, `ForcedText`. Letters: B sentences, T target
positions, N tokens, C tokens that a memory names, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor

from fairseq_ccpr.decoding.mixture import SILENT, Columns, Distribution, Mixture, ModelEvidence, Said, Vote

T = TypeVar("T")


@dataclass
class GivenText:
    """Given targets of B sentences, at whose N tokens a memory votes as it would in beam search."""

    previous: Tensor  # int64 [B, T], the decoder's input: y_<t, with the end of the sentence in front
    real: Tensor  # bool [B, T], the N tokens
    log_probs: Tensor  # fp32 [B, T, V], log p_NMT
    model: Distribution  # the same at the N tokens
    attention: Tensor | None = None  # fp32 [B, T, S], see `Step`


def joined(several: Sequence[T], join: Callable[[list[Tensor]], Tensor]) -> T:
    """Join records tensor by tensor, through tuples and records in them; what else they have is shared."""
    records: list[Any] = list(several)
    one = records[0]
    if isinstance(one, Tensor):
        found: Any = join(records)
    elif isinstance(one, tuple):
        parts = [joined(each, join) for each in zip(*records)]
        found = type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
    elif isinstance(one, Record):
        names = [part.name for part in fields(one)]
        each = {name: joined([getattr(record, name) for record in records], join) for name in names}
        found = replace(one, **each)
    else:
        found = one
    same: T = found
    return same


@dataclass
class Record:
    """What a memory saw at N given tokens, in tensors [N, ...]: enough to vote with any settings."""

    def vote(self, memory: Any, trusted: bool) -> Vote:
        """Vote as a memory does in beam search: the one that was asked, with other settings perhaps."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> Self:
        """Select some of the tokens, by number or by bool."""
        return joined([self], lambda parts: parts[0][rows])

    def cpu(self) -> Self:
        return joined([self], lambda parts: parts[0].cpu())


@dataclass
class VoteRecord(Record):
    """The record of a memory whose votes no setting changes."""

    values: Tensor  # int64 [N, C]
    log_probs: Tensor  # fp32 [N, C]
    weight: Tensor  # fp32 [N]
    features: Tensor  # fp32 [N, F]

    def vote(self, memory: Any, trusted: bool) -> Vote:
        return Vote(self.values, self.log_probs, self.weight, Columns(self.features) if trusted else None)


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

    def said(self, votes: Sequence[Vote]) -> list[Said]:
        """Look up what votes say of the targets, and their weights, as `Mixture.of_targets` takes them."""
        return [vote.said(self.targets) for vote in votes]

    def mixed(self, votes: Sequence[Vote]) -> Tensor:
        """Mix log p of the targets with votes, fp32 [N]."""
        return self.mixture.of_targets(self.log_probs, self.said(votes))

    def kept(self, first: int) -> ForcedText:
        """Return what tuning keeps of it, on the CPU, its sentences numbered from `first`."""
        targets, sentences, positions, log_probs, likeliest = joined(
            [self._tokens], lambda parts: parts[0].cpu()
        )
        records = {name: record.cpu() for name, record in self.records.items()}
        said = log_probs.clamp_min(SILENT)  # of what the model rules out, which only memories name
        return ForcedText(targets, sentences + first, positions, said, likeliest, records, self.mixture)

    def select(self, rows: Tensor) -> ForcedText:
        targets, sentences, positions, log_probs, likeliest = joined(
            [self._tokens], lambda parts: parts[0][rows]
        )
        records = {name: record.select(rows) for name, record in self.records.items()}
        return ForcedText(targets, sentences, positions, log_probs, likeliest, records, self.mixture)

    @property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, ModelEvidence]:
        return self.targets, self.sentences, self.positions, self.log_probs, self.likeliest
