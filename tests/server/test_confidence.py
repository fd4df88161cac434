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
    (found,) = sure.ask("/sentences", "POST", q=source)[1]["sentences"]
    assert found["confidence"] == one.confidence
    assert [tuple(both) for both in found["words"]] == list(one.word_confidences) != []


def test_what_is_wrong_is_said_in_one_sentence(sure: Served, server: Served) -> None:
    for sent in ({"confidence": True}, {"min_confidence": 0.5}):
        status, answer = server.ask("/translate", "POST", q="Licht", **sent)
        assert (status, answer["error"].split(":")[0]) == (
            400,
            "the confidence of these settings was not calibrated",
        )
    for name, value, expected in (("confidence", "yes", "true or false"), ("min_confidence", 1.5, "0 to 1")):
        status, answer = sure.ask("/translate", "POST", q="Licht", **{name: value})
        assert status == 400 and str(value) in answer["error"] and answer["error"].endswith(expected)
    assert server.ask("/sentences", "POST", q="Licht")[1]["sentences"][0]["confidence"] is None
