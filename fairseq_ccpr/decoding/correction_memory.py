"""The memory of corrections: what was learned for the very source, as an exact match.

    p'(v) = (1 - w) p(v) + w [v = y_t]

at step t of hypotheses that begin with y_1 ... y_(t-1), y being the target of a pair whose source the model
reads as it reads this one. So a correction counts whatever k, T, lambda and trust are. No hypothesis of the
sentence may end before it does: fairseq ends a search once as many hypotheses have ended as the beam is wide,
and poor short ones would be the first.

Letters: B sentences, H hypotheses, L tokens of the longest target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fairseq_ccpr.datastore.learned import ReadAs
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.memory import Memory, MemoryBatch, Snapshot, Step
from fairseq_ccpr.decoding.mixture import Vote
from fairseq_ccpr.settings import signature

WEIGHT = 0.99  # w; a hypothesis that leaves a correction loses 4.6 nats at once
END_COST = 20.0  # in nats, of ending before it
AFTER_END = -1  # in place of tokens after the end of a target


@dataclass(frozen=True)
class CorrectionMemory(Memory):
    """Pairs that were learned alongside a token datastore, by their sources.

    Args:
        learned: live, or as a snapshot.
        read_tokens: the subwords of a source of the batch, int64 [S], as `ReadAs.ids` has them.
        read_as: hashes what the model reads as a text.
        end_token: ends target sentences.
    """

    name = "corrections"
    acts_on = "mixture"

    learned: LearnedMemory | LearnedEntries = field()
    read_tokens: Callable[[Tensor], np.ndarray]
    read_as: Callable[[str], ReadAs]
    end_token: int

    def begin(self, sources: Tensor, snapshot: Snapshot) -> CorrectionBatch:
        """Begin a batch of sentences, int64 [B, S]."""
        rows = torch.arange(len(sources), device=sources.device)
        nothing, following = sources.new_empty(len(sources), 0), torch.ones_like(rows).bool()
        batch = CorrectionBatch(self.at(snapshot), sources, nothing, rows, following)
        batch.look_up(snapshot.texts)
        return batch

    def target(self, source: Tensor, text: str | None) -> np.ndarray | None:
        """Return the target learned for a source, int64 [S], and its text if that is known; None without.

        Of several that differ in unknown subwords it is that of the text, or else the one that was learned
        last.
        """
        entries = self.learned.entries
        if not (pairs := entries.by_source.get(tuple(self.read_tokens(source).tolist()), [])):
            return None
        read_as = self.read_as(text) if text is not None else None
        return entries.target(next((pair for pair in reversed(pairs) if pair.read_as == read_as), pairs[-1]))

    def signature(self) -> str:
        return signature({self.name: WEIGHT}) if self.learned.entries.by_source else ""


@dataclass
class CorrectionBatch(MemoryBatch):
    """The memory during a batch; without corrections of its sources it does nothing."""

    memory: CorrectionMemory
    sources: Tensor  # int64 [B, S]
    # int64 [B, L + 1], the tokens of its corrections, then `AFTER_END`; [B, 0] where there are none
    table: Tensor
    rows: Tensor  # int64 [H], the sentence of each hypothesis
    following: Tensor  # bool [H], which hypotheses have followed a correction so far

    def look_up(self, texts: Sequence[str] | None) -> None:
        """Look up the sources."""
        if not self.memory.learned.entries.by_source:
            return
        known = texts if texts is not None else [None] * len(self.sources)
        found = [self.memory.target(*one) for one in zip(self.sources.cpu(), known)]
        if any(target is not None for target in found):
            targets = [torch.tensor(target.tolist() if target is not None else []).long() for target in found]
            table = pad_sequence(targets, batch_first=True, padding_value=AFTER_END)
            self.table = pad(table, (0, 1), value=AFTER_END).to(self.rows.device)

    def rescore(self, step: Step) -> Tensor | None:
        """Mix in the next token of corrections that hypotheses follow, in place: log p fp32 [H, V]."""
        if (place := step.tokens.size(1) - 1) >= self.table.size(1):
            return None
        targets = self.table.index_select(0, self.rows)
        if place:
            self.following = self.following & (targets[:, place - 1] == step.tokens[:, -1])
        next_token = targets[:, place]
        follows = self.following & (next_token != AFTER_END)
        said = torch.zeros_like(follows, dtype=torch.float32).masked_fill(~follows, float("-inf"))
        vote = Vote(next_token.clamp_min(0).unsqueeze(1), said.unsqueeze(1), WEIGHT * follows)
        mixed, end = step.mix([vote]), self.memory.end_token
        mixed[:, end] -= END_COST * ((next_token != AFTER_END) & (next_token != end))
        return mixed

    def reorder(self, order: Tensor) -> Self:
        if not self.table.size(1):
            return self
        rows, following = self.rows.index_select(0, order), self.following.index_select(0, order)
        return replace(self, rows=rows, following=following)
