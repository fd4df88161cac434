"""Confidence in translations: its features, calibration and measures, and what every door answers with it."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.tuned import TUNED
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.confidence import binned, calibrate, confidence_table, measure, measured
from fairseq_ccpr.evaluation.test_set import BASE, Decodings, SystemOutput, compare_decoding
from fairseq_ccpr.evaluation.tune import Trial
from fairseq_ccpr.inference.confidence import Confidence, ScoredText, token_ends
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, refused
from tests.small_models import World

PIECES = ["", "Good", "Good m", "Good morning", "Good morning, 中", "Good morning, 中."]
KNOWN = Confidence((1.0, 2.0, 0.0), (0.0, 1.0, 0.0), 50.0)


def test_a_word_has_the_probability_of_all_its_tokens() -> None:
    ends = token_ends(lambda ids: PIECES[len(ids)], [7] * 5, PIECES[-1])
    scores = [-0.1, -0.2, -0.3, -1.0, -0.5, -0.4]
    one = ScoredText.of(PIECES[-1], ends, scores)
    assert one.sentence == pytest.approx((sum(scores) / 6, math.log(6)))
    assert [word for word, _ in one.words] == ["Good", "morning", "中"]  # "," and "." are no words
    assert [own for _, (own, _) in one.words] == pytest.approx([-0.1, -0.5, -1.0])
    assert {mean for _, (_, mean) in one.words} == {one.sentence[0]}
    assert KNOWN.of_words(one)[1] == ("morning", round(1 / (1 + math.exp(0.5)), 4))
    for nothing in (-math.inf, math.nan):  # ruled out, yet written: a prefix
        assert KNOWN.of_sentence(ScoredText.of("", [0], [nothing])) == 0


def test_a_word_that_no_token_is_seen_to_write_has_no_confidence() -> None:
    text = "Good evening, 中."  # as it was learned
    ends = token_ends(lambda ids: PIECES[len(ids)], [7] * 5, text)
    assert ends == [0, 4, 5, 5, 5, 5]
    one = ScoredText.of(text, ends, [-0.1, -0.2, -0.3, -1.0, -0.5, -0.4])
    assert [word for word, _ in KNOWN.of_words(one)] == ["Good", "evening", "中"]
    assert [confidence is None for _, confidence in KNOWN.of_words(one)] == [False, True, True]


def test_bytes_of_a_character_are_of_its_word() -> None:
    pieces = [
        "",
        "a",
        "a \ufffd",
        "a \ufffd\ufffd",
        "a 中",
        "a «中",
        "a 中»",
    ]  # the second last is another text
    ends = token_ends(lambda ids: pieces[len(ids)], [7] * 6, pieces[-1])
    assert ends == [0, 1, 2, 2, 2, 2, 4]
    scores = [-1.0, -2.0, -4.0, -8.0, -16.0, -32.0, -64.0]
    assert [own for _, own in ScoredText.of(pieces[-1], ends, scores).words] == [
        (-1.0, pytest.approx(-127 / 7)),
        (-60.0, pytest.approx(-127 / 7)),
    ]


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=2, max_size=40))
def test_measures_agree_with_their_definitions(pairs: list[tuple[float, bool]]) -> None:
    good, bad = ([p for p, right in pairs if right == wanted] for wanted in (True, False))
    auc, error = measured(*map(np.array, zip(*pairs)))
    if good and bad:
        wins = [(a > b) + (a == b) / 2 for a in good for b in bad]
        assert auc == pytest.approx(sum(wins) / len(wins), abs=1e-4)
    else:
        assert math.isnan(auc)
    bins: dict[int, list[float]] = {}
    for p, right in pairs:
        bins.setdefault(min(9, int(p * 10)), []).append(p - right)
    assert error == pytest.approx(sum(abs(sum(one)) for one in bins.values()) / len(pairs), abs=1e-4)
    found = binned(*map(np.array, zip(*pairs)))  # empty bins are left out
    assert [one.number for one in found] == [len(bins[place]) for place in sorted(bins)]
    off = [one.claimed - one.right for one in found]
    assert off == pytest.approx([float(np.mean(bins[place])) for place in sorted(bins)])


def decodings(count: int, seed: int) -> Decodings:
    """Make translations of a word each, which the likelier have right; some right and some wrong at every p."""
    draw, system, references = np.random.default_rng(seed), SystemOutput(), {}
    for number in range(count):
        score = float(draw.uniform(-3, 0))
        references[number] = "right" if draw.uniform() < math.exp(score / 3) else "other"
        system.ids[number], system.scores[number] = np.array([7, 2]), np.array([score, score])
    return Decodings({BASE: system}, {}, references, to_scored=of_right)


def of_right(ids: np.ndarray, scores: np.ndarray) -> ScoredText:
    return ScoredText.of("right", [0, 5], scores.tolist())


def test_calibration_makes_confidence_of_probability() -> None:
    confidence = calibrate(decodings(600, 1), BASE, {})
    assert isinstance(confidence, Confidence)
    found = measure(decodings(3000, 2), BASE, confidence)
    assert found["words"]["error"] < 0.05 < 0.1 < found["words"]["probability_error"]
    assert (
        found["words"]["auc"] == pytest.approx(found["words"]["probability_auc"], abs=1e-3)
        and found["words"]["auc"] > 0.6
    )
    assert found["sentences"]["right"] == found["words"]["right"]  # of one word each
    assert (
        found["words"]["model_auc"] == found["words"]["probability_auc"]
    )  # the model alone is what was measured
    for kind, name in ((kind, name) for kind in found for name in ("", "probability_")):
        bins, number = found[kind][f"{name}bins"], found[kind]["number"]
        assert sum(one["number"] for one in bins) == number
        off = sum(one["number"] * abs(one["claimed"] - one["right"]) for one in bins) / number
        assert found[kind][f"{name}error"] == pytest.approx(off, abs=2e-4)
    assert len(found["words"]["bins"]) < 10  # bins above 0.9 are empty, and left out
    assert [len(row) for row in confidence_table(found)] == [8, 8, 8]


def test_a_word_is_right_as_often_as_the_reference_has_it() -> None:
    def to_scored(ids: np.ndarray, scores: np.ndarray) -> ScoredText:
        return ScoredText.of("the the left", [0, 3, 7], scores.tolist())

    system = SystemOutput({}, {0: np.array([7, 7, 2])}, {0: np.full(3, -1.0)})
    texts = Decodings({BASE: system}, {}, {0: "the left"}, to_scored=to_scored)
    found = measure(texts, BASE, KNOWN)["words"]
    assert (found["number"], found["right"]) == (2, 0.5)  # "left", which no token writes, does not count


def test_too_little_calibrates_nothing() -> None:
    alike, opposite = decodings(30, 1), decodings(600, 1)
    assert "0 are right and 0 wrong" in str(calibrate(decodings(0, 1), BASE, {}))
    alike.references = dict.fromkeys(alike.references, "right")
    expected = (
        "of the decoded sentences 30 are right and 0 wrong, and it takes 10 of each: tune on more pairs"
    )
    assert calibrate(alike, BASE, {}) == expected
    opposite.systems[BASE].scores = {i: -3 - one for i, one in opposite.systems[BASE].scores.items()}
    expected = "of the decoded sentences the more probable ones are worse: tune on more pairs"
    assert calibrate(opposite, BASE, {}) == expected


@pytest.fixture(scope="module")
def tuned(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A datastore that was tuned on enough pairs, and what that printed."""
    store = shutil.copytree(world.datastore, tmp_path_factory.mktemp("tuned") / "store")
    words = ["--combiner", "fixed", "--decode", 1, "--max-len-b", 25, "--cpu", "--no-progress-bar"]
    return store, call("tune", world.data_bin, "--datastore", store, "--subset", "train", *words).stdout


