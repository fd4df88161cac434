"""Writing while the next result is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def write_behind(write: Callable[[T], R], results: Iterable[T]) -> Iterator[R]:
    """Write each result in a thread while the next is computed; yields what `write` returns, in order.

    At most two results are in memory: one that is written, and one that is computed or waits. Errors of either side are
    raised, and nothing is written any more when this ends.
    """
    with ThreadPoolExecutor(1) as thread:
        last: Future[R] | None = None
        for result in results:
            if last is not None:
                yield last.result()
            last = thread.submit(write, result)
            del result  # which would stay until the next is there
        if last is not None:
            yield last.result()
