"""Exact search in torch: the keys are read tile by tile, so memory does not grow with them."""

from __future__ import annotations

import warnings
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.search.base import Index

TILE_NUMBERS = 1 << 24  # numbers in a tile of keys, or of scores: 64 MB in fp32


class ExactIndex(Index):
    """Compares each query with every key, on the CPU or a GPU.

    1. a tile of keys is brought to fp32 and multiplied with the queries;
    2. its best k join the best k so far;
    3. the final k are scored again in fp32, distances by differences rather than by products, which cancel.

    Args:
        keys: [N, d], any float dtype; may be memory-mapped.
        metric: `l2` or `ip`.
    """

    def __init__(self, keys: np.ndarray | Tensor, metric: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.keys = keys if isinstance(keys, Tensor) else torch.from_numpy(keys)
        self.metric = metric
        self.size, self.dimension = self.keys.shape

    @cached_property
    def half_norms(self) -> Tensor:
        """|x|^2 / 2 of each key, fp32 [N]."""
        norms = torch.empty(self.size, device=self.keys.device)
        rows = max(1, TILE_NUMBERS // self.dimension)
        for start in range(0, self.size, rows):
            norms[start : start + rows] = self.keys[start : start + rows].float().square().sum(1) / 2
        return norms

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        queries = queries.float()
        found = self._nearest(queries, min(k, self.size))  # [H, min(k, N)]
        scores, order = self._score(queries, found).sort(dim=1, descending=True, stable=True)
        missing = k - found.size(1)
        scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
        return scores, torch.nn.functional.pad(found.gather(1, order), (0, missing), value=-1)

    def _nearest(self, queries: Tensor, k: int) -> Tensor:
        """Ids of the k nearest keys, int64 [H, k]."""
        best_scores = queries.new_empty(len(queries), 0)
        best_ids = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        rows = max(1, TILE_NUMBERS // max(self.dimension, len(queries)))
        for start in range(0, self.size, rows):
            scores = queries @ self.keys[start : start + rows].float().T  # [H, rows]
            if self.metric == "l2":
                # -|q-x|^2 / 2 = q.x - |x|^2 / 2 - |q|^2 / 2, and the last is the same for every key.
                scores -= self.half_norms[start : start + rows]
            tile_scores, tile_ids = scores.topk(min(k, scores.size(1)), dim=1)
            best_scores = torch.cat([best_scores, tile_scores], dim=1)
            best_ids = torch.cat([best_ids, tile_ids + start], dim=1)
            best_scores, order = best_scores.topk(min(k, best_scores.size(1)), dim=1)
            best_ids = best_ids.gather(1, order)
        return best_ids

    def _score(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Scores of given keys, fp32 [H, k]."""
        scores = torch.empty(ids.shape, device=queries.device)
        rows = max(1, TILE_NUMBERS // max(1, ids.size(1) * self.dimension))
        for start in range(0, len(queries), rows):
            block = slice(start, start + rows)
            keys, query = self.keys[ids[block]].float(), queries[block]  # [rows, k, d], [rows, d]
            if self.metric == "ip":
                scores[block] = (keys @ query.unsqueeze(2)).squeeze(2)
            else:
                scores[block] = -(keys - query.unsqueeze(1)).square().sum(2)
        return scores

    def to(self, device: torch.device) -> ExactIndex:
        """A copy on `device`."""
        return self if self.keys.device == device else ExactIndex(self.keys.to(device), self.metric)
