"""Exact search over keys as they are, in torch, and what other searches share with it."""

from __future__ import annotations

from functools import cached_property
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fairseq_ccpr.device import sync_is_free, to_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search.base import Index, IndexDescription, IndexRequest, RemoteKeys
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.timing import SEARCH, phase

EXACT = "exact"
SPARE = 8  # keys that are scored again beyond k, since products and differences round differently
QUERIES = 1 << 12  # at a time
TILE_NUMBERS = 1 << 24  # numbers in a tile of keys, or of scores: 64 MB in fp32
CACHE_NUMBERS = 1 << 20  # the same where a CPU converts them, whose cache holds 4 MB
GPU_NUMBERS = 1 << 28  # scores at a time on a GPU, or numbers of keys that are gathered: 1 GB in fp32
GPU_KEYS = (1 << 31) - 1  # numbers in a tile of keys on a GPU: products of more were never tried
RUN = 64  # scores of a GPU, of which the largest stands for all
PEAKS = 1 << 27  # largest scores, of all queries that share a sweep of the keys: 512 MB
SELECTED = 1 << 24  # numbers that the best are selected among at a time, of 24 bytes each meanwhile
SCRATCH = 4 * (GPU_NUMBERS + PEAKS) + 24 * SELECTED  # bytes that a search of a GPU takes at most
LARGEST_HALF = 65504.0
KEPT_NORMS = 1 << 27  # keys, up to which a CPU keeps their norms: 512 MB
LARGEST_SINGLE = torch.finfo(torch.float32).max
HALVES = (torch.float16, torch.bfloat16)


