"""Phases: each second belongs to one, threads have timers of their own, and marks without a timer do nothing."""

from __future__ import annotations

import time
from threading import Thread

import pytest
import torch

from fairseq_ccpr.timing import PhaseTimer, phase


@phase("inner")
def inner(seconds: float = 0.02) -> float:
    time.sleep(seconds)
    return seconds


@phase("outer")
def outer() -> None:
    inner()
    time.sleep(0.01)
    inner()


def test_inner_phases_are_not_counted_twice() -> None:
    start = time.perf_counter()
    with PhaseTimer(torch.device("cpu")) as timer:
        outer()
        time.sleep(0.02)  # in no phase
        assert inner() == 0.02
    total = time.perf_counter() - start
    assert timer.calls == {"outer": 1, "inner": 3}
    assert timer.seconds["inner"] >= 0.06 and timer.seconds["outer"] >= 0.01
    assert sum(timer.seconds.values()) <= total - 0.02


def test_whole_phases_have_no_phases_inside() -> None:
    with PhaseTimer(torch.device("cpu")) as timer, phase("whole", whole=True):
        outer()
    assert (
        timer.calls == {"whole": 1} and timer.seconds.keys() == {"whole"} and timer.seconds["whole"] >= 0.05
    )


def test_phases_end_with_errors_and_timers() -> None:
    with PhaseTimer(torch.device("cpu")) as timer:
        with pytest.raises(TypeError):
            inner("much")
        inner(0)
    inner(0)
    assert timer.calls == {"inner": 2}


def test_other_threads_are_not_timed() -> None:
    with PhaseTimer(torch.device("cpu")) as timer:
        thread = Thread(target=inner)
        thread.start()
        thread.join()
    assert not timer.calls
