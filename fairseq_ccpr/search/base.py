"""The interface of an index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

METRICS = ("l2", "ip")
DISK = "disk"  # FAISS with inverted lists that stay on disk
MILVUS = "milvus"


@dataclass(frozen=True)
class IndexDescription:
    """What must be stored beside the keys to search them again.

    `exact` has no file; `disk` has two: an index, and its inverted lists; others have one made by `factory`. Of `milvus` that
    is the type of its index, which it keeps itself.
    """

    backend: str
    metric: str
    factory: str = ""
    parameters: str = ""
    file: str = ""

    def __str__(self) -> str:
        named = self.backend in (DISK, MILVUS)
        kind = f"{self.backend}:{self.factory}" if named else self.factory or self.backend
        return ";".join(part for part in (kind, self.parameters) if part)

    @property
    def files(self) -> list[str]:
        """The names of its files."""
        return [self.file, *([lists_file(self.file)] if self.backend == DISK else [])] if self.file else []


def lists_file(file: str) -> str:
    """The file of the inverted lists that stay on disk, beside that of the index."""
    return file.removesuffix(".faiss") + ".lists"


class Index(ABC):
    """Finds the nearest of N keys of width d.

    Scores are always "higher is nearer": the inner product for `ip`, minus the *squared* distance for `l2`.
    """

    metric: str
    size: int
    dimension: int
    remote = False  # whether a search is mostly waiting for another process

    @abstractmethod
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k nearest keys of each query.

        Args:
            queries: [H, d], any float dtype, on the index's device.
            k: at least 1; may exceed N.

        Returns:
            scores fp32 [H, k], nearest first, and ids int64 [H, k], on the device of the queries. Where fewer
            than k were found, the rest has score -inf and id -1.
        """

    @property
    def deepest(self) -> int:
        """The k beyond which a search gives no more: N, or less where a back end has a limit of its own."""
        return self.size

    @abstractmethod
    def to(self, device: torch.device) -> Index:
        """The same index on another device, where it can be; else itself."""
