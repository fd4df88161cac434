"""Compacting a datastore with phrases: as if all text had been built together, and nothing is left of what was forgotten."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.learned import OWN_SENTENCE
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import read_tuned, write_tuned
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, contents, refused, write_lines
from tests.killing import ids_of, kill_compacting, maker, new_pair, store_at
from tests.small_models import Ccpr, World

SHORT: dict[str, Any] = {"max_len_b": 25, "device": "cpu", "tokens_temperature": 5, "phrases_k": 3}


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "valid.tsv"))  # which `mono` has nothing of


@pytest.fixture
def store(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both, tmp_path / "store"))


def compacted(folder: Path) -> str:
    return call("compact", folder, "--quiet", "--cpu").stdout


def outcome(folder: Path, sentences: list[str]) -> list[tuple[str, tuple[float, ...]]]:
    translations = Translator(datastore=folder, **SHORT).translate(sentences)
    return [(one.text, tuple(round(score, 3) for score in one.token_scores)) for one in translations]


def sentences_of(store: PhraseDatastore) -> list[str]:
    return [store.sentence(number) for number in range(store.section.sentences)]


def test_compacted_is_what_a_build_from_all_text_is(
    store: Path, ccpr: Ccpr, mono: Path, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Sentences, places and strings, keys but for the company in their batches; targets that are there already once."""
    sentences = [source for source, _ in pairs[:2]]
    own = PhraseDatastore(store)
    write_tuned({"token": TokenDatastore(store), "phrase": own}, {"phrases": {"k": 2}}, "tuned before")
    translator = Translator(datastore=store, **SHORT)
    targets = [pairs[0][1], own.sentence(7), pairs[1][1], pairs[0][1], pairs[2][1]]
    for number, target in enumerate(targets):
        translator.learn(f"Satz {number}", target)
    translator.forget(5)
    translator.close()
    before = outcome(store, sentences)
    assert list(store.glob("subwords-*/"))  # made by decoding, of the phrases before
    assert "4 pairs moved into it, 1 that were forgotten left it" in compacted(store)
    assert not list(store.glob("subwords-*/"))
    assert outcome(store, sentences) == before

    text = write_lines(tmp_path / "all.txt", *mono.read_text(encoding="utf-8").splitlines(), *targets[:4])
    words = ["--encoder", ccpr.checkpoint, "--segmentation", "all", "--max-words", 3, "--cpu", "--quiet"]
    call("build phrases", text, *words, "--output", tmp_path / "built")
    found, built = PhraseDatastore(store), PhraseDatastore(tmp_path / "built")
    assert sentences_of(found) == sentences_of(built) and np.array_equal(found.spans, built.spans)
    assert found.keys is not None and built.keys is not None and own.keys is not None
    np.testing.assert_allclose(found.keys, built.keys, atol=2e-3)
    assert np.array_equal(found.keys[: own.section.size], own.keys)
    assert [(one.name, one.sentences) for one in found.section.sources] == [
        ("store", own.section.sentences), ("store-learnt", 3),
    ]  # fmt: skip
    sources = found.open_sources()
    assert np.flatnonzero(sources[:, 1]).tolist() == [7, own.section.sentences, own.section.sentences + 1]
    assert sources[: own.section.sentences, 0].all() and not sources[own.section.sentences :, 0].any()
    first = own.section.sentences
    assert [one.sentence for one in store_at(store).pairs.values()] == [first, OWN_SENTENCE, first + 1, first]
    assert read_tuned({"token": TokenDatastore(store), "phrase": found}) == {"phrases": {"k": 2}}
    assert {"phrase-1", "token-1"} <= {path.name for path in store.iterdir()} and not (
        store / "phrase"
    ).exists()
    assert "health         good: checksums, numbers, places" in call("inspect", store).stdout
    # a sentence stays as long as a pair has it, and as long as the text has it
    call("forget", store, 1, 2)
    assert not store_at(store).gone_sentences
    call("forget", store, 4)
    assert store_at(store).gone_sentences == [first]
    compacted(store)
    assert sentences_of(PhraseDatastore(store)) == [*sentences_of(own), targets[2]]
    call("forget", store, 3)
    compacted(store)
    last = PhraseDatastore(store)
    assert sentences_of(last) == sentences_of(own) and np.array_equal(last.keys, own.keys)
    assert np.array_equal(last.spans, own.spans) and last.section.generation == 3


