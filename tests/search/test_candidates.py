"""Search among a few keys for each sentence: against brute force, whatever the order and number of queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fairseq_ccpr.search.candidates import Candidates
from tests.vectors import DEVICE

SENTENCES, MOST, WIDTH = 5, 30, 16


def made(metric: str) -> Candidates:
    """Sentences of different numbers of candidates, one of none."""
    keys = 20 + torch.randn(SENTENCES, MOST, WIDTH) if metric == "l2" else torch.randn(SENTENCES, MOST, WIDTH)
    entries = torch.arange(100, 100 + SENTENCES * MOST).view(SENTENCES, MOST)
    for row, size in enumerate((MOST, 7, 0, 1, 20)):
        entries[row, size:] = -1
        keys[row, size:] = 0
    keys = keys.half().float() if DEVICE.type == "cpu" else keys.half()
    return Candidates(keys.to(DEVICE), entries.to(DEVICE), metric)


def plain(candidates: Candidates, query: Tensor, row: int, k: int) -> tuple[list[float], list[int]]:
    there = candidates.entries[row] >= 0
    keys, entries = candidates.keys[row][there].double(), candidates.entries[row][there]
    near = (
        keys @ query.double() if candidates.metric == "ip" else -(keys - query.double()).square().sum(dim=1)
    )
    best = near.argsort(descending=True, stable=True)[:k]
    missing = k - len(best)
    return near[best].tolist() + [float("-inf")] * missing, entries[best].tolist() + [-1] * missing


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("k", [1, 8, 50])
def test_it_finds_what_brute_force_finds(metric: str, k: int) -> None:
    torch.manual_seed(k)
    candidates = made(metric)
    for rows, each in (
        # as sentences end
        ([0, 1, 2, 3, 4], 1), ([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], 2), ([1, 1, 3, 3], 2), ([3], 1),
        ([0, 1, 1, 1, 4], None), ([2, 2], None),
    ):  # fmt: skip
        queries = torch.randn(len(rows), WIDTH, device=DEVICE) + (20 if metric == "l2" else 0)
        scores, entries = candidates.search(queries, torch.tensor(rows, device=DEVICE), k, each)
        for place, row in enumerate(rows):
            wanted = plain(candidates, queries[place], row, k)
            assert entries[place].tolist() == wanted[1]
            torch.testing.assert_close(scores[place].cpu(), torch.tensor(wanted[0]), rtol=1e-3, atol=1e-3)
