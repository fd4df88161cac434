"""Commands in processes of their own that leave nothing running behind, one at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from fairseq_ccpr.errors import ConfigurationError

LOCK = "lock"
PATIENCE = 10  # seconds that an interrupted command has to end by itself


@contextmanager
def locked(folder: Path, work: str) -> Iterator[IO[str]]:
    """Keep other processes out of a folder, and let SIGTERM and SIGHUP interrupt this one as Ctrl-C does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigurationError(
                f"{work} in {folder} (process {lock.read() or 'unknown'}): wait for it, or stop it"
            ) from None

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield lock
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_child(
    command: list[str], lock: IO[str], output: IO[str], environment: dict[str, str], folder: Path, own_group: bool
) -> int:
    """Run a command, which ends when this function does, and return its exit code.

    Args:
        lock: of `locked`. The command holds it as well, and keeps it if this process is killed.
        own_group: whether it leads a process group, which ends with it; else it is in ours, and is killed with us.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=own_group, pass_fds=[lock.fileno()],
    )  # fmt: skip
    lock.truncate(0)
    print(process.pid, end="", file=lock, flush=True)
    send = partial(os.killpg, process.pid) if own_group else process.send_signal
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            try:
                if process.poll() is None:
                    send(signal.SIGTERM)
                    process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                pass
            finally:
                send(signal.SIGKILL)
