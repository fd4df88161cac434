"""What speeds and scores were measured with: the device, its memory, what it can do, and the versions that decide them."""

from __future__ import annotations

import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from fairseq_ccpr.version import __version__

PACKAGES = ("torch", "triton", "fairseq", "faiss", "numpy", "sacrebleu")
COPY_BYTES = 1 << 28  # beyond any cache


def machine_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {torch.get_num_threads()} threads"


def describe_run(device: torch.device) -> dict[str, str]:
    """What figures were measured with: the device, versions, the command line, and when."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"device": machine_name(device), **versions(), "command": command, "date": date}


def gigabytes(count: int) -> str:
    """Bytes, for a table.

    >>> gigabytes(1_500_000_000)
    '1.50 GB'
    """
    return f"{count / 1e9:.2f} GB"


def versions() -> dict[str, str]:
    """By package; one that is not installed is left out."""
    found = {"fairseq-ccpr": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = import_module(name).__version__
        except ImportError:
            continue
    return found


def start_peak(device: torch.device) -> None:
    """Forget what `peak_bytes` knows of a GPU."""
    if device.type == "cuda":
        torch.cuda.init()  # there is nothing to forget before
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most that tensors held on a GPU since `start_peak`; for the CPU, that this process held since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done all it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Limits:
    """What a device does at best."""

    bytes_per_second: float  # read or written
    operations_per_second: float  # additions and multiplications, in a product of matrices

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:,.0f} GB/s, {self.operations_per_second / 1e12:,.2f} TFLOP/s"

    def floor(self, size: int, dimension: int, queries: int) -> float:
        """Seconds below which no exact search of fp16 keys [size, dimension] can be."""
        read, computed = 2 * size * dimension, 2 * queries * size * dimension
        return max(read / self.bytes_per_second, computed / self.operations_per_second)


def measure_limits(device: torch.device) -> Limits:
    """Copies of what fits no cache, and products of large matrices in the best of the precisions that search might use."""
    source = torch.ones(COPY_BYTES // 2, dtype=torch.float16, device=device)
    target = torch.empty_like(source)
    copying = _fastest(lambda: target.copy_(source), device)
    side = 8192 if device.type == "cuda" else 1024
    kinds = (torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    matrices = [torch.ones(side, side, dtype=kind, device=device) for kind in kinds]
    multiplying = min(_fastest(partial(torch.matmul, matrix, matrix), device) for matrix in matrices)
    return Limits(2 * COPY_BYTES / copying, 2 * side**3 / multiplying)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some runs."""
    seconds = []
    for _ in range(6):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
