"""MoCo: a copy of an encoder that follows it slowly, and a queue of the vectors it has computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MomentumEncoder(nn.Module):
    """theta_m <- mu theta_m + (1 - mu) theta.

    It has no gradients and no dropout, and stays in fp32 when the model trains in fp16, where steps of 1 - mu would be lost.

    Args:
        encoder: the encoder to follow; the copy starts equal to it.
        momentum: mu, in [0, 1).
        queue: vectors of earlier batches that are kept for each side.
        dimension: o, their width.
    """

    vectors: Tensor  # of the queue, [2, size, o]
    strings: Tensor  # int64 [size, 2], of both phrases of each pair
    enqueued: Tensor  # how many pairs there were so far

    def __init__(self, encoder: nn.ModuleDict, momentum: float, queue: int, dimension: int) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum = momentum
        self.register_buffer("vectors", torch.zeros(2, queue, dimension))
        self.register_buffer("strings", torch.zeros(queue, 2, dtype=torch.int64))
        self.register_buffer("enqueued", torch.zeros((), dtype=torch.int64))
        self.train()

    def train(self, mode: bool = True) -> MomentumEncoder:
        """Switch the mode of the module, but keep its encoder in evaluation mode."""
        super().train(mode)
        self.encoder.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> MomentumEncoder:
        """Move it like any module, but keep its dtypes: `half` rounds the values once, and training continues in fp32."""
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), *args, **kwargs)

    @torch.no_grad()
    def follow(self, encoder: nn.Module) -> None:
        """Take a step after the optimizer's."""
        for slow, fast in zip(self.encoder.parameters(), encoder.parameters()):
            slow.lerp_(fast.to(slow.dtype), 1 - self.momentum)

    @property
    def filled(self) -> int:
        """The number of vectors in the queue for each side."""
        return min(int(self.enqueued), self.vectors.size(1))

    def queued(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the vectors [F, o] of a side, and the strings of both phrases of each pair, int64 [F, 2]."""
        return self.vectors[side, : self.filled], self.strings[: self.filled]

    @torch.no_grad()
    def enqueue(self, vectors: tuple[Tensor, Tensor], strings: Tensor) -> None:
        """Replace the oldest pairs in the queue with new ones.

        Args:
            vectors: [K, o] of either side.
            strings: int64 [K, 2].
        """
        size = self.vectors.size(1)
        first = max(0, len(strings) - size)  # earlier pairs would be overwritten at once
        rows = (int(self.enqueued) + torch.arange(first, len(strings), device=strings.device)) % max(size, 1)
        for own, new in zip(self.vectors, vectors):
            own[rows] = new[first:].to(own.dtype)
        self.strings[rows] = strings[first:]
        self.enqueued += len(strings)
