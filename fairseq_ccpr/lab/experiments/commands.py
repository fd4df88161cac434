"""Running the commands of an experiment, each in a process of its own with a log."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import IO

from fairseq_ccpr.child_process import run_child

PACKAGE = Path(__file__).resolve().parents[2]  # fairseq_ccpr, as --user-dir
TAIL_BYTES = 4096  # of a log, where its last line is


def execute(words: list[str], folder: Path, log: IO[str], lock: IO[str]) -> int:
    """Run Python with these words in a folder, able to import this package, and return its exit code."""
    print(f"# {shlex.join(['python', *words])}", file=log, flush=True)
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return run_child([sys.executable, *words], lock, log, environment, folder, own_group=True)


def last_line(log: Path) -> str:
    """Read the last line of a log."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = stream.read().decode("utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next(line.strip() for line in reversed(lines) if line.strip())  # the first is the command
