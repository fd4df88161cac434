"""Results are written in order, while the next is computed; an error of either side ends both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event
from weakref import WeakSet

import pytest

from fairseq_ccpr.storage.arrays import write_behind

SECONDS = 30  # after which a wait that should have ended fails


def test_results_are_written_in_order_and_told_when_they_are() -> None:
    for count in (0, 1, 5):
        written: list[int] = []

        def write(result: int, written: list[int] = written) -> int:
            written.append(result)
            return -result

        for number, told in enumerate(write_behind(write, range(count))):
            assert told == -number == -written[number]
        assert written == list(range(count))


def test_what_was_written_leaves_memory_while_the_next_is_computed() -> None:
    alive: WeakSet[Result] = WeakSet()
    for _ in write_behind(id, Result.some(8, alive)):
        assert len(alive) <= 2


class Result:
    """What is computed; it can be referred to weakly."""

    @classmethod
    def some(cls, count: int, alive: WeakSet[Result]) -> Iterator[Result]:
        """Compute results that are counted while they are in memory."""
        for _ in range(count):
            deadline = time.monotonic() + SECONDS
            while alive and time.monotonic() < deadline:
                time.sleep(0.001)  # until the one before is written and the thread has let go of it
            assert not alive
            alive.add(result := cls())
            yield result
            del result


def test_the_next_is_computed_while_one_is_written() -> None:
    begun, computed = Event(), Event()

    def results() -> Iterator[int]:
        yield 0
        assert begun.wait(SECONDS)
        computed.set()
        yield 1

    def write(result: int) -> int:
        if result == 0:
            begun.set()
            assert computed.wait(SECONDS)
        return result

    assert list(write_behind(write, results())) == [0, 1]


def test_what_cannot_be_written_ends_the_computing() -> None:
    computed = []

    def results() -> Iterator[int]:
        for number in range(9):
            computed.append(number)
            yield number

    def write(result: int) -> None:
        if result == 1:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        list(write_behind(write, results()))
    assert computed == [0, 1, 2]


def test_a_failing_computation_leaves_nothing_half_written() -> None:
    begun, written = Event(), []

    def results() -> Iterator[int]:
        yield 0
        assert begun.wait(SECONDS)
        raise KeyboardInterrupt

    def write(result: int) -> None:
        begun.set()
        written.append(result)

    with pytest.raises(KeyboardInterrupt):
        list(write_behind(write, results()))
    assert written == [0]
