"""`Translator.learn` alongside a datastore with phrases: they count from the next sentence on, until they are forgotten."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.learned import LEARNED
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.models import phrase_encoder
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, refused, write_lines
from tests.killing import store_at
from tests.small_models import Ccpr, World, Xpr, subword_options

SHORT: dict[str, Any] = {"max_len_b": 25, "device": "cpu", "tokens_temperature": 5, "phrases_k": 3}
# of the memories
PHRASES_ALONE = {**SHORT, "tokens_lambda": 0.0, "phrases_lambda": 0.9, "phrases_min_similarity": 0.0}


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "valid.tsv"))  # which `mono` has nothing of


@pytest.fixture
def store(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both, tmp_path / "store"))


def outcome(translator: Translator, sentences: list[str]) -> list[tuple[str, float, tuple[float, ...]]]:
    return [(one.text, one.score, one.token_scores) for one in translator.translate(sentences)]


def test_phrases_are_those_that_a_build_gives(
    store: Path, ccpr: Ccpr, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    """To the bit, where the sentence is encoded alone."""
    translator = Translator(datastore=store, **SHORT)
    words = ["--encoder", ccpr.checkpoint, "--segmentation", "all", "--max-words", 3, "--cpu", "--quiet"]
    repeated = "and the house and the house and the house"
    for place, target in enumerate([pairs[0][1], pairs[3][1], repeated]):
        number = translator.learn(f"Satz {place}", target).id
        call(
            "build phrases", write_lines(tmp_path / "text", target), *words, "--output", tmp_path / str(place)
        )
        built, found = PhraseDatastore(tmp_path / str(place)), store_at(store).phrases[number]
        assert built.keys is not None and np.array_equal(found.keys, built.keys)
        assert np.array_equal(found.spans, built.spans[:, 1:])


def test_a_phrase_counts_from_the_next_sentence_on(store: Path, pairs: list[tuple[str, str]]) -> None:
    """By the phrase memory alone; and its sentence is followed beyond it."""
    translator = Translator(datastore=store, **PHRASES_ALONE)
    source, target = pairs[0]
    before = outcome(translator, [source])
    number = translator.learn(source, target).id
    after = outcome(translator, [source])
    assert after != before and str(translator.signature).count("|learned:1-") == 2
    assert outcome(Translator(datastore=store, **PHRASES_ALONE), [source]) == after
    explanation = translator.explain(source)
    phrases = explanation.sentences[0].phrases
    learned = [one for phrase in phrases for one in phrase.retrieved if one.learned]
    own = [one for phrase in phrases for one in phrase.retrieved if not one.learned]
    assert own and learned and {one.learned for one in learned} == {number}
    assert {explanation.texts[one.sentence] for one in learned} == {target}
    assert target not in {explanation.texts[one.sentence] for one in own}
    votes = [vote for token in explanation.sentences[0].tokens for vote in token.votes]
    places = {vote.place for vote in votes if phrases[vote.query].retrieved[vote.retrieved].learned}
    assert places <= {"begins", "continues", "follows"} and places
    translator.learn(source, pairs[1][1])
    other = Translator(datastore=store, **PHRASES_ALONE).explain(source)
    assert target not in {
        other.texts[one.sentence] for phrase in other.sentences[0].phrases for one in phrase.retrieved
    }
    translator.forget(number + 1)
    assert outcome(translator, [source]) == after
    translator.forget(number)
    assert outcome(translator, [source]) == before


def test_what_was_forgotten_is_as_if_it_never_had_been_learned(
    store: Path, tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    """To the bit, signature included, whatever was tokenised and cached meanwhile."""
    never = Path(shutil.copytree(store, tmp_path / "never"))
    sentences = [source for source, _ in pairs[:4]]
    one, other, untouched = (
        Translator(datastore=folder, **PHRASES_ALONE) for folder in (store, never, never)
    )
    plain = outcome(untouched, sentences)
    numbers = [one.learn(*pair).id for pair in pairs[:6]]
    assert outcome(one, sentences) != plain
    one.forget(*numbers[::2])
    for pair in pairs[1:6:2]:
        other.learn(*pair)
    assert outcome(one, sentences) == outcome(other, sentences) != plain and one.signature == other.signature
    assert outcome(Translator(datastore=store, **PHRASES_ALONE), sentences) == outcome(other, sentences)
    one.forget(*numbers[1::2])
    assert outcome(one, sentences) == plain and one.signature == untouched.signature
    again = one.learn(pairs[0][0], pairs[2][1]).id  # with the number of an entry that another phrase had
    assert one.explain(sentences[0]).sentences[0].phrases and again == 7


def test_a_text_decoded_as_fairseq_does_has_what_was_learned_and_the_command_retrieve_too(
    store: Path, world: World, ccpr: Ccpr, pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--datastore", store, "--cpu", "--quiet"]
    (source, target), options = pairs[0], [store, "--cpu", "--phrases-k", 3, "--phrases-min-similarity", 0]
    assert "learned 1 pair " in call("learn", *words, "--source", source, "--target", target).stdout
    shown = call("inspect", store).stdout
    assert "learned        1 pair, in addition to them, 1 of them with phrases (" in shown
    monkeypatch.setattr("fairseq_ccpr.cli.retrieve.read_standard_input", lambda: iter([source]))
    found = call("retrieve", *options, "--output-format", "jsonl")
    assert '"learned": 1' in found.stdout and "|learned:1-" in found.stderr
    call("forget", store, 1)
    found = call("retrieve", *options, "--output-format", "jsonl")
    assert '"learned": 1' not in found.stdout and "|learned:" not in found.stderr


def test_no_phrase_encoder_is_loaded_without_phrases(
    world: World, tmp_path: Path, pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (phrase_encoder, __import__("fairseq_ccpr.decoding.phrase_retriever", fromlist=["name"])):
        monkeypatch.setattr(
            module, "load_phrase_encoder", lambda *_, **__: pytest.fail("an encoder was loaded")
        )
    folder = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    translator = Translator(datastore=folder, max_len_b=25, device="cpu")
    translator.learn(*pairs[0])
    assert not store_at(folder).phrases


def test_phrases_in_another_folder_do_not_learn_and_that_is_said(
    world: World,
    phrase_store: Path,
    tmp_path: Path,
    pairs: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    translator = Translator(datastore=f"{folder}:{phrase_store}", **SHORT)
    translator.learn(*pairs[0])
    assert (
        f"the phrases of what is learned do not count: they are in {phrase_store}, and what is learned"
        in caplog.text
    )
    assert str(translator.signature).count("|learned:1-") == 1 and not store_at(folder).phrases


def test_phrases_that_are_left_out_do_not_learn_and_that_is_said(
    store: Path, pairs: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    translator = Translator(datastore=store, phrases_lambda=0, **SHORT)
    assert " phrases:" not in (translator.signature or "") and translator.learn(*pairs[0]).id == 1
    assert "do not count: their weight is 0, and they are not loaded" in caplog.text
    translator.close()


@pytest.mark.full
def test_phrases_of_one_entry_a_string_do_not_learn_and_that_is_said(
    world: World,
    xpr: Xpr,
    mono: Path,
    tmp_path: Path,
    pairs: list[tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    call(
        "build phrases",
        mono,
        "--encoder",
        xpr.checkpoint,
        "--output",
        folder,
        "--max-words",
        2,
        "--cpu",
        "--quiet",
    )
    translator = Translator(datastore=folder, **SHORT, phrases_segmentation="all")
    translator.learn(*pairs[0])
    assert (
        "do not count: they are one entry a string, the mean over its places in one text (XPR)" in caplog.text
    )
    assert str(translator.signature).count("|learned:1-") == 1
    translator.close()
    call("compact", folder, "--quiet", "--cpu")
    assert (folder / "phrase").is_dir() and (folder / "token-1").is_dir()


def test_phrases_alone_learn_once_they_have_an_empty_token_part(
    world: World, phrase_store: Path, tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    folder = Path(shutil.copytree(phrase_store, tmp_path / "store"))
    words = ["--path", world.model, "--data", world.data_bin, *subword_options(world), "--cpu"]
    alone = [*words, "--datastore", folder, "--source", pairs[0][0], "--target", pairs[0][1]]
    refused(
        call("learn", *alone, check=False),
        "store has phrases alone, and learning needs tokens as well: add them",
    )
    call("build memory", *words, "-s", "de", "-t", "en", "--output", folder)
    assert (
        TokenDatastore(folder).section.size == 0 and "health         good" in call("inspect", folder).stdout
    )
    translator = Translator(datastore=folder, max_len_b=25, device="cpu", phrases_min_similarity=0.0)
    number = translator.learn(*pairs[0]).id
    assert len(store_at(folder).phrases[number].spans) and str(translator.signature).count("|learned:1-") == 2
    refused(call("build memory", *words, "--output", folder, check=False), "exists: give a new folder")


def test_another_encoder_or_a_changed_lexicon_is_refused(
    world: World, ccpr: Ccpr, mono: Path, tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    lexicon, folder = write_lines(tmp_path / "lexicon.txt", "the house", "and"), tmp_path / "store"
    shutil.copytree(world.datastore, folder)
    words = ["--encoder", ccpr.checkpoint, "--segmentation", f"lexicon:{lexicon}", "--cpu", "--quiet"]
    call("build phrases", mono, *words, "--output", folder)
    translator = Translator(datastore=folder, **SHORT, phrases_segmentation="all")
    number = translator.learn("Haus und Hof", "the house and the yard").id
    assert store_at(folder).phrases[number].spans.tolist() == [[0, 9], [10, 13]]
    translator.close()
    write_lines(lexicon, "the yard")
    translator = Translator(datastore=folder, **SHORT, phrases_segmentation="all")
    with pytest.raises(
        DatastoreError, match=r"lexicon.txt, which names the phrases of .*, has changed since they were"
    ):
        translator.learn(*pairs[0])
    manifest = Manifest.read(folder)
    assert manifest.phrase is not None
    manifest.phrase.segmentation["max_words"] = 2
    manifest.write(folder)
    with pytest.raises(
        DatastoreError, match=r"0.journal was learned with another segmentation of phrases than"
    ):
        Translator(datastore=folder, **SHORT, phrases_segmentation="all")
    shutil.rmtree(folder / LEARNED)
    lexicon.unlink()
    translator = Translator(datastore=folder, **SHORT, phrases_segmentation="all")
    with pytest.raises(ConfigurationError, match=r"there is no lexicon .*lexicon.txt"):
        translator.learn(*pairs[0])
