"""Commands in processes of their own: what ends with them, and what may run alongside them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from fairseq_ccpr.child_process import locked, run_child
from fairseq_ccpr.errors import ConfigurationError

FORKED = multiprocessing.get_context("fork")


def running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


@pytest.mark.parametrize("own_group", [True, False])
def test_interrupted_command_leaves_no_process_behind(tmp_path: Path, own_group: bool) -> None:
    grandchild = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '99']).pid, flush=True); sys.stdin = None\n"
    )
    program = (
        grandchild + "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    )
    log = tmp_path / "log"
    with (
        patch("fairseq_ccpr.child_process.PATIENCE", 0.2),
        pytest.raises(KeyboardInterrupt),
        log.open("w") as to,
        locked(tmp_path / "out", "another run is at work") as lock,
    ):
        handler = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGHUP))
        signal.setitimer(signal.ITIMER_REAL, 1)
        try:
            run_child([sys.executable, "-c", program], lock, to, dict(os.environ), tmp_path, own_group)
        finally:
            signal.signal(signal.SIGALRM, handler)
    child, other = int((tmp_path / "out" / "lock").read_text()), int(log.read_text())
    time.sleep(0.1)
    assert not running(child) and running(other) != own_group
    if not own_group:
        os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize("own_group", [True, False])
def test_a_command_ends_when_what_started_it_is_killed(tmp_path: Path, own_group: bool) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"

    def start() -> None:
        with log.open("w") as to, locked(tmp_path / "out", "another run is at work") as lock:
            run_child([sys.executable, "-c", program], lock, to, dict(os.environ), tmp_path, own_group)

    log = tmp_path / "log"
    log.touch()
    before = FORKED.Process(target=start)
    before.start()
    while not log.read_text():
        time.sleep(0.01)
    before.kill()
    before.join()
    with locked(tmp_path / "out", "another run is at work"):  # at once
        assert not running(int(log.read_text()))


def test_exit_codes_and_output_are_the_commands(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, locked(tmp_path, "a build is at work") as lock:
        program = "import os, sys; print(os.getcwd(), os.environ['WORD']); sys.exit(7)"
        assert run_child([sys.executable, "-c", program], lock, log, {"WORD": "said"}, tmp_path, True) == 7
        refusal = pytest.raises(
            ConfigurationError, match=r"a build is at work in .* \(process \d+\): wait for it"
        )
        with refusal, patch("fairseq_ccpr.child_process.LINGERS", 0):
            locked(tmp_path, "a build is at work").__enter__()
    assert (tmp_path / "log").read_text() == f"{tmp_path} said\n"
