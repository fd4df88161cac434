"""Settings of mining, tuned on labelled pairs: each method's F1, labels that say little, a method that is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.f1 import decide, score
from fairseq_ccpr.lab.mining.labelled import (
    LabelledText,
    distinct_pairs,
    read_labelled,
    remove_partners,
    with_negatives,
)
from fairseq_ccpr.lab.mining.methods import METHODS, Kind, Method, TunedSettings
from fairseq_ccpr.lab.mining.miner import Miner
from fairseq_ccpr.lab.mining.rfr import Grid
from fairseq_ccpr.lab.mining.trial import Trial
from tests.helpers import write_lines
from tests.lab.mining.toy_text import ToyEncoder, random_pairs

pytestmark = pytest.mark.full

GRID = Grid(k=(1, 3, 12), beta=(50, 1000), keep=(0.3, 1.0), threshold=(0.0, 0.2, 0.5, 0.9))
ALL = [
    Method.named("rfr"),
    Method.named("rfr", sentence_half=False),
    Method.named("margin"),
    Method.named("max"),
    Method.named("two-way"),
    Method.named("logistic"),
]


@pytest.mark.parametrize("base", ALL, ids=lambda method: method.name)
def test_tuned_settings_have_the_f1_they_were_chosen_for(base: Method, rng: np.random.Generator) -> None:
    pairs = random_pairs(rng, 36)
    taken, offered, gold = remove_partners(24, 0.5)
    labelled = LabelledText([pairs[i][0] for i in taken], [pairs[i][1] for i in offered], gold)
    trial = Trial.encode(labelled, ToyEncoder(), "", True)
    settings, f1 = trial.tune(base, GRID)
    labels = trial.labels()

    def f1_of(settings: Method) -> float:
        answers = trial.matcher(settings)(labels.rows, labels.hidden)
        return score(decide(answers, settings.threshold), labels.gold).f1

    assert f1 == f1_of(settings) > 0.5
    tried = [settings.having(threshold=threshold) for threshold in np.linspace(0, 2, 300)]
    if base.name == "rfr":
        tried = [
            base.having(k=k, beta=beta, keep=keep, threshold=threshold)
            for k in GRID.k for beta in GRID.beta for keep in GRID.keep for threshold in GRID.threshold
        ]  # fmt: skip
    if base.name != "logistic":  # which does not tune its threshold
        assert f1 >= max(map(f1_of, tried))


@pytest.mark.parametrize(
    "base",
    [Method.named("rfr"), Method.named("margin"), Method.named("max"), Method.named("two-way")],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("apart", [True, False])
def test_settings_are_tuned_among_all_that_is_mined(
    base: Method, apart: bool, tmp_path: Path, rng: np.random.Generator
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

    def f1_of(settings: Method) -> float:
        answers = trial.matcher(settings)(labels.rows, labels.hidden)
        return score(decide(answers, settings.threshold), labels.gold).f1

    assert tuning.f1 == f1_of(mining.method) > 0.5
    others = [mining.method.having(threshold=threshold) for threshold in np.linspace(0, 2, 200)]
    if base.name == "rfr":
        others = [
            base.having(k=k, beta=beta, keep=1.0, threshold=p)
            for k in GRID.k
            for beta in GRID.beta
            for p in GRID.threshold
        ]
    assert tuning.f1 >= max(map(f1_of, others))


@pytest.mark.parametrize("method", [*ALL, Method.named("rfr", k=50)], ids=lambda method: method.name)
def test_a_hidden_partner_is_a_partner_that_is_not_there(method: Method, rng: np.random.Generator) -> None:
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
        if method.name != "rfr" and method.kind.one_to_one and truly.partners[0] < 0:
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
        for method in (Method.named("rfr"), Method.named("max"), Method.named("logistic")):
            work = tmp_path / f"{number}{method.name}"
            mining = Miner(sources, targets, ToyEncoder(), method, work, quiet=True)
            assert mining.tune(labelled, GRID).negatives == negatives
            assert np.isfinite(mining.method.threshold) and all(
                pair.target in targets for pair in mining.mine()
            )
    one = Miner(sources, targets[:1], ToyEncoder(), Method.named("max"), tmp_path / "one", quiet=True)
    assert (
        one.tune(read_labelled(write_lines(tmp_path / "gold.tsv", "\t".join(pairs[0]))), GRID).negatives == 0
    )


@pytest.mark.parametrize(
    "base",
    [Method.named("margin"), Method.named("max"), Method.named("two-way")],
    ids=lambda method: method.name,
)
def test_one_line_without_a_partner_leaves_the_threshold_as_it_was(
    base: Method, tmp_path: Path, rng: np.random.Generator
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
        labelled.sources == ["a", "b", "d"]
        and labelled.targets == ["A", "C"]
        and labelled.gold.tolist() == [0, -1, 0]
    )
    # one that has no partner changes nothing for the pairs
    labels = with_negatives(np.arange(3), labelled.gold)
    assert labels.rows.tolist() == [0, 1, 2, 0, 2] and labels.hidden.tolist() == [-1, -1, -1, 0, 0]
    assert labels.gold.tolist() == [0, -1, 0, -1, -1]
    rows = ["One!\tEins", "one\tzwei", "two\tEINS.", "three\t...", "four\tvier"]
    assert distinct_pairs(write_lines(tmp_path / "same.tsv", *rows)) == [("One!", "Eins"), ("four", "vier")]


def test_settings_of_the_paper_are_in_the_grid() -> None:
    grid = Grid()
    assert grid.k == tuple(range(5, 51, 5)) and set(range(50, 101, 5)) <= set(grid.beta)
    assert (
        len(grid.keep) == 10 and len(grid.threshold) == 11 and grid.keep[0] == 0.1 and grid.threshold[-1] == 1
    )


def test_a_third_method_is_a_score_and_a_line(
    tmp_path: Path, monkeypatch: Any, rng: np.random.Generator
) -> None:
    monkeypatch.setitem(METHODS, "nearest", Kind({"threshold": 0.5}, lambda evidence, _: evidence.cosines))
    pairs = random_pairs(rng, 60)
    labelled = read_labelled(write_lines(tmp_path / "gold.tsv", *map("\t".join, pairs[:24])))
    sources, targets = ([pair[side] for pair in pairs[30:]] for side in (0, 1))
    mining = Miner(sources, targets, ToyEncoder(), Method.named("nearest"), tmp_path / "work", quiet=True)
    assert mining.tune(labelled, GRID).f1 > 0.5
    found = list(mining.mine())
    assert sum(pair[:2] in pairs for pair in found) > 0.7 * len(found) > 14
    TunedSettings(mining.method, "toy").write(tmp_path / "s.json")
    assert TunedSettings.read(tmp_path / "s.json").method == mining.method
    TunedSettings(mining.method.having(threshold="high"), "toy").write(tmp_path / "s.json")
    with pytest.raises(ConfigurationError, match=r"threshold is 'high', and must be a float"):
        TunedSettings.read(tmp_path / "s.json")
