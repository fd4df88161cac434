"""The machine that figures were measured on: its name, versions of packages, and the most memory that was held."""

from __future__ import annotations

import platform
import resource
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from shutil import which

import torch

from fairseq_ccpr.version import __version__

PACKAGES = ("torch", "fairseq", "faiss", "numpy", "sacrebleu")


def machine_name(device: torch.device) -> str:
    """Name a GPU, or the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {torch.get_num_threads()} threads"


def commit_of_code() -> str:
    """Name the commit of this checkout, with -dirty if it was changed; empty for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or not which("git"):  # installed, maybe within another repository
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def describe_run(device: torch.device) -> dict[str, str]:
    """Describe how figures were measured: device, versions, commit, command line, and time."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "device": machine_name(device),
        **versions(),
        "commit": commit_of_code(),
        "command": command,
        "date": date,
    }


def gigabytes(count: int) -> str:
    """Write a number of bytes for a table, such as 1.50 GB."""
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
