"""Search through FAISS: any index its factory can make."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.base import Index, IndexDescription

logger = logging.getLogger(__name__)

ADD_ROWS = 1 << 16
GPU_NEIGHBOURS = 2048  # more, a search on the GPU refuses to give
TRAIN_ROWS_PER_CENTROID = 64
TRAIN_ROWS = 1 << 16  # at least, where the store has as many: product quantisers want 2^8 centroids trained well


def import_faiss() -> Any:
    """FAISS, or a `ConfigurationError` that says how to get it."""
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it reports which instruction sets it tried
    try:
        import faiss
        import faiss.contrib.torch_utils  # lets indexes take tensors, on the GPU without a round trip
    except ImportError:
        raise ConfigurationError(
            "this index needs FAISS, which is not installed: pip install faiss-cpu (or faiss-gpu), or use --index exact"
        ) from None
    return faiss


class FaissIndex(Index):
    """A FAISS index. Which keys it finds, and how exact its scores are, is as its factory string says."""

    def __init__(self, index: Any, metric: str) -> None:
        self.index = index
        self.metric = metric
        self.size = int(index.ntotal)
        self.dimension = int(index.d)

    @classmethod
    def open(cls, path: Path, metric: str, parameters: str) -> FaissIndex:
        """Read an index from its file and set its search parameters, such as `nprobe=32`.

        Raises:
            ConfigurationError: FAISS is missing or knows no such parameter.
            DatastoreError: FAISS cannot read the file.
        """
        faiss = import_faiss()
        try:
            index = faiss.read_index(str(path))
        except RuntimeError:
            raise DatastoreError(f"{path} is damaged: FAISS cannot read it; build the datastore again") from None
        set_parameters(index, parameters)
        return cls(index, metric)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Index.search`."""
        device = queries.device
        if not hasattr(self.index, "getDevice"):
            queries = queries.cpu()
        distances, ids = self.index.search(queries.float().contiguous(), k)
        scores = distances if self.metric == "ip" else -distances
        return scores.masked_fill(ids < 0, float("-inf")).to(device), ids.to(device)

    @property
    def deepest(self) -> int:
        """See `Index.deepest`."""
        return min(self.size, GPU_NEIGHBOURS) if hasattr(self.index, "getDevice") else self.size

    def to(self, device: torch.device) -> FaissIndex:
        """On a GPU where FAISS was built for one; else this index, searched on the CPU."""
        faiss = import_faiss()
        if device.type != "cuda" or not getattr(faiss, "get_num_gpus", lambda: 0)():
            return self
        resources = faiss.StandardGpuResources()
        try:
            index = faiss.index_cpu_to_gpu(resources, device.index or 0, self.index)
        except RuntimeError:
            kind = type(self.index).__name__
            logger.warning("FAISS cannot put this %s on the GPU: searching on the CPU; --index exact is faster", kind)
            return self
        on_gpu = FaissIndex(index, self.metric)
        on_gpu.resources = resources  # type: ignore[attr-defined]  # must live as long as the index
        return on_gpu


def set_parameters(index: Any, parameters: str) -> None:
    """Apply search-time parameters in FAISS's own notation; an empty string changes nothing."""
    if not parameters:
        return
    try:
        import_faiss().ParameterSpace().set_index_parameters(index, parameters)
    except RuntimeError:
        raise ConfigurationError(
            f"FAISS does not know the index parameters '{parameters}' for a {type(index).__name__}: "
            "give --index-parameters in its notation, such as nprobe=32 or efSearch=64"
        ) from None


def default_parameters(index: Any, probes: int | None = None) -> str:
    """Search parameters that give good recall, where FAISS's own defaults favour speed above all.

    Args:
        probes: lists to search, of an index that has them; 24 or, by distance, 16 if not given.
    """
    faiss = import_faiss()
    parameters = []
    if (ivf := inverted_lists(index)) is not None:
        # By angle, the nearest keys are spread over more lists.
        probes = probes or (24 if ivf.metric_type == faiss.METRIC_INNER_PRODUCT else 16)
        parameters.append(f"nprobe={min(probes, ivf.nlist)}")
    if isinstance(index, faiss.IndexRefine):
        parameters.append("k_factor_rf=8")
    if isinstance(index, faiss.IndexHNSW):
        parameters.append("efSearch=64")
    return ",".join(parameters)


def inverted_lists(index: Any) -> Any | None:
    """The inverted-list index inside `index`, if there is one."""
    return import_faiss().try_extract_index_ivf(index)


def make_index(dimension: int, factory: str, metric: str) -> Any:
    """An empty index.

    Raises:
        ConfigurationError: FAISS cannot make sense of `factory` at this width.
    """
    faiss = import_faiss()
    kind = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    try:
        return faiss.index_factory(dimension, factory, kind)
    except RuntimeError:
        raise ConfigurationError(
            f"FAISS cannot make an index '{factory}' for keys of width {dimension}: "
            "give --index exact or a FAISS factory string such as IVF1024,SQfp16"
        ) from None


def build_faiss(
    keys: np.ndarray, description: IndexDescription, path: Path, progress: Callable[[int], object], seed: int = 1
) -> None:
    """Train an index on a random sample of `keys`, add all of them, and write it to `path`.

    Args:
        keys: [N, d], may be memory-mapped; read in blocks.
        progress: told how many keys were added.

    Raises:
        ConfigurationError: a store too small to train such an index.
        DatastoreError: the file cannot be written.
    """
    index = make_index(keys.shape[1], description.factory, description.metric)
    if not index.is_trained:
        ivf = inverted_lists(index)
        wanted = max(TRAIN_ROWS, TRAIN_ROWS_PER_CENTROID * (ivf.nlist if ivf is not None else 0))
        rows = np.random.default_rng(seed).choice(len(keys), min(wanted, len(keys)), replace=False)
        rows.sort()
        try:
            index.train(torch.from_numpy(keys[rows].astype(np.float32)))
        except RuntimeError:
            raise ConfigurationError(
                f"the datastore has {len(keys):,} keys, too few to train the index '{description.factory}' on: "
                "use a smaller index or --index exact"
            ) from None
    for start in range(0, len(keys), ADD_ROWS):
        block = torch.from_numpy(keys[start : start + ADD_ROWS].astype(np.float32))
        index.add(block)
        progress(len(block))
    try:
        import_faiss().write_index(index, str(path))
    except RuntimeError as error:
        path.unlink(missing_ok=True)
        raise DatastoreError(
            f"FAISS could not write {path} ({str(error).splitlines()[-1]}): is the disk full?"
        ) from None
