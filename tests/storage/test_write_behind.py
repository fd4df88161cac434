"""Results are written in order, while the next is computed; an error of either side ends both."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest

from fairseq_ccpr.storage.write_behind import write_behind

SECONDS = 30  # after which a wait that should have ended fails


def test_results_are_written_in_order_and_yielded_when_they_are() -> None:
    written: list[int] = []
    for count in (0, 1, 5):
        written.clear()
        for result in write_behind(written.append, range(count)):
            assert written[result] == result
        assert written == list(range(count))


def test_the_next_is_computed_while_one_is_written() -> None:
    begun, computed = Event(), Event()

    def results() -> Iterator[int]:
        yield 0
        assert begun.wait(SECONDS)
        computed.set()
        yield 1

    def write(result: int) -> None:
        if result == 0:
            begun.set()
            assert computed.wait(SECONDS)

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
