"""Putting together what the processes of a distributed training hold, for losses that compare across them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist


def processes() -> int:
    """How many train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def share_gradient(number: Tensor | float) -> Tensor | float:
    """The same number, with a gradient that is this process's part of the whole.

    For what all processes hold alike, where each takes the loss of all rows: the sum over processes counts it once.
    """
    if processes() == 1 or not isinstance(number, Tensor):
        return number
    return number.detach() + (number - number.detach()) / processes()


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all processes, in the order of their ranks; gradients flow into this process's own.

    When each process takes the loss of all rows, the sum of what the processes send back is the gradient of that loss.

    Args:
        rows: [n, ...], with as many rows as this process happens to have.
    """
    if processes() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(processes())]
    dist.all_gather(counts, counts[0].new_tensor([len(rows)]))
    most = max(int(count) for count in counts)
    padded = rows.detach().new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    everything = [part[: int(count)] for part, count in zip(parts, counts)]
    everything[dist.get_rank()] = rows
    return torch.cat(everything)
