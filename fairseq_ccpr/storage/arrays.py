"""Arrays on disk that grow chunk by chunk, resume after a kill, and are written in the background."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from fairseq_ccpr.errors import DatastoreError, naming

T = TypeVar("T")
R = TypeVar("R")
DONE = "done"  # folder of empty files, one for each finished chunk
PARSING = (
    ValueError,
    EOFError,
    SyntaxError,
    TypeError,
    OverflowError,
    TokenError,
)  # NumPy's errors on a damaged header


def write_behind(write: Callable[[T], R], results: Iterable[T]) -> Iterator[R]:
    """Write each result in a thread while the next is computed; yields what `write` returns, in order.

    At most two results are in memory: one that is written, and one that is computed or waits. Errors of
    either side are raised, and nothing is written any more when this ends.
    """
    with ThreadPoolExecutor(1) as thread:
        last: Future[R] | None = None
        for result in results:
            if last is not None:
                yield last.result()
            last = thread.submit(write, result)
            del result  # which would stay until the next is there
        if last is not None:
            yield last.result()


Shapes = dict[str, tuple[tuple[int, ...], str]]  # of arrays by name, rows first, and their dtypes


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the header of a `.npy` file, whose length does not depend on the number of rows."""
    buffer = BytesIO()
    header = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


class ArrayWriter:
    """Fills `.npy` files of known shape in any order of row ranges.

    The files are true `.npy` from the start and their space is taken at once, so a disk that is too small
    says so before any work is done. A chunk is done when its rows are on disk: a mark in the folder `done`
    says so. Several processes may write different chunks of the same files.
    """

    def __init__(self, directory: Path, shapes: Shapes) -> None:
        self.directory, self.shapes = directory, shapes

    def create(self) -> None:
        """Create the files, full of zeros; overwrite what a run left that was killed before it had a plan."""
        for name, (shape, dtype) in self.shapes.items():
            with naming(self._path(name)), self._path(name).open("wb") as stream:
                stream.write(npy_header(shape, dtype))
                stream.flush()
                if total := math.prod(shape) * np.dtype(dtype).itemsize:
                    os.posix_fallocate(stream.fileno(), stream.tell(), total)
        (self.directory / DONE).mkdir(exist_ok=True)

    def write_chunk(self, chunk: int, first_row: int, rows: dict[str, np.ndarray]) -> None:
        """Write `rows` of every array at `first_row`, bring them to disk, and mark `chunk` as done."""
        for name, (shape, dtype) in self.shapes.items():
            block = np.ascontiguousarray(rows[name], dtype=dtype)
            with naming(self._path(name)), self._path(name).open("r+b") as stream:
                with contextlib.suppress(OSError):  # a file system without locks
                    # NFS writes whole pages, and without a lock its old copy of a neighbour's rows.
                    fcntl.lockf(stream, fcntl.LOCK_EX)
                row_bytes = math.prod(shape[1:]) * block.itemsize
                stream.seek(len(npy_header(shape, dtype)) + first_row * row_bytes)
                stream.write(block.data)
                bring_to_disk(stream)
        (self.directory / DONE / str(chunk)).touch()

    def done(self) -> set[int]:
        return {int(mark.name) for mark in (self.directory / DONE).iterdir()}

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.npy"


class GrowingArray:
    """A `.npy` file to which rows are appended; its header is completed when it is closed."""

    def __init__(self, path: Path, row_shape: tuple[int, ...], dtype: str) -> None:
        self.row_shape, self.dtype, self.rows = row_shape, dtype, 0
        self.stream: IO[bytes] = path.open("wb")
        self.stream.write(npy_header((0, *row_shape), dtype))

    def append(self, rows: np.ndarray) -> None:
        with naming(self.stream.name):
            self.stream.write(np.ascontiguousarray(rows, self.dtype).data)
        self.rows += len(rows)

    def close(self) -> None:
        """Write the final header, which has room for any number of rows; bring the file to disk; close it."""
        self.stream.seek(0)
        self.stream.write(npy_header((self.rows, *self.row_shape), self.dtype))
        with naming(self.stream.name):
            bring_to_disk(self.stream)
        self.stream.close()


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a `.npy` file and bring it to disk."""
    with naming(path), path.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
        bring_to_disk(stream)


def bring_to_disk(stream: IO[Any]) -> None:
    """Wait until all that was written to an open file is on disk: a file that vouches for it may follow."""
    stream.flush()
    os.fsync(stream.fileno())


def open_array(path: Path, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory-map a `.npy` file that must have this shape and dtype; nothing is unpickled."""
    try:
        # An empty file cannot be mapped.
        array = np.load(path, mmap_mode="r" if math.prod(shape) else None, allow_pickle=False)
    except PARSING as error:
        raise DatastoreError(f"{path} is damaged ({error}): build the datastore again") from None
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise DatastoreError(
            f"{path} holds {array.dtype} {array.shape}, but the manifest says {dtype} {shape}: build the "
            "datastore again"
        )
    return array


def as_tensor(array: np.ndarray) -> Tensor:
    """Share an array's memory with a tensor, which must not be written to: a file may be mapped there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def check_space(directory: Path, needed: int) -> None:
    """Refuse to start work if fewer than `needed` bytes are free where `directory` is, or will be."""
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise DatastoreError(
            f"the disk of {directory} is too full: {needed / 1e9:,.2f} GB needed, {free / 1e9:,.2f} GB free; "
            "free some space, or use another disk"
        )
