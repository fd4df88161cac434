"""Search in a few to a million entries that were added one after the other, and of which some may be gone.

Few are compared with one by one. On a CPU more of them are in inverted lists, and only the last are compared with one by one,
so that what comes last is found for certain. Letters: n rows, d width of keys, H queries, m rows that are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairseq_ccpr.search import tiled
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.growing_lists import GrowingLists
from fairseq_ccpr.search.selection import largest
from fairseq_ccpr.search.without import search_without
from fairseq_ccpr.timing import SEARCH, phase

CANDIDATES = 4  # for each neighbour that is wanted, whose keys are looked at


@dataclass(frozen=True)
class Segment:
    """Entries up to a moment, which do not change any more.

    Args:
        keys: fp16 [n, d].
        half_norms: |x|^2 / 2 of each, fp32 [n].
        metric: `l2` or `ip`.
        lists: over the rows before `listed`; None: there are none.
        listed: rows from here on are compared with one by one.
        gone: int64 [m], ascending, of those rows the ones that are gone, counted from `listed`.
    """

    keys: Tensor
    half_norms: Tensor
    metric: str
    lists: GrowingLists | None = None
    listed: int = 0
    gone: Tensor | None = None

    @property
    def size(self) -> int:
        """Rows, with those that are gone."""
        return len(self.keys)

    @cached_property
    def _last(self) -> ExactIndex:
        index = ExactIndex(self.keys[self.listed :], self.metric)
        if self.metric == "l2":
            index.half_norms = self.half_norms[self.listed :]
        return index

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest entries.

        Args:
            queries: [H, d], any float dtype.

        Returns:
            scores fp32 [H, k], nearest first, and rows int64 [H, k]; -inf and -1 where there are not as many.
        """
        scores, rows = self.candidates(queries, k)
        best, places = largest(scores, torch.arange(rows.size(1), device=rows.device), k)
        return best, rows.gather(1, places)

    def candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find entries that the k nearest are among, in no order: as `search`, fp32 and int64 [H, k or more]."""
        if self.gone is None:
            scores, rows = self._last.search(queries, k)
        else:
            scores, rows = search_without(self._last, self.gone, queries, k)
        if self.lists is None:
            return scores, rows
        rows = torch.where(rows >= 0, rows + self.listed, rows)
        more, others = self._listed(self.lists, queries.float(), min(CANDIDATES * k, self.lists.size))
        return torch.cat([more, scores], dim=1), torch.cat([others, rows], dim=1)

    @phase(SEARCH)
    def _listed(self, lists: GrowingLists, queries: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Search the lists: codes say what is near, keys how near."""
        rows = lists.candidates(queries, depth)
        scores = tiled.scores_of(self.keys, queries, rows.clamp_min(0), self.metric)
        return scores.masked_fill_(rows < 0, float("-inf")), rows
