"""Exact search over keys as they are, in torch, and what other searches share with it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.device import to_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search.base import Index, IndexDescription, IndexRequest, RemoteKeys
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.timing import SEARCH, phase

EXACT = "exact"
SPARE = 8  # keys that are scored again beyond k, since products and differences round differently
QUERIES = 1 << 12  # at a time
TILE_NUMBERS = 1 << 24  # numbers in a tile of keys, or of scores: 64 MB in fp32
CACHE_NUMBERS = 1 << 20  # the same where a CPU converts them, whose cache holds 4 MB
# the same on a GPU, where a tile is a dozen kernels whatever its size: 1 GB of scores at most
GPU_NUMBERS = 1 << 28
RUN = 64  # scores of a GPU, of which the largest stands for all
LARGEST_HALF = 65504.0
KEPT_NORMS = 1 << 27  # keys, up to which a CPU keeps their norms: 512 MB
_LAST_PLACE = 2**32 - 1
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float but its sign


class ExactIndex(Index):
    """Compares each query with every key, on the CPU or a GPU.

    1. Keys are multiplied with the queries tile by tile, so that memory does not grow with N, and keys on
       disk are read once, in order.
    2. The k + `SPARE` nearest by product are scored again in fp32, distances by differences, which products
       cancel.
    3. Of these the k nearest are kept, of equal ones the lower id first.
    """

    def __init__(self, keys: np.ndarray | Tensor, metric: str) -> None:
        self.keys = keys if isinstance(keys, Tensor) else as_tensor(keys)
        self.metric = metric
        self.size, self.dimension = self.keys.shape
        self.on_host = self.keys.device.type == "cpu"

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
        found = queries.new_full((len(queries), k), float("-inf"), dtype=torch.float32)
        found_ids = torch.full_like(found, -1, dtype=torch.int64)
        halves = self.keys.is_cuda and self.keys.dtype in (torch.float16, torch.bfloat16)
        # no tile is converted in a CPU's cache
        whole = self.keys.is_cuda or self._single.dtype == torch.float32
        numbers = GPU_NUMBERS if halves else TILE_NUMBERS if whole else CACHE_NUMBERS
        for start in range(0, len(queries), QUERIES):
            block = queries[start : start + QUERIES].float()
            # Tensor cores multiply halves exactly and add in fp32. Rounding the queries costs no neighbour that
            # SPARE keys do not make up for, and keys in fp32 would be read and written five times over.
            rounded = block.clamp(-LARGEST_HALF, LARGEST_HALF).to(self.keys.dtype) if halves else block
            products, ids = block.new_empty(len(block), 0), found_ids.new_empty(len(block), 0)
            rows = max(RUN, numbers // max(self.dimension, len(block)) // RUN * RUN)
            for first in range(0, self.size, rows):
                tile = slice(first, first + rows)
                if halves:
                    scores = torch.mm(rounded, self.keys[tile].T, out_dtype=torch.float32)
                else:
                    scores = block @ self._single[tile].float().T
                if self.metric == "l2":
                    # -|q-x|^2 / 2 = q.x - |x|^2 / 2 - |q|^2 / 2, and the last is the same for every key.
                    kept = self.keys.is_cuda or self.size <= KEPT_NORMS
                    scores -= self.half_norms[tile] if kept else half_norms(self.keys[tile])
                select = _best_by_runs if scores.is_cuda else _best
                best, places = select(scores, min(count + SPARE, scores.size(1)))
                products, ids = torch.cat([products, best], dim=1), torch.cat([ids, places + first], dim=1)
                if ids.size(1) > count + SPARE:
                    products, places = _best(products, count + SPARE)
                    ids = ids.gather(1, places)
            scores, places = largest(scores_of(self.keys, block, ids, self.metric), count)
            found[start : start + QUERIES, :count] = scores
            found_ids[start : start + QUERIES, :count] = ids.gather(1, places)
        return found, found_ids

    def to(self, device: torch.device) -> ExactIndex:
        return self if self.keys.device == device else ExactIndex(self.keys.to(device), self.metric)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row, of equal ones the first: fp32 and int64 [H, count], by columns."""
    size = scores.size(1)
    best, columns = scores.topk(min(count + 1, size), dim=1)
    last = best[:, count - 1 : count]
    # Which of equal scores topk takes is undefined. A CPU looks whether that matters; a GPU would have to be
    # waited for.
    if size > count and (scores.is_cuda or np.any(last.numpy() == best[:, count:].numpy())):
        order = torch.arange(size, 0, -1, device=scores.device)  # the first columns have the most
        order = torch.where(scores == last, order, 0).masked_fill(scores > last, size + 1)
        columns = order.topk(count, dim=1).indices
    columns = columns[:, :count].sort(dim=1).values
    return scores.gather(1, columns), columns


