"""Pairs learnt alongside a datastore: what was acknowledged is there once, by its id; what belongs elsewhere is refused."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fairseq_ccpr.datastore import learnt_records as records
from fairseq_ccpr.datastore.learnt import LEARNT, identity, journal_path
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.storage.journal import DAMAGED, MAGIC, create_journal
from tests.helpers import contents
from tests.killing import kill_learning, maker, new_pair, same, store_at
from tests.small_models import World, build


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    shutil.copytree(world.datastore, tmp_path / "store")
    return tmp_path / "store"


def test_what_is_learnt_is_read_again_and_what_is_forgotten_is_not(folder: Path) -> None:
    store = store_at(folder)
    assert not store.pairs and not (folder / LEARNT).exists()
    pairs = dict(zip(store.learn([new_pair(n) for n in range(1, 6)]), map(new_pair, range(1, 6))))
    assert list(pairs) == [1, 2, 3, 4, 5] and same(store, pairs) and same(store_at(folder), pairs)
    store.forget([2, 4])
    left = {number: pair for number, pair in pairs.items() if number not in (2, 4)}
    assert same(store, left) and same(store_at(folder), left)
    assert store.learn([new_pair(2)]) == [6]  # an id is never given again
    for number in (2, 7):
        with pytest.raises(ConfigurationError, match=f"there is no pair {number} among what was learnt"):
            store.forget([3, number])
    assert same(store_at(folder), {**left, 6: new_pair(2)})
    assert [one.id for one in store.find("QUELLE 中")] == [6, 5, 3, 1]
    assert [one.id for one in store.find("target 5")] == [5] and not store.find("target 2 4")


def test_a_pair_that_is_learnt_again_is_counted(folder: Path) -> None:
    store = store_at(folder)
    assert store.learn([new_pair(1), new_pair(2), new_pair(1)]) == [1, 2, 1]
    assert store.learn([new_pair(1)]) == [1]
    for one in (store, store_at(folder)):
        assert [pair.count for pair in one.pairs.values()] == [3, 1] and len(one.entries) == 2
    store.forget([1])
    assert store.learn([new_pair(1)]) == [3] and store.pairs[3].count == 1


def test_one_writes_and_others_read_until_it_closes(folder: Path) -> None:
    first, second = store_at(folder), store_at(folder)
    first.learn([new_pair(1)])
    with pytest.raises(DatastoreError, match=r"learnt is being written to by process \d+ on "):
        second.learn([new_pair(2)])
    with pytest.raises(DatastoreError, match="is being written to by process"):
        second.forget([1])
    first.close()
    assert second.learn([new_pair(2)]) == [2]  # having read what the first one wrote
    assert same(second, {1: new_pair(1), 2: new_pair(2)}) and same(store_at(folder), {1: new_pair(1), 2: new_pair(2)})
    with pytest.raises(DatastoreError, match="is being written to by process"):
        first.learn([new_pair(3)])


def test_a_journal_of_something_else_is_refused(world: World, folder: Path, tmp_path: Path) -> None:
    store_at(folder).learn([new_pair(1)])
    build(world, tmp_path / "other", "--subset", "test")
    shutil.copytree(folder / LEARNT, tmp_path / "other" / LEARNT)
    with pytest.raises(
        DatastoreError, match=r"0.journal was learnt with another set of keys than .*other has \(\w{12}, here"
    ):
        store_at(tmp_path / "other")
    manifest = Manifest.read(folder)
    assert manifest.token is not None
    manifest.token.fingerprints["model"] = "0" * 64
    manifest.write(folder)
    with pytest.raises(
        DatastoreError, match=r"was learnt with another model than .*store has \(\w{12}, here 000000000000\)"
    ):
        store_at(folder)


def test_a_datastore_that_was_built_again_meanwhile_is_not_written_beside(
    world: World, folder: Path, tmp_path: Path
) -> None:
    store = store_at(folder)
    build(world, tmp_path / "other", "--subset", "test")
    shutil.rmtree(folder)
    shutil.move(tmp_path / "other", folder)
    with pytest.raises(DatastoreError, match="was compacted or built again since it was opened: open it again"):
        store.learn([new_pair(1)])
    assert not journal_path(folder, 0).exists()


def test_before_damage_all_is_kept_and_the_damage_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = {number: new_pair(number) for number in range(1, 9)}
    sizes, store = [], store_at(folder)
    for pair in pairs.values():
        store.learn([pair])
        sizes.append(journal_path(folder, 0).stat().st_size)
    store.close()
    whole = journal_path(folder, 0).read_bytes()
    for at in [sizes[3], *np.random.default_rng().integers(sizes[3], sizes[4], 20).tolist()]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << random.randrange(8)
        for content in (damaged, whole[: at + (at == sizes[3])]):
            journal_path(folder, 0).write_bytes(content)
            caplog.clear()
            found = store_at(folder)
            assert same(found, {n: pairs[n] for n in range(1, 5)}) and found.damage in caplog.text
            assert f"0.journal: {len(content) - sizes[3]:,} bytes at its end are damaged" in found.damage
    assert found.learn([new_pair(20)]) == [5] and same(
        store_at(folder), {**{n: pairs[n] for n in range(1, 5)}, 5: new_pair(20)}
    )
    assert (folder / LEARNT / f"0.journal{DAMAGED}").read_bytes() == whole[sizes[3] : at]
    for content in (b"", MAGIC, b"something else"):
        journal_path(folder, 0).write_bytes(content)
        with pytest.raises(DatastoreError, match="is damaged from its beginning on: move it away"):
            store_at(folder)
    journal_path(folder, 0).unlink()
    create_journal(journal_path(folder, 0), [bytes([2]) + bytes(8)])
    with pytest.raises(DatastoreError, match="does not begin as a journal does"):
        store_at(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run as a user who may write nowhere, where this one is root, who may write everywhere."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def test_a_folder_that_cannot_be_written_is_read_and_not_learnt_beside(folder: Path) -> None:
    store_at(folder).learn([new_pair(1)])
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        Path(open_to_all).chmod(0o755)
        for name in ("with", "without"):
            shutil.copytree(folder, Path(open_to_all) / name)
        shutil.rmtree(Path(open_to_all) / "without" / LEARNT)
        for path in [*Path(open_to_all).rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = contents(Path(open_to_all))
        with as_nobody():
            for name in ("with", "without"):
                store = store_at(Path(open_to_all) / name)
                with pytest.raises(
                    DatastoreError, match=r"learnt cannot be written \(Permission denied\), as learning requires"
                ):
                    store.learn([new_pair(2)])
        assert contents(Path(open_to_all)) == before
        for path in [Path(open_to_all), *Path(open_to_all).rglob("*")]:
            path.chmod(0o755)


def test_a_kill_at_any_moment_loses_nothing_that_was_acknowledged(folder: Path, rng: np.random.Generator) -> None:
    assert kill_learning(folder, 36, rng) > 0


@pytest.fixture
def with_phrases(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both, tmp_path / "both"))


def test_phrases_are_read_again_and_forgotten_with_their_pairs(with_phrases: Path) -> None:
    store, make = store_at(with_phrases), maker(with_phrases)
    pairs = dict(zip(store.learn([make(n) for n in range(1, 9)]), map(make, range(1, 9))))
    assert same(store, pairs) and same(store_at(with_phrases), pairs) and len(store.phrases) == 8
    store.forget([2, 4])
    left = {number: pair for number, pair in pairs.items() if number not in (2, 4)}
    assert same(store, left) and same(store_at(with_phrases), left)
    assert store.learn([make(1), make(20), make(20)]) == [1, 9, 9]
    for one in (store, store_at(with_phrases)):
        assert same(one, {**left, 9: make(20)}) and (one.pairs[1].count, one.pairs[9].count) == (2, 2)


def test_pairs_that_were_learnt_without_phrases_have_them_once_they_are_learnt_again(with_phrases: Path) -> None:
    store, make = store_at(with_phrases), maker(with_phrases)
    store.learn([new_pair(1), new_pair(2)])
    assert not store.phrases and same(store_at(with_phrases), {1: new_pair(1), 2: new_pair(2)})
    assert store.learn([make(2), make(2)]) == [2, 2]
    for one in (store, store_at(with_phrases)):
        assert same(one, {1: new_pair(1), 2: make(2)}) and one.pairs[2].count == 3
    store.forget([2])
    assert not store.phrases and not store_at(with_phrases).phrases


def test_a_journal_of_the_first_version_is_read_and_goes_on(with_phrases: Path) -> None:
    """Its header has another version, and none of its records tells of phrases."""
    store, make = store_at(with_phrases), maker(with_phrases)
    header = records.Header(1, identity(store.datastore.section), 1)
    path = journal_path(with_phrases, 0)
    path.parent.mkdir()
    create_journal(path, [records.header(header), records.learnt(1, new_pair(1)), records.again(1)])
    store = store_at(with_phrases)
    assert same(store, {1: new_pair(1)}) and store.pairs[1].count == 2
    assert store.learn([make(2)]) == [2] and same(store_at(with_phrases), {1: new_pair(1), 2: make(2)})


def test_a_journal_of_another_phrase_encoder_is_refused(with_phrases: Path, tmp_path: Path) -> None:
    store, make = store_at(with_phrases), maker(with_phrases)
    store.learn([new_pair(1)])
    manifest = Manifest.read(with_phrases)
    assert manifest.phrase is not None
    encoder = manifest.phrase.fingerprints["encoder"]
    manifest.phrase.fingerprints["encoder"] = "0" * 64
    manifest.write(with_phrases)
    assert same(store_at(with_phrases), {1: new_pair(1)})  # which has nothing of an encoder
    manifest.phrase.fingerprints["encoder"] = encoder
    manifest.write(with_phrases)
    store.learn([make(2)])
    manifest.phrase.fingerprints["encoder"] = "0" * 64
    manifest.write(with_phrases)
    with pytest.raises(
        DatastoreError, match=r"was learnt with another phrase encoder than .*both has \(\w{12}, here 000000000000\)"
    ):
        store_at(with_phrases)
    manifest.phrase = None
    manifest.write(with_phrases)
    with pytest.raises(DatastoreError, match=r"another phrase encoder than .*both has \(\w{12}, here None\)"):
        store_at(with_phrases)


def test_phrases_are_whole_or_the_record_is_refused() -> None:
    record = records.learnt(7, new_pair(3, 32, 16))
    found = records.read(record, 32)
    assert isinstance(found, records.Learnt) and found.phrases is not None and len(found.phrases.spans)
    for wrong in (record[:-1], record + b"\0", records.phrases(7, found.phrases)[:-3]):
        with pytest.raises(ValueError, match="its length is not that of its parts"):
            records.read(wrong, 32)


def test_a_kill_at_any_moment_loses_no_phrases(with_phrases: Path, rng: np.random.Generator) -> None:
    assert kill_learning(with_phrases, 20, rng) > 0