def test_tune_stores_it_as_plain_data(tuned: tuple[Path, str]) -> None:
    (stored,) = json.loads((tuned[0] / TUNED).read_text(encoding="utf-8"))["tuned"].values()
    with Translator(datastore=tuned[0], device="cpu") as translator:
        assert translator.confidence == Confidence.read(stored["confidence"]) is not None
    for other in ({"another version's": 1}, {"word": [1.0, 1.0]}, {"sentence": [1.0, math.nan, 1.0]}):
        assert Confidence.read({**stored["confidence"], **other}) is None
    assert "not calibrated" not in tuned[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tokens_lambda": 0.85}, r"for tokens lambda \S+, and here is tokens lambda 0\.85: leave that out"),
        ({"beam": 1}, "for beam 5, and here is beam 1: leave that out, or tune again with it"),
        ({"lenpen": 0.5}, r"for lenpen 1\.0, and here is lenpen 0.5"),
        ({"temperature": 2.0}, r"for temperature 1\.0, and here is temperature 2\.0"),
        ({"sampling": True}, "for sampling False, and here is sampling True"),
        (
            {"glossary": "terms.tsv"},
            "for memories corrections, and here is memories glossary and corrections",
        ),
    ],
)
def test_it_does_not_hold_for_other_options(
    tuned: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("terms.tsv").write_text("Licht\tlight\n", encoding="utf-8")
    with Translator(datastore=tuned[0], device="cpu", **options) as translator:
        assert translator.confidence is None
        with pytest.raises(
            ConfigurationError,
            match=f"the confidence of these settings was not calibrated: it is .*{expected}",
        ):
            translator.translate(["Licht"], confidence=True)


def test_it_holds_on_after_learning(tuned: tuple[Path, str], tmp_path: Path) -> None:
    store = shutil.copytree(tuned[0], tmp_path / "store")
    with Translator(datastore=store, device="cpu") as translator:
        translator.learn("Und Gott sprach: Es werde Licht!", "AND GOD said")
    with Translator(datastore=store, device="cpu") as translator:
        (one,) = translator.translate(["Und Gott sprach: Es werde Licht!"], confidence=True)
    assert one.text == "AND GOD said" and one.confidence is not None


@pytest.mark.full
@pytest.mark.parametrize("helps", [True, False])
def test_it_holds_for_what_tune_leaves(both: Path, world: World, tmp_path: Path, helps: bool) -> None:
    """Trust in tokens and phrases, or silence: a translator has the conditions that the tuner had."""
    store = shutil.copytree(both, tmp_path / "store")
    words = [world.data_bin, "--datastore", store, "--subset", "train", "--max-len-b", 25, "--cpu"]
    with nullcontext() if helps else patch.object(Trial, "deciding", lambda trial, candidate: -1.0):
        shown = call("tune", *words, "--no-progress-bar").stdout
    assert ("nothing is better than the model alone here" in shown) != helps
    with Translator(datastore=store, device="cpu", max_len_b=25) as translator:
        assert translator.confidence is not None, translator.unrated
        (one,) = translator.translate(["Es werde Licht!"], confidence=True)
        assert one.confidence is not None
    with Translator(datastore=store, device="cpu", trust="none") as translator:
        assert translator.confidence is None


def test_unknown_words_are_not_measured(world: World, tmp_path: Path) -> None:
    """Neither that the model writes them, nor that references have them."""
    system = System.of(["--datastore", str(world.datastore), "--cpu", "--no-progress-bar"], world.data_bin)
    decodings, unk = compare_decoding(system), system.task.target_dictionary.unk()
    assert decodings.to_scored is not None
    ids, scores = (getattr(decodings.systems[BASE], name)[0] for name in ("ids", "scores"))
    known = decodings.to_scored(ids, scores)
    ids, scores = np.insert(ids, 0, unk), np.insert(scores, 0, -4.0)
    assert system.to_text(system.task.target_dictionary, torch.tensor(ids)).startswith("<unk>")
    found = decodings.to_scored(ids, scores)
    assert (found.text, [word for word, _ in found.words]) == (known.text, [word for word, _ in known.words])


def test_a_translation_has_it_where_it_is_asked_for(tuned: tuple[Path, str], world: World) -> None:
    sources = [source for source, _ in read_pairs(world.folder / "test.tsv")]
    with Translator(datastore=tuned[0], device="cpu", max_len_b=25) as translator:
        plain, rated = (list(translator.translate([*sources, ""], confidence=one)) for one in (False, True))
    assert [one.text for one in plain] == [one.text for one in rated]
    assert all(one.confidence is None and one.word_confidences == () for one in [*plain, rated[-1]])
    for one in rated[:-1]:
        assert one.confidence is not None and 0 <= one.confidence <= 1
        at = 0
        for word, confidence in one.word_confidences:
            at = one.text.index(word, at) + len(word)
            assert 0 <= confidence <= 1
    assert len({one.confidence for one in rated}) > 2


def test_the_command_prints_it(tuned: tuple[Path, str], world: World, tmp_path: Path) -> None:
    (file := tmp_path / "in").write_text("Es werde Licht!\n\nUnd Gott sprach:\n", encoding="utf-8")
    words = ["--datastore", tuned[0], "--input", file, "--cpu", "--max-len-b", 25]
    plain = call("translate", *words).stdout.splitlines()
    lines = [line.split("\t") for line in call("translate", *words, "--confidence").stdout.splitlines()]
    assert [text for _, text in lines] == plain and [lines[1], len(lines)] == [["", ""], 3]
    shown = call("translate", *words, "--confidence", "--output-format", "jsonl").stdout.splitlines()
    assert [f"{json.loads(shown[n])['confidence']:.2f}" for n in (0, 2)] == [lines[0][0], lines[2][0]]
    shown = call(
        "compare", world.data_bin, *words[:2], "--cpu", "--results-path", tmp_path / "found", *words[5:]
    )
    assert "| sentences |" in shown.stdout
    row = json.loads((tmp_path / "found" / "comparison.json").read_text(encoding="utf-8"))["rows"][1]
    assert row["confidence"]["words"]["number"] > row["confidence"]["sentences"]["number"] == 20


def test_nothing_calibrated_is_said_in_one_sentence(
    tuned: tuple[Path, str], world: World, tmp_path: Path
) -> None:
    alone, untuned = ["--path", world.model, "--data", world.data_bin], ["--datastore", tuned[0], "--untuned"]
    for words, of in ((alone, "of the model alone"), (untuned, "of these settings")):
        done = call("translate", *words, "--confidence", "--cpu", check=False)
        refused(done, f"the confidence {of} was not calibrated: run fairseq-ccpr tune")
    with (
        Translator(datastore=tuned[0], device="cpu") as translator,
        pytest.raises(ConfigurationError, match="alone"),
    ):
        translator.translate(["Licht"], retrieve=False, confidence=True)
