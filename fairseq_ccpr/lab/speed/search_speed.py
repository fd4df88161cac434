"""Speed and recall of a search by index, keys, queries and neighbours, in real or synthetic datastores of any size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.cli.planning import Limits, synchronise
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.lab.machine import peak_bytes, start_peak
from fairseq_ccpr.search import ExactIndex, Index, IndexDescription, build_index, open_index
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.search.recall import found_among_nearest

NOISE = 0.3  # of the keys' own spread in each dimension
BLOCK = 1 << 20  # entries made at a time
RECALL_QUERIES = 200


def grow(
    keys: np.ndarray, values: np.ndarray, size: int, unit: bool, device: torch.device, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Make a datastore of `size` entries with keys distributed, and tokens as frequent, as in a real one.

    Up to the real size it is a random part of the real one. Beyond, each entry of the real one is taken as
    often as any other, give or take one, and all but the first copy are moved by random noise.

    Keys are fp16 [N, d] and may be memory-mapped; `unit` tells whether they have length 1, which the new ones
    then have too. Values are int32 [N, ...].

    Returns:
        keys fp16 [size, d], values int32 [size, ...].
    """
    chance = torch.Generator(device).manual_seed(seed)
    source = torch.from_numpy(np.ascontiguousarray(keys)).to(device)
    tokens = torch.from_numpy(np.array(values, dtype=np.int32)).to(device)
    real = len(source)
    spread = source[:BLOCK].float().std(dim=0, correction=0) * NOISE  # [d]
    made = torch.empty(size, source.size(1), dtype=torch.float16, device=device)
    made_values = torch.empty(size, *tokens.shape[1:], dtype=torch.int32, device=device)
    order = torch.randperm(real, generator=chance, device=device)
    for start in range(0, size, BLOCK):
        places = torch.arange(start, min(start + BLOCK, size), device=device)
        rows = order[places % real]
        block = source[rows].float()
        noise = torch.randn(block.shape, generator=chance, device=device) * spread
        block += noise * (places >= real).unsqueeze(1)
        made[places] = (torch.nn.functional.normalize(block, dim=1) if unit else block).half()
        made_values[places] = tokens[rows]
    return made, made_values


def queries_near(keys: Tensor, count: int, unit: bool, seed: int = 2) -> Tensor:
    """Draw queries fp32 [count, d] around random keys [N, d], as far away as `grow` puts new keys."""
    chance = torch.Generator(keys.device).manual_seed(seed)
    rows = torch.randint(len(keys), (count,), generator=chance, device=keys.device)
    spread = keys[:BLOCK].float().std(dim=0, correction=0) * NOISE
    queries = (
        keys[rows].float() + torch.randn(count, keys.size(1), generator=chance, device=keys.device) * spread
    )
    return torch.nn.functional.normalize(queries, dim=1) if unit else queries


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


def make_index(
    keys: Tensor, choice: str, metric: str, parameters: str = ""
) -> tuple[Index, IndexDescription, float]:
    """Build an index of keys [N, d], on their device where it can be; the last result is its bytes per key."""
    size, dimension = keys.shape
    description = plan_index(choice, metric, parameters, size, dimension, keys.is_cuda)
    if description.backend == "exact":
        return ExactIndex(keys, metric), description, keys.element_size() * dimension + 4 * (metric == "l2")
    with TemporaryDirectory() as name:
        folder, rows = Path(name), keys.cpu().numpy()
        build_index(rows, description, folder / description.file, lambda count: None)
        index = open_index(description, rows, folder)
        length = sum((folder / file).stat().st_size for file in description.files)
    return index.to(keys.device), description, length / size


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
    """Time every combination of the sweep: each search once to warm up, then `repeats` times."""
    unit, metric = store.section.projection is not None, store.section.index.metric
    for size in sorted(sweep.sizes):  # the most that a process held only grows: the small ones first
        keys, _ = grow(store.keys, store.values, size, unit, device)
        exact = ExactIndex(keys, metric)
        for choice in sweep.index:
            start_peak(device)
            start = time.perf_counter()
            index, description, bytes_per_key = make_index(keys, choice, metric)
            built = 0.0 if description.backend == "exact" else time.perf_counter() - start
            known = queries_near(keys, RECALL_QUERIES, unit)
            recalls = {k: recall(index, exact, known, min(k, size)) for k in sweep.k}
            for count in sweep.queries:
                queries = queries_near(keys, count, unit)
                for k in sweep.k:
                    times = [1000 * time_search(index, queries, k) for _ in range(1 + sweep.repeats)][1:]
                    yield SearchCost(
                        name,
                        choice,
                        size,
                        keys.size(1),
                        count,
                        k,
                        float(np.median(times)),
                        min(times),
                        max(times),
                        1000 * limits.floor(size, keys.size(1), count),
                        recalls[k],
                        bytes_per_key,
                        built,
                        peak_bytes(device),
                    )


def time_search(index: Index, queries: Tensor, k: int) -> float:
    """Time one search, in seconds."""
    synchronise(queries.device)
    start = time.perf_counter()
    index.search(queries, k)
    synchronise(queries.device)
    return time.perf_counter() - start


def recall(index: Index, exact: ExactIndex, queries: Tensor, k: int) -> float:
    """Measure what fraction of the k nearest keys `index` finds, on average over the queries [H, d].

    A key as near as the last of the k counts: which of several equal ones is found makes no difference.
    """
    return float(found_among_nearest(index, exact, queries, k, k).float().mean())
