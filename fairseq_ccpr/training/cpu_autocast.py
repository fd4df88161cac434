"""Half precision for training on a CPU, where fairseq's own `--bf16` does not work."""

from __future__ import annotations

from typing import Any

import torch


class CpuAutocast:
    """Mix into a fairseq task, before its base: steps of a model that is on the CPU run under bf16 autocast."""

    def train_step(self, sample: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `FairseqTask.train_step`."""
        with cpu_autocast(model):
            return super().train_step(sample, model, *args, **kwargs)  # type: ignore[misc]

    def valid_step(self, sample: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """See `FairseqTask.valid_step`."""
        with cpu_autocast(model):
            return super().valid_step(sample, model, *args, **kwargs)  # type: ignore[misc]


def cpu_autocast(model: torch.nn.Module) -> torch.autocast:
    """bf16 autocast where `model` is on the CPU, else nothing."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    return torch.autocast("cpu", torch.bfloat16, enabled=on_cpu)
