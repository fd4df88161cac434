"""all_gather with gradients, for losses that compare across the processes of a distributed training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist


def world_size() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def divide_gradient(value: Tensor | float) -> Tensor | float:
    """Return the same value with its gradient divided by the number of processes.

    For values that all processes share, when each computes the loss of all rows: the sum over processes counts them once.
    """
    if world_size() == 1 or not isinstance(value, Tensor):
        return value
    return value.detach() + (value - value.detach()) / world_size()


def all_gather_rows(rows: Tensor) -> Tensor:
    """Gather the rows of all processes, in the order of their ranks; gradients flow into this process's own.

    When each process computes the loss of all rows, the gradients they send back sum to the gradient of that loss.

    Args:
        rows: [n, ...]; n may differ between processes.
    """
    if world_size() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(counts, counts[0].new_tensor([len(rows)]))
    most = max(int(count) for count in counts)
    padded = rows.detach().new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    everything = [part[: int(count)] for part, count in zip(parts, counts)]
    everything[dist.get_rank()] = rows
    return torch.cat(everything)
