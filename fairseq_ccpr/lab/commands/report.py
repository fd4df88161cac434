"""What commands of research share: tables and notes on standard output, figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.errors import naming
from fairseq_ccpr.provenance import describe_run

CPU = torch.device("cpu")


@dataclass
class EncoderOptions:
    """Options of all commands that compare encoders."""

    bf16: bool = False
    json: Optional[Path] = None
    cpu: bool = False
    quiet: bool = False


def report(
    tables: Mapping[str, list[list[Any]]],
    notes: Iterable[str],
    json: Path | None,
    results: dict[str, Any],
    device: torch.device = CPU,
) -> int:
    """Print tables by their titles, and lines below them, and write the results; see `write_results`."""
    for title, rows in tables.items():
        print(f"{title}\n\n{markdown_table(rows)}\n")
    for note in notes:
        print(note)
    write_results(json, results, device)
    return 0


def write_results(path: Path | None, results: dict[str, Any], device: torch.device = CPU) -> None:
    """Write what a command found as JSON, below how it was found on a device, if there is a path for it."""
    if path is not None:
        text = json.dumps(describe_run(device) | results, indent=1)
        with naming(path):
            path.write_text(text + "\n", encoding="utf-8")
