"""The interface of search backends, what they are planned and opened from, and where keys are placed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

METRICS = ("l2", "ip")
DISK = "disk"  # FAISS with inverted lists that stay on disk
MILVUS = "milvus"
EXACT_UP_TO = 20_000  # keys; on a CPU, comparing with more of them costs about a step of a small decoder


@dataclass(frozen=True)
class IndexDescription:
    """The data that must be stored alongside the keys to search them again.

    `exact` has no file; `disk` has two: an index, and its inverted lists; others have one made by `factory`.
    `milvus` keeps its index itself, and `factory` is its type.
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
        return [self.file, *([lists_file(self.file)] if self.backend == DISK else [])] if self.file else []


def lists_file(file: str) -> str:
    """Name the file of inverted lists that stay on disk, next to that of the index."""
    return file.removesuffix(".faiss") + ".lists"


@dataclass(frozen=True)
class StoreAddress:
    """Where keys are in a database: a server's URI, without credentials, or an embedded one's file."""

    uri: str
    collection: str
    backend = MILVUS  # of the index over them; the only database so far

    @property
    def embedded(self) -> bool:
        return "://" not in self.uri

    def __str__(self) -> str:
        return f"the collection '{self.collection}' of {self.backend.capitalize()} at {self.uri}"


@dataclass(frozen=True)
class RemoteKeys:
    """N keys of width d that a database holds: their location and expected properties."""

    address: StoreAddress
    size: int
    dimension: int
    # as JSON has it: `dimension`, `size`, `fingerprints` and what else must be the same
    identity: Mapping[str, Any]
    timeout: float  # seconds that an answer may take, all attempts together
    token: str = ""  # credentials; if empty, those of the environment

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.dimension


Target = Path | RemoteKeys  # an index's file, or the database that takes the keys
Progress = Callable[[int], object]  # called with the number of keys added since the last call


class Effort(NamedTuple):
    """The effort that a search may take."""

    probes: int | None = None  # inverted lists that it looks through; the backend's own number if not given
    candidates: int = 8  # scored again for each neighbour that is wanted
    min_candidates: int = 0  # scored again for each query, however few neighbours are wanted


@dataclass(frozen=True)
class IndexRequest:
    """The user's choices for an index, and the keys it is for."""

    choice: str  # `--index`
    metric: str
    parameters: str  # of the search; empty for those that suit the index
    size: int  # N
    dimension: int  # d
    effort: Effort  # where `parameters` do not say
    store: StoreAddress | None = None  # where the keys are to be, if in a database


class Index(ABC):
    """Finds the nearest of N keys of width d. A backend is a subclass, listed in `fairseq_ccpr.search.BACKENDS`.

    `plan`, `open` and `search` are all that a backend must have, `build` and `bytes_needed` too if it has a
    file; `to` where it works on a GPU; the rest for databases. Scores are always "higher is nearer": the
    inner product for `ip`, minus the *squared* distance for `l2`.
    """

    metric: str  # `l2` or `ip`
    size: int  # N
    dimension: int  # d
    remote = False  # whether a search is mostly waiting for another process
    on_host = False  # whether the CPU searches, also for queries of a GPU
    stands_in = False  # whether it is exact search in place of the index that the manifest describes

    @classmethod
    @abstractmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        """Decide everything that is stored about an index, before any work is done."""

    @classmethod
    def build(
        cls, keys: np.ndarray, description: IndexDescription, target: Target, progress: Progress
    ) -> None:
        """Build the index over `keys` [N, d] and write its file, or bring them to their database."""

    @classmethod
    def bytes_needed(cls, description: IndexDescription, size: int, dimension: int) -> int:
        """Estimate the bytes that the index's files take for N keys of width d while they are made."""
        return 0

    @classmethod
    @abstractmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> Index:
        """Open the index over `keys` [N, d], with its files in `folder`, on the CPU."""

    @abstractmethod
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest keys of queries [H, d], which are on the index's device; k may exceed N.

        Returns:
            scores fp32 [H, k], nearest first, and ids int64 [H, k], on the device of the queries. Where fewer
            than k were found, the rest has score -inf and id -1.
        """

    @property
    def deepest(self) -> int:
        """The k beyond which a search returns no more: N, or less if a backend has its own limit."""
        return self.size

    def to(self, device: torch.device) -> Index:
        """Return the same index on another device if possible, else itself."""
        return self

    def check(self) -> None:
        """Check that a database has all of the keys, and can search them."""

    def refuse_foreign(self) -> None:
        """Refuse to write keys where a database has others under the same name."""

    def read(self) -> Iterator[np.ndarray]:
        """Read the keys that a database has, fp32 [n, d], block by block, in their order; missing ones are left out."""
        yield from ()

    def drop(self) -> None:
        """Remove the keys from a database."""
