"""Commands in processes of their own, which leave nothing running behind, one at a time in an output."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from fairseq_ccpr.errors import ConfigurationError

PACKAGE = Path(__file__).resolve().parent.parent
PATIENCE = 10  # seconds that an interrupted command has to end by itself
TAIL_BYTES = 4096  # of a log, where its last line is


@contextmanager
def locked(output: Path) -> Iterator[IO[str]]:
    """Keep other runs out of an output, and let SIGTERM and SIGHUP interrupt this one as Ctrl-C does.

    Raises:
        ConfigurationError: another run, or a command that one left behind, is at work there.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / "lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigurationError(
                f"another run is at work in {output} (process {lock.read() or 'unknown'}): wait for it, or stop it"
            ) from None

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield lock
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def execute(words: list[str], folder: Path, log: IO[str], lock: IO[str]) -> int:
    """Run Python with these words in a folder, this package at hand, in a group that ends with it; its exit code."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    print(f"# {shlex.join(['python', *words])}", file=log, flush=True)
    # The command holds the lock as well, and so on its own, should this process be killed.
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[lock.fileno()],
    )  # fmt: skip
    lock.truncate(0)
    print(process.pid, end="", file=lock, flush=True)
    try:
        return process.wait()
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of a process and of those it started: politely at first."""
    with suppress(ProcessLookupError):
        try:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """What a log says in the end."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = stream.read().decode("utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next(line.strip() for line in reversed(lines) if line.strip())  # the first is the command
