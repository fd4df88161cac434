"""Building inverted lists in torch: clusters of a sample of the keys, and every key in the list of the nearest.

Letters: L lists, P places for keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search import tiled
from fairseq_ccpr.search.base import IndexDescription
from fairseq_ccpr.storage.atomic import atomic_file

TORCH_IVF = "torch-ivf"
ALIGN = 128  # a multiple of the runs of every way to score them
TRAIN_ROWS_PER_LIST = 64
LONGEST = 3  # times the mean length; a list beyond, of keys that are almost equal, counts as several
MOST_INT32 = 2**31 - 1


@dataclass
class Lists:
    """Keys in lists; the file of an index has tensors of these names."""

    keys: Tensor  # fp16 [P, d], zeros after each list's end
    ids: Tensor  # int32 [P], int64 of very many keys: the number of each key, rising in a list; -1 after its end
    sizes: Tensor  # int64 [L], keys of each list
    centroids: Tensor  # fp32 [L, d]


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
    ids = torch.full((places,), -1, dtype=torch.int32 if len(list_of) <= MOST_INT32 else torch.int64)
    ids[in_order] = order.to(ids.dtype)
    keys = torch.zeros(places, centroids.size(1), dtype=torch.float16)
    return Lists(keys, ids, sizes, centroids[origin].contiguous()), place_of
