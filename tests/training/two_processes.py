"""Gradients of two processes, held against those of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fairseq.data import FairseqDataset
from torch import Tensor, nn


def gradients_of_part(rank: int, folder: str, model: nn.Module, criterion: nn.Module, parts: list) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    loss, count, logged = criterion(model, parts[rank])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.save((gradients, float(logged["loss"]), count), f"{folder}/{rank}")
    dist.destroy_process_group()


def gradient_of_two_processes(
    model: nn.Module, criterion: nn.Module, dataset: FairseqDataset, folder: Path
) -> dict[str, Tensor]:
    """Assert that two processes with unequal parts of a batch have its gradient; what that is."""
    samples = [dataset[i] for i in range(16)]
    loss, count, _ = criterion(model, dataset.collater(samples))
    loss.backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    parts = [dataset.collater(samples[:6]), dataset.collater(samples[6:])]
    arguments = str(folder), model, criterion, parts
    torch.multiprocessing.start_processes(gradients_of_part, arguments, nprocs=2, start_method="fork")
    made = [torch.load(folder / str(rank)) for rank in range(2)]
    assert sum(of_part for _, _, of_part in made) == count
    assert sum(logged for _, logged, _ in made) == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in whole.items():
        together = made[0][0][name] + made[1][0][name]
        assert (together - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max()), name
    return whole
