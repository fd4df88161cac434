"""FAISS: factory strings, training on a sample, building on disk, search with torch tensors in and out."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.device import to_device
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.base import (
    DISK,
    Effort,
    Index,
    IndexDescription,
    IndexRequest,
    Progress,
    RemoteKeys,
    Target,
    lists_file,
)
from fairseq_ccpr.storage.files import atomic_file, move_into_place, scratch_directory
from fairseq_ccpr.timing import SEARCH, phase

NARROW = 128  # dimensions, each of which then has a code of its own
FACTOR, CANDIDATES = "k_factor_rf", "candidates"  # a search parameter of FAISS, and one that it does not have
ADD_ROWS = 1 << 16
TRAIN_ROWS_PER_CENTROID = 64
# at least, where the datastore has as many: product quantisers want 2^8 centroids trained well
TRAIN_ROWS = 1 << 16
RESCORED = "faiss-keys"
SUFFIX = ",Refine(keys)"  # of a factory string, like that of FAISS for a copy of the keys
COPY = ",Refine(SQfp16)"


def import_faiss() -> Any:
    """Import FAISS, or say how to install it."""
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it reports which instruction sets it tried
    try:
        import faiss
        import faiss.contrib.torch_utils  # lets indexes take tensors, on the GPU without a round trip
    except ImportError:
        raise ConfigurationError(
            "this index needs FAISS, which is not installed: pip install faiss-cpu (or faiss-gpu), or use "
            "--index exact"
        ) from None
    return faiss


def set_parameters(index: Any, parameters: str) -> int:
    """Apply search-time parameters in FAISS's own notation; an empty string changes nothing.

    One parameter is not FAISS's. Where candidates are scored again, `candidates=64` sets their minimum per
    query: few neighbours need more candidates each than many do. It is returned, 0 if it is not given.
    """
    faiss, named = import_faiss(), named_parameters(parameters)
    candidates = named.pop(CANDIDATES, "0") if isinstance(index, faiss.IndexRefine) else "0"
    if not candidates.isdecimal():
        raise ConfigurationError(
            f"--index-parameters '{parameters}': {CANDIDATES} is '{candidates}'; give the number of keys to "
            f"score again, such as {CANDIDATES}=64"
        )
    try:
        faiss.ParameterSpace().set_index_parameters(index, _format(named))
    except RuntimeError:
        raise ConfigurationError(
            f"FAISS does not know the index parameters '{parameters}' for a {type(index).__name__}: "
            "give --index-parameters in its notation, such as nprobe=32 or efSearch=64"
        ) from None
    return int(candidates)


def named_parameters(parameters: str) -> dict[str, str]:
    """Return the values of search parameters by their names.

    >>> named_parameters("nprobe=16, k_factor_rf = 4")
    {'nprobe': '16', 'k_factor_rf': '4'}
    """
    named = {}
    for word in re.sub(r"\s*=\s*", "=", parameters).replace(",", " ").split():
        if not re.fullmatch(r"\w+=[\w.+-]+", word):
            raise ConfigurationError(
                f"--index-parameters '{parameters}': '{word}' is not NAME=VALUE; separate parameters by "
                "commas, such as nprobe=32,k_factor_rf=4"
            )
        name, value = word.split("=")
        named[name] = value
    return named


def _format(parameters: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in parameters.items())


def complete_parameters(index: Any, given: str, effort: Effort) -> str:
    """Add defaults for search parameters that are not given: FAISS's own favour speed above recall."""
    faiss, named = import_faiss(), named_parameters(given)
    parameters = {}
    if (ivf := inverted_lists(index)) is not None:
        # By angle, the nearest keys are spread over more lists.
        probes = effort.probes or (24 if ivf.metric_type == faiss.METRIC_INNER_PRODUCT else 16)
        parameters["nprobe"] = f"{min(probes, ivf.nlist)}"
    if isinstance(index, faiss.IndexRefine):
        parameters[FACTOR] = f"{effort.candidates}"
        if effort.min_candidates and FACTOR not in named:
            parameters[CANDIDATES] = f"{effort.min_candidates}"
    if isinstance(index, faiss.IndexHNSW):
        parameters["efSearch"] = "64"
    return _format(parameters | named)


def inverted_lists(index: Any) -> Any | None:
    """Return the inverted-list index inside `index`, if there is one."""
    return import_faiss().try_extract_index_ivf(index)