class ExactIndex(Index):
    """Compares each query with every key, on the CPU or a GPU.

    1. Keys are multiplied with the queries tile by tile, so that memory does not grow with N, and keys on
       disk are read once, in order.
    2. The k + `SPARE` nearest by product are scored again in fp32, distances by differences, which products
       cancel.
    3. Of these the k nearest are kept, of equal ones the lower id first. Among keys whose products are
       infinite, or no numbers, any may be found.
    """

    def __init__(self, keys: np.ndarray | Tensor, metric: str) -> None:
        self.keys = keys if isinstance(keys, Tensor) else as_tensor(keys)
        self.metric = metric
        self.size, self.dimension = self.keys.shape
        self.on_host = self.keys.device.type == "cpu"
        self.by_runs = self.keys.is_cuda  # how it selects

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        if request.choice != EXACT:
            raise ConfigurationError(f"--index is '{request.choice}': give {EXACT} or a FAISS factory string")
        if request.parameters:
            raise ConfigurationError(
                f"--index-parameters '{request.parameters}' are for FAISS, and exact search has none"
            )
        return IndexDescription(EXACT, request.metric)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> ExactIndex:
        assert isinstance(keys, np.ndarray)  # they are in a folder
        return cls(keys, description.metric)

    @cached_property
    def half_norms(self) -> Tensor:
        return half_norms(self.keys)

    @cached_property
    def _single(self) -> Tensor:
        return self.keys.float() if self.on_host and self.keys.numel() <= TILE_NUMBERS else self.keys

    @torch.no_grad()
    @phase(SEARCH)
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self.on_host and queries.is_cuda:  # its keys do not fit into the GPU
            scores, ids = to_device(self.search(queries.cpu(), k), queries.device)
            return scores, ids
        count = min(k, self.size)
        near, at_once = self._near_by_tiles, QUERIES
        if self.by_runs:
            near, at_once = self._near_by_runs, max(1, min(QUERIES, RUN * PEAKS // max(1, self.size)))
        found = []
        for block in queries.split(at_once):
            block = block.float()
            ids = near(block, min(count + SPARE, self.size))
            scores = scores_of(self.keys, block, ids, self.metric)
            scores = scores.nan_to_num(float("-inf"), float("inf"), float("-inf"))
            scores, places = scores.sort(dim=1, descending=True, stable=True)
            found.append((scores[:, :count], ids.gather(1, places[:, :count])))
        scores, ids = found[0] if len(found) == 1 else map(torch.cat, zip(*found))
        if (missing := k - count) > 0:
            scores, ids = pad(scores, (0, missing), value=float("-inf")), pad(ids, (0, missing), value=-1)
        return scores, ids

    def _near_by_tiles(self, queries: Tensor, count: int) -> Tensor:
        """Select the keys of the largest products with queries [H, d] on a CPU: int64 [H, count], in order."""
        numbers = TILE_NUMBERS if self._single.dtype == torch.float32 else CACHE_NUMBERS
        rows = max(RUN, numbers // max(self.dimension, len(queries)) // RUN * RUN)
        products, ids = queries.new_empty(len(queries), 0), queries.new_empty(len(queries), 0).long()
        for first in range(0, self.size, rows):
            tile = slice(first, first + rows)
            scores = queries @ self._single[tile].float().T
            if self.metric == "l2":
                kept = self.size <= KEPT_NORMS
                scores -= self.half_norms[tile] if kept else half_norms(self.keys[tile])
            best, places = _best(scores, min(count, scores.size(1)))
            products, ids = torch.cat([products, best], dim=1), torch.cat([ids, places + first], dim=1)
            if ids.size(1) > count:
                products, places = _best(products, count)
                ids = ids.gather(1, places)
        return ids

    def _near_by_runs(self, queries: Tensor, count: int) -> Tensor:
        """Select the same on a GPU, where few operations count, as the host has to launch each.

        1. Of the products, tile by tile, only the largest of each run of keys is kept.
        2. The best are in the runs whose largest are the best, of equal ones the first, or after all runs.
        3. Of these, products are looked up, or computed again where there was more than one tile.
        """
        queries = rounded(queries, self.keys)
        rows = min(GPU_NUMBERS // max(1, len(queries)), GPU_KEYS // self.dimension)
        rows = max(RUN, rows // RUN * RUN)
        highest = queries.new_empty(len(queries), self.size // RUN, dtype=torch.float32)
        for first in range(0, max(1, self.size), rows):
            scores = queries  # instead of the last scores, whose memory the next ones take
            scores = products(queries, self.keys[first : first + rows])
            if self.metric == "l2":
                scores -= self.half_norms[first : first + rows]
            runs, begin = scores.size(1) // RUN, first // RUN
            into = highest[:, begin : begin + runs]
            torch.amax(scores[:, : runs * RUN].unflatten(1, (runs, RUN)), 2, out=into)
        at_once = max(1, SELECTED // max(1, highest.size(1), (count + 1) * RUN))
        every = scores.split(at_once) if rows >= self.size else repeat(None)
        del scores
        blocks = zip(queries.split(at_once), highest.split(at_once), every)
        found = [self._near_of(count, *block) for block in blocks]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _near_of(self, count: int, queries: Tensor, highest: Tensor, scores: Tensor | None) -> Tensor:
        """Select for some queries, by the highest of each run, fp32 [H, R]; None: scores were not kept."""
        best = first_largest(highest, min(count, highest.size(1))).sort(dim=1).values
        ids = torch.add(self._within_run, best.unsqueeze(2), alpha=RUN).flatten(1)
        if len(self._after_runs):
            ids = torch.cat([ids, self._after_runs.expand(len(ids), -1)], dim=1)
        near = scores.gather(1, ids) if scores is not None else self._products_of(queries, ids)
        return ids.gather(1, first_largest(near, count).sort(dim=1).values)

    def _products_of(self, queries: Tensor, ids: Tensor) -> Tensor:
        """Compute products with given keys for each of queries [H, d], less half the norm, fp32 [H, n]."""
        at_once = max(1, GPU_NUMBERS // max(1, ids.size(1) * self.dimension))
        blocks = zip(queries.unsqueeze(1).split(at_once), ids.split(at_once))
        near = torch.cat([products(query, self.keys[some]) for query, some in blocks]).squeeze(1)
        return near - self.half_norms[ids] if self.metric == "l2" else near

    @cached_property
    def _within_run(self) -> Tensor:
        return torch.arange(RUN, device=self.keys.device)

    @cached_property
    def _after_runs(self) -> Tensor:
        return torch.arange(self.size // RUN * RUN, self.size, device=self.keys.device)

    def to(self, device: torch.device) -> ExactIndex:
        return self if self.keys.device == device else ExactIndex(self.keys.to(device), self.metric)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row on a CPU, of equal ones the first: fp32 and int64 [H, count], by columns."""
    best, columns = scores.topk(min(count + 1, scores.size(1)), dim=1)
    # Which of equal scores topk takes is undefined; they are looked at where that matters.
    if np.any(best[:, count - 1 : count].numpy() == best[:, count:].numpy()):
        columns = first_largest(scores, count)
    columns = columns[:, :count].sort(dim=1).values
    return scores.gather(1, columns), columns


def rounded(queries: Tensor, keys: Tensor) -> Tensor:
    """Round queries, fp32, to keys where those are halves, as Tensor cores multiply halves exactly.

    That costs no neighbour that SPARE keys do not make up for; keys in fp32 would be read and written five
    times over.
    """
    return queries.clamp(-LARGEST_HALF, LARGEST_HALF).to(keys.dtype) if keys.dtype in HALVES else queries


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries [H, d] with keys [N, d], or batches of both: fp32 [H, N]; halves on a GPU alone."""
    multiply, transposed = (torch.mm if keys.dim() == 2 else torch.bmm), keys.transpose(-1, -2)
    if keys.dtype in HALVES:
        return multiply(queries, transposed, out_dtype=torch.float32)
    return multiply(queries, transposed)


def half_norms(keys: Tensor) -> Tensor:
    """Compute |x|^2 / 2 of each key, [N, d] -> fp32 [N]."""
    tiles = keys.split(max(1, TILE_NUMBERS // keys.size(1)))
    return torch.cat([tile.float().square().sum(1) / 2 for tile in tiles])


@torch.no_grad()
def scores_of(keys: Tensor, queries: Tensor, ids: Tensor, metric: str) -> Tensor:
    """Score given keys [N, d] for queries [H, d], fp32 [H, n], squared distances by differences."""
    numbers = TILE_NUMBERS if keys.is_cuda else CACHE_NUMBERS
    at_once = max(1, numbers // max(1, ids.size(1) * keys.size(1)))
    scores = []
    for query, some in zip(queries.float().unsqueeze(1).split(at_once), ids.split(at_once)):
        # [rows, n, d], a copy. A CPU takes ten times as long for `keys[some]`, and to compute with fp16 and
        # fp32 at once, or into new memory; a GPU would only launch one operation more.
        found = keys.index_select(0, some.flatten()).unflatten(0, some.shape)
        found = found.float() if sync_is_free(keys.device) else found
        into = found if found.dtype == torch.float32 else None
        # from 0, as the distance of a key that is the query is then 0, and not -0
        scores.append(
            torch.mul(found, query, out=into).sum(2)
            if metric == "ip"
            else 0 - torch.sub(found, query, out=into).square_().sum(2)
        )
    return scores[0] if len(scores) == 1 else torch.cat(scores)


def first_largest(scores: Tensor, k: int) -> Tensor:
    """Find the places of the k largest of each row, [H, n], of equal ones the first: int64 [H, k], in order.

    What is not a number, or infinite, may come anywhere. fp64 has 29 bits more than fp32: a score less its
    place times 2^-52 of itself, and of next to nothing where it is 0, stays between those that it was
    between, for 2^27 places.
    """
    places = torch.arange(1, scores.size(1) + 1, dtype=torch.float64, device=scores.device)
    order = torch.sub(scores, places, alpha=1e-300)
    return order.addcmul_(order.abs(), places, value=-(2.0**-52)).topk(k, dim=1).indices


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the k largest scores of each row, [H, n], and their places, without asking a GPU for a number.

    Returns:
        fp32 and int64 [H, k], largest first, of equal scores the first; what is not a number counts as -inf.

    >>> largest(torch.tensor([[0.5, 2.0, 2.0, -1.0]]), 3)
    (tensor([[2.0000, 2.0000, 0.5000]]), tensor([[1, 2, 0]]))
    """
    scores = scores.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    places = first_largest(scores.clamp(-LARGEST_SINGLE, LARGEST_SINGLE), k)
    return scores.gather(1, places), places
