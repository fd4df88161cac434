"""Inverted lists in torch: a query is compared with the keys of the nearest clusters, on the CPU or a GPU.

Lists lie one after another, each from a multiple of `ALIGN` on, so that they are made of runs of keys and the second half of
exact search can score them. Letters: L lists, P places for keys, p lists that are searched, R runs that those have at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import tiled
from fairseq_ccpr.search.base import IndexDescription, IndexRequest, RemoteKeys, file_stem
from fairseq_ccpr.search.exact import MAXIMA_NUMBERS, half_norms
from fairseq_ccpr.search.launching import ScoringIndex, load_steps
from fairseq_ccpr.search.selection import largest, search_by_blocks
from fairseq_ccpr.search.torch_ivf_build import (
    ALIGN,
    TORCH_IVF,
    Lists,
    build_torch_ivf,
    first_places,
    nearness,
    number_of_lists,
)

PROBES = 64
LIST_MAJOR = 64  # queries from which lists are read once for all of them; a guess, until a GPU has measured it
ROOM = 1.5  # times the mean length, for each list that is searched: what few queries need more of, they go without


class TorchIvfIndex(ScoringIndex):
    """Compares each query with the keys of the lists whose centroids are nearest to it, in fp32.

    Args:
        lists: the keys.
        metric: `l2` or `ip`, of keys and of centroids.
        probes: lists that are searched, or all where there are fewer.
        fused: whether keys are scored by Triton; if not given, where they can be.
    """

    def __init__(self, lists: Lists, metric: str, probes: int, fused: bool | None = None) -> None:
        self.lists, self.metric = lists, metric
        self.probes = min(probes, len(lists.sizes))
        self.size, self.dimension = int(lists.sizes.sum()), lists.keys.size(1)
        self.on_host = lists.keys.device.type == "cpu"
        self.steps = load_steps(lists.keys, fused)
        self.first_runs = first_places(lists.sizes) // self.steps.BUCKET  # [L]
        self.runs = -(-lists.sizes // self.steps.BUCKET)  # [L]
        self.longest = int(self.runs.max())  # M
        room = math.ceil(ROOM * self.probes * float(self.runs.double().mean()))
        self.most_runs = min(int(self.runs.topk(self.probes).values.sum()), room)  # R

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        """Take four times as many lists as the root of N, if not given: on a GPU, many centroids cost little.

        But not so many that most of what lists are padded with to a multiple of `ALIGN` is no keys.
        """
        given = request.choice.removeprefix(TORCH_IVF)
        if not re.fullmatch(r"[1-9]\d*|", given):
            raise ConfigurationError(
                f"--index is '{request.choice}': give {TORCH_IVF}, or with a number of lists {TORCH_IVF}1024"
            )
        most = max(1, request.size // ALIGN)
        lists = int(given) if given else min(1 << round(math.log2(4 * math.sqrt(request.size))), most)
        if lists > request.size:
            raise request.too_many_lists(request.choice, lists)
        if not re.fullmatch(r"nprobe=[1-9]\d*|", request.parameters):
            raise ConfigurationError(
                f"--index-parameters is '{request.parameters}': {TORCH_IVF} takes nprobe=N, the lists to search"
            )
        factory = f"{TORCH_IVF}{lists}"
        parameters = request.parameters or f"nprobe={min(max(request.effort.probes or 0, PROBES), lists)}"
        file = f"{file_stem(factory, request.metric, TORCH_IVF)}.safetensors"
        return IndexDescription(TORCH_IVF, request.metric, factory, parameters, file)

    @classmethod
    def build(
        cls,
        keys: np.ndarray,
        description: IndexDescription,
        path: Path,
        progress: Callable[[int], object],
        remote: RemoteKeys | None = None,
    ) -> None:
        """Find centroids and put all keys into lists."""
        build_torch_ivf(keys, description, path, progress)

    @classmethod
    def bytes_needed(cls, description: IndexDescription, size: int, dimension: int) -> int:
        """Count keys and ids, half a run of padding for each list, and centroids."""
        lists = number_of_lists(description.factory)
        return (size + ALIGN // 2 * lists) * (2 * dimension + 4) + lists * (4 * dimension + 8)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> TorchIvfIndex:
        """Map the index's file into memory."""
        return cls.read_file(folder / description.file, description.metric, description.parameters)

    @classmethod
    def read_file(cls, path: Path, metric: str, parameters: str) -> TorchIvfIndex:
        """Map an index's file into memory.

        Raises:
            DatastoreError: the file is damaged.
        """
        try:
            lists = Lists(**load_file(path))
        except (SafetensorError, TypeError) as error:
            raise DatastoreError(f"{path} is damaged ({error}): build the datastore again") from None
        return cls(lists, metric, int(parameters.removeprefix("nprobe=")))

    def in_torch(self) -> TorchIvfIndex:
        """Return the same without Triton."""
        return TorchIvfIndex(self.lists, self.metric, self.probes, fused=False)

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Compare each query with the keys of the nearest lists."""
        depth = self.most_runs * self.steps.BUCKET
        rows = max(1, MAXIMA_NUMBERS // max(len(self.runs), depth, self.probes * self.longest))
        by_list = self.steps is not tiled and len(queries) >= LIST_MAJOR
        return search_by_blocks(self._nearest_by_list if by_list else self._nearest, queries, rows, depth, k)

    def _nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest keys of a block of queries.

        1. Choose the lists;
        2. line up their runs, the nearest list's first: as many for every query, the last of which may be none;
        3. score their keys, all but what comes after a list's end;
        4. keep the k nearest.
        """
        chosen = nearness(queries, self.lists.centroids, self.metric).topk(self.probes, dim=1).indices  # [H, p]
        ends = self.runs[chosen].cumsum(dim=1)
        run = torch.arange(self.most_runs, device=queries.device).expand(len(queries), -1).contiguous()  # [H, R]
        probe = torch.searchsorted(ends, run, right=True).clamp_max(self.probes - 1)
        of_list = chosen.gather(1, probe)  # [H, R]
        run -= (ends - self.runs[chosen]).gather(1, probe)  # in its list
        left = self.lists.sizes[of_list] - run * self.steps.BUCKET  # keys of the list from here on
        none = len(self.lists.keys) // self.steps.BUCKET  # a run beyond all others, which is not read
        run = torch.where(left > 0, run + self.first_runs[of_list], none)
        scores = self.steps.bucket_scores(self.lists.keys, queries, run, self.metric)  # [H, R * BUCKET]
        return self._best(scores, run, left, k)

    def _nearest_by_list(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the same, and what few queries need more of as well.

        1. Choose the lists;
        2. of each run of keys in them, find the largest score, a list at a time for all queries that want it;
        3. score the keys of the k best runs again: the k nearest are among them;
        4. keep the k nearest.
        """
        from fairseq_ccpr.search.list_major import list_maxima  # needs Triton

        lists = self.lists
        chosen = nearness(queries, lists.centroids, self.metric).topk(self.probes, dim=1).indices  # [H, p]
        norms = self.half_norms if self.metric == "l2" else None
        maxima = list_maxima(lists.keys, norms, queries, chosen, lists.sizes, self.first_runs, self.longest).flatten(1)
        places = torch.arange(maxima.size(1), device=queries.device)
        _, best = largest(maxima, places, min(k, maxima.size(1)))  # [H, n]
        of_list, run = chosen.gather(1, best // self.longest), best % self.longest
        left = lists.sizes[of_list] - run * self.steps.BUCKET
        none = len(lists.keys) // self.steps.BUCKET
        run = torch.where(left > 0, run + self.first_runs[of_list], none)
        return self._best(self.steps.bucket_scores(lists.keys, queries, run, self.metric), run, left, k)

    def _best(self, scores: Tensor, run: Tensor, left: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Keep the k nearest keys of some runs.

        Args:
            scores: fp32 [H, R * BUCKET].
            run: int64 [H, R].
            left: int64 [H, R], keys of the list from each run on.
        """
        within = torch.arange(self.steps.BUCKET, device=scores.device)
        scores.masked_fill_((within >= left.unsqueeze(2)).flatten(1), float("-inf"))
        best, places = largest(scores, (run.unsqueeze(2) * self.steps.BUCKET + within).flatten(1), k)
        ids = self.lists.ids[places.clamp_max(len(self.lists.ids) - 1)].long()
        return best, ids.masked_fill(best == float("-inf"), -1)

    @cached_property
    def half_norms(self) -> Tensor:
        """|x|^2 / 2 of each place for a key, fp32 [P]; computed once."""
        return half_norms(self.lists.keys)

    def to(self, device: torch.device) -> TorchIvfIndex:
        """Copy to `device`."""
        if self.lists.keys.device == device:
            return self
        moved = {name: tensor.to(device) for name, tensor in vars(self.lists).items()}
        return TorchIvfIndex(replace(self.lists, **moved), self.metric, self.probes)