def _best_by_runs(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same in one pass: the best are in the runs whose largest score is among the best."""
    size = scores.size(1)
    if size <= RUN * count:
        return _best(scores, count)
    whole = size // RUN * RUN  # the columns after it are looked at one by one: padding would copy all scores
    runs = scores[:, :whole].unflatten(1, (-1, RUN))
    places = _best(runs.amax(dim=2), count)[1].unsqueeze(2)
    near = torch.cat([runs.gather(1, places.expand(-1, -1, RUN)).flatten(1), scores[:, whole:]], dim=1)
    best, columns = _best(near, count)
    ids = (places * RUN + torch.arange(RUN, device=scores.device)).flatten(1)
    rest = torch.arange(whole, size, device=scores.device).expand(len(scores), -1)
    return best, torch.cat([ids, rest], dim=1).gather(1, columns)


def half_norms(keys: Tensor) -> Tensor:
    """Compute |x|^2 / 2 of each key, [N, d] -> fp32 [N]."""
    tiles = keys.split(max(1, TILE_NUMBERS // keys.size(1)))
    return torch.cat([tile.float().square().sum(1) / 2 for tile in tiles])


def scores_of(keys: Tensor, queries: Tensor, ids: Tensor, metric: str) -> Tensor:
    """Score given keys [N, d] for queries [H, d], fp32 [H, n], squared distances by differences."""
    scores = torch.empty(ids.shape, device=keys.device)
    rows = max(1, (TILE_NUMBERS if keys.is_cuda else CACHE_NUMBERS) // max(1, ids.size(1) * keys.size(1)))
    for start in range(0, len(queries), rows):
        block = slice(start, start + rows)
        found = keys[ids[block]].float()  # [rows, n, d], a copy
        query = queries[block].float().unsqueeze(1)
        if metric == "ip":
            scores[block] = found.mul_(query).sum(2)
        else:
            scores[block] = found.sub_(query).square_().sum(2).neg_()
    return scores


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the k largest scores of each row, [H, n], and their places, without asking a GPU for a number.

    Returns:
        fp32 and int64 [H, k], largest first, of equal scores the first; what is not a number counts as -inf.

    >>> largest(torch.tensor([[0.5, 2.0, 2.0, -1.0]]), 3)
    (tensor([[2.0000, 2.0000, 0.5000]]), tensor([[1, 2, 0]]))
    """
    # One number carries both: the score in its upper half, in an order that integers keep, and its place
    # below.
    # + 0.0: -0 is 0
    bits = (scores.nan_to_num(float("-inf"), float("inf"), float("-inf")) + 0.0).view(torch.int32)
    places = torch.arange(scores.size(1), device=scores.device)
    both = ((bits ^ ((bits >> 31) & _MAGNITUDE)).long() << 32) | (_LAST_PLACE - places)
    best = both.topk(k, dim=1).values
    high = (best >> 32).int()
    return (high ^ ((high >> 31) & _MAGNITUDE)).view(torch.float32), _LAST_PLACE - (best & _LAST_PLACE)
