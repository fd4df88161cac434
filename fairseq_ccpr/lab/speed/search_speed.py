"""Speed and recall of a search by index, number of keys, queries and neighbours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.evaluation.planning import Limits, peak_bytes, start_peak, synchronise
from fairseq_ccpr.lab.speed.synthetic_store import grow, queries_near
from fairseq_ccpr.search import ExactIndex, Index, IndexDescription, build_index, open_index
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.search.recall import recall

RECALL_QUERIES = 200


@dataclass
class SearchCost:
    """Searches for one batch of queries, again and again."""

    store: str  # the datastore around whose keys the searched ones lie
    index: str  # as requested
    keys: int
    dimension: int
    queries: int
    k: int
    milliseconds: float  # median
    fastest: float  # milliseconds
    slowest: float
    floor: float  # milliseconds that exact search takes at least
    recall: float  # see `search.recall`
    bytes_per_key: float  # of the searched data, besides the keys where it is a file
    build_seconds: float
    peak_bytes: int  # see `peak_bytes`


@dataclass
class MadeIndex:
    """An index, and what it took."""

    index: Index
    description: IndexDescription
    bytes_per_key: float
    seconds: float


def make_index(keys: Tensor, choice: str, metric: str, parameters: str = "") -> MadeIndex:
    """Build an index of keys [N, d], on their device where it can be.

    Args:
        choice, parameters: see `plan_index`.
    """
    size, dimension = keys.shape
    description = plan_index(choice, metric, parameters, size, dimension, keys.is_cuda)
    start = time.perf_counter()
    if description.backend == "exact":
        size_of_key = keys.element_size() * dimension + 4 * (metric == "l2")
        return MadeIndex(ExactIndex(keys, metric), description, size_of_key, 0.0)
    with TemporaryDirectory() as folder:
        index, length = _make_file(keys.cpu().numpy(), description, Path(folder))
    index = index.to(keys.device)
    return MadeIndex(index, description, length / size, time.perf_counter() - start)


def _make_file(keys: np.ndarray, description: IndexDescription, folder: Path) -> tuple[Index, int]:
    build_index(keys, description, folder / description.file, lambda rows: None)
    return open_index(description, keys, folder), sum((folder / name).stat().st_size for name in description.files)


@dataclass
class Sweep:
    """What is searched. The options of `fairseq-ccpr benchmark decoding` have these names."""

    sizes: list[int]
    index: list[str]
    queries: list[int]
    k: list[int]
    repeats: int

    def __len__(self) -> int:
        return len(self.sizes) * len(self.index) * len(self.queries) * len(self.k)


def measure_searches(
    name: str, store: TokenDatastore, sweep: Sweep, device: torch.device, limits: Limits
) -> Iterator[SearchCost]:
    """Time every combination of the sweep: each search once to warm up, then `repeats` times.

    Args:
        name: what the datastore is called.
        store: a datastore around whose keys those that are searched lie.
        device: where they are searched, where an index can be.
        limits: of the device.
    """
    unit, metric = store.section.projection is not None, store.section.index.metric
    for size in sorted(sweep.sizes):  # the most that a process held only grows: the small ones first
        keys, _ = grow(store.keys, store.values, size, unit, device)
        exact = ExactIndex(keys, metric)
        for choice in sweep.index:
            start_peak(device)
            made = make_index(keys, choice, metric)
            recalls = {
                k: recall(made.index, exact, queries_near(keys, RECALL_QUERIES, unit), min(k, size)) for k in sweep.k
            }
            for count in sweep.queries:
                queries = queries_near(keys, count, unit)
                for k in sweep.k:
                    times = [_time_search(made.index, queries, k) for _ in range(1 + sweep.repeats)][1:]
                    yield SearchCost(
                        name, choice, size, keys.size(1), count, k, float(np.median(times)), min(times), max(times),
                        1000 * limits.floor(size, keys.size(1), count), recalls[k], made.bytes_per_key, made.seconds,
                        peak_bytes(device),
                    )  # fmt: skip


def _time_search(index: Index, queries: Tensor, k: int) -> float:
    """Time one search, in milliseconds."""
    synchronise(queries.device)
    start = time.perf_counter()
    index.search(queries, k)
    synchronise(queries.device)
    return 1000 * (time.perf_counter() - start)
