"""Where figures come from: what every file of figures says of the run that measured them."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any

import torch

from fairseq_ccpr.version import __version__

PACKAGES = ("torch", "fairseq", "faiss", "numpy", "sacrebleu")
# Of absolute paths, in PATH, NAME=PATH, PATH:PATH or "--option PATH".
FOLDERS = re.compile(r"(?<![^=:,\s])/(?!/)[^=:,\s]*/(?=[^=:,/\s])")


def describe_run(device: torch.device) -> dict[str, Any]:
    """Describe how figures were measured: the words of the command, date, versions, commit and machine.

    Of absolute paths the words have the last name alone: folders of one machine say nothing on another.
    """
    words = [*Path(sys.argv[0]).name.split(), *(FOLDERS.sub("", word) for word in sys.argv[1:])]
    return {
        "command": words,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "commit": commit_of_code(),
        "machine": machine_name(device),
    }


def versions() -> dict[str, str]:
    """Return versions by package, without those that are not installed."""
    installed = {"fairseq-ccpr": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(ImportError):
            installed[name] = import_module(name).__version__
    return installed


def commit_of_code() -> str:
    """Name the commit of this checkout, with -dirty if it was changed; empty for an installed package."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists() or not which("git"):  # installed, maybe within another repository
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def machine_name(device: torch.device) -> str:
    """Name a GPU, or the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {torch.get_num_threads()} threads"
