"""Choosing an index: what `--index` means for so many keys."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

import numpy as np
import torch

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import BACKENDS, open_index
from fairseq_ccpr.search.base import (
    EXACT_UP_TO,
    METRICS,
    Effort,
    Index,
    IndexDescription,
    IndexRequest,
    RemoteKeys,
    StoreAddress,
)
from fairseq_ccpr.search.exact import EXACT, SCRATCH, ExactIndex
from fairseq_ccpr.search.faiss_index import RESCORED, SUFFIX, automatic_factory

CPU = torch.device("cpu")
MANY = 1_000_000  # keys; to compare with as many takes a CPU ten steps of a small decoder
# Of a GPU's free memory, what datastores may take: decoding wants a fifth. What a search takes stays free
# when further keys are placed, each of which finds less.
SHARE = 0.8
# A token memory searches at each step. docs/speed.md, Effort, has speed and BLEU for other settings.
TOKEN_EFFORT = Effort(probes=16, candidates=4, min_candidates=64)
# Once per sentence, more inverted lists can be searched than at each step, and fewer candidates rescored for
# each of the neighbours, which outnumber the phrases wanted. docs/results/monolingual.md has speed and BLEU
# for other settings.
PHRASE_EFFORT = Effort(probes=24, candidates=2)
PHRASE_DEPTH = 32  # neighbours requested, at least
logger = logging.getLogger(__name__)


def open_for_device(
    description: IndexDescription,
    keys: np.ndarray | RemoteKeys,
    folder: Path,
    device: torch.device = CPU,
    rebuild: str = "",
) -> Index:
    """Open the index that a manifest describes, where it will be searched; `rebuild` makes another.

    On a GPU, exact search over the keys stands in for an index that FAISS has for the CPU only, and for FAISS
    where it is not installed, unless the keys are too large for the GPU, or in a database.
    """
    if device.type == "cpu":
        index = open_index(description, keys, folder)
        if description.backend == EXACT and index.size >= MANY:
            logger.warning(
                "the index of %s is exact, and each search compares with %s keys on the CPU: %s rebuilds "
                "only the index",
                folder,
                f"{index.size:,}",
                rebuild,
            )
        return index
    fits = not isinstance(keys, RemoteKeys) and keys.nbytes + 4 * len(keys) <= room(device)
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
            "the index of %s, %s, is searched on the CPU while the GPU waits: the GPU has no room for %s "
            "keys",
            folder,
            description,
            f"{index.size:,}",
        )
    return index


def _stand_in(keys: np.ndarray | RemoteKeys, description: IndexDescription, device: torch.device) -> Index:
    assert isinstance(keys, np.ndarray)
    index = ExactIndex(keys, description.metric).to(device)
    index.stands_in = True
    return index


def room(device: torch.device, scratch: int = SCRATCH) -> float:
    """Return the bytes that one more datastore may take of a GPU's memory, beside what a search takes."""
    return max(0.0, SHARE * (free_bytes(device) - scratch))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or that torch has kept of what it freed."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def plan_index(
    choice: str,
    metric: str,
    parameters: str,
    size: int,
    dimension: int,
    gpu: bool = False,
    effort: Effort = TOKEN_EFFORT,
    store: StoreAddress | None = None,
) -> IndexDescription:
    """Decide what `--index`, `--metric` and `--index-parameters` mean for `size` keys.

    Args:
        choice: `exact`; a FAISS factory string; `disk:` and one whose inverted lists stay on disk, `disk`
            alone for `disk_factory`; another backend's name; or `auto`: exact on a GPU, for small datastores,
            and without FAISS, else `automatic_factory`. For a store, see its backend's `plan`.
    """
    if metric not in METRICS:
        raise ConfigurationError(f"--metric is '{metric}': choose one of {', '.join(METRICS)}")
    if choice == "auto" and store is None:
        exact = gpu or size <= EXACT_UP_TO or importlib.util.find_spec("faiss") is None
        choice = "exact" if exact else automatic_factory(size, dimension, metric)
    # FAISS takes as a factory what begins with no backend's name
    first = re.split("[:,]", choice, maxsplit=1)[0]
    named = RESCORED if choice.endswith(SUFFIX) else first if first in BACKENDS else "faiss"
    backend = BACKENDS[named if store is None else store.backend]
    return backend.plan(IndexRequest(choice, metric, parameters, size, dimension, effort, store))


def index_bytes(description: IndexDescription, size: int, dimension: int) -> int:
    """Estimate the bytes that the index's files take for so many keys while they are made."""
    return BACKENDS[description.backend].bytes_needed(description, size, dimension)
