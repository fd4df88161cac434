"""Nearest-neighbour search behind one small interface.

To add a backend, write a file with a subclass of `Index` and add a line to `BACKENDS`: `--index NAME` then
plans, builds and opens it, and manifests keep its name. Nothing outside this package distinguishes backends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search.base import DISK, METRICS, MILVUS, Index, IndexDescription, RemoteKeys, StoreAddress
from fairseq_ccpr.search.exact import EXACT, ExactIndex
from fairseq_ccpr.search.faiss_index import RESCORED, FaissIndex, RescoredIndex
from fairseq_ccpr.search.milvus import SLOW, TIMEOUT, MilvusIndex, read_address

__all__ = [
    "BACKENDS", "DISK", "EXACT", "METRICS", "SLOW", "TIMEOUT", "ExactIndex", "FaissIndex", "Index",
    "IndexDescription", "RemoteKeys", "RescoredIndex", "StoreAddress", "build_index", "open_index",
    "read_address",
]  # fmt: skip

BACKENDS: dict[str, type[Index]] = {
    EXACT: ExactIndex,
    DISK: FaissIndex,
    MILVUS: MilvusIndex,
    RESCORED: RescoredIndex,
    "faiss": FaissIndex,
}


def build_index(
    keys: np.ndarray,
    description: IndexDescription,
    target: Path | RemoteKeys,
    progress: Callable[[int], object],
) -> None:
    """Build an index over keys [N, d] and write its file, or bring them to their database."""
    BACKENDS[description.backend].build(keys, description, target, progress)


def open_index(description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> Index:
    """Open the index that a manifest describes, over `keys` [N, d], with its files in `folder`."""
    if description.backend not in BACKENDS:
        raise DatastoreError(
            f"{folder} needs the index backend '{description.backend}', unknown here: build another with "
            "--index auto, or change the version of fairseq-ccpr"
        )
    index = BACKENDS[description.backend].open(description, keys, folder)
    if (index.size, index.dimension) != keys.shape:
        raise DatastoreError(
            f"{folder / description.file} indexes {index.size:,} keys of width {index.dimension}, but there "
            f"are {keys.shape[0]:,} of width {keys.shape[1]}: build the datastore again"
        )
    return index
