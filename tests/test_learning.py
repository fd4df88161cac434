"""`Translator.learn`, `forget` and `memory`: a correction counts from the next sentence on, and no longer than it should."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.learned import LEARNED
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.inference.learning import tidy
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.translation_memory import SignedPair
from tests.helpers import call, write_lines
from tests.small_models import World

SHORT = {"max_len_b": 45, "device": "cpu", "tokens_temperature": 5}
# what it learned, it says
KEEN: dict[str, Any] = {**SHORT, "tokens_lambda": 0.95, "tokens_k": 4, "tokens_temperature": 0.5}


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


@pytest.fixture
def store(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.datastore, tmp_path / "store"))


@pytest.fixture(scope="module")
def nothing_learned(world: World, tmp_path_factory: pytest.TempPathFactory) -> Translator:
    return Translator(
        datastore=shutil.copytree(world.datastore, tmp_path_factory.mktemp("nothing") / "store"), **SHORT
    )


def outcome(translator: Translator, sentences: list[str]) -> list[tuple[str, float, tuple[float, ...]]]:
    return [(one.text, one.score, one.token_scores) for one in translator.translate(sentences)]


def test_a_correction_counts_from_the_next_sentence_on(store: Path, pairs: list[tuple[str, str]]) -> None:
    translator = Translator(datastore=store, **KEEN)
    source, target = pairs[0]
    before = outcome(translator, [source])
    number = translator.learn(source, target).id
    (learned,) = translator.translate([source])
    assert learned.text == target != before[0][0]
    assert "|learned:1-" in str(translator.signature)
    (other,) = Translator(datastore=store, **KEEN).translate([source])
    assert other.text == target
    assert [(one.id, one.source, one.target, one.count) for one in translator.memory()] == [
        (number, source, target, 1)
    ]
    assert translator.learn(f" {source}\n", target)[:2] == (number, False)
    assert translator.memory(source[:5])[0].count == 2
    translator.forget(number)
    assert outcome(translator, [source]) == before and not translator.memory()


def test_the_last_correction_counts_and_an_earlier_one_can_be_brought_back(
    store: Path, tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    """Each as if the other had never been learned, to the bit, signature included."""
    folders = [Path(shutil.copytree(store, tmp_path / name)) for name in "ab"]
    options = {**KEEN, "tokens_k": 1}
    translator, first, second = (Translator(datastore=folder, **options) for folder in (store, *folders))
    (source, wrong), (_, right) = pairs[:2]
    for one, texts in ((translator, (pairs[2], (source, wrong))), (first, (pairs[2], (source, wrong)))):
        ids = [one.learn(*pair).id for pair in texts]
    second.learn(*pairs[2])
    second.learn(source, right)
    before, wanted = outcome(first, [source]), outcome(second, [source])
    assert outcome(translator, [source]) == before and before[0][0] == wrong != wanted[0][0]

    learned = translator.learn(source + " ", right)
    assert learned.new and learned.replaced is not None and learned.replaced.target == wrong
    assert outcome(translator, [source]) == wanted and translator.signature == second.signature
    assert outcome(Translator(datastore=store, **options), [source]) == wanted
    assert [(one.id, one.replaced_by) for one in translator.memory(source)] == [
        (learned.id, None),
        (ids[1], learned.id),
    ]
    neighbours = {n.learned for t in translator.explain(source).sentences[0].tokens for n in t.neighbours}
    assert learned.id in neighbours and ids[1] not in neighbours

    again = translator.learn(source, wrong)
    assert (
        (again.id, again.new) == (ids[1], False)
        and again.replaced is not None
        and again.replaced.target == right
    )
    assert outcome(translator, [source]) == before and translator.signature == first.signature
    assert not translator.forget(learned.id) and outcome(translator, [source]) == before
    translator.learn(source, right)
    assert [one.id for one in translator.forget(translator.memory(source)[0].id)] == [ids[1]]
    assert outcome(translator, [source]) == before and translator.signature == first.signature


FORMS = [
    ("Er kam und sah…", "Er kam und sah..."),
    ("Er kam über", "Er kam u\u0308ber"),
    ("Er sah 12 Tage", "Er sah １２ Tage"),
    ("Und der König sprach", "Und\u00a0der  König\u200b sprach"),
    ("Ｅr kam", "Er kam"),
    ("Die Offiziere kamen", "Die Oﬃziere kamen"),
]


@pytest.mark.parametrize(("one", "other"), FORMS)
def test_texts_that_the_model_reads_alike_are_one_source(store: Path, one: str, other: str) -> None:
    """The last correction counts for all of them, pairs are listed as they were given, and undoing one restores the first."""
    with Translator(datastore=store, **KEEN) as translator:
        first, second = (
            translator.learn(one, "He came to the land."),
            translator.learn(other, "The king said, Go out."),
        )
        assert second.replaced is not None and second.replaced.id == first.id
        assert [found.text for found in translator.translate([one, other])] == ["The king said, Go out."] * 2
        assert [pair.source for pair in translator.memory()] == [tidy(other), tidy(one)]
        assert [pair.id for pair in translator.memory(one)] == [pair.id for pair in translator.memory(other)]
        again = translator.learn(one, "He came to the land.")
        assert (again.id, again.new) == (first.id, False)
        assert [found.text for found in translator.translate([one, other])] == ["He came to the land."] * 2
        assert [pair.id for pair in translator.forget(first.id)] == [second.id]
        assert [found.text for found in translator.translate([one, other])] == ["The king said, Go out."] * 2


def test_sources_that_differ_in_unknown_characters_are_two(store: Path) -> None:
    with Translator(datastore=store, **KEEN) as translator:
        assert (
            translator.learn("Er sah 東", "He saw.").replaced
            is translator.learn("Er sah 京", "He saw it.").replaced
        )
        assert [pair.replaced_by for pair in translator.memory()] == [None, None]


@pytest.mark.parametrize("parts", ["tokens", "all"])
@pytest.mark.parametrize("settings", [KEEN, {**SHORT, "tokens_k": 8}], ids=["keen", "defaults"])
def test_what_the_datastore_has_of_a_learned_source_gives_way_until_that_is_forgotten(
    world: World, store: Path, both: Path, mono: Path, tmp_path: Path, parts: str, settings: dict[str, Any]
) -> None:
    rows = [pair for pair in read_pairs(world.folder / "train.tsv") if len(pair[1]) < 60][:3]
    if parts == "all":
        store = Path(shutil.copytree(both, tmp_path / "both"))
        text = write_lines(
            tmp_path / "text", *mono.read_text(encoding="utf-8").splitlines(), *(y for _, y in rows)
        )
        call(
            "build text", text, "--path", world.model, "--data", world.data_bin, "--output", store, "--quiet"
        )
        settings = {**settings, "text_alpha": 0.3, "phrases_lambda": 0.3}
    sources = [source for source, _ in rows]
    translator = Translator(datastore=store, **settings)
    before = outcome(translator, sources)
    ids = [translator.learn(source, f"Moses said, Go {n}.").id for n, (source, _) in enumerate(rows)]
    learned = outcome(translator, sources)
    memory = translator.find_memory(TokenMemory).learned.entries
    datastore = TokenDatastore(store)
    hidden = set(datastore.provenance[memory.gone.numpy(), 0].tolist())
    assert len(hidden) == 3 and len(memory.superseded) == 3 and learned != before
    if parts == "all":
        counts = translator.ensemble.now().find(TextMemory).counts
        plain = translator.find_memory(TextMemory).counts
        for target in memory.superseded:
            said = [
                one.counted(torch.from_numpy(target[None, :-1].astype(np.int64)), torch.tensor(target[-1:]))
                for one in (plain, counts)
            ]
            assert said[0][-1] == said[1][-1] + 1
    translator.close()
    call("compact", store, "--cpu", "--quiet")
    translator = Translator(datastore=store, **settings)
    moved = translator.find_memory(TokenMemory).learned.entries
    assert {bytes(one) for one in moved.superseded} == {bytes(one) for one in memory.superseded}
    assert [one[0] for one in outcome(translator, sources)] == [one[0] for one in learned]
    translator.forget(*ids)
    assert outcome(translator, sources) == before


def test_keys_are_those_that_a_build_gives(world: World, store: Path) -> None:
    """Sentences of the datastore, learned again: their keys are the datastore's own, but for the company in their batch."""
    translator, datastore = Translator(datastore=store, **SHORT), TokenDatastore(store)
    rows = list(read_pairs(world.folder / "train.tsv"))
    for sentence in (0, 7):
        number = translator.learn(*rows[sentence]).id
        learned = translator.find_memory(TokenMemory).learned
        assert learned is not None
        values, keys = learned.store.entries[number]
        own = datastore.provenance[:, 0] == sentence
        assert values.tolist() == datastore.values[own].tolist()
        torch.testing.assert_close(
            torch.tensor(keys), torch.tensor(datastore.keys[own]), rtol=2e-2, atol=2e-2
        )


