"""Random keys, and their nearest neighbours by brute force."""

from __future__ import annotations

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def brute_force(keys, queries, k, metric):
    """Scores of the k nearest keys, float64 [H, k]."""
    keys, queries = keys.astype(np.float64), queries.double().numpy()
    scores = queries @ keys.T if metric == "ip" else -((queries[:, None] - keys[None]) ** 2).sum(2)
    return -np.sort(-scores, axis=1)[:, :k]


def clustered(size, dimension, seed=0):
    """Keys in clusters, as a decoder makes them."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(1, size // 30), dimension)) * 3
    return (centres[rng.integers(0, len(centres), size)] + rng.normal(size=(size, dimension))).astype(
        np.float16
    )


def all_scores(keys, queries, metric):
    """Scores of all keys, float64 [H, N]."""
    keys, queries = keys.double().cpu(), queries.double().cpu()
    return (
        queries @ keys.T
        if metric == "ip"
        else -torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist").square()
    )


def multiplied(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What Tensor cores make of halves, which a CPU has no such product of."""
    return queries.float() @ keys.float().transpose(-1, -2)