def find_anywhere(folder: Path, *needles: bytes) -> list[str]:
    return [
        name for name, content in contents(folder).items() if any(needle in content for needle in needles)
    ]


def test_nothing_of_what_was_forgotten_is_left_in_any_file(store: Path) -> None:
    made = [maker(store)(number) for number in range(1, 12)]
    made = [pair for pair in made if pair.phrases is not None and len(pair.phrases.keys)][:4]
    needles = [
        (pair.target.encode(), pair.phrases.keys[0].tobytes(), pair.keys[0].tobytes())
        for pair in made
        if pair.phrases
    ]
    learning = store_at(store)
    assert ids_of(learning.learn(made)) == [1, 2, 3, 4]
    learning.forget([1])
    learning.close()
    assert len(find_anywhere(store, *needles[0])) == 1
    compacted(store)
    assert not find_anywhere(store, *needles[0])
    assert all(find_anywhere(store, needle) for needle in needles[1])
    call("forget", store, 2)
    compacted(store)
    assert not find_anywhere(store, *needles[0], *needles[1]) and all(
        find_anywhere(store, one) for one in needles[3]
    )
    shutil.copytree(store / "phrase-2", store / "phrase-3")  # as a run leaves it that was killed
    call("forget", store, "--all")
    compacted(store)
    assert not find_anywhere(store, *(needle for each in needles for needle in each))


def test_phrases_that_come_later_move_later(store: Path) -> None:
    """A pair may be learned without phrases, move, and have phrases when it is learned again."""
    learning, make = store_at(store), maker(store)
    learning.learn([new_pair(1), new_pair(2)])
    learning.close()
    compacted(store)
    assert (store / "phrase").is_dir() and PhraseDatastore(store).section.generation == 0
    learning = store_at(store)
    learning.learn([make(1)])
    words = [store, f"other={store}", "--output", store.with_name("merged"), "--quiet"]
    refused(call("merge", *words, check=False), r"store has learned pairs \(2\), and only")
    learning.close()
    assert "1 pair moved into it, 0 that" in compacted(store)
    with pytest.raises(Exception, match="was compacted or built again since it was opened"):
        learning.learn([make(3)])
    again = store_at(store)
    own = PhraseDatastore(store).section.sentences
    assert [one.sentence for one in again.pairs.values()] == [own - 1, None] and not again.phrases
    assert PhraseDatastore(store).section.generation == 1 and again.datastore.section.generation == 2


def test_a_compacted_datastore_merges(store: Path, world: World, ccpr: Ccpr, tmp_path: Path) -> None:
    learning, make = store_at(store), maker(store)
    learning.learn([make(1), make(2)])
    learning.close()
    compacted(store)
    call("merge", store, "--remove", "store-learnt", "--output", tmp_path / "without", "--quiet")
    without, own = PhraseDatastore(tmp_path / "without"), PhraseDatastore(store)
    assert without.section.generation == 0 and without.section.sentences == own.section.sentences - 2
    call("merge", store, "--remove", "store", "--output", tmp_path / "learned", "--quiet")
    learned = PhraseDatastore(tmp_path / "learned")
    assert sentences_of(learned) == [make(1).target, make(2).target]
    assert "health         good" in call("inspect", tmp_path / "learned").stdout


@pytest.mark.full
def test_a_kill_at_any_moment_changes_nothing_or_all(store: Path, rng: np.random.Generator) -> None:
    assert kill_compacting(store, 12, rng) <= {0, 1}