def test_what_was_forgotten_is_as_if_it_never_had_been_learned(
    store: Path, tmp_path: Path, pairs: list[tuple[str, str]]
) -> None:
    """To the bit, signature included; and so is a memory that all was taken out of."""
    never = Path(shutil.copytree(store, tmp_path / "never"))
    sentences = [source for source, _ in pairs[:4]]
    one, other, untouched = (Translator(datastore=folder, **SHORT) for folder in (store, never, never))
    plain = outcome(untouched, sentences)
    numbers = [one.learn(*pair).id for pair in pairs[:6]]
    assert outcome(one, sentences) != plain
    one.forget(*numbers[::2])
    for pair in pairs[1:6:2]:
        other.learn(*pair)
    assert outcome(one, sentences) == outcome(other, sentences) != plain and one.signature == other.signature
    assert outcome(Translator(datastore=store, **SHORT), sentences) == outcome(other, sentences)
    one.forget(*numbers[1::2])
    assert outcome(one, sentences) == plain and one.signature == untouched.signature


def test_an_explanation_names_what_was_learned(store: Path, pairs: list[tuple[str, str]]) -> None:
    translator = Translator(datastore=store, **KEEN)
    (source, target), (other, _) = pairs[:2]
    number = translator.learn(source, target).id
    explanation = translator.explain([source, other])
    texts = explanation.texts
    learned = [
        n for one in explanation.sentences for token in one.tokens for n in token.neighbours if n.learned
    ]
    own = [
        n for one in explanation.sentences for token in one.tokens for n in token.neighbours if not n.learned
    ]
    assert own and learned and {one.learned for one in learned} == {number}
    assert {texts[one.sentence] for one in learned} == {target} and target not in {
        texts[one.sentence] for one in own
    }
    for token in explanation.sentences[0].tokens:
        nearest = token.neighbours[0]
        assert (
            nearest.learned == number
            and texts[nearest.sentence][nearest.start : nearest.end]
            == explanation.sentences[0].translation[token.start : token.end]
        )


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("", "one", "its source is empty"),
        ("eins", " \n", "its target is empty"),
        ("Wort " * 3000, "word", "its source is longer than the 1,024 tokens that the model takes"),
        ("Wort", "word " * 3000, "its target is longer than the 1,024 tokens that the model takes"),
        ("Wort", "世界你好朋友", "half of its target or more is not in the dictionary"),
        ("привет мир", "hello world", "half of its source or more is not in the dictionary"),
        ("eins \x00", "one", "its source has control characters"),
        ("eins", "one \udcff", "its target has control characters, or is no Unicode"),
    ],
)
def test_what_cannot_be_learned_is_refused_with_its_reason(
    nothing_learned: Translator, source: str, target: str, sentence: str
) -> None:
    translator = nothing_learned
    with pytest.raises(ConfigurationError, match=f"the pair was not learned: {sentence}"):
        translator.learn(source, target)
    assert not translator.memory()
    learned, reason = translator.learn_all([("Es ist gut.", "It is good."), (source, target)])
    assert not isinstance(learned, str) and isinstance(reason, str)
    assert not translator.forget(learned.id)
    with pytest.raises(ConfigurationError, match="there is no pair 300 among what was learned"):
        translator.forget(300)


