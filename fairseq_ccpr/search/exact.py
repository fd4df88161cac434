"""Exact search over keys as they are: in Triton on a GPU that has it, else in torch."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import tiled
from fairseq_ccpr.search.base import IndexDescription, IndexRequest, RemoteKeys
from fairseq_ccpr.search.launching import ScoringIndex, load_steps
from fairseq_ccpr.search.selection import FINE, best_rows, largest, search_by_blocks
from fairseq_ccpr.storage.arrays import as_tensor

EXACT = "exact"
MAXIMA_NUMBERS = 1 << 27  # numbers that are kept of one search, of as many keys as that allows: 512 MB
# Scores that a CPU keeps, 32 MB: more take longer to write than runs of keys take to score again.
KEPT_NUMBERS = 1 << 23
SPARE = 8  # keys that are scored again beyond k, as products and differences round differently
MOST_ROWS = 1 << 30  # of keys in a block, whose numbers kernels count in 32 bits
QUERIES = 1 << 12  # at a time


class ExactIndex(ScoringIndex):
    """Compares each query with every key, on the CPU or a GPU.

    1. of each run of keys, the largest score is kept;
    2. the k runs are chosen whose largest are largest: the k nearest keys are among theirs;
    3. those keys are scored again in fp32, distances by differences rather than by products, which cancel, and the k
       nearest are kept, of equal ones the lower id first.

    On a CPU, few scores are all kept, so that step 3 scores only the k + 8 nearest keys again.

    Many keys are searched in blocks, one after the other, and the nearest of all blocks are kept: memory does not grow
    with N, and keys on disk are read once, in order.

    Args:
        keys: [N, d], any float dtype; may be memory-mapped.
        metric: `l2` or `ip`.
        fused: whether steps 1 and 3 are done by Triton, for keys in half precision; if not given, where it can be.
    """

    def __init__(self, keys: np.ndarray | Tensor, metric: str, fused: bool | None = None) -> None:
        self.keys = keys if isinstance(keys, Tensor) else as_tensor(keys)
        self.metric = metric
        self.size, self.dimension = self.keys.shape
        self.on_host = self.keys.device.type == "cpu"
        self.steps = load_steps(self.keys, fused)
        if self.steps is not tiled:
            self.keys = self.keys.contiguous()

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        """Take no parameters."""
        if request.choice != EXACT:
            raise ConfigurationError(f"--index is '{request.choice}': give {EXACT} or a FAISS factory string")
        if request.parameters:
            raise ConfigurationError(
                f"--index-parameters '{request.parameters}' are for FAISS, and exact search has none"
            )
        return IndexDescription(EXACT, request.metric)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> ExactIndex:
        """Search the keys as they are."""
        assert isinstance(keys, np.ndarray)  # they are in a folder
        return cls(keys, description.metric)

    @cached_property
    def half_norms(self) -> Tensor:
        """|x|^2 / 2 of each key, fp32 [N]; computed once."""
        return half_norms(self.keys)

    def in_torch(self) -> ExactIndex:
        """Return the same without Triton."""
        return ExactIndex(self.keys, self.metric, fused=False)

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Compare each query with every key; see the class."""
        return search_by_blocks(self._nearest, queries, QUERIES, self.size, k)

    def _nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest keys of a block of queries, k being N at most."""
        rows = min(self.steps.BUCKET * max(1, MAXIMA_NUMBERS // len(queries)), MOST_ROWS)  # of keys at a time
        scores, ids = self._nearest_of(slice(0, rows), queries, k)
        for start in range(rows, self.size, rows):
            more, others = self._nearest_of(slice(start, start + rows), queries, k)
            scores, ids = torch.cat([scores, more], dim=1), torch.cat([ids, others], dim=1)
            # Places stand for ids, which may be too large to be compared: those before have the lower ids.
            scores, places = largest(scores, torch.arange(ids.size(1), device=ids.device), min(k, ids.size(1)))
            ids = ids.gather(1, places)
        return scores, ids

    def _nearest_of(self, rows: slice, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest keys in a block of keys, or all where they are fewer."""
        keys = self.keys[rows]
        norms = self._half_norms_of(rows) if self.metric == "l2" else None
        if self.steps is tiled and self.on_host and len(keys) * len(queries) <= KEPT_NUMBERS:
            scores = tiled.all_scores(keys, queries, norms)
            ids = best_rows(scores, k + SPARE, group=FINE, direct=FINE * FINE)
            scores = tiled.scores_of(keys, queries, ids, self.metric)
            scores, ids = largest(scores, ids, min(k, len(keys)))
            return scores, ids + rows.start
        buckets = best_rows(self.steps.bucket_maxima(keys, queries, norms), min(k, len(keys)))  # [H, n]
        scores = self.steps.bucket_scores(keys, queries, buckets, self.metric)
        within = torch.arange(self.steps.BUCKET, device=queries.device)
        ids = (buckets.unsqueeze(2) * self.steps.BUCKET + within).flatten(1)
        scores, ids = largest(scores, ids, min(k, len(keys)))
        return scores, ids + rows.start

    def _half_norms_of(self, rows: slice) -> Tensor:
        """Return |x|^2 / 2 of a block of keys: cached, unless there are too many for a CPU, whose keys may be on disk."""
        kept = self.keys.is_cuda or self.size <= MAXIMA_NUMBERS
        return self.half_norms[rows] if kept else half_norms(self.keys[rows])

    def to(self, device: torch.device) -> ExactIndex:
        """Copy to `device`."""
        return self if self.keys.device == device else ExactIndex(self.keys.to(device), self.metric)


def half_norms(keys: Tensor) -> Tensor:
    """Compute |x|^2 / 2 of each key, [N, d] -> fp32 [N]."""
    norms = torch.empty(len(keys), device=keys.device)
    rows = max(1, tiled.TILE_NUMBERS // keys.size(1))
    for start in range(0, len(keys), rows):
        norms[start : start + rows] = keys[start : start + rows].float().square().sum(1) / 2
    return norms
