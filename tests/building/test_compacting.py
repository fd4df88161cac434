"""Compacting: the same is found afterwards, what was forgotten is in no file, and a kill at any moment changes nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.learned import LEARNED, LearnedStore
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import write_tuned
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, contents, files_up_to, refused
from tests.killing import ids_of, kill_beside, kill_compacting, new_pair, store_at
from tests.small_models import World, build, subword_options

SHORT = {"max_len_b": 45, "device": "cpu", "tokens_temperature": 5}


@pytest.fixture(scope="module")
def small(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "store"
    build(world, folder, "--subset", "valid")
    return folder


@pytest.fixture
def store(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "store"))


@pytest.fixture(scope="module")
def rows(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


def outcome(folder: Path, sentences: list[str]) -> list[tuple[str, tuple[float, ...]]]:
    translations = Translator(datastore=folder, **SHORT).translate(sentences)
    return [(one.text, tuple(round(score, 3) for score in one.token_scores)) for one in translations]


def test_the_same_is_found_before_and_after(store: Path, rows: list[tuple[str, str]]) -> None:
    sentences = [source for source, _ in rows[:2]]
    write_tuned({"token": TokenDatastore(store)}, {"tokens": {"k": 5}}, "tuned before")
    translator = Translator(datastore=store, **SHORT)
    ids = [translator.learn(*pair).id for pair in rows[:5]]
    translator.forget(ids[1])
    refused(call("compact", store, "--quiet", check=False), "is being written to by process")
    translator.close()
    before, own = outcome(store, sentences), TokenDatastore(store)
    assert (
        "4 pairs moved into it, 1 that were forgotten left it"
        in call("compact", store, "--quiet", "--cpu").stdout
    )
    assert outcome(store, sentences) == before
    datastore = TokenDatastore(store)
    assert np.array_equal(datastore.keys[: own.section.size], own.keys)
    assert datastore.section.size > own.section.size and not LearnedStore(datastore).entries
    assert [one.name for one in datastore.section.sources] == ["store", "store-learnt"]
    assert datastore.provenance[:, 0].max() == 24 + 3 and datastore.section.subsets == {
        "store/valid": 24,
        "store-learnt/learnt": 4,
    }
    found = Translator(datastore=store, **SHORT)
    assert "|k:5|" in str(found.signature)  # what was tuned before
    assert sorted(path.name for path in store.glob("*")) == [
        "learnt",
        "manifest.json",
        "preprocessing",
        "token-1",
        "tuned.json",
    ]
    assert [path.name for path in sorted((store / LEARNED).iterdir())] == ["1.journal", "lock"]
    assert "health         good" in call("inspect", store).stdout
    # ids, texts and explanations are as they were, and it goes on
    assert [one.id for one in found.memory()] == [5, 4, 3, 1]
    learned = {
        n.learned for token in found.explain(sentences[0]).sentences[0].tokens for n in token.neighbours
    }
    assert 1 in learned and learned <= {0, 1, 3, 4, 5}
    assert found.learn(*rows[0]).id == 1 and found.learn(*rows[1]).id == 6
    found.close()
    unchanged = contents(store)
    assert "1 pair moved" in call("compact", store, "--quiet", "--cpu").stdout
    assert "0 pairs moved" in call("compact", store, "--quiet", "--cpu").stdout
    assert [one.count for one in store_at(store).pairs.values()] == [2, 1, 1, 1, 1]
    assert contents(store)["tuned.json"] == unchanged["tuned.json"]


def test_entries_whose_pairs_are_lost_are_counted_still(store: Path, rows: list[tuple[str, str]]) -> None:
    for some in (rows[:4], rows[4:6]):
        with Translator(datastore=store, **SHORT) as translator:
            translator.learn_all(some)
        call("compact", store, "--quiet", "--cpu")
        section = TokenDatastore(store).section
        assert sum(source.size for source in section.sources) == section.size
        shutil.rmtree(store / LEARNED)  # all that knows which pairs they were


def test_a_pair_that_has_moved_is_forgotten_as_if_it_never_had_been_learned(
    store: Path, rows: list[tuple[str, str]]
) -> None:
    sentences = [source for source, _ in rows[:2]]
    plain = outcome(store, sentences)
    translator = Translator(datastore=store, **SHORT)
    for pair in rows[:4]:
        translator.learn(*pair)
    translator.close()
    call("compact", store, "--quiet", "--cpu")
    assert outcome(store, sentences) != plain
    call("forget", store, 1, 3)
    some = outcome(store, sentences)
    call("forget", store, 2, 4)
    assert outcome(store, sentences) == plain != some
    call("compact", store, "--quiet", "--cpu")
    assert outcome(store, sentences) == plain and not store_at(store).pairs


def find_anywhere(folder: Path, *needles: bytes) -> list[str]:
    return [
        name for name, content in contents(folder).items() if any(needle in content for needle in needles)
    ]


@pytest.mark.parametrize("index", ["", "IVF8,Flat", "IVF8,PQ32x4fs,Refine(SQfp16)"])
def test_nothing_of_what_was_forgotten_is_left_in_any_file(
    world: World, small: Path, tmp_path: Path, index: str
) -> None:
    """Nor in the file of an index, which has keys in fp32 or in fp16."""
    store = tmp_path / "store"
    if index:
        build(world, store, "--index", index, "--subset", "valid")
    else:
        shutil.copytree(small, store)
    width = np.float32 if "Flat" in index else np.float16
    first, second, third, kept = (new_pair(number) for number in (1, 2, 3, 4))
    needles = [
        part for pair in (first, second, third) for part in (pair.source.encode(), pair.target.encode())
    ]
    needles += [
        pair.keys[0].astype(kind).tobytes() for kind in {np.float16, width} for pair in (first, second, third)
    ]
    learning = store_at(store)
    assert ids_of(learning.learn([first, second, third, kept])) == [1, 2, 3, 4]
    assert len(find_anywhere(store, *needles)) == 1
    learning.forget([1])
    learning.close()
    call("compact", store, "--quiet", "--cpu")
    assert not find_anywhere(
        store, *needles[:2], first.keys[0].tobytes(), first.keys[0].astype(width).tobytes()
    )
    found = find_anywhere(store, second.keys[0].astype(width).tobytes())
    assert found and any(name.endswith(".faiss") for name in found) == bool(index)
    call("forget", store, 2)
    path = store / LEARNED / "1.journal"
    path.write_bytes(path.read_bytes() + b"damage that has Quelle 3 in it")  # put aside by the next writer
    call("forget", store, 3)
    assert find_anywhere(store, *needles[2:6])
    call("compact", store, "--quiet", "--cpu")
    assert not find_anywhere(store, *needles) and find_anywhere(store, kept.keys[0].tobytes())
    assert [one.source for one in store_at(store).pairs.values()] == [kept.source]


@pytest.mark.parametrize("index", ["exact", "IVF8,SQfp16"])
def test_a_full_disk_is_told_and_changes_nothing(world: World, tmp_path: Path, index: str) -> None:
    store = tmp_path / "store"
    build(world, store, "--index", index, "--subset", "valid")
    learning = store_at(store)
    ids = ids_of(learning.learn([new_pair(number) for number in range(1, 6)]))
    learning.forget(ids[:1])
    learning.close()
    before = contents(store)
    whole = len(before["token/keys.npy"])
    for most in (200, whole // 30, whole // 2):
        with files_up_to(most):
            done = call("compact", store, "--quiet", "--cpu", check=False)
        refused(
            done,
            r"cannot be compacted \(.*\): it is as it was; free some space|could not be written .* is the disk full",
        )
        assert contents(store) == before, most
    call("compact", store, "--quiet", "--cpu")
    assert list(store_at(store).pairs) == ids[1:] and not store_at(store).entries


@pytest.mark.full
def test_a_kill_at_any_moment_changes_nothing_or_all(store: Path, rng: np.random.Generator) -> None:
    assert kill_compacting(store, 24, rng) <= {0, 1}


@pytest.mark.full
def test_a_build_and_a_compaction_may_meet_and_be_killed(store: Path, rng: np.random.Generator) -> None:
    assert kill_beside(store, 8, rng).total() == 8


def test_an_index_stays_of_its_kind(world: World, tmp_path: Path) -> None:
    build(world, tmp_path / "ivf", "--index", "IVF8,Flat", "--subset", "valid")
    learning = store_at(tmp_path / "ivf")
    learning.learn([new_pair(number) for number in range(30)])
    learning.close()
    call("compact", tmp_path / "ivf", "--quiet", "--cpu")
    datastore = TokenDatastore(tmp_path / "ivf")
    assert datastore.section.index.factory == "IVF8,Flat" and datastore.section.index_recall is not None
    keys = datastore.keys
    call("compact", tmp_path / "ivf", "--quiet", "--cpu", "--index", "exact")  # which is all there is to do
    datastore = TokenDatastore(tmp_path / "ivf")
    assert datastore.section.index.backend == "exact" and np.array_equal(datastore.keys, keys)
    assert datastore.section.generation == 1 and not list((tmp_path / "ivf").rglob("*.faiss"))
    assert "health         good" in call("inspect", tmp_path / "ivf").stdout


def test_stored_index_parameters_stay(world: World, tmp_path: Path) -> None:
    """Earlier versions stored those that were given alone."""
    build(world, tmp_path / "ivf", "--index", "IVF8,PQ16x4fs,Refine(keys)", "--subset", "valid")
    manifest = Manifest.read(tmp_path / "ivf")
    assert (
        manifest.token is not None
        and manifest.token.index.parameters == "nprobe=8,k_factor_rf=4,candidates=64"
    )
    manifest.token.index = replace(manifest.token.index, parameters="nprobe=3")
    manifest.write(tmp_path / "ivf")
    learning = store_at(tmp_path / "ivf")
    learning.learn([new_pair(1)])
    learning.close()
    call("compact", tmp_path / "ivf", "--quiet", "--cpu")
    assert TokenDatastore(tmp_path / "ivf").section.index.parameters == "nprobe=3"


def test_an_empty_memory_is_filled_and_emptied(
    world: World, rows: list[tuple[str, str]], tmp_path: Path
) -> None:
    words = ["--path", world.model, "--data", world.data_bin, *subword_options(world), "--cpu"]
    call("build memory", *words, "-s", "de", "-t", "en", "--output", tmp_path / "store")
    translator = Translator(datastore=tmp_path / "store", max_len_b=45, device="cpu")
    for pair in rows[:3]:
        translator.learn(*pair)
    before = [one.text for one in translator.translate([source for source, _ in rows[:4]])]
    translator.close()
    call("compact", tmp_path / "store", "--quiet", "--cpu")
    translator = Translator(datastore=tmp_path / "store", max_len_b=45, device="cpu")
    assert [one.text for one in translator.translate([source for source, _ in rows[:4]])] == before
    assert before[0] == rows[0][1] and TokenDatastore(tmp_path / "store").section.subsets == {"learnt": 3}
    translator.forget(1, 2, 3)
    translator.close()
    call("compact", tmp_path / "store", "--quiet", "--cpu")
    assert TokenDatastore(tmp_path / "store").section.size == 0
    assert "health         good" in call("inspect", tmp_path / "store").stdout


def test_a_merge_refuses_what_was_learned_and_is_not_compacted(
    store: Path, small: Path, tmp_path: Path
) -> None:
    learning = store_at(store)
    learning.learn([new_pair(1)])
    learning.close()
    words = [store, f"other={small}", "--output", tmp_path / "merged", "--quiet"]
    refused(
        call("merge", *words, check=False),
        r"store has learned pairs \(1\), and only .*: fairseq-ccpr compact",
    )


def test_the_index_of_what_was_merged_or_compacted_is_replaced(
    world: World, store: Path, small: Path, both: Path, phrase_store: Path, tmp_path: Path
) -> None:
    """No corpus alone is what such a part was made from: a build refuses it, and what the refusal advises works."""
    build(world, tmp_path / "test", "--subset", "test")
    call("merge", small, tmp_path / "test", "--output", merged := tmp_path / "merged", "--quiet")
    learning = store_at(store)
    learning.learn([new_pair(1)])
    learning.close()
    call("compact", store, "--quiet", "--cpu")
    for folder, subset in ((merged, "valid"), (store, "valid")):
        keys, words = np.array(TokenDatastore(folder).keys), ["--subset", subset, "--index", "IVF8,Flat"]
        done = build(world, folder, *words, check=False)
        refused(
            done,
            rf"the token part of {folder} was (merged|compacted).*fairseq-ccpr compact {folder} --index auto",
        )
        call("compact", folder, "--index", "IVF8,Flat", "--quiet", "--cpu")
        datastore = TokenDatastore(folder)
        assert datastore.section.index.factory == "IVF8,Flat" and np.array_equal(datastore.keys, keys)
        assert datastore.section.sources and "health         good" in call("inspect", folder).stdout
    alone, joint = (shutil.copytree(one, tmp_path / one.name) for one in (phrase_store, both))
    assert "index IVF8,Flat" in call("compact", alone, "--index", "IVF8,Flat", "--quiet", "--cpu").stdout
    call("compact", alone, "--index", "auto", "--quiet", "--cpu")
    call("compact", joint, "--index", "auto", "--quiet", "--cpu")
    sections = Manifest.read(alone).parts + Manifest.read(joint).parts
    assert [section.index.backend for section in sections] == ["exact"] * 3


@pytest.mark.parametrize("name", ["token-1", "learnt/1.journal"])
def test_what_is_in_the_way_is_named(store: Path, tmp_path: Path, name: str) -> None:
    learning = store_at(store)
    learning.learn([new_pair(1)])
    learning.close()
    (tmp_path / "elsewhere").mkdir()
    if name == "token-1":
        (store / name).symlink_to(tmp_path / "elsewhere")
    else:
        (store / name).mkdir()
    before = contents(store)
    done = call("compact", store, "--quiet", "--cpu", check=False)
    refused(
        done, r"token-1 is no folder.*move it away|Is a directory\): it is as it was; see to .*1\.journal"
    )
    assert "free some space" not in done.stderr and store_at(store).pairs
    assert {path: one for path, one in contents(store).items() if "token-1" not in path} == before
    (store / name).unlink() if name == "token-1" else (store / name).rmdir()
    (store / "compacted.partial" / "token").mkdir(parents=True)  # left by a run that was killed
    call("compact", store, "--quiet", "--cpu")
    assert {path.name for path in store.iterdir()} == {LEARNED, "manifest.json", "preprocessing", "token-1"}
