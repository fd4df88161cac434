"""Tiles of the queries that want the same inverted list, without a loop over lists.

Letters: H queries, p lists for each, L lists, G tiles at most.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tiles_of_pairs(chosen: Tensor, sizes: Tensor, first_runs: Tensor, bucket: int, most: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a query and a list it is to be compared with by list, and cut them into tiles of one list each.

    Nothing here asks the device for a number: there are as many tiles as there could be, and some have no pairs.

    Args:
        chosen: int64 [H, p], different lists for each query.
        sizes: int64 [L], keys of each list.
        first_runs: int64 [L], the run that each list begins with.
        bucket: keys in a run.
        most: pairs in a tile.

    Returns:
        int64 [H * p], pairs as query * p + probe, sorted by list; and int64 [G, 5], of each tile the place of its first pair,
        how many pairs it has, the run that its list begins with, that list's runs and keys. Tiles that are not needed have no
        pairs and no runs.
    """
    lists, pairs = chosen.flatten().sort(stable=True)
    counts = torch.zeros_like(sizes).scatter_add_(0, lists, torch.ones_like(lists))  # [L], pairs of each list
    tiles = -(-counts // most)
    ends, first_pairs = tiles.cumsum(0), counts.cumsum(0) - counts
    tile = torch.arange(len(lists) // most + min(len(sizes), len(lists)), device=lists.device)  # [G]
    of_list = torch.searchsorted(ends, tile, right=True).clamp_max(len(sizes) - 1)
    done = (tile - (ends - tiles)[of_list]) * most  # pairs of the list in the tiles before
    left = (counts[of_list] - done).clamp(0, most)
    size = sizes[of_list] * (left > 0)
    return pairs, torch.stack([first_pairs[of_list] + done, left, first_runs[of_list], -(-size // bucket), size], dim=1)
