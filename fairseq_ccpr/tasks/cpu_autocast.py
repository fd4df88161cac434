"""Half precision for training on a CPU, where fairseq's own `--bf16` does not work."""

from __future__ import annotations

from typing import Any

import torch


class CpuAutocast:
    """Mix into a fairseq task, before its base: forward passes on a CPU run in bf16 where the hardware has it."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `FairseqTask.train_step`."""
        with self._autocast():
            return super().train_step(*args, **kwargs)  # type: ignore[misc]

    def valid_step(self, *args: Any, **kwargs: Any) -> Any:
        """See `FairseqTask.valid_step`."""
        with self._autocast():
            return super().valid_step(*args, **kwargs)  # type: ignore[misc]

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=not torch.cuda.is_available())
