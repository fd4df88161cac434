"""Progress bars, all alike: rate, time left, and nothing where standard error is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress_bar(
    what: str, unit: str, items: Iterable[T] | None = None, *, total: int | None = None, done: int = 0,
    quiet: bool = False, delay: float = 0.0,
) -> tqdm[T]:  # fmt: skip
    """Return a bar over items, or one that advances by `update`.

    Args:
        what: is being done.
        unit: what is counted.
        total: units until the end; large numbers are shown as 12.3k.
        done: how many of them an earlier run has done; they are not in the rate.
        quiet: without a bar.
        delay: seconds before it is shown.
    """
    scaled, hidden = total is not None or items is None, quiet or None  # None: hidden where there is no terminal
    return tqdm(
        items, what, total, unit=unit, unit_scale=scaled, initial=done, disable=hidden, delay=delay, dynamic_ncols=True
    )


def progress_over(
    items: Sequence[T], what: str, unit: str, size: Callable[[T], int], quiet: bool = False
) -> Iterator[T]:
    """Iterate over items, such as batches, of `size` units each, with a bar that counts units."""
    with progress_bar(what, unit, total=sum(map(size, items)), quiet=quiet) as bar:
        for item in items:
            yield item
            bar.update(size(item))
