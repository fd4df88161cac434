"""Search in a few to a million entries that were added one after the other, and of which some may be gone.

Few are compared with one by one. On a CPU more of them are in inverted lists, and only the last are compared with one by one,
so that what comes last is found for certain. Letters: n rows, d width of keys, H queries, k neighbours, m rows that are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairseq_ccpr.search.exact import ExactIndex, largest, scores_of
from fairseq_ccpr.search.growing_lists import GrowingLists
from fairseq_ccpr.timing import SEARCH, phase

CANDIDATES = 4  # for each neighbour that is wanted, whose codes are near, and whose keys are looked at
SPARE = 2  # the same, of those whose products are near: these are as exact as fp32 allows
FEW = 1024  # rows that a CPU compares with all at once, where there are no lists


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
    def _exact(self) -> ExactIndex:
        index = ExactIndex(self.keys, self.metric)
        if self.metric == "l2":
            index.half_norms = self.half_norms
        return index

    @cached_property
    def _last(self) -> tuple[Tensor, Tensor]:
        """The rows that are compared with one by one: keys fp32 [r, d], and what products are too large by, fp32 [r]."""
        less = self.half_norms[self.listed :].clone() if self.metric == "l2" else self.half_norms.new_zeros(self._few)
        if self.gone is not None:
            less[self.gone] = float("inf")
        return self.keys[self.listed :].float(), less

    @property
    def _few(self) -> int:
        return self.size - self.listed

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest entries.

        Args:
            queries: [H, d], any float dtype.

        Returns:
            scores fp32 [H, k], nearest first, and rows int64 [H, k]; -inf and -1 where there are not as many.
        """
        scores, rows = self.candidates(queries, k)
        missing = 0, max(0, k - rows.size(1))
        scores = torch.nn.functional.pad(scores, missing, value=float("-inf"))
        best, places = largest(scores, torch.arange(scores.size(1), device=rows.device), k)
        return best, torch.nn.functional.pad(rows, missing, value=-1).gather(1, places)

    def candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find entries that the k nearest are among, in no order: fp32 and int64 [H, c], -inf and -1 where one is missing."""
        if self.lists is None and (self.keys.is_cuda or self._few > FEW):
            return self._exact.search(queries, k)
        queries = queries.float()
        found = [self._compared(queries, min(SPARE * k, self._few))]
        if self.lists is not None:
            found.insert(0, self._scored(queries, self.lists.candidates(queries, min(CANDIDATES * k, self.lists.size))))
        scores, rows = (torch.cat(parts, dim=1) for parts in zip(*found))
        return scores, rows

    @phase(SEARCH)
    def _compared(self, queries: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Compare with all of the last rows, and score the nearest again as the exact index does."""
        keys, less = self._last
        near, rows = largest(queries @ keys.T - less, torch.arange(self._few), depth)
        return self._scored(queries, torch.where(near > float("-inf"), rows + self.listed, -1))

    @phase(SEARCH)
    def _scored(self, queries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Score rows, int64 [H, c], -1 where there is none, by their keys."""
        scores = scores_of(self.keys, queries, rows.clamp_min(0), self.metric) if rows.size(1) else rows.float()
        return scores.masked_fill(rows < 0, float("-inf")), rows
