"""Translation models loaded with their memories, and phrase retrieval whose results a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.mixture import Distribution
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, RetrievedEntries
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.text.words import word_spans
from tests.small_models import World


def load_ensemble(world: World, words: list[object]) -> tuple[Any, Any, list[Any], Any]:
    """Load the settings, the task, its models, and the ensemble of these with their memories."""
    cfg = parse_generation(world.options("--no-progress-bar", *words))
    task, models = load(cfg)
    return cfg, task, models, task.build_ensemble(models)


def mixed_and_phrase_vote(ensemble: RetrievalEnsemble, sample: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Compute log p at the real tokens of the references, and the vote of the phrase memory there."""
    text = ensemble.force_decode(sample)
    assert text.whole is not None
    votes = ensemble.decided(text, ensemble.votes(text))
    model = Distribution(text.whole.log_probs[text.whole.real])
    return ensemble.mixture.mix(model, votes).log_probs, votes[-1]


@contextmanager
def retrieving(texts: list[str], choose: Callable[[str], int], size: int = 3) -> Iterator[None]:
    """Retrieve the phrases of a text chosen for each source sentence, instead of those the encoder finds.

    Texts are cut into phrases of `size` words, each of which is retrieved with score 1 for a query of its
    own.
    """
    places = []
    for number, text in enumerate(texts):
        words = word_spans(text)
        for first in range(0, len(words), size):
            places.append([number, words[first][0], words[first : first + size][-1][1]])

    def phrase(entry: int) -> tuple[str, str, int, int]:
        number, start, end = places[entry]
        return texts[number][start:end], texts[number], start, end

    spans = np.array(places, np.int32).reshape(-1, 3)
    store = SimpleNamespace(spans=spans, sentence=texts.__getitem__, phrase=phrase)

    def start(self: PhraseRetriever, sources: list[str], *_: None) -> Callable[[], RetrievedEntries]:
        self.datastore = store
        found = [np.flatnonzero(store.spans[:, 0] == choose(source)) for source in sources]
        spans = np.zeros((sum(map(len, found)), 3), np.int32)
        spans[:, 0] = np.repeat(np.arange(len(sources)), [len(entries) for entries in found])
        entries = np.concatenate(found)[:, None]
        return lambda: RetrievedEntries(
            spans, np.ones(len(spans), np.float32), entries, np.ones(entries.shape)
        )

    unwritten = patch("fairseq_ccpr.decoding.phrase_candidates.open_or_write", return_value=None)
    with patch.object(PhraseRetriever, "start", start), unwritten:
        yield
