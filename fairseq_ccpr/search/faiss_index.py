"""Search through FAISS: any index its factory can make."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.base import DISK, Index, IndexDescription, lists_file
from fairseq_ccpr.storage.atomic import atomic_file, move_into_place, scratch_directory
from fairseq_ccpr.timing import SEARCH, phase

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
    """A FAISS index. Which keys it finds, and how exact its scores are, is as its factory string says.

    Args:
        index: of FAISS.
        metric: `l2` or `ip`.
        file_bytes: of the file it was read from.
        on_disk: whether its inverted lists stay there, mapped into memory.
    """

    def __init__(self, index: Any, metric: str, file_bytes: int, on_disk: bool = False) -> None:
        self.index = index
        self.metric = metric
        self.file_bytes, self.on_disk = file_bytes, on_disk
        self.on_gpu = False
        self.size = int(index.ntotal)
        self.dimension = int(index.d)

    @classmethod
    def open(cls, path: Path, metric: str, parameters: str, on_disk: bool = False) -> FaissIndex:
        """Read an index from its file and set its search parameters, such as `nprobe=32`.

        Args:
            on_disk: whether its inverted lists are in a file beside it, which is mapped into memory and not read.

        Raises:
            ConfigurationError: FAISS is missing or knows no such parameter.
            DatastoreError: FAISS cannot read the file.
        """
        faiss = import_faiss()
        try:
            # FAISS maps such lists into memory; they are beside the index, wherever both were made.
            flags = faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY if on_disk else 0
            with _silence(on_disk):
                index = faiss.read_index(str(path), flags)
        except RuntimeError:
            raise DatastoreError(f"{path} is damaged: FAISS cannot read it; build the datastore again") from None
        set_parameters(index, parameters)
        return cls(index, metric, path.stat().st_size, on_disk)

    @phase(SEARCH)
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
        return min(self.size, GPU_NEIGHBOURS) if self.on_gpu else self.size

    def to(self, device: torch.device) -> FaissIndex:
        """On a GPU where FAISS was built for one, or shared among all of them where it is too large for that one.

        An index that FAISS has for the CPU only, or whose lists stay on disk, is this one, searched on the CPU.
        """
        faiss = import_faiss()
        gpus = getattr(faiss, "get_num_gpus", lambda: 0)() if device.type == "cuda" else 0
        if self.on_disk or not gpus:
            return self
        resources = faiss.StandardGpuResources()
        try:
            if gpus > 1 and self.file_bytes > torch.cuda.mem_get_info(device)[0]:
                options = faiss.GpuMultipleClonerOptions()
                options.shard = True  # each GPU has a part of the entries; else each would have all
                index = faiss.index_cpu_to_all_gpus(self.index, options)
            else:
                index = faiss.index_cpu_to_gpu(resources, device.index or 0, self.index)
        except RuntimeError:
            kind = type(self.index).__name__
            logger.warning("FAISS cannot put this %s on the GPU: searching on the CPU; --index exact is faster", kind)
            return self
        moved = FaissIndex(index, self.metric, self.file_bytes)
        moved.on_gpu = True
        moved.resources = resources  # type: ignore[attr-defined]  # must live as long as the index
        return moved


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


class Effort(NamedTuple):
    """What a search may cost."""

    probes: int | None = None  # inverted lists that it looks through; 24 or, by distance, 16 if not given
    candidates: int = 8  # scored again for each neighbour that is asked for


def default_parameters(index: Any, effort: Effort) -> str:
    """Search parameters that give good recall, where FAISS's own defaults favour speed above all."""
    faiss = import_faiss()
    parameters = []
    if (ivf := inverted_lists(index)) is not None:
        # By angle, the nearest keys are spread over more lists.
        probes = effort.probes or (24 if ivf.metric_type == faiss.METRIC_INNER_PRODUCT else 16)
        parameters.append(f"nprobe={min(probes, ivf.nlist)}")
    if isinstance(index, faiss.IndexRefine):
        parameters.append(f"k_factor_rf={effort.candidates}")
    if isinstance(index, faiss.IndexHNSW):
        parameters.append("efSearch=64")
    return ",".join(parameters)


def inverted_lists(index: Any) -> Any | None:
    """The inverted-list index inside `index`, if there is one."""
    return import_faiss().try_extract_index_ivf(index)


