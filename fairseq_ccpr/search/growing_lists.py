"""Inverted lists in memory with insertion and removal, for when there are too many entries to compare with all of them.

FAISS scans codes of four bits in the lists that are nearest; what may be among the nearest is scored again by its keys.
Letters: n entries, L lists, p lists that are searched, d width of keys, H queries.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.search.faiss_library import NARROW, import_faiss, list_count, make_index

PROBES = 8  # lists that are searched
SAMPLE_PER_LIST = 64  # entries that centroids are learned from
ITERATIONS = 5  # of k-means: lists need not be perfect, and learning waits for them
RETRAINED_AT = 4  # times as many entries as there were when the centroids were learned
BLOCK_ROWS = 1 << 14  # keys that are in fp32 at a time


def can_grow() -> bool:
    """Check whether such lists are possible: FAISS may not be installed."""
    return importlib.util.find_spec("faiss") is not None


class GrowingLists:
    """Inverted lists over some rows of an array of keys. They do not change: adding and removing return others.

    Args:
        index: of FAISS, over rows by their numbers.
        trained: entries that there were when the centroids were learned.
    """

    def __init__(self, index: Any, trained: int) -> None:
        self.index, self.trained = index, trained
        self.size = int(index.ntotal)
        self._metric = "ip" if index.metric_type == import_faiss().METRIC_INNER_PRODUCT else "l2"
        self._centroids = torch.as_tensor(index.quantizer.reconstruct_n(0, index.nlist))

    @classmethod
    def of(cls, keys: Tensor, rows: np.ndarray, metric: str) -> GrowingLists:
        """Learn centroids and codes from keys, and put them into lists.

        Args:
            keys: fp16 [n, d].
            rows: int64 [n], by which they are found.
        """
        size, dimension = keys.shape
        codes = dimension if dimension <= NARROW or dimension % 2 else dimension // 2
        count = list_count(size)
        index = make_index(dimension, f"IVF{count},PQ{codes}x4fs", metric)
        index.cp.niter = index.pq.cp.niter = ITERATIONS
        index.cp.min_points_per_centroid = 1  # it would warn
        index.nprobe = min(PROBES, count)
        chosen = np.random.default_rng(1).permutation(size)[: SAMPLE_PER_LIST * count]
        index.train(keys[torch.from_numpy(chosen)].float().numpy())
        _add(index, keys, rows)
        return cls(index, size)

    def with_more(self, keys: Tensor, rows: np.ndarray) -> GrowingLists:
        """Return lists that have more keys, fp16 [m, d], by their rows, int64 [m]."""
        index = import_faiss().clone_index(self.index)
        _add(index, keys, rows)
        return GrowingLists(index, self.trained)

    def without(self, ranges: Sequence[tuple[int, int]]) -> GrowingLists:
        """Return lists without rows, each range from its first to before its last."""
        faiss = import_faiss()
        index = faiss.clone_index(self.index)
        rows = np.concatenate([np.arange(*one) for one in ranges])
        index.remove_ids(faiss.IDSelectorBatch(rows))
        return GrowingLists(index, self.trained)

    @property
    def outgrown(self) -> bool:
        """Whether there are too many entries for its centroids."""
        return self.size >= RETRAINED_AT * self.trained

    def candidates(self, queries: Tensor, depth: int) -> Tensor:
        """Find rows that may be the nearest of queries fp32 [H, d]: int64 [H, depth], -1 where there are fewer."""
        near = queries @ self._centroids.T  # [H, L]
        if self._metric == "l2":
            near -= self._centroids.square().sum(dim=1) / 2
        near, lists = near.topk(self.index.nprobe, dim=1)  # [H, p]
        return self.index.search_preassigned(queries.contiguous(), depth, lists, near)[1]


def _add(index: Any, keys: Tensor, rows: np.ndarray) -> None:
    """Add keys block by block."""
    for start in range(0, len(keys), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        index.add_with_ids(keys[block].float().numpy(), rows[block])
