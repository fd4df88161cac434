"""The terms in which parts are declared: how keys are stored, and files with shape and dtype.

`parts.py` has the declarations. Whatever opens, checks, lists, writes or copies a part goes by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.storage.arrays import GrowingArray, Shapes, open_array
from fairseq_ccpr.storage.files import atomic_file


@dataclass(frozen=True)
class KeyForm:
    """How keys are stored: nothing else knows the numbers of a key on disk. Letters: n keys of width d.

    Another form is a subclass, which `Section.KEY_FORM` of its part names.

    Args:
        dtype: of a stored number.
        name: for people.
    """

    dtype: str
    name: str

    def width(self, dimension: int) -> int:
        """Count the numbers of a row, which is a key of this width."""
        return dimension

    def row_bytes(self, dimension: int) -> int:
        return self.width(dimension) * np.dtype(self.dtype).itemsize

    def empty(self, size: int, dimension: int) -> np.ndarray:
        """Make room for the rows of so many keys."""
        return np.empty((size, self.width(dimension)), self.dtype)

    def none(self, dimension: int, device: torch.device) -> Tensor:
        """Return no vectors, [0, d], to which decoded ones can be appended."""
        return torch.from_numpy(self.decode(self.empty(0, dimension))).to(device)

    def encode(self, vectors: Tensor) -> np.ndarray:
        """Turn vectors, [n, d] of any float dtype on any device, into rows."""
        rows: np.ndarray = vectors.to(getattr(torch, self.dtype)).cpu().numpy()
        return rows

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Turn rows into vectors [n, d] of a float dtype, to search and compute with; fp16 stays mapped."""
        return rows


@dataclass(frozen=True)
class PartFile:
    """A file of a part, whose functions take its description, such as the section of the manifest.

    Args:
        name: of the file, or of an array, whose file is NAME.npy.
        shape: of an array; None: it is none.
        dtype: of an array, or a function to it.
        there: whether it is there.
    """

    name: str
    shape: Callable[[Any], tuple[int, ...]] | None = None
    dtype: str | Callable[[Any], str] = ""
    there: Callable[[Any], object] = lambda described: True

    @property
    def file(self) -> str:
        return self.name if self.shape is None else f"{self.name}.npy"

    def layout(self, described: Any) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of an array."""
        assert self.shape is not None
        return self.shape(described), self.dtype if isinstance(self.dtype, str) else self.dtype(described)

    def within(self, entry: str) -> PartFile:
        """Return the same, described by an entry of the description."""
        shape = self.shape
        assert shape is not None
        return replace(self, shape=lambda described: shape(getattr(described, entry)))


def token_type(words: int) -> str:
    """Choose the dtype of the tokens of a vocabulary."""
    return "uint16" if words <= 1 << 16 else "int32"


def place_type(size: int) -> str:
    """Choose the dtype of places among so many rows."""
    return "int32" if size < 1 << 31 else "int64"


class Described:
    """What describes files, and so knows how to open and write them."""

    FILES: ClassVar[tuple[PartFile, ...]]

    def shapes(self, *names: str) -> Shapes:
        """Return shapes and dtypes of arrays; of all that are there, if none are named."""
        arrays = {one.name: one for one in self.FILES if one.shape is not None}
        chosen = names or [name for name, one in arrays.items() if one.there(self)]
        return {name: arrays[name].layout(self) for name in chosen}

    def open_arrays(self, folder: Path, *names: str) -> dict[str, np.ndarray]:
        """Map arrays, which must be as described; all that are there, if none are named."""
        return {name: open_array(folder / f"{name}.npy", *of) for name, of in self.shapes(*names).items()}

    def grow(self, folder: Path, name: str, path: Path | None = None) -> GrowingArray:
        """Begin an array whose number of rows is not known yet, in its own file or another."""
        shape, dtype = self.shapes(name)[name]
        return GrowingArray(path or folder / f"{name}.npy", shape[1:], dtype)

    def write(self, folder: Path, name: str, blocks: Iterable[np.ndarray]) -> int:
        """Write an array block by block, in place of one that is there once it is complete; returns its rows."""
        with atomic_file(folder / f"{name}.npy") as path:
            array = self.grow(folder, name, path)
            for block in blocks:
                array.append(block)
            array.close()
        return array.rows
