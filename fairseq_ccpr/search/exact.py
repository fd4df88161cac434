"""Exact search over keys as they are: in Triton on a GPU that has it, else in torch."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.search import tiled
from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.selection import best_rows, largest

MAXIMA_NUMBERS = 1 << 27  # numbers that are kept of one search, of as many queries as that allows: 512 MB


class ExactIndex(Index):
    """Compares each query with every key, on the CPU or a GPU.

    1. of each run of keys, the largest score is kept;
    2. the k runs are chosen whose largest are largest: the k nearest keys are among theirs;
    3. those keys are scored again in fp32, distances by differences rather than by products, which cancel, and the k
       nearest are kept, of equal ones the lower id first.

    Args:
        keys: [N, d], any float dtype; may be memory-mapped.
        metric: `l2` or `ip`.
        fused: whether steps 1 and 3 are done by Triton, for keys in half precision; if not given, where it can be.
    """

    def __init__(self, keys: np.ndarray | Tensor, metric: str, fused: bool | None = None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.keys = keys if isinstance(keys, Tensor) else torch.from_numpy(keys)
        self.metric = metric
        self.size, self.dimension = self.keys.shape
        self.steps: Any = tiled
        if can_fuse(self.keys) if fused is None else fused:
            self.keys = self.keys.contiguous()
            self.steps = importlib.import_module("fairseq_ccpr.search.fused")

    @cached_property
    def half_norms(self) -> Tensor:
        """|x|^2 / 2 of each key, fp32 [N]."""
        norms = torch.empty(self.size, device=self.keys.device)
        rows = max(1, tiled.TILE_NUMBERS // self.dimension)
        for start in range(0, self.size, rows):
            norms[start : start + rows] = self.keys[start : start + rows].float().square().sum(1) / 2
        return norms

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        depth = min(k, self.size)
        if not depth or not len(queries):
            ids = torch.full((len(queries), k), -1, dtype=torch.long, device=queries.device)
            return torch.full_like(ids, float("-inf"), dtype=torch.float32), ids
        rows = max(1, MAXIMA_NUMBERS * self.steps.BUCKET // self.size)
        parts = [self._nearest(block, depth) for block in queries.split(rows)]
        scores, ids = (torch.cat(part) for part in zip(*parts))
        missing = 0, k - depth
        pad = torch.nn.functional.pad
        return pad(scores, missing, value=float("-inf")), pad(ids, missing, value=-1)

    def _nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest keys of a block of queries, k being N at most."""
        half_norms = self.half_norms if self.metric == "l2" else None
        buckets = best_rows(self.steps.bucket_maxima(self.keys, queries, half_norms), k)  # [H, n]
        scores = self.steps.bucket_scores(self.keys, queries, buckets, self.metric)
        within = torch.arange(self.steps.BUCKET, device=queries.device)
        return largest(scores, (buckets.unsqueeze(2) * self.steps.BUCKET + within).flatten(1), k)

    def to(self, device: torch.device) -> ExactIndex:
        """A copy on `device`."""
        return self if self.keys.device == device else ExactIndex(self.keys.to(device), self.metric)


def can_fuse(keys: Tensor) -> bool:
    """Whether Triton can search these keys: in half precision, on a GPU, and Triton is installed."""
    half = keys.dtype in (torch.float16, torch.bfloat16)
    return half and keys.is_cuda and importlib.util.find_spec("triton") is not None
