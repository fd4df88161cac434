"""Nearest-neighbour search behind one small interface. Imports nothing above it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search.base import DISK, METRICS, Index, IndexDescription
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.faiss_index import FaissIndex

__all__ = ["DISK", "METRICS", "ExactIndex", "FaissIndex", "Index", "IndexDescription", "open_index"]

# A new backend is one file and one line here.
_BACKENDS = {
    "exact": lambda description, keys, folder: ExactIndex(keys, description.metric),
    "faiss": lambda description, keys, folder: FaissIndex.open(
        folder / description.file, description.metric, description.parameters
    ),
    DISK: lambda description, keys, folder: FaissIndex.open(
        folder / description.file, description.metric, description.parameters, on_disk=True
    ),
}


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
