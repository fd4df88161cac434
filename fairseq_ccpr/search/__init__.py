"""Nearest-neighbour search behind one small interface. Imports nothing above it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fairseq_ccpr.search.base import METRICS, Index, IndexDescription
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.faiss_index import FaissIndex

__all__ = ["METRICS", "ExactIndex", "FaissIndex", "Index", "IndexDescription", "open_index"]

# A new backend is one file and one line here.
_BACKENDS = {
    "exact": lambda description, keys, folder: ExactIndex(keys, description.metric),
    "faiss": lambda description, keys, folder: FaissIndex.open(
        folder / description.file, description.metric, description.parameters
    ),
}


def open_index(description: IndexDescription, keys: np.ndarray, folder: Path) -> Index:
    """The index a manifest describes, over `keys` [N, d], with its file in `folder`."""
    return _BACKENDS[description.backend](description, keys, folder)
