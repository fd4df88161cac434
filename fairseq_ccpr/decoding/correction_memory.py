"""The memory of corrections: what was learned for the very source that is translated, as a translation memory's exact match.

    p'(v) = (1 - w) p(v) + w [v = y_t]

at step t of hypotheses that begin with y_1 ... y_(t-1), y being the target of a pair whose source the model reads as it reads
this one. So a correction counts whatever k, T, lambda and trust are. Hypotheses that have left it may end only after it has:
fairseq ends a search once as many hypotheses have ended as the beam is wide, and poor short ones would be the first.

Letters: B sentences, H hypotheses, L tokens of the longest target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Step
from fairseq_ccpr.decoding.mixture import Vote, interpolate_
from fairseq_ccpr.settings import signature

WEIGHT = 0.99  # w; a hypothesis that leaves a correction loses 4.6 nats at once
END_COST = 20.0  # in nats, of ending before it
NOTHING = -1  # after the end of a target


@dataclass(frozen=True)
class CorrectionMemory(Memory):
    """Pairs that were learned alongside a token datastore, by their sources.

    Args:
        learned: live, or as a snapshot.
        hash_source: identifies a source of the batch, int64 [S], as `ReadAs.ids` does.
    """

    name = "corrections"
    acts_on = "mixture"

    learned: LearnedMemory | LearnedEntries
    hash_source: Callable[[Tensor], int]
    end_token: int

    def now(self, moment: dict[int, Any]) -> CorrectionMemory:
        """Return a snapshot, unaffected by later learning and forgetting."""
        return replace(self, learned=moment.setdefault(id(self.learned), self.learned.entries))

    def begin(self, sources: Tensor) -> CorrectionBatch:
        """Look up the sources of a batch, int64 [B, S]."""
        entries, empty = self.learned.entries, torch.empty(0, dtype=torch.int64)
        if not entries.by_source:
            return CorrectionBatch(self)
        found = [entries.target(self.hash_source(source)) for source in sources.cpu()]
        if all(target is None for target in found):
            return CorrectionBatch(self)
        targets = [empty if target is None else torch.as_tensor(target, dtype=torch.int64) for target in found]
        table = pad_sequence([*targets], batch_first=True, padding_value=NOTHING)
        table = torch.nn.functional.pad(table, (0, 1), value=NOTHING).to(sources.device)
        rows = torch.arange(len(sources), device=sources.device)
        return CorrectionBatch(self, table, rows, torch.ones_like(rows, dtype=torch.bool))

    def signature(self) -> str:
        """Name the weight, where there is something to weigh."""
        return signature({self.name: WEIGHT}) if self.learned.entries.by_source else ""


@dataclass
class CorrectionBatch(MemoryBatch):
    """The corrections of a batch, and which hypotheses have followed them so far; without a table there are none."""

    memory: CorrectionMemory
    table: Tensor | None = None  # int64 [B, L + 1], their tokens, then `NOTHING`
    rows: Tensor | None = None  # int64 [H], the sentence of each hypothesis
    following: Tensor | None = None  # bool [H]

    def rescore(self, step: Step) -> Tensor:
        """Mix in the next token of corrections that hypotheses follow, in place: log p fp32 [H, V]."""
        if self.table is None or self.rows is None or self.following is None:
            return step.model.log_probs
        place, last = step.tokens.size(1) - 1, self.table.size(1) - 1
        if place > last:
            return step.model.log_probs
        targets = self.table.index_select(0, self.rows)
        if place:
            self.following = self.following & (targets[:, place - 1] == step.tokens[:, -1])
        under_way = targets[:, place] != NOTHING
        follows = self.following & under_way
        said = torch.zeros_like(follows, dtype=torch.float32).masked_fill(~follows, float("-inf"))
        vote = Vote(targets[:, place : place + 1].clamp_min(0), said.unsqueeze(1), WEIGHT * follows)
        mixed = interpolate_(step.model.log_probs, [vote])
        mixed[:, self.memory.end_token] -= END_COST * (under_way & ~follows)
        return mixed

    def reorder(self, order: Tensor) -> Self:
        """Follow the beam."""
        if self.rows is None or self.following is None:
            return self
        rows, following = (one.index_select(0, order) for one in (self.rows, self.following))
        return replace(self, rows=rows, following=following)
