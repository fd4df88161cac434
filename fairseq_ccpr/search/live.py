"""Search in what changes: an index joined with segments of learned keys, less what is forgotten."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.device import sync_is_free
from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.exact import ExactIndex, largest, scores_of
from fairseq_ccpr.search.faiss_index import (
    NARROW,
    FaissIndex,
    RescoredIndex,
    import_faiss,
    inverted_lists,
    list_count,
    make_index,
)
from fairseq_ccpr.timing import SEARCH, phase

FIRST_SPARE = 64  # entries that are looked for beyond k at first, at most
DEEPER = 4  # times as many the next time, where more than the spare were gone
PROBES = 16  # lists that are searched
SAMPLE_PER_LIST = 64  # entries that centroids are learned from
ITERATIONS = 5  # of k-means: lists need not be perfect, and learning waits for them
RETRAINED_AT = 4  # times as many entries as there were when the centroids were learned
BLOCK_ROWS = 1 << 14  # keys that are in fp32 at a time
CANDIDATES = 4  # for each neighbour that is wanted, whose codes are near, and whose keys are looked at
FEWEST = 32  # of them: the codes are rough, and a live memory wants a single neighbour
SPARE = 2  # the same, of those whose products are near: these are as exact as fp32 allows
FEW = 1024  # rows that a CPU compares with all at once, where there are no lists


@dataclass(frozen=True)
class JoinedIndex:
    """Finds the nearest keys of two indexes, neither empty; the second's are numbered after the first's."""

    first: Index
    second: Index

    @property
    def deepest(self) -> int:
        return self.first.deepest + self.second.deepest

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search both for k up to `deepest`; of equal scores the first index's come first."""
        scores, ids = self.first.search(queries, min(k, self.first.deepest))
        more, others = self.second.search(queries, min(k, self.second.deepest))
        scores = torch.cat([scores, more], dim=1)
        ids = torch.cat([ids, torch.where(others >= 0, others + self.first.size, others)], dim=1)
        best, places = largest(scores, k)
        return best, ids.gather(1, places)


