"""Fallback for indexes whose kernels a GPU cannot run: warn once, and search in torch."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from abc import abstractmethod
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.device import to_device
from fairseq_ccpr.search import tiled
from fairseq_ccpr.search.base import Index
from fairseq_ccpr.timing import SEARCH, phase

logger = logging.getLogger(__name__)

FUSED = "fairseq_ccpr.search.fused"


class LaunchError(Exception):
    """A kernel that cannot be compiled, or that the device cannot run."""


class ScoringIndex(Index):
    """An index that scores keys itself: by kernels in Triton where they can be launched, else in torch.

    Attributes:
        steps: the module that scores runs of `steps.BUCKET` keys.
    """

    steps: Any
    _in_torch: ScoringIndex | None = None  # the same, once a kernel was refused

    @torch.no_grad()
    @phase(SEARCH)
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find the k nearest keys of each query; see `Index.search`."""
        if self.on_host and queries.is_cuda:  # its keys do not fit into the GPU
            scores, ids = to_device(self.search(queries.cpu(), k), queries.device)
            return scores, ids
        if self._in_torch is None:
            try:
                return self.nearest(queries, k)
            except LaunchError as error:
                warn_of_launch(str(error))
                self._in_torch = self.in_torch()
        return self._in_torch.nearest(queries, k)

    @abstractmethod
    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search, as `search` does.

        Raises:
            LaunchError: a kernel cannot run here.
        """

    @abstractmethod
    def in_torch(self) -> ScoringIndex:
        """Return an index over the same keys that uses no kernel of Triton."""


def load_steps(keys: Tensor, fused: bool | None) -> Any:
    """Import the module that scores keys.

    Args:
        fused: whether it is Triton's; if not given, where that can be.
    """
    if not (can_fuse(keys) if fused is None else fused):
        return tiled
    try:
        return importlib.import_module(FUSED)
    except Exception as error:  # whatever a broken or outdated installation of Triton raises
        if fused:
            raise
        warn_of_launch(f"Triton cannot be imported ({first_line(error)})")
        return tiled


def can_fuse(keys: Tensor) -> bool:
    """Return whether Triton can search these keys: in half precision, on a GPU, and Triton is installed."""
    half = keys.dtype in (torch.float16, torch.bfloat16)
    return half and keys.is_cuda and importlib.util.find_spec("triton") is not None


@cache
def warn_of_launch(reason: str) -> None:
    """Warn, once for each reason, that the search is slower than it could be."""
    logger.warning("%s: searching in torch, which is slower but finds the same", reason)


def first_line(error: Exception) -> str:
    """Return the name of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