def can_stay_on_disk(index: Any) -> bool:
    """Whether all that grows with the entries of an empty index is in inverted lists of plain codes."""
    faiss = import_faiss()
    ivf = None if isinstance(index, faiss.IndexRefine) else inverted_lists(index)
    return ivf is not None and isinstance(faiss.downcast_InvertedLists(ivf.invlists), faiss.ArrayInvertedLists)


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
    """Train an index on a random sample of `keys`, add all of them, and write it to `path` when it is complete.

    Args:
        keys: [N, d], may be memory-mapped; read in blocks.
        description: of an index in memory, or of one on disk, whose lists go beside it; see `build_on_disk`.
        path: its file, with the name that the description has.
        progress: told how many keys were added.

    Raises:
        ConfigurationError: a store too small to train such an index.
        DatastoreError: the file cannot be written.
    """
    index, rows = trained_index(keys, description, seed)
    if description.backend == DISK:
        build_on_disk(keys, index, rows, path, progress)
        return
    _add(index, keys, progress)
    with atomic_file(path) as partial:
        _write(index, partial)


def trained_index(keys: np.ndarray, description: IndexDescription, seed: int) -> tuple[Any, int]:
    """An index that is ready to take keys, and how many it is trained on where there are as many."""
    index = make_index(keys.shape[1], description.factory, description.metric)
    ivf = inverted_lists(index)
    wanted = max(TRAIN_ROWS, TRAIN_ROWS_PER_CENTROID * (ivf.nlist if ivf is not None else 0))
    if not index.is_trained:
        rows = np.random.default_rng(seed).choice(len(keys), min(wanted, len(keys)), replace=False)
        rows.sort()
        try:
            index.train(torch.from_numpy(keys[rows].astype(np.float32)))
        except RuntimeError:
            raise ConfigurationError(
                f"the datastore has {len(keys):,} keys, too few to train the index '{description.factory}' on: "
                "use a smaller index or --index exact"
            ) from None
    return index, wanted


def build_on_disk(keys: np.ndarray, index: Any, rows: int, path: Path, progress: Callable[[int], object]) -> None:
    """Fill an index whose inverted lists are never in memory as a whole, and write it to `path`, its lists beside it.

    1. Blocks of keys become an index each, in a folder of their own.
    2. FAISS merges the inverted lists of all blocks into one file, list by list.

    Args:
        keys: [N, d], may be memory-mapped.
        index: trained and empty; its inverted lists are replaced.
        rows: of keys in a block.
        path: of the index; its folder may be renamed later, but not the files.
    """
    faiss = import_faiss()
    from faiss.contrib.ondisk import merge_ondisk

    with scratch_directory(path) as folder:
        blocks: list[str] = []
        for start in range(0, len(keys), rows):
            block = faiss.clone_index(index)
            _add(block, keys[start : start + rows], progress, start)
            blocks.append(str(folder / str(len(blocks))))
            _write(block, Path(blocks[-1]))
        with _silence(), _explain_failure(lists := folder / lists_file(path.name)):
            merge_ondisk(index, blocks, str(lists))
        # FAISS looks for the lists beside the index when it reads them: the index is the same wherever it was built.
        faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists).filename = lists.name
        _write(index, folder / path.name)
        for name in (lists.name, path.name):  # the index last: its file vouches for both
            move_into_place(folder / name, path.with_name(name))


@contextmanager
def _silence(silent: bool = True) -> Iterator[None]:
    """Keep from stdout, which is for results, what FAISS writes there about lists on disk."""
    if not silent:
        yield
        return
    stdout = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _add(index: Any, keys: np.ndarray, progress: Callable[[int], object], first_id: int | None = None) -> None:
    """Add keys [N, d] in blocks, numbered from `first_id` where the index is to be told."""
    for start in range(0, len(keys), ADD_ROWS):
        block = torch.from_numpy(keys[start : start + ADD_ROWS].astype(np.float32))
        if first_id is None:
            index.add(block)
        else:
            index.add_with_ids(block, torch.arange(len(block)) + first_id + start)
        progress(len(block))


def _write(index: Any, path: Path) -> None:
    with _explain_failure(path):
        import_faiss().write_index(index, str(path))


@contextmanager
def _explain_failure(path: Path) -> Iterator[None]:
    """Raise a DatastoreError of one sentence where FAISS cannot write a file."""
    try:
        yield
    except RuntimeError as error:
        raise DatastoreError(
            f"FAISS could not write {path} ({str(error).splitlines()[-1]}): is the disk full?"
        ) from None
