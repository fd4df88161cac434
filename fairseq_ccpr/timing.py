"""Where time goes: phases that code marks and a timer adds up, and progress bars, all alike.

    @phase(SEARCH)
    def search(self, queries): ...

    with PhaseTimer(device) as timer:
        decode()
    timer.seconds[SEARCH]

A mark costs a look-up when no timer is active, which is under a microsecond.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from typing import TypeVar

import torch
from tqdm import tqdm

# Of a decoding step; the rest is the encoder and beam search. Phrases are found once per sentence, then
# followed each step.
DECODER, PROJECTION, SEARCH, LIKENESS, MERGE = "decoder", "projection", "search", "likeness", "merge"
FINDING, PHRASES, TEXT = "finding phrases", "phrases", "text"
# Of mining.
ENCODING, INDEXING, VOTING = "encoding", "indexing", "voting"

_active: ContextVar[PhaseTimer | None] = ContextVar("timer", default=None)
T = TypeVar("T")


class phase(ContextDecorator):
    """Mark a function, or a block, as a phase.

    Args:
        whole: phases inside this one count as part of it.
    """

    def __init__(self, name: str, whole: bool = False) -> None:
        self.name, self.whole = name, whole

    def __enter__(self) -> None:
        if (timer := _active.get()) is not None:
            timer.enter(self)

    def __exit__(self, *_: object) -> None:
        if (timer := _active.get()) is not None:
            timer.leave()


class PhaseTimer:
    """Times phases while it is entered, in this thread alone; it waits for the device at the border of each.

    Waiting makes the whole take longer.

    Attributes:
        seconds: of each phase, without the phases inside it.
        calls: of each phase.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._running: list[phase | None] = []  # None inside of a whole phase
        self._since = 0.0
        self._token: Token[PhaseTimer | None]

    def __enter__(self) -> PhaseTimer:
        self._token = _active.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.reset(self._token)

    def enter(self, entered: phase) -> None:
        """Begin a phase, which interrupts the one that it is inside of."""
        outer = self._running[-1] if self._running else entered
        if self._running and (outer is None or outer.whole):
            self._running.append(None)
            return
        self._spend()
        self._running.append(entered)

    def leave(self) -> None:
        ended = self._running[-1]
        if ended is not None:
            self._spend()
            self.calls[ended.name] += 1
        self._running.pop()

    def _spend(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._running and (running := self._running[-1]) is not None:
            self.seconds[running.name] += now - self._since
        self._since = now


def progress_bar(
    what: str,
    unit: str,
    items: Iterable[T] | None = None,
    *,
    total: int | None = None,
    done: int = 0,
    quiet: bool = False,
    delay: float = 0.0,
) -> tqdm[T]:
    """Return a bar over items, or one that advances by `update`.

    Args:
        total: units until the end; large numbers are shown as 12.3k.
        done: how many of them an earlier run has done; they are not in the rate.
        delay: seconds before it is shown.
    """
    # None: hidden where there is no terminal
    scaled, hidden = total is not None or items is None, quiet or None
    return tqdm(
        items,
        what,
        total,
        unit=unit,
        unit_scale=scaled,
        initial=done,
        disable=hidden,
        delay=delay,
        dynamic_ncols=True,
    )


def progress_over(
    items: Sequence[T], what: str, unit: str, size: Callable[[T], int], quiet: bool = False
) -> Iterator[T]:
    """Iterate over items, such as batches, of `size` units each, with a bar that counts units."""
    with progress_bar(what, unit, total=sum(map(size, items)), quiet=quiet) as bar:
        for item in items:
            yield item
            bar.update(size(item))
