"""The untrained model as the first candidate for the best checkpoint, which fairseq itself does not measure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fairseq.checkpoint_utils import save_checkpoint, torch_persistent_save
from fairseq.distributed.utils import get_global_rank

logger = logging.getLogger(__name__)
BEST = "checkpoint_best.pt"


def has_best() -> bool:
    """Check whether a checkpoint of this training was measured, in this process or in the one that it resumes."""
    return hasattr(save_checkpoint, "best")


def save_start(model: Any, task_state: dict[str, Any], accuracy: float, directory: Path) -> None:
    """Save an untrained model as the best checkpoint so far: later ones replace it if they are no worse.

    Several processes may call it; the first of them writes.

    Args:
        model: as fairseq would save it.
        task_state: of the task.
        accuracy: as fairseq would measure it.
        directory: of fairseq's checkpoints; it exists.
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
