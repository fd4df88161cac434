"""bf16 training on a CPU, where fairseq's `--bf16` does not work, and the untrained model as first best checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from fairseq.checkpoint_utils import save_checkpoint, torch_persistent_save
from fairseq.distributed.utils import get_global_rank
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from fairseq_ccpr.device import has_bf16

logger = logging.getLogger(__name__)
BEST = "checkpoint_best.pt"


def has_best() -> bool:
    """Check whether a checkpoint of this training was measured, in this process or in the one that it resumes."""
    return hasattr(save_checkpoint, "best")


def save_start(model: Any, task_state: dict[str, Any], accuracy: float, directory: Path) -> None:
    """Save an untrained model as the best checkpoint so far: later ones replace it if they are no worse.

    Several processes may call it; the first of them writes.
    """
    save_checkpoint.best = accuracy
    logger.info(f"update 0, before training: accuracy {accuracy}")
    if get_global_rank():
        return
    state = {
        "args": None,
        "cfg": None,
        "model": {name: tensor.cpu() for name, tensor in model.state_dict().items()},
        "optimizer_history": [{"lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": task_state,
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 0},
            "val_loss": accuracy,
            "best": accuracy,
        },
    }
    torch_persistent_save(state, str(directory / BEST))


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

    Nor on a CPU that is slower in bf16.
    """
    device = next(model.parameters()).device
    return torch.autocast("cpu", torch.bfloat16, enabled=device.type == "cpu" and has_bf16(device))


@register_task("translation_cpu_bf16", dataclass=TranslationConfig)
class TranslationCpuBf16Task(CpuAutocast, TranslationTask):
    """Translation; on a GPU the same as `translation`, with fairseq's own `--fp16` and `--bf16`."""