def make_index(dimension: int, factory: str, metric: str) -> Any:
    """Create an empty index."""
    faiss = import_faiss()
    kind = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
    try:
        return faiss.index_factory(dimension, factory, kind)
    except RuntimeError:
        raise ConfigurationError(
            f"FAISS cannot make an index '{factory}' for keys of width {dimension}: "
            "give --index exact or a FAISS factory string such as IVF1024,SQfp16"
        ) from None


def automatic_factory(size: int, dimension: int, metric: str) -> str:
    """Choose inverted lists of 4-bit codes that registers scan, the best few scored again from the fp16 keys.

    There are about as many lists as keys in each, and a code for two dimensions, or for one where keys are
    narrow. By inner product, codes are of what a key is beyond the centre of its list: half the bytes then
    find as much, and a query needs but one more number of each list. A rotation shares out between all codes
    what there is to tell. By distance, a query would need tables of its own in each list, which cost more
    than they find: codes are of whole keys.

    >>> automatic_factory(1_000_000, 256, "l2"), automatic_factory(1_000_000, 128, "ip")
    ('IVF1024,PQ128x4fs,Refine(keys)', 'RR128,IVF1024,PQ64x4fsr,Refine(keys)')
    """
    lists, by_angle = f"IVF{list_count(size)}", metric == "ip"
    narrow = NARROW // 2 if by_angle else NARROW
    if dimension <= narrow or dimension % 2:
        return f"{lists},PQ{dimension}x4fs{'r' if by_angle else ''},Refine(keys)"
    codes = f"{lists},PQ{dimension // 2}x4fs"
    return f"RR{dimension},{codes}r,Refine(keys)" if by_angle else f"{codes},Refine(keys)"


def disk_factory(size: int) -> str:
    """Choose inverted lists of a byte for a dimension: nearly exact, with nothing in memory."""
    return f"IVF{list_count(size)},SQ8"


def list_count(size: int) -> int:
    """Choose about as many lists as keys in each, a power of 2."""
    return 1 << round(math.log2(math.sqrt(size)))


@contextmanager
def silence() -> Iterator[None]:
    """Silence what FAISS writes about lists on disk to stdout, which is for results."""
    stdout = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def trained_index(keys: np.ndarray, description: IndexDescription, seed: int = 1) -> tuple[Any, int]:
    """Train an index on a random sample of `keys` [N, d]; returns it and how many keys at most that takes."""
    faiss = import_faiss()
    index = inner = make_index(keys.shape[1], description.factory, description.metric)
    while isinstance(inner, faiss.IndexPreTransform | faiss.IndexRefine):
        inner = faiss.downcast_index(
            inner.index if isinstance(inner, faiss.IndexPreTransform) else inner.base_index
        )
    if isinstance(inner, faiss.IndexPQ) and "ht=" not in description.parameters:
        # The factory orders codes for polysemous search by annealing, many times as long as all other
        # training.
        inner.do_polysemous_training = False
    ivf = inverted_lists(index)
    most = max(TRAIN_ROWS, TRAIN_ROWS_PER_CENTROID * (ivf.nlist if ivf is not None else 0))
    if not index.is_trained:
        rows = np.random.default_rng(seed).choice(len(keys), min(most, len(keys)), replace=False)
        rows.sort()
        try:
            index.train(torch.from_numpy(keys[rows].astype(np.float32)))
        except RuntimeError:
            raise ConfigurationError(
                f"the datastore has {len(keys):,} keys, too few to train the index '{description.factory}' "
                "on: use a smaller index or --index exact"
            ) from None
    return index, most


