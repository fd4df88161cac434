"""Opening an index for the device that it will be searched on, which need not be like the one it was built on."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import open_index
from fairseq_ccpr.search.base import Index, IndexDescription, RemoteKeys
from fairseq_ccpr.search.exact import EXACT, ExactIndex

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
MANY = 1_000_000  # keys; to compare with as many takes a CPU ten steps of a small decoder
SHARE = 0.8  # of a GPU's free memory that keys may take; decoding wants the rest


def open_for_device(
    description: IndexDescription,
    keys: np.ndarray | RemoteKeys,
    folder: Path,
    device: torch.device = CPU,
    rebuild: str = "",
) -> Index:
    """Open the index that a manifest describes, where it will be searched.

    On a GPU, exact search over the keys stands in for an index that FAISS has for the CPU only, and for FAISS where it is
    not installed, unless the keys are too large for the GPU, or in a database.

    Args:
        keys: [N, d].
        folder: with the index's files.
        rebuild: the command that makes another index, for a warning.

    Raises:
        ConfigurationError: FAISS is missing, and nothing can stand in.
        DatastoreError: see `open_index`.
    """
    if device.type == "cpu":
        index = open_index(description, keys, folder)
        if description.backend == EXACT and index.size >= MANY:
            logger.warning(
                "the index of %s is exact, and each search compares with %s keys on the CPU: %s rebuilds only "
                "the index", folder, f"{index.size:,}", rebuild,
            )  # fmt: skip
        return index
    fits = not isinstance(keys, RemoteKeys) and keys.nbytes + 4 * len(keys) <= SHARE * free_bytes(device)
    try:
        index = open_index(description, keys, folder)
        if fits or description.backend != EXACT:  # FAISS says itself what it has no room for
            index = index.to(device)
        if index.on_host and fits:
            logger.info("%s: %s is for the CPU, so the GPU compares with all keys", folder, description)
            return _stand_in(keys, description, device)
    except ConfigurationError:
        if not fits:
            raise
        return _stand_in(keys, description, device)
    if index.on_host:
        logger.warning(
            "the index of %s, %s, is searched on the CPU while the GPU waits: the GPU has no room for %s keys", folder,
            description, f"{index.size:,}",
        )  # fmt: skip
    return index


def _stand_in(keys: np.ndarray | RemoteKeys, description: IndexDescription, device: torch.device) -> Index:
    assert isinstance(keys, np.ndarray)
    index = ExactIndex(keys, description.metric).to(device)
    index.stands_in = True
    return index


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a GPU."""
    return torch.cuda.mem_get_info(device)[0]
