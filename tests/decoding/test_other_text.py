"""Sentences of other text are translated again without the text memory and phrases: which, how, and what stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.inference.system import Session
from tests.decoding.test_decoding import SEARCHES
from tests.helpers import equal
from tests.small_models import World, subword_options

ALL, NONE = -1e9, "inf"  # nats, beyond which all and no translations are of other text


@pytest.fixture(scope="module")
def text(only_text: Path) -> TextMemory:
    translator = Translator(datastore=only_text, device="cpu")
    memory = translator.find_memory(TextMemory)
    assert memory is not None
    return memory


def test_how_foreign_a_translation_is_as_step_by_step(text: TextMemory) -> None:
    rng = torch.Generator().manual_seed(3)
    words = len(text.counts.ratios)
    some = [torch.randint(4, words, (length,), generator=rng) for length in (1, 2, 7, 12, 1)]
    some[3][5] = 3  # unknown, which no text has
    expected = []
    for one in some:
        sentence, total = torch.cat([torch.tensor([text.end]), one]), 0.0
        for place, token in enumerate(one):
            found = text.counts.look_up(sentence[None, : place + 1], torch.zeros(1).long(), token[None])
            total += float(found.general - found.text) if int(token) not in text.special.tolist() else 0.0
        expected.append(total)
    torch.testing.assert_close(text.foreignness(some), torch.tensor(expected), rtol=1e-4, atol=1e-3)
    assert text.foreignness([torch.zeros(0).long()] * 2).tolist() == [0.0, 0.0]  # no translation has ended


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: " ".join(map(str, s)) or "plain")
def test_where_all_is_other_text_the_model_translates_alone(
    decode: Callable, only_text: Path, search: list[object]
) -> None:
    words, alone = ["--datastore", only_text, "--text-alpha", 0.5, *search], decode(*search, base=True)
    if not {"--sampling", "--score-reference"} & {*search}:  # which draws again, or scores what is given
        assert equal(decode(*words, "--text-foreign", ALL), alone)
    assert not equal(decode(*words, "--text-foreign", NONE), alone, tolerance=1e-2)


@pytest.mark.parametrize("more", [[], ["--prefix-size", 2], ["--print-alignment"]], ids=str)
def test_each_sentence_is_as_with_the_text_or_as_without(
    decode: Callable, only_text: Path, text: TextMemory, more: list[object]
) -> None:
    """Which it is, what the text's translation says decides; batches mix both."""
    words = ["--datastore", only_text, "--text-alpha", 0.5, *more]
    whole, alone = decode(*words, "--text-foreign", NONE), decode(*more, base=True)
    odds = {i: float(text.foreignness([each[0]["tokens"]])) for i, each in whole.items()}
    bound = sorted(odds.values())[len(odds) // 2] + 1e-3
    mixed = decode(*words, "--text-foreign", bound)
    again = {i for i, each in mixed.items() if "other_text" in each[0]}
    assert again == {i for i, one in odds.items() if one > bound} and 0 < len(again) < len(odds)
    expected = {i: alone[i] if i in again else whole[i] for i in whole}
    assert equal(mixed, expected, tolerance=1e-4)


def test_phrases_beside_the_text_are_silent_as_well(
    world: World, decode: Callable, only_text: Path, phrase_store: Path
) -> None:
    """And what weighs nothing is not searched."""
    words = ["--datastore", f"{phrase_store}:{only_text}", "--text-alpha", 0.1, "--nbest", 3]
    words += subword_options(world)
    alone = decode("--nbest", 3, base=True)
    assert equal(decode(*words, "--text-foreign", ALL), alone, tolerance=1e-4)
    assert not equal(decode(*words, "--text-foreign", NONE), alone, tolerance=1e-2)
    with patch.object(PhraseRetriever, "start", side_effect=AssertionError("searched")):
        silent = ["--phrases-lambda", 0, "--text-foreign", NONE]
        assert equal(decode(*words, *silent), decode(*words[2:], "--datastore", only_text, *silent[2:]))


def test_a_text_without_general_text_cannot_tell(
    decode: Callable, build_text: Callable, references: Path
) -> None:
    words = ["--datastore", build_text(references), "--text-alpha", 0.5, "--text-foreign"]
    assert equal(decode(*words, ALL), decode(*words, NONE))


def test_glossaries_and_what_was_learned_stay(
    world: World, build_text: Callable, references: Path, general: Path, tmp_path: Path
) -> None:
    store = build_text(references, False, "--against", general)
    settings: dict[str, Any] = {"device": "cpu", "text_alpha": 0.5, "text_foreign": ALL}
    with Translator(datastore=store, **settings) as translator:
        source = (world.folder / "test.tsv").read_text("utf-8").splitlines()[0].split("\t")[0]
        (before,) = (one.text for one in translator.translate([source]))
        wanted = " ".join(reversed(before.split()))
        translator.learn(source, wanted)
        assert [one.text for one in translator.translate([source])] == [wanted] != [before]


def test_an_explanation_and_a_log_are_of_what_translated(
    world: World, decode: Callable, only_text: Path, tmp_path: Path
) -> None:
    """Of other text the model alone, and of the rest the text as well."""
    sources = [line.split("\t")[0] for line in (world.folder / "test.tsv").read_text("utf-8").splitlines()]
    with Translator(datastore=only_text, device="cpu", text_alpha=0.5, text_foreign=ALL) as translator:
        explained = translator.explain(sources[:3]).sentences
    assert [one.translation == one.plain for one in explained] == [one.other_text for one in explained]
    assert all(one.other_text for one in explained)
    written = {}
    for name, bound in (("all", ALL), ("none", NONE)):
        log = tmp_path / name
        decode("--datastore", only_text, "--text-alpha", 0.5, "--text-foreign", bound, "--tokens-log", log)
        written[name] = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert all(line["mixed"] == pytest.approx(line["model"], abs=1e-5) for line in written["all"])
    assert len({line["sentence"] for line in written["none"]}) == len(
        {one["sentence"] for one in written["all"]}
    )


def test_several_texts_must_agree_that_a_sentence_is_of_none(
    world: World, build_text: Callable, references: Path, general: Path, only_text: Path
) -> None:
    """Beside another store, or a session, as alone: with both silent only where both texts say so."""
    sources = [line.split("\t")[0] for line in (world.folder / "test.tsv").read_text("utf-8").splitlines()]
    tokens = build_text(references, False, "--against", general)
    stores: Any = {"one": only_text, "two": tokens}
    settings: dict[str, Any] = {"device": "cpu", "text_alpha": 0.5, "tokens_lambda": 0}
    outputs: dict[str, list[str]] = {}
    for name, bound in (("all", ALL), ("some", 0.0), ("none", "inf")):
        with Translator(datastore=stores, text_foreign=bound, **settings) as translator:
            outputs[name] = [one.text for one in translator.translate(sources, memory=["one", "two"])]
            alone = [one.text for one in translator.translate(sources, retrieve=False)]
            translator.begin(document := Session.name_of("", "document"))
            beside = [one.text for one in translator.translate(sources, memory=[document, "one"])]
            assert beside == [one.text for one in translator.translate(sources)]
    assert outputs["all"] == alone != outputs["none"]
    assert all(one in pair for one, *pair in zip(outputs["some"], outputs["all"], outputs["none"]))
