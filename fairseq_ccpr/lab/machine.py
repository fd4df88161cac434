"""What pages of figures say of the run that measured them, and the most memory that was held."""

from __future__ import annotations

import resource
import shlex
from typing import Any

import torch

from fairseq_ccpr.provenance import describe_run


def circumstances(results: dict[str, Any]) -> str:
    """Write when, on what machine, and with which versions figures were measured, as `describe_run` has it."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    commit = f"commit {results['commit']}" if results.get("commit") else ""
    return " · ".join([*filter(None, [results["date"], commit]), results["machine"], versions])


def page_of_run(device: torch.device) -> str:
    """Write for a page of figures how they were measured, and with which command."""
    run = describe_run(device)
    return f"{circumstances(run)}\n\n`{shlex.join(run['command'])}`"


def gigabytes(count: int) -> str:
    """Write a number of bytes for a table, such as 1.50 GB."""
    return f"{count / 1e9:.2f} GB"


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
