"""The one thread that owns the translator: what waits is translated together, and no request has the machine to itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any, TypeVar

from fairseq_ccpr.inference.sentences import Translation
from fairseq_ccpr.translator import Translator

BATCH = 64  # sentences that are translated together, at most
MAX_WAITING = 1000  # requests

T = TypeVar("T")


class BusyError(Exception):
    """More waits than is accepted, or the server is shutting down."""


@dataclass
class Texts:
    """Sentences of one request, and those of their translations that there are."""

    sentences: list[str]
    done: Future[list[Translation]] = field(default_factory=Future)
    translations: list[Translation] = field(default_factory=list)
    started: bool = False

    def begin(self) -> bool:
        """Say whether anyone still waits; from now on nobody can give it up."""
        if not self.started:
            self.started = self.done.set_running_or_notify_cancel()
        return self.started


class Work:
    """Translate for several clients with one translator, in a thread of its own.

    Each round takes the same number of sentences from every request that waits, so that a long text keeps nobody waiting;
    between two rounds one call is made, such as `Translator.learn`. What was learnt counts from the next round on.

    Args:
        translator: which nothing else may use from now on.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self._texts: deque[Texts] = deque()
        self._calls: deque[tuple[Callable[[Translator], Any], Future[Any]]] = deque()
        self._changed = Condition()
        self._closing = False
        self._thread = Thread(target=self._run, name="translator")
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive()

    def translate(self, sentences: list[str]) -> Future[list[Translation]]:
        """Translate sentences, which may share batches with those of others.

        Raises:
            BusyError: too much waits.
        """
        texts = Texts(sentences)
        with self._accepting():
            self._texts.append(texts)
        return texts.done

    def call(self, function: Callable[[Translator], T]) -> Future[T]:
        """Call a function with the translator.

        Raises:
            BusyError: too much waits.
        """
        done: Future[T] = Future()
        with self._accepting():
            self._calls.append((function, done))
        return done

    def close(self) -> None:
        """Finish what waits, and let others learn beside the datastore."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.translator.close()

    @contextmanager
    def _accepting(self) -> Iterator[None]:
        """Hold the lock of what waits while a request is added, and wake the thread then."""
        with self._changed:
            if self._closing or not self.alive:
                raise BusyError("the server is shutting down")
            if len(self._texts) + len(self._calls) >= MAX_WAITING:
                raise BusyError(f"{MAX_WAITING:,} requests are waiting already: try again later")
            yield
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._calls or self._closing)
                if not self._texts and not self._calls:
                    return
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                self._make(*call)
            self._round()

    def _make(self, function: Callable[[Translator], T], done: Future[T]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(function(self.translator))
        except Exception as error:
            done.set_exception(error)

    def _round(self) -> None:
        """Translate some sentences of every request that waits."""
        with self._changed:
            waiting = [texts for texts in self._texts if texts.begin()][:BATCH]
        share = BATCH // max(1, len(waiting))
        taken = [texts.sentences[len(texts.translations) :][:share] for texts in waiting]
        try:
            self._translate(waiting, taken)
        except Exception:  # of one of them, which the others are not to pay for
            for texts, sentences in zip(waiting, taken):
                try:
                    self._translate([texts], [sentences])
                except Exception as error:
                    texts.done.set_exception(error)
        with self._changed:
            self._texts = deque(texts for texts in self._texts if not texts.done.done())

    def _translate(self, waiting: list[Texts], taken: list[list[str]]) -> None:
        translations = iter(list(self.translator.translate([sentence for some in taken for sentence in some])))
        for texts, some in zip(waiting, taken):
            texts.translations += [next(translations) for _ in some]
            if len(texts.translations) == len(texts.sentences):
                texts.done.set_result(texts.translations)
