"""Nearest-neighbour search behind one small interface. Imports nothing above it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search.base import DISK, METRICS, Index, IndexDescription
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.faiss_index import FaissIndex, build_faiss
from fairseq_ccpr.search.torch_ivf import TorchIvfIndex, build_torch_ivf

__all__ = [
    "DISK", "METRICS", "ExactIndex", "FaissIndex", "Index", "IndexDescription", "TorchIvfIndex", "build_index", "open_index",
]  # fmt: skip

# A new backend is one file and a line in each of these; without a file there is nothing to build.
_BACKENDS = {
    "exact": lambda description, keys, folder: ExactIndex(keys, description.metric),
    "faiss": lambda description, keys, folder: FaissIndex.open(
        folder / description.file, description.metric, description.parameters
    ),
    DISK: lambda description, keys, folder: FaissIndex.open(
        folder / description.file, description.metric, description.parameters, on_disk=True
    ),
    "torch-ivf": lambda description, keys, folder: TorchIvfIndex.open(
        folder / description.file, description.metric, description.parameters
    ),
}
_BUILDERS = {"faiss": build_faiss, DISK: build_faiss, "torch-ivf": build_torch_ivf}


def build_index(keys: np.ndarray, description: IndexDescription, path: Path, progress: Callable[[int], object]) -> None:
    """Make the file of an index that has one.

    Args:
        keys: [N, d], may be memory-mapped; read in blocks.
        description: see `plan_index`.
        path: where the file goes.
        progress: told how many keys were added.

    Raises:
        ConfigurationError: a store too small to train such an index.
        DatastoreError: the file cannot be written.
    """
    _BUILDERS[description.backend](keys, description, path, progress)


def open_index(description: IndexDescription, keys: np.ndarray, folder: Path) -> Index:
    """The index a manifest describes, over `keys` [N, d], with its file in `folder`.

    Raises:
        DatastoreError: an index of a kind that is not known, or one of other keys.
    """
    if description.backend not in _BACKENDS:
        raise DatastoreError(
            f"{folder} needs the index backend '{description.backend}', unknown here: upgrade fairseq-ccpr"
        )
    index = _BACKENDS[description.backend](description, keys, folder)
    if (index.size, index.dimension) != keys.shape:
        raise DatastoreError(
            f"{folder / description.file} indexes {index.size:,} keys of width {index.dimension}, but there are "
            f"{keys.shape[0]:,} of width {keys.shape[1]}: build the datastore again"
        )
    return index
