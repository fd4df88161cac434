"""Writing while the next result is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def write_behind(write: Callable[[T], object], results: Iterable[T]) -> Iterator[T]:
    """Write each result in a thread while the next is computed; yields it once it is written.

    At most two are in memory: one that is written, and one that is computed or waits. Errors of either are raised, and
    nothing is written any more when this ends.
    """
    with ThreadPoolExecutor(1) as thread:
        last = None
        for result in results:
            if last is not None:
                last[1].result()
                yield last[0]
            last = result, thread.submit(write, result)
        if last is not None:
            last[1].result()
            yield last[0]
