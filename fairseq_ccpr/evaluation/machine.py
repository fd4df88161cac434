"""The machine that speeds are measured on: its name, memory, limits, and the versions of its software."""

from __future__ import annotations

import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from fairseq_ccpr.version import __version__

PACKAGES = ("torch", "fairseq", "faiss", "numpy", "sacrebleu")
COPY_BYTES = 1 << 28  # beyond any cache


def machine_name(device: torch.device) -> str:
    """Name a GPU, or the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {torch.get_num_threads()} threads"


def describe_run(device: torch.device) -> dict[str, str]:
    """Describe how figures were measured: the device, versions, the command line, and the time."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"device": machine_name(device), **versions(), "command": command, "date": date}


def gigabytes(count: int) -> str:
    """Write a number of bytes for a table.

    >>> gigabytes(1_500_000_000)
    '1.50 GB'
    """
    return f"{count / 1e9:.2f} GB"


def versions() -> dict[str, str]:
    """Return versions by package, without those that are not installed."""
    installed = {"fairseq-ccpr": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = import_module(name).__version__
        except ImportError:
            continue
    return installed


def start_peak(device: torch.device) -> None:
    """Reset the count of `peak_bytes` on a GPU."""
    if device.type == "cuda":
        torch.cuda.init()  # there is nothing to reset before
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most that tensors held on a GPU since `start_peak`; of a CPU, that this process held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Limits:
    """The peak speeds of a device."""

    bytes_per_second: float  # read or written
    operations_per_second: float  # additions and multiplications, in a product of matrices

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:,.0f} GB/s, {self.operations_per_second / 1e12:,.2f} TFLOP/s"

    def floor(self, size: int, dimension: int, queries: int) -> float:
        """Return the seconds below which no exact search of fp16 keys [size, dimension] can be."""
        read, computed = 2 * size * dimension, 2 * queries * size * dimension
        return max(read / self.bytes_per_second, computed / self.operations_per_second)


def measure_limits(device: torch.device) -> Limits:
    """Time copies larger than any cache, and products of large matrices in the fastest precision a search may use."""
    source = torch.ones(COPY_BYTES // 2, dtype=torch.float16, device=device)
    target = torch.empty_like(source)
    copying = _fastest(lambda: target.copy_(source), device)
    side = 8192 if device.type == "cuda" else 1024
    kinds = (torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    # Of random numbers: with equal ones a GPU draws less power and is faster.
    matrices = [torch.randn(side, side, dtype=kind, device=device) for kind in kinds]
    multiplying = min(_fastest(partial(torch.matmul, matrix, matrix), device) for matrix in matrices)
    return Limits(2 * COPY_BYTES / copying, 2 * side**3 / multiplying)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Time some runs; return the seconds of the fastest."""
    seconds = []
    for _ in range(6):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