def build_on_disk(keys: np.ndarray, index: Any, rows: int, path: Path, progress: Progress) -> None:
    """Fill a trained index whose inverted lists, never all in memory, get a file next to its `path`.

    1. Blocks of `rows` keys become an index each, in a folder of their own.
    2. FAISS merges the inverted lists of all blocks into one file, list by list.
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
        with silence(), _explain_failure(lists := folder / lists_file(path.name)):
            merge_ondisk(index, blocks, str(lists))
        # FAISS looks for the lists next to the index when it reads them: the index is the same wherever it
        # was built.
        faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists).filename = lists.name
        _write(index, folder / path.name)
        for name in (lists.name, path.name):  # the index last: its file vouches for both
            move_into_place(folder / name, path.with_name(name))


def _add(index: Any, keys: np.ndarray, progress: Progress, first_id: int | None = None) -> None:
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
    try:
        yield
    except RuntimeError as error:
        raise DatastoreError(
            f"FAISS could not write {path} ({str(error).splitlines()[-1]}): is the disk full?"
        ) from None


class FaissIndex(Index):
    """A FAISS index; its factory string decides which keys it finds and how exact its scores are."""

    def __init__(
        self, index: Any, metric: str, file_bytes: int, on_disk: bool = False, min_candidates: int = 0
    ) -> None:
        self.index, self.metric, self.on_host = index, metric, True
        # its inverted lists stay in a file, mapped into memory
        self.file_bytes, self.on_disk = file_bytes, on_disk
        self.min_candidates = min_candidates  # that are scored again, at least; see `set_parameters`
        self.size, self.dimension = int(index.ntotal), int(index.d)

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        """Take a factory string, and parameters; those not given have defaults chosen for good recall.

        `disk:` before the string keeps the inverted lists on disk, `disk` alone those of `disk_factory`.
        """
        name, _, factory = request.choice.partition(":")
        if name == DISK:
            return _plan(DISK, factory or disk_factory(request.size), request)
        return _plan("faiss", request.choice, request)

    @classmethod
    def build(
        cls, keys: np.ndarray, description: IndexDescription, target: Target, progress: Progress
    ) -> None:
        assert isinstance(target, Path)
        index, rows = trained_index(keys, description)
        if description.backend == DISK:
            build_on_disk(keys, index, rows, target, progress)
            return
        _add(index, keys, progress)
        with atomic_file(target) as partial:
            _write(index, partial)

    @classmethod
    def bytes_needed(cls, description: IndexDescription, size: int, dimension: int) -> int:
        index = make_index(dimension, description.factory, description.metric)
        copies = 2 if description.backend == DISK else 1  # in a block, and merged
        try:
            return copies * size * (index.sa_code_size() + 8)
        except RuntimeError:
            return size * (4 * dimension + 300)  # a graph: the key itself and its links

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> FaissIndex:
        """Map the index from its file into memory, and its lists if they stay on disk."""
        path, on_disk = folder / description.file, description.backend == DISK
        return cls.read_file(path, description.metric, description.parameters, on_disk)

    @classmethod
    def read_file(cls, path: Path, metric: str, parameters: str, on_disk: bool = False) -> FaissIndex:
        """Map an index into memory, perhaps with lists in the file next to it, and set its parameters."""
        faiss = import_faiss()
        try:
            # FAISS maps such lists into memory; they are next to the index, wherever both were made
            in_lists = faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY
            flags = in_lists if on_disk else faiss.IO_FLAG_MMAP_IFC  # processes share what they map
            with silence() if on_disk else nullcontext():
                index = faiss.read_index(str(path), flags)
            if on_disk:
                # FAISS would start up to 32 threads a search to read ahead. They cost more than a cached list
                # does, and on a cold file they found nothing to gain.
                faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists).prefetch_nthread = 0
        except RuntimeError:
            raise DatastoreError(
                f"{path} is damaged: FAISS cannot read it; build the datastore again"
            ) from None
        min_candidates = set_parameters(index, parameters)
        return cls(index, metric, path.stat().st_size, on_disk, min_candidates)

    @phase(SEARCH)
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        device = queries.device
        if not hasattr(self.index, "getDevice"):
            queries = queries.cpu()
        distances, ids = self._ask(queries.float().contiguous(), k)
        scores = distances if self.metric == "ip" else 0 - distances  # from 0, as in `scores_of`
        scores, ids = to_device([scores.masked_fill(ids < 0, float("-inf")), ids], device)
        return scores, ids

    def _ask(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Where k is so small that candidates would be too few, the factor is greater."""
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
        return self.size if self.on_host else min(self.size, 2048)

    def to(self, device: torch.device) -> FaissIndex:
        """Copy to a GPU if FAISS was built for one, or share among all if it is too large for that one.

        An index that FAISS has for the CPU only, or whose lists stay on disk, stays as it is and is searched
        on the CPU.
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
        # whose parts on the GPUs take no minimum of candidates
        moved = FaissIndex(index, self.metric, self.file_bytes)
        moved.on_host = False
        moved.resources = resources  # type: ignore[attr-defined]  # must live as long as the index
        return moved


def _plan(backend: str, factory: str, request: IndexRequest) -> IndexDescription:
    faiss, index = import_faiss(), make_index(request.dimension, factory, request.metric)
    ivf = inverted_lists(index)
    # All that grows with the entries must be in inverted lists of plain codes.
    plain = ivf is not None and isinstance(
        faiss.downcast_InvertedLists(ivf.invlists), faiss.ArrayInvertedLists
    )
    if backend == DISK and (isinstance(index, faiss.IndexRefine) or not plain):
        raise ConfigurationError(
            f"--index {DISK}:{factory} is not plain inverted lists, the only index that FAISS keeps on "
            f"disk: give one such as {DISK}:{disk_factory(request.size)}"
        )
    if ivf is not None and ivf.nlist > request.size:
        raise ConfigurationError(
            f"--index {factory} has {ivf.nlist:,} lists, but the datastore will have {request.size:,} keys: "
            "use fewer lists or exact"
        )
    set_parameters(index, request.parameters)
    parameters = complete_parameters(index, request.parameters, request.effort)
    return IndexDescription(
        backend, request.metric, factory, parameters, _file(factory, request.metric, backend)
    )


def _file(factory: str, metric: str, backend: str) -> str:
    """A name that no other index over the same keys has."""
    kind = f"{factory} {metric}" + (f" {DISK}" if backend == DISK else "")
    return f"index-{hashlib.sha256(kind.encode()).hexdigest()[:8]}.faiss"


class RescoredIndex(FaissIndex):
    """FAISS's own `Refine(SQfp16)`, but its fp16 keys are those of the datastore, mapped from their file."""

    parts: tuple[object, ...] = ()

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        alike = FaissIndex.plan(replace(request, choice=request.choice.removesuffix(SUFFIX) + COPY))
        file = _file(request.choice, request.metric, RESCORED)
        return replace(alike, backend=RESCORED, factory=request.choice, file=file)

    @classmethod
    def build(
        cls, keys: np.ndarray, description: IndexDescription, target: Target, progress: Progress
    ) -> None:
        super().build(keys, _codes(description), target, progress)

    @classmethod
    def bytes_needed(cls, description: IndexDescription, size: int, dimension: int) -> int:
        return super().bytes_needed(_codes(description), size, dimension)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> FaissIndex:
        """Map the codes from their file into memory, and let FAISS find the keys where they are mapped."""
        assert isinstance(keys, np.ndarray)  # they are in a folder
        path = folder / description.file
        codes = FaissIndex.read_file(path, description.metric, "").index
        if keys.shape != (codes.ntotal, codes.d):
            return cls(codes, description.metric, path.stat().st_size)  # which `open_index` refuses
        return cls.over(codes, keys, description.metric, description.parameters, path.stat().st_size)

    @classmethod
    def over(
        cls, codes: Any, keys: np.ndarray, metric: str, parameters: str, file_bytes: int = 0
    ) -> RescoredIndex:
        """Let FAISS score again what it finds by codes, whose ids are rows of keys fp16 [n, d], where these are."""
        faiss = import_faiss()
        mapped = faiss.IndexScalarQuantizer(codes.d, faiss.ScalarQuantizer.QT_fp16, codes.metric_type)
        array = np.ascontiguousarray(keys, np.float16)  # the same memory
        codes_of_keys = faiss.swig_ptr(array.reshape(-1).view(np.uint8))
        nobody = mapped.codes.owner  # whom the view would keep alive: Python does
        mapped.codes = faiss.MaybeOwnedVectorUInt8.create_view(codes_of_keys, array.nbytes, nobody)
        mapped.ntotal = codes.ntotal  # FAISS wants these to be equal, and then ids below its own number
        index = faiss.IndexRefine(codes, mapped)
        index.ntotal = mapped.ntotal = len(array)
        min_candidates = set_parameters(index, parameters)
        opened = cls(index, metric, file_bytes, min_candidates=min_candidates)
        opened.parts = (codes, mapped, array)  # which FAISS does not keep alive
        return opened


def _codes(description: IndexDescription) -> IndexDescription:
    return replace(description, backend="faiss", factory=description.factory.removesuffix(SUFFIX))
