"""Two indexes searched as one: that of a datastore, and a small one over what was learned alongside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.exact import largest


@dataclass(frozen=True)
class JoinedIndex:
    """Finds the nearest of the keys of two indexes; those of the second are numbered after those of the first.

    Args:
        first, second: of the same metric and width, neither without keys.
    """

    first: Index
    second: Index

    @property
    def deepest(self) -> int:
        """The k beyond which a search returns no more."""
        return self.first.deepest + self.second.deepest

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search both, see `Index.search`, for k up to `deepest`; of equal scores the first index's come first."""
        scores, ids = self.first.search(queries, min(k, self.first.deepest))
        more, others = self.second.search(queries, min(k, self.second.deepest))
        scores = torch.cat([scores, more], dim=1)
        ids = torch.cat([ids, torch.where(others >= 0, others + self.first.size, others)], dim=1)
        # Places stand for ids, which may be missing.
        best, places = largest(scores, torch.arange(ids.size(1), device=ids.device), k)
        return best, ids.gather(1, places)
