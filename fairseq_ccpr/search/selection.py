"""The largest of many scores, found through the largest of each group; of equal scores the one with the lower id first.

The k largest numbers lie in the k groups whose own largest are largest. So a search need not keep its scores: the largest
of each run of keys will do, and the scores of k runs. Nothing here asks the device for a number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GROUP = 64  # numbers that the largest stands for
FINE = 16  # the same on a CPU, where comparing costs more than the launch of one more operation
DIRECT = 4096  # as many are compared with one another
_LAST_ID = 2**32 - 1
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float but its sign


def largest(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the k largest scores of each row, and their ids.

    Args:
        scores: fp32 [H, n]; what is not a number counts as -inf.
        ids: int64 [H, n], or what broadcasts to it, from 0 to 2^32 - 1 and no two of a row alike.
        k: up to n.

    Returns:
        fp32 and int64 [H, k], largest first, of equal scores the lower id first.

    >>> largest(torch.tensor([[0.5, 2.0, 2.0, -1.0]]), torch.tensor([7, 9, 8, 1]), 3)
    (tensor([[2.0000, 2.0000, 0.5000]]), tensor([[8, 9, 7]]))
    """
    # One number carries both: the score in its upper half, in an order that integers keep, and the id below.
    bits = (scores.nan_to_num(float("-inf"), float("inf"), float("-inf")) + 0.0).view(torch.int32)  # + 0.0: -0 is 0
    both = (_ordered(bits).long() << 32) | (_LAST_ID - ids)
    best = both.topk(k, dim=1).values
    return _ordered((best >> 32).int()).view(torch.float32), _LAST_ID - (best & _LAST_ID)


def _ordered(bits: Tensor) -> Tensor:
    """Map the bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


def best_rows(values: Tensor, k: int, group: int = GROUP, direct: int = DIRECT) -> Tensor:
    """Find the rows that hold the k largest numbers of each column.

    Args:
        values: fp32 [M, H].
        group, direct: see `GROUP` and `DIRECT`.

    Returns:
        int64 [H, min(k, M)], largest first, of equal ones the lower row first.
    """
    size, columns = values.shape
    k = min(k, size)
    if size <= max(direct, k * group):
        return largest(values.T.contiguous(), torch.arange(size, device=values.device), k)[1]
    missing = -size % group
    padded = torch.nn.functional.pad(values, (0, 0, 0, missing), value=float("-inf")) if missing else values
    groups = best_rows(padded.view(-1, group, columns).amax(dim=1), k, group, direct)  # [H, k]
    rows = (groups.unsqueeze(2) * group + torch.arange(group, device=values.device)).flatten(1)  # [H, k * group]
    return largest(padded.T.gather(1, rows), rows, k)[1]


def search_by_blocks(
    nearest: Callable[[Tensor, int], tuple[Tensor, Tensor]], queries: Tensor, rows: int, depth: int, k: int
) -> tuple[Tensor, Tensor]:
    """Search for queries block by block, and join the answers.

    Args:
        nearest: a block of queries and n -> the n nearest keys of each, fp32 and int64 [H', n].
        queries: [H, d].
        rows: queries in a block.
        depth: keys that can be found at most.
        k: keys wanted; missing ones score -inf and have id -1.

    Returns:
        fp32 and int64 [H, k].
    """
    depth = min(k, depth)
    if not depth or not len(queries):
        ids = torch.full((len(queries), k), -1, dtype=torch.long, device=queries.device)
        return torch.full_like(ids, float("-inf"), dtype=torch.float32), ids
    scores, ids = (torch.cat(part) for part in zip(*(nearest(block, depth) for block in queries.split(rows))))
    missing = 0, k - depth
    pad = torch.nn.functional.pad
    return pad(scores, missing, value=float("-inf")), pad(ids, missing, value=-1)
