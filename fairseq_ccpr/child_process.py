"""Commands in processes of their own that leave nothing running behind, one at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from fairseq_ccpr import parent
from fairseq_ccpr.errors import ConfigurationError

LOCK = "lock"
PATIENCE = 10.0  # seconds that an interrupted command has to end by itself
LINGERS = 3.0  # seconds that a command may hold its lock after a kill of what started it


@contextmanager
def locked(folder: Path, work: str) -> Iterator[IO[str]]:
    """Keep other processes out of a folder, and let SIGTERM and SIGHUP interrupt this one as Ctrl-C does."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        if not lock_within(LINGERS, lock.fileno()):
            lock.seek(0)
            raise ConfigurationError(
                f"{work} in {folder} (process {lock.read() or 'unknown'}): wait for it, or stop it"
            )

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield lock
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def lock_within(seconds: float, file: int) -> bool:
    """Lock an open file or folder, waiting so long while others hold it; returns whether it is locked."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.1)


def ending_with_us(command: list[str]) -> list[str]:
    """Return a command that is killed when the thread that starts it ends or is killed; on Linux."""
    return [sys.executable, "-I", parent.__file__, str(os.getpid()), *command]


def run_child(
    command: list[str],
    lock: IO[str],
    output: IO[str],
    environment: dict[str, str],
    folder: Path,
    own_group: bool,
) -> int:
    """Run a command, which ends when this function does, and return its exit code.

    Args:
        lock: of `locked`. The command holds it as well, until it has ended.
        own_group: whether it leads a process group, which ends with it; else it is in ours.
    """
    process = subprocess.Popen(
        ending_with_us(command),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=own_group,
        pass_fds=[lock.fileno()],
    )
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
