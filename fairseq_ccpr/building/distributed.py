"""Building with one process, or with several launched by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fairseq_ccpr.errors import ConfigurationError


@dataclass(frozen=True)
class Processes:
    """This process's place among `world` processes."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process does what must be done once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            dist.barrier()

    def device(self, cpu: bool) -> torch.device:
        """Choose this process's GPU and make it the current one, or the CPU if there is none or `cpu`.

        Raises:
            ConfigurationError: more processes on this machine than GPUs.
        """
        if cpu or not torch.cuda.is_available():
            return torch.device("cpu")
        if self.local_rank >= (count := torch.cuda.device_count()):
            raise ConfigurationError(
                f"torchrun started process {self.local_rank + 1} of this machine, which has {count} GPUs: "
                f"give --nproc-per-node {count}, or --cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)


@contextmanager
def launched() -> Iterator[Processes]:
    """Join the processes that torchrun started, by its environment variables; without them, there is just this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    # The first process indexes alone when all keys are written, for an unknown time.
    dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))
    finally:
        dist.destroy_process_group()
