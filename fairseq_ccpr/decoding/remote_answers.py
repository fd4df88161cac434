"""Asking a database while decoding: what happens where it does not answer."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fairseq_ccpr.decoding.options import SKIP, StoreSettings
from fairseq_ccpr.errors import UnreachableError
from fairseq_ccpr.search import StoreAddress

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RemoteAnswers:
    """Answers of an index in another process, some of which may not come.

    After a failure nothing is asked for as long as was waited, so that at most half of the time is lost.

    Args:
        what: sentences go without: phrases, or tokens.
    """

    def __init__(self, waiting: StoreSettings, what: str, address: StoreAddress | None) -> None:
        self.waiting, self.what, self.address = waiting, what, address
        self.skipped: list[int] = []  # sentences that went without, each time
        self._thread = ThreadPoolExecutor(1)  # while it waits, the caller encodes
        self._not_before = 0.0  # seconds of the clock

    def start(self, question: Callable[[], T], sentences: int) -> Callable[[], T | None]:
        """Ask in a thread; returns a function that waits for what `ask` returns."""
        begun = self._thread.submit(question).result if time.monotonic() >= self._not_before else question
        return partial(self.ask, begun, sentences)

    def ask(self, question: Callable[[], T], sentences: int = 0) -> T | None:
        """Ask; None where no answer comes and the sentences may go without."""
        try:
            if time.monotonic() >= self._not_before:
                return question()
        except UnreachableError as error:
            if self.waiting.unreachable != SKIP:
                raise UnreachableError(
                    f"{error}; --store-unreachable {SKIP} continues without {self.what}"
                ) from None
            logger.warning("%s; continuing without %s, and trying again later", error, self.what)
            self._not_before = time.monotonic() + self.waiting.timeout
        if sentences and not self.skipped:
            # Once, at the end, to standard error: fairseq has closed the file of its log by then.
            weakref.finalize(self, _report_skipped, self.skipped, self.what, self.address)
        self.skipped += [sentences] * (sentences > 0)
        return None


def _report_skipped(skipped: list[int], what: str, address: StoreAddress | None) -> None:
    told = f"{sum(skipped):,} sentences went without {what}: {address} did not answer"
    print(f"fairseq-ccpr: {told}", file=sys.stderr)
