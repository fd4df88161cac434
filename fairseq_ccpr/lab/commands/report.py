"""What commands of research share: tables and notes on standard output, figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.errors import naming


@dataclass
class EncoderOptions:
    """Options of all commands that compare encoders."""

    bf16: bool = False
    json: Optional[Path] = None
    cpu: bool = False
    quiet: bool = False


def report(
    tables: Mapping[str, list[list[Any]]], notes: Iterable[str], json: Path | None, results: dict[str, Any]
) -> int:
    """Print tables by their titles, and lines below them, and write the results."""
    for title, rows in tables.items():
        print(f"{title}\n\n{markdown_table(rows)}\n")
    for note in notes:
        print(note)
    write_results(json, results)
    return 0


def write_results(path: Path | None, results: dict[str, Any]) -> None:
    """Write what a command found as JSON, if there is a path for it."""
    if path is not None:
        with naming(path):
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
