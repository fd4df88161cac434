"""The one thread that owns the translator, batches of requests, and compaction while the server answers."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from threading import Condition, Thread
from typing import Any, TypeVar

from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import CcprError, ConfigurationError
from fairseq_ccpr.inference.learning import learned_memory
from fairseq_ccpr.inference.system import Translation
from fairseq_ccpr.translator import Translator

COMPACTED_AT = 20_000  # learned entries
PAUSE = 600.0  # seconds, after a compaction that failed
# or one learned entry per this many of the datastore's own, if that is more: its index is rebuilt
SHARE_COMPACTED = 8
logger = logging.getLogger(__name__)
ROUND_SENTENCES = 32  # sentences translated together, at most: pairs to be learned wait that long
MAX_WAITING = 10_000  # sentences, and calls
T = TypeVar("T")
Finish = Callable[[Translator, int, list[Translation]], list[Any]]


class BusyError(Exception):
    """More waits than is accepted, or the server is shutting down."""


@dataclass
class Asked:
    """Sentences of one request, and what is answered; a cancelled one is dropped at the next batch."""

    sentences: list[str]
    finish: Finish
    memory: tuple[str, ...]  # names of the datastores
    done: Future[Any] = field(default_factory=Future)
    finished: list[Any] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.sentences) - len(self.finished)

    def end(self, result: Any = None, error: Exception | None = None) -> None:
        if self.done.set_running_or_notify_cancel():
            self.done.set_result(result) if error is None else self.done.set_exception(error)


class Work:
    """Translate for several clients with one translator, in a thread of its own, which alone may decode.

    Each round takes the same number of sentences from every request that waits, so that a long text keeps
    nobody waiting. Before a round all calls are made that wait, such as `Translator.learn`: what was learned
    counts from that round on. All raise `BusyError` where too much waits.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self._asked: deque[Asked] = deque()
        self._calls: deque[tuple[Callable[[Translator], Any], Future[Any]]] = deque()
        self._changed = Condition()
        self._closing = False
        self._compaction: Thread | None = None
        self._not_before = dict.fromkeys(translator.named, 0.0)  # the time of the next try, by datastore
        self._thread = Thread(target=self._run, name="translator")
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def translate(
        self,
        sentences: list[str],
        finish: Finish = lambda translator, first, translations: translations,
        memory: tuple[str, ...] = (),
    ) -> Future[list[Any]]:
        """Translate sentences, which may share batches with those of others.

        Args:
            finish: called in the thread with the translator, the number of a sentence, and its translation
                and those of the next; what it returns for each takes their place.
            memory: names of the datastores that are used, see `System.over`.
        """
        asked = Asked(sentences, finish, memory)
        with self._accepting():
            self._asked.append(asked)
        return asked.done

    def call(self, function: Callable[[Translator], T]) -> Future[T]:
        done: Future[T] = Future()
        with self._accepting():
            self._calls.append((function, done))
        return done

    def close(self) -> None:
        """Finish what waits, and let others learn into the datastore."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.translator.close()
        if self._compaction is not None:
            self._compaction.join()

    @contextmanager
    def _accepting(self) -> Iterator[None]:
        with self._changed:
            if self._closing or not self.alive:
                raise BusyError("the server is shutting down")
            if sum(asked.left for asked in self._asked) + len(self._calls) >= MAX_WAITING:
                raise BusyError(f"{MAX_WAITING:,} sentences are waiting already: try again later")
            yield
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._calls or self._closing)
                if not self._asked and not self._calls:
                    return
                calls = list(self._calls)
                self._calls.clear()
            for call in calls:
                self._make(*call)
            self._keep_small()
            self._round()

    def _keep_small(self) -> None:
        """Compact a datastore in a thread of its own, where much was learned alongside it."""
        if self._compaction is not None and self._compaction.is_alive():
            return
        for name, translator in self.translator.named.items():
            if time.monotonic() < self._not_before[name] or translator.find_memory(TokenMemory) is None:
                continue
            memory = learned_memory(translator)
            own = memory.store.datastore.section.size
            if memory.entries.index.size >= max(COMPACTED_AT, own // SHARE_COMPACTED):
                self._compaction = Thread(target=self._compact, args=(name,), name="upkeep")
                self._compaction.start()
                return

    def _compact(self, name: str) -> None:
        try:
            self.translator.named[name].compact()
        except ConfigurationError as error:  # it would be refused each time
            logger.warning("%s; this server does not try again", error)
            self._not_before[name] = math.inf
        except Exception as error:
            told = error if isinstance(error, CcprError) else f"compaction failed with {type(error).__name__}"
            logger.warning("%s; it is tried again in %.0f minutes or more", told, PAUSE / 60)
            self._not_before[name] = time.monotonic() + PAUSE

    def _make(self, function: Callable[[Translator], T], done: Future[T]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function(self.translator))
        except Exception as error:
            done.set_exception(error)

    def _round(self) -> None:
        with self._changed:
            waiting = [asked for asked in self._asked if not asked.done.cancelled()][:ROUND_SENTENCES]
        share = ROUND_SENTENCES // max(1, len(waiting))
        for memory in dict.fromkeys(asked.memory for asked in waiting):
            self._translate_some([asked for asked in waiting if asked.memory == memory], share)
        with self._changed:
            had = {id(asked) for asked in waiting}
            left = [asked for asked in self._asked if not asked.done.done()]
            self._asked = deque(sorted(left, key=lambda asked: id(asked) in had))

    def _translate_some(self, waiting: list[Asked], share: int) -> None:
        taken = [asked.sentences[len(asked.finished) :][:share] for asked in waiting]
        try:
            self._translate(waiting, taken)
        except Exception:  # of one of them, which the others are not to pay for
            for asked, sentences in zip(waiting, taken):
                try:
                    self._translate([asked], [sentences])
                except Exception as error:
                    asked.end(error=error)

    def _translate(self, waiting: list[Asked], taken: list[list[str]]) -> None:
        translator = self.translator.over(waiting[0].memory)
        sentences, beam = [sentence for some in taken for sentence in some], translator.cfg.generation.beam
        # they cost nothing but their text
        translations = iter(list(translator.translate(sentences, nbest=beam)))
        made = [list(islice(translations, len(some))) for some in taken]
        each = [asked.finish(translator, len(asked.finished), some) for asked, some in zip(waiting, made)]
        for asked, finished in zip(waiting, each):
            asked.finished += finished
            if not asked.left:
                asked.end(asked.finished)
