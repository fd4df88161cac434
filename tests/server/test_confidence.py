"""Confidence through the API: of texts, of words, and translations that are held back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.inference.confidence import Confidence
from fairseq_ccpr.text.pairs import read_pairs
from tests.server.conftest import Served, served
from tests.small_models import World

KNOWN = Confidence((1.0, 1.0, 0.0), (2.0, 1.0, 0.0), 50.0)


@pytest.fixture(scope="module")
def sure(new_translator: Callable[[], Translator]) -> Iterator[Served]:
    translator = new_translator()
    translator.confidence = KNOWN
    with served(translator) as one:
        yield one


def test_a_text_has_the_confidence_of_its_worst_sentence(sure: Served, world: World) -> None:
    sources = [source for source, _ in read_pairs(world.folder / "test.tsv")][:4]
    each = [one.confidence for one in sure.translator.translate(sources, confidence=True)]
    plain = sure.ask("/translate", "POST", q=sources)[1]
    assert set(plain) == {"translatedText"}
    answer = sure.ask("/translate", "POST", q=sources, confidence=True)[1]
    assert answer == {**plain, "confidence": each}
    marked = {"q": "<p>" + "</p><p>".join(sources) + "</p>", "format": "html", "confidence": "true"}
    assert sure.ask("/translate", "POST", **marked)[1]["confidence"] == min(each)
    assert sure.ask("/translate", "POST", q=" ", confidence=1)[1]["confidence"] == 1
    assert (
        sure.ask("/translate", "POST", q="so", source="en", confidence=True)[1]["confidence"] == 1
    )  # as it is
    least = sorted(each)[2]
    answer = sure.ask("/translate", "POST", q=sources, min_confidence=least, alternatives=1)[1]
    kept = [text if one >= least else "" for text, one in zip(plain["translatedText"], each)]
    assert (answer["translatedText"], answer["confidence"]) == (kept, each) and "" in kept and any(kept)
    assert [bool(one) for one in answer["alternatives"]] == [bool(one) for one in kept]


def test_sentences_have_confidence_in_their_words(sure: Served, world: World) -> None:
    source, _ = next(read_pairs(world.folder / "test.tsv"))
    (one,) = sure.translator.translate([source], confidence=True)
    (plain,) = sure.ask("/sentences", "POST", q=source)[1]["sentences"]
    assert (plain["translation"], plain["confidence"], plain["words"]) == (one.text, None, [])
    (found,) = sure.ask("/sentences", "POST", q=source, confidence=True)[1]["sentences"]
    assert found["confidence"] == one.confidence
    assert [tuple(both) for both in found["words"]] == list(one.word_confidences) != []


def test_what_was_not_decoded_has_no_confidence(sure: Served) -> None:
    """Unknown characters are copied, which says nothing of a translation."""
    answer = sure.ask("/translate", "POST", q=["愛", "Licht.\n愛"], confidence=True)[1]
    assert answer["confidence"] == [None, None] and answer["translatedText"][0] == "愛"
    answer = sure.ask("/translate", "POST", q=["愛", " "], min_confidence=0.01)[1]
    assert answer == {"translatedText": ["", " "], "confidence": [None, 1]}


def test_what_is_wrong_is_said_in_one_sentence(sure: Served, server: Served) -> None:
    for sent in ({"confidence": True}, {"min_confidence": 0.5}):
        status, answer = server.ask("/translate", "POST", q="Licht", **sent)
        assert (status, answer["error"].split(":")[0]) == (
            400,
            "the confidence of these settings was not calibrated",
        )
    wrong = [("confidence", "yes", "true or false"), ("confidence", 2, "true or false")]
    wrong += [
        ("min_confidence", value, "0 to 1") for value in (1.5, "nan", True, -1e-9, 10**400, "high", [0.5])
    ]
    for name, value, expected in wrong:
        status, answer = sure.ask("/translate", "POST", q="Licht", **{name: value})
        assert status == 400 and str(value)[:30] in answer["error"] and answer["error"].endswith(expected)
    (one,) = server.ask("/sentences", "POST", q="Licht", confidence=True)[1]["sentences"]  # as the page asks
    assert one["confidence"] is None
    for value in (1e-7, "5e-1", ".5", 1):
        assert (
            "min_confidence"
            not in server.ask("/translate", "POST", q="Licht", min_confidence=value)[1]["error"]
        )
