"""Datastores of any size for measuring: entries of a real one, or new ones around them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NOISE = 0.3  # of the keys' own spread in each dimension
BLOCK = 1 << 20  # entries made at a time


def grow(
    keys: np.ndarray, values: np.ndarray, size: int, unit: bool, device: torch.device, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Make a datastore of `size` entries with keys distributed, and tokens as frequent, as in a real one.

    Up to the real size it is a random part of the real one. Beyond, each entry of the real one is taken as often as any
    other, give or take one, and all but the first copy are moved by random noise.

    Args:
        keys: fp16 [N, d]; may be memory-mapped.
        values: int [N].
        size: at least 1.
        unit: whether keys have length 1, which the new ones then have as well.
        device: where the new datastore is made.

    Returns:
        keys fp16 [size, d], values int32 [size].
    """
    chance = torch.Generator(device).manual_seed(seed)
    source = torch.from_numpy(np.ascontiguousarray(keys)).to(device)
    tokens = torch.from_numpy(np.array(values, dtype=np.int32)).to(device)
    real = len(source)
    spread = source[:BLOCK].float().std(dim=0, correction=0) * NOISE  # [d]
    made = torch.empty(size, source.size(1), dtype=torch.float16, device=device)
    made_values = torch.empty(size, dtype=torch.int32, device=device)
    order = torch.randperm(real, generator=chance, device=device)
    for start in range(0, size, BLOCK):
        places = torch.arange(start, min(start + BLOCK, size), device=device)
        rows = order[places % real]
        block = source[rows].float()
        noise = torch.randn(block.shape, generator=chance, device=device) * spread
        block += noise * (places >= real).unsqueeze(1)
        made[places] = (torch.nn.functional.normalize(block, dim=1) if unit else block).half()
        made_values[places] = tokens[rows]
    return made, made_values


def queries_near(keys: Tensor, count: int, unit: bool, seed: int = 2) -> Tensor:
    """Draw queries fp32 [count, d] around random keys [N, d], as far away as `grow` puts new keys."""
    chance = torch.Generator(keys.device).manual_seed(seed)
    rows = torch.randint(len(keys), (count,), generator=chance, device=keys.device)
    spread = keys[:BLOCK].float().std(dim=0, correction=0) * NOISE
    queries = keys[rows].float() + torch.randn(count, keys.size(1), generator=chance, device=keys.device) * spread
    return torch.nn.functional.normalize(queries, dim=1) if unit else queries
