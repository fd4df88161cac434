"""How similar a datastore's sentences are to the sources of a batch, and the features of these for trust."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairseq_ccpr.datastore.source_index import Likeness
from fairseq_ccpr.timing import LIKENESS, phase

if TYPE_CHECKING:
    from fairseq_ccpr.decoding.token_memory import TokenMemory
    from fairseq_ccpr.decoding.token_retriever import Neighbours

# What trust looks at of each source sentence: fp32 [B] by name. A feature of the source is a line here, and
# nothing elsewhere.
SOURCE_COLUMNS: dict[str, Callable[[SourceLikeness], Tensor]] = {
    "likeness of best sentence": lambda sources: sources.best
}
SOURCE_FEATURES = tuple(SOURCE_COLUMNS)


@dataclass
class SourceLikeness:
    """How much the datastore's sentences are like the sources of a batch; computed when asked for."""

    memory: TokenMemory  # as of the batch's snapshot
    sources: Tensor  # int64 [B, S], on the host: later, it would have to be waited for
    device: torch.device  # of the model

    @cached_property
    def _found(self) -> Likeness | None:
        """What is known of the sources, on the host; None without source sentences."""
        learned, read_tokens = self.memory.learned, self.memory.read_tokens
        if learned is None or read_tokens is None:
            return None
        sentences = learned.entries.sentences
        if not sentences.size:
            return None
        with phase(LIKENESS):
            return sentences.likeness([read_tokens(source) for source in self.sources])

    @cached_property
    def _sims(self) -> Tensor | None:
        return torch.from_numpy(self._found.sims).to(self.device) if self._found is not None else None

    @cached_property
    def best(self) -> Tensor:
        """The likeness of the sentence most like each source, fp32 [B]; 0 where not known."""
        if self._found is None:
            return torch.zeros(len(self.sources), device=self.device)
        return torch.from_numpy(self._found.best).to(self.device).float()

    @cached_property
    def _columns(self) -> Tensor:
        columns = [column(self) for column in SOURCE_COLUMNS.values()]
        guarding = [self.memory.familiarity(self.best)] if self.memory.settings.guard else []
        return torch.stack([*columns, *guarding], dim=1)

    def columns(self, rows: Tensor) -> Tensor:
        """Look up what is known of the sources in these rows of the batch, int64 [N]: see `Course.of`."""
        return self._columns[rows]

    def prepare(self) -> None:
        _ = self.strange, self._sims, self._columns

    def of(self, found: Neighbours, rows: Tensor) -> Neighbours:
        """Add the likeness of the neighbours' sentences to the sources in these rows, int64 [N]."""
        if found.likeness is not None or self._sims is None or self.memory.learned is None:
            return found
        sentences = self.memory.learned.entries.sentences_of(found.ids)
        return found._replace(likeness=self._sims[rows.unsqueeze(1), sentences])

    @cached_property
    def strange(self) -> tuple[bool, Tensor] | None:
        """Tell whether the guard leaves no source any neighbours, and which, bool [B]; None: all have some."""
        if not self.memory.settings.guard or self.memory.first_learned is not None or self._found is None:
            return None
        strange = self.memory.familiarity(torch.from_numpy(self._found.best).float()) <= 0
        return (bool(strange.all()), strange.to(self.device)) if strange.any() else None
