"""What tuning keeps of what it decoded with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairseq_ccpr.evaluation import tune
from fairseq_ccpr.evaluation.grids import TextWorth, Worth
from fairseq_ccpr.evaluation.test_set import Decodings, SystemOutput, TranslationScores
from fairseq_ccpr.evaluation.tune import FAITHFUL, QUALITY, REFERENCES, SPEED, Trial


def candidate(name: str, k: int = 0, trust: bool = False) -> Any:
    """Make a stand-in for a candidate: what `choose` asks of its ensemble."""
    tokens = SimpleNamespace(name="tokens", settings=SimpleNamespace(k=k)) if k else None
    voting = [tokens] if tokens is not None else []
    return SimpleNamespace(
        name=name, ensemble=SimpleNamespace(find=lambda kind: tokens, trust=trust or None, voting=voting)
    )


def trial(prefer: str, scores: dict[str, TranslationScores], seconds: dict[str, float]) -> Trial:
    system: Any = None
    return Trial(system, [], prefer, scores, seconds)


@pytest.mark.parametrize(
    ("bleu", "quality", "speed"),
    [
        ({"a": 30.0, "b": 29.8, "c": 29.6, "base": 20.0}, "a", "b"),  # c is the fastest, and too far below
        ({"a": 30.0, "b": 29.8, "c": 29.75, "base": 20.0}, "a", "c"),
        ({"a": 30.0, "b": 29.8, "c": 29.75, "base": 29.9}, "a", "a"),  # the others are below the base
        ({"a": 19.0, "b": 18.9, "c": 18.8, "base": 20.0}, "a", "a"),
    ],
)
def test_the_best_or_the_fastest_beside_it(bleu: dict[str, float], quality: str, speed: str) -> None:
    tried = [candidate(name) for name in "abc"]
    scores = {name: TranslationScores(value, value, "", "") for name, value in bleu.items()}
    seconds = {"a": 3.0, "b": 2.0, "c": 1.0, "base": 0.5}
    for prefer, name in {QUALITY: quality, SPEED: speed}.items():
        assert trial(prefer, scores, seconds).choose(tried).name == name


@pytest.mark.parametrize(
    ("many", "few", "trust", "chosen"),
    [
        (30.0, 29.9, True, "few"),
        (30.0, 29.7, True, "many"),
        (30.0, 29.9, False, "many"),  # points of a grid, of which likelihood has chosen
        (20.1, 20.0, True, "many"),  # not better than the base
    ],
)
def test_more_neighbours_must_gain(many: float, few: float, trust: bool, chosen: str) -> None:
    tried = [candidate("many", 32, trust), candidate("few", 8, trust)]
    values = {"many": many, "few": few, "base": 20.0}
    scores = {name: TranslationScores(value, value, "", "") for name, value in values.items()}
    assert trial(QUALITY, scores, {}).choose(tried).name == chosen


def test_leaving_the_text_out_is_timed_and_other_weights_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(trial: Trial, tried: list[Any], samples: Any, base: bool) -> Any:
        names = [one.name for one in tried] + ["base"] * base
        scores = dict.fromkeys(names, TranslationScores(29.9, 29.9, "", ""))
        return scores, {"base": 4.0, names[0]: 6.0}, Decodings(dict.fromkeys(names, SystemOutput()))

    monkeypatch.setattr(Trial, "_decode", decoded)
    whole, half, none = map(candidate, ("whole", "half", "none"))
    scores = {
        name: TranslationScores(value, value, "", "") for name, value in {"base": 20.0, "whole": 30.0}.items()
    }
    took = {"base": 2.0, "whole": 3.5}  # of another decoding, on a machine that was less busy
    decoded_before = trial(SPEED, scores, took)
    for other in (half, none):
        decoded_before.decode_another(whole, other, timed=other is none)
    assert took == {"base": 2.0, "whole": 3.5, "half": 3.5, "none": 3.0} and scores["base"].bleu == 20
    assert decoded_before.choose([whole, half, none]) is none


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ({"a": 0.05, "b": 0.01, "c": 0.02}, "b"),
        ({"a": 0.02, "b": 0.01, "c": 0.0}, "b"),  # c loses least, and b little more
        ({"a": 0.005, "b": -0.02, "c": -0.03}, "a"),  # what gains there is no better than what loses nothing
        ({}, "a"),
    ],
)
def test_what_loses_much_more_on_other_text_is_not_chosen(losses: dict[str, float], chosen: str) -> None:
    tried = [candidate(name) for name in "abc"]
    bleu = {"a": 30.0, "b": 29.0, "c": 28.0, "base": 20.0}
    decoded = trial(
        QUALITY, {name: TranslationScores(value, value, "", "") for name, value in bleu.items()}, {}
    )
    decoded.losses = losses
    assert decoded.choose(tried).name == chosen


@pytest.mark.parametrize(("model", "chosen"), [(30.0, "a"), (29.0, "b"), (37.0, "a")])
def test_what_is_worse_than_the_model_sets_no_bar_on_other_text(model: float, chosen: str) -> None:
    bleu = {"a": 36.0, "b": 29.9, "base": model}  # b loses nothing
    scores = {name: TranslationScores(value, value, "", "") for name, value in bleu.items()}
    decoded = trial(QUALITY, scores, {})
    decoded.losses = {"a": 0.02, "b": 0.0}
    assert decoded.choose([candidate("a"), candidate("b")]).name == chosen


@pytest.mark.parametrize("count", [3, 7, 12, 13, 48, 200])
def test_what_losses_are_measured_on_trains_nothing_and_is_of_all_lengths(
    count: int, rng: np.random.Generator
) -> None:
    samples = [{"ntokens": int(one)} for one in np.sort(rng.integers(10, 600, count))]
    size = sum(one["ntokens"] for one in samples)
    train, apart = tune.held_apart(samples, 6000)
    assert sorted([*train, *apart], key=id) == sorted(samples, key=id) and 0 < len(apart) <= -(-count // 4)
    if count >= 12:
        told = sum(one["ntokens"] for one in apart)
        assert 0.7 < told / min(6000, size / 4) < 1.4
        means = [float(np.mean([one["ntokens"] for one in some])) for some in (samples, apart)]
        assert 0.8 < means[0] / means[1] < 1.25
    assert tune.held_apart(samples[:2], 6000) == (samples[:2], [])


def test_copies_are_looked_up_once_for_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def copied(systems: dict[str, Any], text: Any) -> dict[str, float]:
        asked.append(sorted(systems))
        return dict.fromkeys(systems, 0.5)

    monkeypatch.setattr(tune, "copied", copied)
    decoded = trial(FAITHFUL, {}, {})
    decoded.decoded.systems["base"] = SystemOutput()
    assert decoded.copied == {} and asked == []  # without a text
    decoded.text = np.zeros(9, np.int32)
    for name in "ab":
        decoded.decoded.systems[name] = SystemOutput()
        assert decoded.copied.keys() == {REFERENCES, *decoded.decoded.systems} == decoded.copied.keys()
    assert asked == [["a", "base", REFERENCES], ["b"]]


def test_one_batch_is_decoded_again_with_the_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    """No finalist has the seconds of another, and nothing else is in the table."""

    def decoded(trial: Trial, tried: list[Any], samples: Any, base: bool = True, before: Any = None) -> Any:
        names = [one.name for one in tried] + ["base"] * base
        took = {name: float(2 + len(name)) for name in names}
        scores = dict.fromkeys(names, TranslationScores(29.9, 29.9, "", ""))
        return scores, took, Decodings({name: SystemOutput() for name in names})

    monkeypatch.setattr(Trial, "_decode", decoded)
    batch, tried = {"ntokens": 60}, [candidate("a"), candidate("bad")]
    screened = Trial(None, [batch], QUALITY)  # type: ignore[arg-type]
    screened.decode(tried)
    screened.decode_another(tried[0], candidate("half"), timed=False)
    finalists = [tried[0], screened.tried[-1]]
    whole = screened.decode_rest(finalists, [], {})
    assert whole.sample == whole.timed == [batch] and whole.seconds == {"a": 3.0, "half": 6.0, "base": 6.0}
    assert whole.scores.keys() == whole.decoded.systems.keys() == {"a", "half", "base"}
    assert (screened.seconds["half"], whole.speed("half"), whole.speed("a")) == (3.0, 10.0, 20.0)


def test_columns_of_a_table_stay_apart() -> None:
    worth = Worth(0.1, 0.02, {"tokens": 0.3, "phrasebook of mine": 0.25, "text": 0.1})
    header, _, row = tune.table({"valid": TextWorth(-1.0, {"with trust": worth})})
    ends = [header.index(name) + len(name) for name in ("gain", "harm", *worth.weights)]
    assert [row[:end].split()[-1] for end in ends] == ["+0.100", "0.020", "0.30", "0.25", "0.10"]
    assert all(header[end : end + 2] in ("  ", "") for end in ends)


def test_of_equally_fast_ones_the_better_one() -> None:
    tried = [candidate(name) for name in "ab"]
    scores = {
        name: TranslationScores(value, value, "", "")
        for name, value in {"a": 9.9, "b": 10.0, "base": 7.0}.items()
    }
    assert trial(SPEED, scores, {"a": 2.0, "b": 2.0, "base": 1.0}).choose(tried).name == "b"


@pytest.mark.parametrize(
    ("copied", "chosen"),
    [
        ({"a": 0.4, "b": 0.3, "c": 0.1}, "b"),  # c has less than half of the gain
        ({"a": 0.4, "b": 0.5, "c": 0.6}, "a"),
        ({"a": 0.2, "b": 0.1, "c": 0.1}, "a"),  # references share as much with the text
    ],
)
def test_what_copies_less_keeps_half_of_the_gain(copied: dict[str, float], chosen: str) -> None:
    tried = [candidate(name) for name in "abc"]
    bleu = {"a": 30.0, "b": 26.0, "c": 24.0, "base": 20.0}
    scores = {name: TranslationScores(value, value, "", "") for name, value in bleu.items()}
    decoded = trial(FAITHFUL, scores, {})
    decoded.decoded.copied = {**copied, "base": 0.0, REFERENCES: 0.25}
    assert decoded.choose(tried).name == chosen
