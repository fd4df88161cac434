"""Search through FAISS: any index its factory can make, in memory or with inverted lists on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.device import to_device
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.base import DISK, Index, IndexDescription, IndexRequest, RemoteKeys, file_stem
from fairseq_ccpr.search.faiss_build import build_faiss
from fairseq_ccpr.search.faiss_library import (
    can_stay_on_disk,
    complete_parameters,
    disk_factory,
    import_faiss,
    inverted_lists,
    make_index,
    set_parameters,
    silence,
)
from fairseq_ccpr.timing import SEARCH, phase

GPU_NEIGHBOURS = 2048  # a search on the GPU refuses to return more


class FaissIndex(Index):
    """A FAISS index; its factory string decides which keys it finds and how exact its scores are.

    Args:
        index: of FAISS.
        metric: `l2` or `ip`.
        file_bytes: of the file it was read from.
        on_disk: whether its inverted lists stay there, mapped into memory.
        min_candidates: keys that are scored again, at least; see `set_parameters`.
    """

    def __init__(
        self, index: Any, metric: str, file_bytes: int, on_disk: bool = False, min_candidates: int = 0
    ) -> None:
        self.index = index
        self.metric = metric
        self.file_bytes, self.on_disk, self.min_candidates = file_bytes, on_disk, min_candidates
        self.on_host = True
        self.size = int(index.ntotal)
        self.dimension = int(index.d)

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        """Take a factory string, and parameters; those not given have defaults chosen for good recall."""
        return _plan("faiss", request.choice, request)

    @classmethod
    def build(
        cls,
        keys: np.ndarray,
        description: IndexDescription,
        path: Path,
        progress: Callable[[int], object],
        remote: RemoteKeys | None = None,
    ) -> None:
        """Train an index on a sample of `keys`, and add all of them."""
        build_faiss(keys, description, path, progress)

    @classmethod
    def bytes_needed(cls, description: IndexDescription, size: int, dimension: int) -> int:
        """Count the codes of all keys, or the keys and links of a graph."""
        index = make_index(dimension, description.factory, description.metric)
        try:
            return size * (index.sa_code_size() + 8)
        except RuntimeError:
            return size * (4 * dimension + 300)  # a graph: the key itself and its links

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> FaissIndex:
        """Map the index from its file into memory."""
        return cls.read_file(folder / description.file, description.metric, description.parameters)

    @classmethod
    def read_file(cls, path: Path, metric: str, parameters: str, on_disk: bool = False) -> FaissIndex:
        """Map an index from its file into memory and set its search parameters, such as `nprobe=32`.

        Args:
            on_disk: whether its inverted lists are in a file next to it, which is mapped into memory and not read.

        Raises:
            ConfigurationError: FAISS is missing or knows no such parameter.
            DatastoreError: FAISS cannot read the file.
        """
        faiss = import_faiss()
        try:
            if on_disk:  # FAISS maps such lists into memory; they are next to the index, wherever both were made
                flags = faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY
            else:  # processes share what they map; FAISS before 1.11 copies the file
                flags = getattr(faiss, "IO_FLAG_MMAP_IFC", 0)
            with silence(on_disk):
                index = faiss.read_index(str(path), flags)
            if on_disk:
                # FAISS would start up to 32 threads a search to read ahead. They cost more than a cached list does,
                # and on a cold file they found nothing to gain.
                faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists).prefetch_nthread = 0
        except RuntimeError:
            raise DatastoreError(f"{path} is damaged: FAISS cannot read it; build the datastore again") from None
        min_candidates = set_parameters(index, parameters)
        return cls(index, metric, path.stat().st_size, on_disk, min_candidates)

    @phase(SEARCH)
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Ask FAISS, whose distances become negative scores."""
        device = queries.device
        if not hasattr(self.index, "getDevice"):
            queries = queries.cpu()
        distances, ids = self._ask(queries.float().contiguous(), k)
        scores = distances if self.metric == "ip" else -distances
        scores, ids = to_device([scores.masked_fill(ids < 0, float("-inf")), ids], device)
        return scores, ids

    def _ask(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search in FAISS; where k is so small that candidates would be too few, with a greater factor."""
        candidates = min(self.min_candidates, self.size)
        if not candidates or candidates <= k * self.index.k_factor:
            distances, ids = self.index.search(queries, k)
            return distances, ids
        # The product of k and the factor is rounded down.
        parameters = import_faiss().IndexRefineSearchParameters(k_factor=(candidates + 0.5) / k)
        found = self.index.search_numpy(queries.detach().numpy(), k, params=parameters)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    @property
    def deepest(self) -> int:
        """The k beyond which a search returns no more: N, or FAISS's own limit on a GPU."""
        return self.size if self.on_host else min(self.size, GPU_NEIGHBOURS)

    def to(self, device: torch.device) -> FaissIndex:
        """Copy to a GPU if FAISS was built for one, or share among all of them if it is too large for that one.

        An index that FAISS has for the CPU only, or whose lists stay on disk, stays as it is and is searched on the CPU.
        """
        faiss = import_faiss()
        gpus = getattr(faiss, "get_num_gpus", lambda: 0)() if device.type == "cuda" else 0
        if self.on_disk or not gpus:
            return self
        resources = faiss.StandardGpuResources()
        shared = gpus > 1 and self.file_bytes > torch.cuda.mem_get_info(device)[0]
        try:
            if shared:
                options = faiss.GpuMultipleClonerOptions()
                options.shard = True  # each GPU has a part of the entries; else each would have all
                index = faiss.index_cpu_to_all_gpus(self.index, options)
            else:
                index = faiss.index_cpu_to_gpu(resources, device.index or 0, self.index)
        except RuntimeError:
            return self
        if not shared and not hasattr(index, "getDevice"):
            return self  # FAISS has copied what is inside, but the whole takes queries from the CPU
        moved = FaissIndex(index, self.metric, self.file_bytes)  # whose parts on the GPUs take no minimum of candidates
        moved.on_host = False
        moved.resources = resources  # type: ignore[attr-defined]  # must live as long as the index
        return moved


class DiskIndex(FaissIndex):
    """A FAISS index whose inverted lists stay in a file, which is mapped into memory."""

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        """Take `disk:` and a factory string, or `disk` alone for `disk_factory`."""
        name, _, factory = request.choice.partition(":")
        return _plan(DISK, factory or disk_factory(request.size) if name == DISK else request.choice, request)

    @classmethod
    def bytes_needed(cls, description: IndexDescription, size: int, dimension: int) -> int:
        """Count the codes of all keys twice: in a block, and merged."""
        return 2 * super().bytes_needed(description, size, dimension)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> FaissIndex:
        """Read the index from its file, and map its lists."""
        return cls.read_file(folder / description.file, description.metric, description.parameters, on_disk=True)


def _plan(backend: str, factory: str, request: IndexRequest) -> IndexDescription:
    index = make_index(request.dimension, factory, request.metric)
    if backend == DISK and not can_stay_on_disk(index):
        raise ConfigurationError(
            f"--index {DISK}:{factory} is not plain inverted lists, the only index that FAISS keeps on disk: give "
            f"one such as {DISK}:{disk_factory(request.size)}"
        )
    if (ivf := inverted_lists(index)) is not None and ivf.nlist > request.size:
        raise request.too_many_lists(factory, ivf.nlist)
    set_parameters(index, request.parameters)
    parameters = complete_parameters(index, request.parameters, request.effort)
    name = f"{file_stem(factory, request.metric, backend)}.faiss"
    return IndexDescription(backend, request.metric, factory, parameters, name)
