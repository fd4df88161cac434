"""FAISS's codes, the best candidates scored again from the datastore's own keys, which no file then has twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.search.base import IndexDescription, IndexRequest, RemoteKeys, file_stem
from fairseq_ccpr.search.faiss_index import FaissIndex, build_faiss, import_faiss, set_parameters

RESCORED = "faiss-keys"
SUFFIX = ",Refine(keys)"  # of a factory string, like that of FAISS for a copy of the keys
COPY = ",Refine(SQfp16)"


class RescoredIndex(FaissIndex):
    """FAISS's own `Refine(SQfp16)`, but its fp16 keys are those of the datastore, mapped from their file."""

    parts: tuple[object, ...] = ()

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        """Take a factory string that ends in `SUFFIX`, and parameters; those not given have defaults."""
        alike = FaissIndex.plan(replace(request, choice=request.choice.removesuffix(SUFFIX) + COPY))
        name = f"{file_stem(request.choice, request.metric, RESCORED)}.faiss"
        return replace(alike, backend=RESCORED, factory=request.choice, file=name)

    @classmethod
    def build(
        cls,
        keys: np.ndarray,
        description: IndexDescription,
        path: Path,
        progress: Callable[[int], object],
        remote: RemoteKeys | None = None,
    ) -> None:
        """Train the codes on a sample of `keys`, and add all of them."""
        build_faiss(keys, of_codes(description), path, progress)

    @classmethod
    def bytes_needed(cls, description: IndexDescription, size: int, dimension: int) -> int:
        """Count the codes of all keys."""
        return FaissIndex.bytes_needed(of_codes(description), size, dimension)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> FaissIndex:
        """Map the codes from their file into memory, and let FAISS find the keys where they are mapped."""
        assert isinstance(keys, np.ndarray)  # they are in a folder
        faiss, path = import_faiss(), folder / description.file
        codes = FaissIndex.read_file(path, description.metric, "").index
        if keys.shape != (codes.ntotal, codes.d):
            return cls(codes, description.metric, path.stat().st_size)  # which `open_index` refuses
        own = faiss.IndexScalarQuantizer(codes.d, faiss.ScalarQuantizer.QT_fp16, codes.metric_type)
        if hasattr(faiss, "MaybeOwnedVectorUInt8"):
            array = np.ascontiguousarray(keys, np.float16)  # the same memory
            codes_of_keys = faiss.swig_ptr(array.reshape(-1).view(np.uint8))
            nobody = own.codes.owner  # whom the view would keep alive: Python does
            own.codes = faiss.MaybeOwnedVectorUInt8.create_view(codes_of_keys, array.nbytes, nobody)
            own.ntotal = len(array)
        else:  # FAISS before 1.11 has no keys but its own
            array = np.asarray(keys, np.float32)
            own.add(array)
        index = faiss.IndexRefine(codes, own)
        min_candidates = set_parameters(index, description.parameters)
        opened = cls(index, description.metric, path.stat().st_size, min_candidates=min_candidates)
        opened.parts = (codes, own, array)  # which FAISS does not keep alive
        return opened


def of_codes(description: IndexDescription) -> IndexDescription:
    """Describe the part that is in FAISS's file."""
    return replace(description, backend="faiss", factory=description.factory.removesuffix(SUFFIX))
