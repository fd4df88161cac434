"""Compacting while the server answers, so that continual learning does not slow it down for ever."""

from __future__ import annotations

import logging
from threading import Thread

from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import CcprError
from fairseq_ccpr.inference.learning import learned_memory
from fairseq_ccpr.translator import Translator

COMPACTED_AT = 20_000  # learned entries
SHARE = 8  # or one learned entry per this many of the datastore's own, if that is more: its index is rebuilt

logger = logging.getLogger(__name__)


class Upkeep:
    """Compacts the datastore of a translator in a thread, when much was learned alongside it.

    Args:
        translator: whose memory it looks at.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self._thread: Thread | None = None
        self._failed = False

    def look(self) -> None:
        """Begin, where it is time to."""
        if self._failed or (self._thread is not None and self._thread.is_alive()):
            return
        if self.translator.find_memory(TokenMemory.name) is None:
            return
        memory = learned_memory(self.translator)
        if memory.entries.index.size >= max(COMPACTED_AT, memory.store.datastore.section.size // SHARE):
            self._thread = Thread(target=self._compact, name="upkeep")
            self._thread.start()

    def close(self) -> None:
        """End what was begun."""
        self.translator.close()
        if self._thread is not None:
            self._thread.join()

    def _compact(self) -> None:
        try:
            self.translator.compact()
        except CcprError as error:
            self._failed = True  # it would fail again with the next pair
            logger.warning("%s", error)
