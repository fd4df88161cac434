"""What speeds and scores were measured with: the device, its memory, and the versions of all that decides them."""

from __future__ import annotations

import platform
import resource
from importlib import import_module
from pathlib import Path

import torch

from fairseq_ccpr.version import __version__

PACKAGES = ("torch", "fairseq", "faiss", "numpy", "sacrebleu")


def machine_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {torch.get_num_threads()} threads"


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
