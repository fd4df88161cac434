"""Inverted lists in torch: a query is compared with the keys of the nearest clusters, on the CPU or a GPU.

Lists lie one after another, each from a multiple of `ALIGN` on, so that they are made of runs of keys and the second half of
exact search can score them. Letters: L lists, P places for keys, p lists that are searched, R runs that those have at most.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import tiled
from fairseq_ccpr.search.base import IndexDescription, IndexRequest, RemoteKeys, file_stem
from fairseq_ccpr.search.exact import MAXIMA_NUMBERS
from fairseq_ccpr.search.launching import ScoringIndex, load_steps
from fairseq_ccpr.search.selection import largest, search_by_blocks
from fairseq_ccpr.storage.atomic import atomic_file

TORCH_IVF = "torch-ivf"
PROBES = 64
ALIGN = 128  # a multiple of the runs of every way to score them
TRAIN_ROWS_PER_LIST = 64
LONGEST = 3  # times the mean length; a list beyond, of keys that are almost equal, counts as several
ROOM = 1.5  # times the mean length, for each list that is searched: what few queries need more of, they go without


@dataclass
class Lists:
    """Keys in lists; the file of an index has tensors of these names."""

    keys: Tensor  # fp16 [P, d], zeros after each list's end
    ids: Tensor  # int32 [P], the number of each key, rising in a list; -1 after its end
    sizes: Tensor  # int64 [L], keys of each list
    centroids: Tensor  # fp32 [L, d]


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
        parameters = request.parameters or f"nprobe={min(request.effort.probes or PROBES, lists)}"
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
        rows = max(1, MAXIMA_NUMBERS // max(len(self.runs), depth))
        return search_by_blocks(self._nearest, queries, rows, depth, k)

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
        within = torch.arange(self.steps.BUCKET, device=queries.device)
        scores.masked_fill_((within >= left.unsqueeze(2)).flatten(1), float("-inf"))
        best, places = largest(scores, (run.unsqueeze(2) * self.steps.BUCKET + within).flatten(1), k)
        ids = self.lists.ids[places.clamp_max(len(self.lists.ids) - 1)].long()
        return best, ids.masked_fill(best == float("-inf"), -1)

    def to(self, device: torch.device) -> TorchIvfIndex:
        """Copy to `device`."""
        if self.lists.keys.device == device:
            return self
        moved = {name: tensor.to(device) for name, tensor in vars(self.lists).items()}
        return TorchIvfIndex(replace(self.lists, **moved), self.metric, self.probes)


def nearness(queries: Tensor, centroids: Tensor, metric: str) -> Tensor:
    """Score how near centroids are to queries, fp32 [H, L], in an order that is the metric's."""
    products = queries.float() @ centroids.T
    return products if metric == "ip" else products - centroids.square().sum(dim=1) / 2


def first_places(sizes: Tensor) -> Tensor:
    """Find where lists of these sizes begin, int64 [L].

    >>> first_places(torch.tensor([200, 128, 1]))
    tensor([  0, 256, 384])
    """
    taken = -(-sizes // ALIGN) * ALIGN
    return taken.cumsum(0) - taken


def build_torch_ivf(
    keys: np.ndarray, description: IndexDescription, path: Path, progress: Callable[[int], object], seed: int = 1
) -> None:
    """Cluster a random sample of `keys`, put all of them into lists, and write these to `path`.

    Args:
        keys: [N, d], may be memory-mapped; read in blocks.
        progress: told how many keys were put into lists.
    """
    count, (size, dimension) = number_of_lists(description.factory), keys.shape
    rows = np.random.default_rng(seed).choice(size, min(TRAIN_ROWS_PER_LIST * count, size), replace=False)
    centroids = find_centroids(keys[np.sort(rows)].astype(np.float32), count, description.metric, seed)
    block_rows = max(1, tiled.TILE_NUMBERS // max(count, dimension))
    blocks = [slice(start, start + block_rows) for start in range(0, size, block_rows)]
    list_of = torch.empty(size, dtype=torch.int64)
    for block in blocks:
        near = nearness(torch.from_numpy(keys[block].astype(np.float32)), centroids, description.metric)
        list_of[block] = near.argmax(dim=1)
        progress(len(near))
    lists, place_of = lay_out(list_of, centroids)
    for block in blocks:
        lists.keys[place_of[block]] = torch.from_numpy(keys[block].astype(np.float16))
    try:
        with atomic_file(path) as partial:
            save_file(vars(lists), partial)
    except (OSError, SafetensorError) as error:
        raise DatastoreError(f"{path} could not be written ({error}): is the disk full?") from None


def number_of_lists(factory: str) -> int:
    """Parse a factory string such as `torch-ivf1024`."""
    return int(factory.removeprefix(TORCH_IVF))


def find_centroids(rows: np.ndarray, count: int, metric: str, seed: int) -> Tensor:
    """Cluster rows fp32 [n, d] and return centroids fp32 [count, d]; for inner product, of directions, each of length 1.

    The largest cluster is cut in two until there are enough of them. Plain k-means finds a few more neighbours in as many
    lists, but its lists are less alike in length, and all queries wait for the longest.
    """
    from sklearn.cluster import BisectingKMeans

    if metric == "ip":
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(np.finfo(np.float32).tiny)
    clusters = BisectingKMeans(count, bisecting_strategy="largest_cluster", max_iter=20, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fewer clusters than asked for, where many keys are equal
        centroids = torch.from_numpy(clusters.fit(rows).cluster_centers_)
    return torch.nn.functional.normalize(centroids, dim=1) if metric == "ip" else centroids


def lay_out(list_of: Tensor, centroids: Tensor) -> tuple[Lists, Tensor]:
    """Lay out lists with ids, but without keys yet.

    A list without keys is left out. One longer than `LONGEST` times the mean becomes several with the same centroid.

    Args:
        list_of: int64 [N], the list that each key belongs in.
        centroids: fp32 [L, d].

    Returns:
        The lists, and int64 [N], the place of each key.
    """
    counts = torch.bincount(list_of, minlength=len(centroids))
    longest = LONGEST * -(-len(list_of) // len(centroids))
    pieces = -(-counts // longest)
    origin = torch.arange(len(centroids)).repeat_interleave(pieces)
    number = torch.arange(len(origin)) - (pieces.cumsum(0) - pieces)[origin]  # of the piece, in its list
    sizes = (counts[origin] - number * longest).clamp_max(longest)
    order = list_of.argsort(stable=True)
    starts = first_places(sizes)
    in_order = torch.arange(len(list_of)) - (sizes.cumsum(0) - sizes - starts).repeat_interleave(sizes)
    place_of = torch.empty_like(list_of)
    place_of[order] = in_order
    places = int(starts[-1] + -(-sizes[-1] // ALIGN) * ALIGN)
    ids = torch.full((places,), -1, dtype=torch.int32)
    ids[in_order] = order.int()
    keys = torch.zeros(places, centroids.size(1), dtype=torch.float16)
    return Lists(keys, ids, sizes, centroids[origin].contiguous()), place_of
