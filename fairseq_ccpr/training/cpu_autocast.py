"""bf16 training on a CPU, where fairseq's own `--bf16` does not work: a mixin, and `--task translation_cpu_bf16`."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask


class CpuAutocast:
    """Mixin for a fairseq task, listed before its base: steps of a model on the CPU run under bf16 autocast."""

    def train_step(self, sample: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch under autocast."""
        with cpu_autocast(model):
            return super().train_step(sample, model, *args, **kwargs)  # type: ignore[misc]

    def valid_step(self, sample: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Validate on a batch under autocast."""
        with cpu_autocast(model):
            return super().valid_step(sample, model, *args, **kwargs)  # type: ignore[misc]


def cpu_autocast(model: torch.nn.Module) -> torch.autocast:
    """Return a bf16 autocast context for a model on the CPU; on other devices it has no effect.

    Nor on a CPU that has no more than AVX2, where products in bf16 take fifty times as long as in fp32.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    return torch.autocast("cpu", torch.bfloat16, enabled=on_cpu and torch.backends.cpu.get_cpu_capability() != "AVX2")


@register_task("translation_cpu_bf16", dataclass=TranslationConfig)
class TranslationCpuBf16Task(CpuAutocast, TranslationTask):
    """Translation; on a GPU the same as `translation`, with fairseq's own `--fp16` and `--bf16`."""