def search_without(index: Index, gone: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k nearest entries of queries [H, d] that are not `gone`, int64 [m], ascending.

    Up to `FIRST_SPARE` entries that are gone are looked for beyond k at once: to compare with all keys takes
    as long for more of them, another search would wait for a database again, and a GPU is asked for no
    number. FAISS's lists on a CPU score again so many candidates for each of the k that they are searched for
    k alone. Queries that found too few, mostly none, are searched for once more, and deeper: these pay twice.

    Returns:
        scores fp32 [H, k], nearest first, and ids int64 [H, k]; -inf and -1 where there are not as many.
    """
    if not len(gone):
        return index.search(queries, k)
    most = max(k, min(k + len(gone), index.deepest))
    spared = min(most, k + FIRST_SPARE)
    in_lists = isinstance(index, FaissIndex) and inverted_lists(index.index) is not None
    depth = k if in_lists and sync_is_free(queries.device) else spared
    scores, ids, more = _left(index, gone, queries, depth, k)
    while depth < most and len(rows := (more & (ids[:, -1] < 0)).nonzero()[:, 0]):
        depth = spared if depth < spared else min(most, DEEPER * depth)
        found = _left(index, gone, queries[rows], depth, k)
        for all_, some in zip((scores, ids, more), found):
            all_[rows] = some
    return scores, ids


def _left(index: Index, gone: Tensor, queries: Tensor, depth: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is left of the nearest `depth`: scores and ids [H, k], and whether there may be more, bool [H]."""
    scores, ids = index.search(queries, depth)
    more = ids[:, -1] >= 0
    place = torch.searchsorted(gone, ids).clamp_max(len(gone) - 1)
    forgotten = gone[place] == ids
    scores, ids = scores.masked_fill(forgotten, float("-inf")), ids.masked_fill(forgotten, -1)
    best, places = largest(scores, k)
    return best, ids.gather(1, places), more


def can_grow() -> bool:
    """Check whether such lists are possible: FAISS may not be installed."""
    return importlib.util.find_spec("faiss") is not None


class GrowingLists:
    """Inverted lists over some rows of an array of keys. Adding and removing return others."""

    def __init__(self, index: Any, trained: int) -> None:
        self.index, self.trained = index, trained  # entries that there were when the centroids were learned
        self.size = int(index.ntotal)

    @classmethod
    def of(cls, keys: Tensor, rows: np.ndarray, metric: str) -> GrowingLists:
        """Learn centroids and codes from keys, fp16 [n, d], and list them by their rows, int64 [n]."""
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

    def without(self, ranges: Sequence[tuple[int, int]], keys: Tensor) -> GrowingLists:
        """Return lists without rows, each range from its first to before its last, of keys fp16 [n, d].

        FAISS leaves the codes of what it removes in a list's last block, and mixes them with those that are
        added there later. So lists that have lost some are filled again.
        """
        faiss = import_faiss()
        index = faiss.clone_index(self.index)
        lists, numbers = index.invlists, range(index.nlist)
        before = [lists.list_size(number) for number in numbers]
        index.remove_ids(faiss.IDSelectorBatch(np.concatenate([np.arange(*one) for one in ranges])))
        shorter = [number for number in numbers if lists.list_size(number) < before[number]]
        rows = np.concatenate(
            [faiss.rev_swig_ptr(lists.get_ids(one), lists.list_size(one)) for one in shorter]
        )
        for number in shorter:
            lists.resize(number, 0)
        index.ntotal -= len(rows)
        _add(index, keys[torch.from_numpy(rows)], rows)
        return GrowingLists(index, self.trained)

    @property
    def outgrown(self) -> bool:
        return self.size >= RETRAINED_AT * self.trained


def _add(index: Any, keys: Tensor, rows: np.ndarray) -> None:
    for start in range(0, len(keys), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        index.add_with_ids(keys[block].float().numpy(), rows[block])


@dataclass(frozen=True)
class Segment:
    """Entries up to a moment, which do not change any more."""

    keys: Tensor  # fp16 [n, d]
    half_norms: Tensor  # |x|^2 / 2 of each, fp32 [n]
    metric: str
    lists: GrowingLists | None = None  # over the rows before `listed`; None: there are none
    listed: int = 0  # rows from here on are compared with one by one
    # int64 [m], ascending, of those rows the ones that are gone, counted from `listed`
    gone: Tensor | None = None

    @property
    def size(self) -> int:
        return len(self.keys)

    @cached_property
    def _exact(self) -> ExactIndex:
        index = ExactIndex(self.keys, self.metric)
        if self.metric == "l2":
            index.half_norms = self.half_norms
        return index

    @cached_property
    def _last(self) -> tuple[Tensor, Tensor]:
        """The rows compared one by one: keys fp32 [r, d], and what products are too large by, fp32 [r]."""
        less = (
            self.half_norms[self.listed :].clone()
            if self.metric == "l2"
            else self.half_norms.new_zeros(self._few)
        )
        if self.gone is not None:
            less[self.gone] = float("inf")
        return self.keys[self.listed :].float(), less

    @cached_property
    def _in_lists(self) -> RescoredIndex:
        """The lists, as an index that looks at the keys of its candidates."""
        assert self.lists is not None
        parameters = f"k_factor_rf={CANDIDATES},candidates={FEWEST}"
        return RescoredIndex.over(self.lists.index, self.keys.numpy(), self.metric, parameters)

    @property
    def _few(self) -> int:
        return self.size - self.listed

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest entries of queries [H, d]: scores fp32 and rows int64 [H, k], nearest first."""
        scores, rows = self.candidates(queries, k)
        pad, missing = torch.nn.functional.pad, (0, max(0, k - rows.size(1)))
        best, places = largest(pad(scores, missing, value=float("-inf")), k)
        return best, pad(rows, missing, value=-1).gather(1, places)

    def candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find entries that the k nearest are among: fp32 and int64 [H, c], -inf and -1 where one is missing."""
        if self.lists is None and (self.keys.is_cuda or self._few > FEW):
            return self._exact.search(queries, k)
        queries = queries.float()
        found = [self._compared(queries, min(SPARE * k, self._few))]
        if self.lists is not None:
            found.insert(0, self._in_lists.search(queries, k))
        scores, rows = (torch.cat(parts, dim=1) for parts in zip(*found))
        return scores, rows

    @phase(SEARCH)
    def _compared(self, queries: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        keys, less = self._last
        near, rows = largest(queries @ keys.T - less, depth)
        rows = torch.where(near > float("-inf"), rows + self.listed, -1)
        scores = scores_of(self.keys, queries, rows.clamp_min(0), self.metric)
        return scores.masked_fill(rows < 0, float("-inf")), rows
