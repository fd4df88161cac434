"""Vectors less their mean: the maths, and what comes later to a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairseq_ccpr.lab.mining import centring
from fairseq_ccpr.lab.mining.centring import Centre, centred
from fairseq_ccpr.lab.mining.labelled import LabelledText
from fairseq_ccpr.lab.mining.method import Grid
from fairseq_ccpr.lab.mining.miner import Miner
from fairseq_ccpr.lab.mining.neighbours import SentenceKeys
from fairseq_ccpr.lab.mining.pair_methods import MaxMethod
from fairseq_ccpr.lab.mining.trial import Trial
from tests.lab.mining.toy_text import ToyEncoder, random_pairs


@pytest.fixture(autouse=True)
def few(monkeypatch: Any) -> None:
    monkeypatch.setattr(centring, "LEAST", 100)


def plain(vectors: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return np.array([(row - mean) / np.linalg.norm(row - mean) for row in vectors.astype(np.float64)])


def test_centring_equals_a_plain_reference(monkeypatch: Any, rng: np.random.Generator) -> None:
    monkeypatch.setattr(centring, "BLOCK", 7)
    vectors, others = ((rng.normal(size=(rows, 8)) + 2).astype(np.float16) for rows in (130, 110))
    nothing = np.zeros(0, np.int64)
    found = centred(SentenceKeys(vectors, nothing, nothing, others, nothing))
    assert np.allclose(found.keys, plain(vectors, vectors.astype(np.float64).mean(0)), atol=2e-3)
    assert np.allclose(found.fragments, plain(others, others.astype(np.float64).mean(0)), atol=2e-3)
    parts = Centre().add(vectors[:50]).add(vectors[50:]).subtract_(vectors.copy())
    assert (parts == found.keys).all() and parts.dtype == np.float16
    assert (centred(SentenceKeys(vectors[:99], nothing, nothing, others[:0], nothing)).keys == vectors[:99]).all()
    same = np.ones((200, 4), np.float16)
    assert (Centre().add(same).subtract_(same) == 0).all()


def test_what_comes_later_is_centred_by_what_was_there(tmp_path: Path, rng: np.random.Generator) -> None:
    pairs = random_pairs(rng, 160)
    sources, targets = ([pair[side] for pair in pairs[:130]] for side in (0, 1))
    later = LabelledText([pairs[150][0]], [pairs[150][1]], np.zeros(1, np.int64))
    vectors = ToyEncoder().encode([*sources, pairs[150][0]]).astype(np.float16)
    seen: list[np.ndarray] = []

    class Spying(MaxMethod):
        def tune(self, sources: Any, targets: Any, labels: Any, grid: Any) -> Any:
            seen.append(sources.keys.keys_of(np.arange(len(sources.keys))))
            return self, 0.0

    Miner(sources, targets, ToyEncoder(), Spying(), tmp_path / "work", quiet=True).tune(later, Grid())
    assert np.allclose(seen[0], plain(vectors, vectors[:130].astype(np.float64).mean(0)), atol=4e-3)


def test_a_common_direction_says_nothing(rng: np.random.Generator) -> None:
    class Alike(ToyEncoder):
        """An encoder to which all texts of a language are alike."""

        def encode(self, texts: list[str]) -> np.ndarray:
            common = np.where([text.startswith("X") for text in texts], 5.0, -5.0)[:, None]
            vectors = np.column_stack([super().encode(texts)[:, 1:], common])
            return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    pairs = random_pairs(rng, 150)
    labelled = LabelledText([source for source, _ in pairs], [target for _, target in pairs], np.arange(150))
    trial = Trial.encode(labelled, Alike(), "", True)
    assert np.mean(trial.answers(MaxMethod()).partners == np.arange(150)) > 0.9