def test_a_file_says_when_a_pair_was_made_unless_an_author_is_given(nothing_learned: Translator) -> None:
    for author, said in (("", (1000, "Bo")), ("Anna", (time.time(), "Anna"))):
        made = SignedPair.of(("Es ist gut.", "It is good."), 1000, "Bo")
        nothing_learned.learn_all([made], author)
        pair = nothing_learned.memory()[0]
        assert (pair.time, pair.author) == (pytest.approx(said[0], abs=60), said[1])
        nothing_learned.forget(pair.id)


def test_an_author_is_a_name_that_others_can_be_shown(nothing_learned: Translator) -> None:
    for author in ("\ud800", "An\u202ena", "Anna\tBo", "a" * 101):
        with pytest.raises(ConfigurationError, match=r"the author is .*: give a name of at most 100"):
            nothing_learned.learn("Es ist gut.", "It is good.", author)
    assert not nothing_learned.memory()


def test_learning_needs_a_token_datastore_and_the_right_to_write(
    world: World, store: Path, tmp_path: Path
) -> None:
    alone = Translator(world.model, data=world.data_bin, device="cpu")
    with pytest.raises(
        ConfigurationError, match="learning needs a token datastore: give one with --datastore, or make"
    ):
        alone.learn("eins", "one")
    first, second = (Translator(datastore=store, **SHORT) for _ in range(2))
    number = first.learn("Es ist gut.", "It is good.").id
    with pytest.raises(DatastoreError, match="is being written to by process"):
        second.learn("Es ist gut.", "It is good.")
    first.close()
    second.forget(number)
    first = Translator(datastore=store, **SHORT)
    with pytest.raises(DatastoreError, match="is being written to by process"):
        first.learn("Es ist gut.", "It is good.")
    del second
    gc.collect()  # a translator that is not there any more holds nothing
    first.forget(first.learn("Es ist gut.", "It is good.").id)
    second = Translator(datastore=store, **SHORT)
    assert not second.memory() and not Translator(datastore=store, **SHORT).memory()


def test_threads_translate_while_others_learn_and_forget(store: Path, pairs: list[tuple[str, str]]) -> None:
    """Each translation is one of those with something learned, and in the end all is as it was."""
    translator = Translator(datastore=store, **KEEN)
    source, target = pairs[0]
    wanted = {tuple(outcome(translator, [source]))}
    number = translator.learn(source, target).id
    wanted.add(tuple(outcome(translator, [source])))
    translator.forget(number)
    found: list[Any] = []
    done = threading.Event()

    def translate() -> None:
        while not done.is_set():
            found.append(tuple(outcome(translator, [source])))

    threads = [threading.Thread(target=translate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        number = translator.learn(source, target).id
        translator.forget(number)
    done.set()
    for thread in threads:
        thread.join()
    assert len(found) >= 2 and set(found) <= wanted
    assert (store / LEARNED).is_dir() and not translator.memory()
