"""Where the time of decoding goes: decoder, projection, search, merge, phrases; the rest is encoder and beam search."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from fairseq.sequence_generator import EnsembleModel

from fairseq_ccpr.datastore.projection import KeyProjection
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.phrase_memory import PhraseBatch, PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.evaluation.speed.machine import synchronise
from fairseq_ccpr.search import ExactIndex, FaissIndex, TorchIvfIndex

DECODER, PROJECTION, SEARCH, MERGE = "decoder", "projection", "search", "merge"
FINDING, PHRASES = "finding phrases", "phrases"  # once a sentence, and at each step
METHODS: dict[tuple[Any, str], str] = {
    (EnsembleModel, "forward_decoder"): DECODER,
    (KeyProjection, "forward"): PROJECTION,
    (ExactIndex, "search"): SEARCH,
    (FaissIndex, "search"): SEARCH,
    (TorchIvfIndex, "search"): SEARCH,
    (TokenMemory, "retrieve"): MERGE,  # less what it calls of the above: values, probabilities, lambda
    (RetrievalEnsemble, "mix"): MERGE,
    (PhraseMemory, "start"): FINDING,
    (PhraseMemory, "_batch"): FINDING,
    (PhraseBatch, "vote"): PHRASES,
    (PhraseBatch, "reorder"): PHRASES,
}


class PartTimer:
    """While it is entered, times the parts, and waits for the device at the border of each: the whole takes longer so.

    Args:
        device: where they work.

    Attributes:
        seconds: of each part, without the parts inside it; but finding phrases includes the search for them.
        calls: of each.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._running: list[str] = []
        self._patches = [
            patch.object(kind, name, self._timed(kind, name, part)) for (kind, name), part in METHODS.items()
        ]

    def __enter__(self) -> PartTimer:
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._patches:
            one.stop()

    def _timed(self, kind: Any, name: str, part: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if FINDING in self._running or PHRASES in self._running:
                return method(*args, **kwargs)
            start = self._now()
            self._running.append(part)
            result = method(*args, **kwargs)
            self._running.pop()
            spent = self._now() - start
            self.calls[part] += 1
            self.seconds[part] += spent
            if self._running:
                self.seconds[self._running[-1]] -= spent
            return result

        return timed

    def _now(self) -> float:
        synchronise(self.device)
        return time.perf_counter()
