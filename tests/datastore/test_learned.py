"""Pairs learned alongside a datastore: what was acknowledged is there once, by its id; what belongs elsewhere is refused."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from stat import S_IMODE

import numpy as np
import pytest

from fairseq_ccpr.datastore.learned import (
    LEARNED,
    Kind,
    NewPair,
    ReadAs,
    identity,
    journal_path,
    remove_superseded,
)
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.storage.journal import Journal, create_journal
from tests.helpers import contents
from tests.killing import damage_journals, ids_of, kill_learning, maker, new_pair, same, store_at
from tests.small_models import World, build


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    shutil.copytree(world.datastore, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def with_phrases(both: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(both, tmp_path / "both"))


def test_what_is_learned_is_read_again_and_what_is_forgotten_is_not(folder: Path) -> None:
    store = store_at(folder)
    assert not store.pairs and not (folder / LEARNED).exists()
    pairs = dict(zip(ids_of(store.learn([new_pair(n) for n in range(1, 6)])), map(new_pair, range(1, 6))))
    assert list(pairs) == [1, 2, 3, 4, 5] and same(store, pairs) and same(store_at(folder), pairs)
    store.forget([2, 4])
    left = {number: pair for number, pair in pairs.items() if number not in (2, 4)}
    assert same(store, left) and same(store_at(folder), left)
    assert ids_of(store.learn([new_pair(2)])) == [6]  # an id is never given again
    for number in (2, 7):
        with pytest.raises(ConfigurationError, match=f"there is no pair {number} among what was learned"):
            store.forget([3, number])
    assert same(store_at(folder), {**left, 6: new_pair(2)})
    assert [one.id for one in store.find("QUELLE 中")] == [6, 5, 3, 1]
    assert [one.id for one in store.find("target 5")] == [5] and not store.find("target 2 4")


def test_the_text_of_what_was_forgotten_is_not_kept_in_memory(folder: Path) -> None:
    store = store_at(folder)
    store.learn([new_pair(1), new_pair(2)])
    json.dumps(asdict(store.find("target 1")[0]))  # a pair that is shown has texts and numbers alone
    store.forget([1])
    for one in (store, store_at(folder)):
        forgotten = one._all[1]
        assert (forgotten.source, forgotten.target, forgotten.read_as) == (
            "",
            "",
            None,
        ) and one.forgotten == 1
    assert ids_of(store.learn([new_pair(1)])) == [3] and store.pairs[3].source == new_pair(1).source
    store.forget([3])
    assert list(store_at(folder).pairs) == [2]


def test_a_pair_that_is_learned_again_is_counted(folder: Path) -> None:
    store = store_at(folder)
    assert ids_of(store.learn([new_pair(1), new_pair(2), new_pair(1)])) == [1, 2, 1]
    assert ids_of(store.learn([new_pair(1)])) == [1]
    for one in (store, store_at(folder)):
        assert [pair.count for pair in one.pairs.values()] == [3, 1] and len(one.entries) == 2
    store.forget([1])
    assert ids_of(store.learn([new_pair(1)])) == [3] and store.pairs[3].count == 1


def test_a_pair_keeps_when_and_by_whom_it_was_learned_last(folder: Path) -> None:
    store, first = store_at(folder), replace(new_pair(1), time=1_700_000_000, author="Änne")
    store.learn([first, new_pair(2)])
    store.learn(
        [replace(new_pair(3), time=1 << 33, author="Bo"), replace(first, time=1_800_000_000, author="")]
    )
    store.learn([replace(first, target="Other.", time=1_900_000_000, author="Ö\t中")])
    known = {1: (1_800_000_000, ""), 2: (0, ""), 3: (1 << 33, "Bo"), 4: (1_900_000_000, "Ö\t中")}
    store.close()
    counting = [*store.pairs.values()]
    records = store.records_after_compaction(store.datastore.section, None, counting)
    for one in (store, store_at(folder)):
        assert {pair.id: (pair.time, pair.author) for pair in one.find("")} == known
    create_journal(journal_path(folder, 0), records)
    after = store_at(folder)
    assert {pair.id: (pair.time, pair.author) for pair in after.find("")} == known
    after.forget([4])
    assert after._all[4].author == "" and after.pairs[1].time == 1_800_000_000


def test_one_writes_and_others_read_until_it_closes(folder: Path) -> None:
    first, second = store_at(folder), store_at(folder)
    first.learn([new_pair(1)])
    with pytest.raises(DatastoreError, match=r"learnt is being written to by process \d+ on "):
        second.learn([new_pair(2)])
    with pytest.raises(DatastoreError, match="is being written to by process"):
        second.forget([1])
    first.close()
    assert ids_of(second.learn([new_pair(2)])) == [2]  # having read what the first one wrote
    assert same(second, {1: new_pair(1), 2: new_pair(2)}) and same(
        store_at(folder), {1: new_pair(1), 2: new_pair(2)}
    )
    with pytest.raises(DatastoreError, match="is being written to by process"):
        first.learn([new_pair(3)])


def test_a_journal_of_something_else_is_refused(world: World, folder: Path, tmp_path: Path) -> None:
    store_at(folder).learn([new_pair(1)])
    build(world, tmp_path / "other", "--subset", "test")
    shutil.copytree(folder / LEARNED, tmp_path / "other" / LEARNED)
    with pytest.raises(
        DatastoreError,
        match=r"0.journal was learned with another set of keys than .*other has \(\w{12}, here",
    ):
        store_at(tmp_path / "other")
    manifest = Manifest.read(folder)
    assert manifest.token is not None
    manifest.token.fingerprints["model"] = "0" * 64
    manifest.write(folder)
    with pytest.raises(
        DatastoreError, match=r"was learned with another model than .*store has \(\w{12}, here 000000000000\)"
    ):
        store_at(folder)


def test_a_datastore_that_was_built_again_meanwhile_is_not_written_beside(
    world: World, folder: Path, tmp_path: Path
) -> None:
    store = store_at(folder)
    build(world, tmp_path / "other", "--subset", "test")
    shutil.rmtree(folder)
    shutil.move(tmp_path / "other", folder)
    with pytest.raises(
        DatastoreError, match="was compacted or built again since it was opened: open it again"
    ):
        store.learn([new_pair(1)])
    assert not journal_path(folder, 0).exists()


def learned_one_by_one(folder: Path, count: int) -> tuple[dict[int, NewPair], list[int]]:
    """Learn pairs; returns them, and where the journal ended before and after each."""
    store, make, ends = store_at(folder), maker(folder), []
    for number in range(1, count + 1):
        store.lock()
        ends.append(journal_path(folder, 0).stat().st_size)
        store.learn([make(number)])
    store.close()
    return {n: make(n) for n in range(1, count + 1)}, [*ends, journal_path(folder, 0).stat().st_size]


def test_damage_is_put_aside_and_nothing_of_it_is_ever_overwritten(folder: Path) -> None:
    pairs, _ = learned_one_by_one(folder, 8)
    path, files = journal_path(folder, 0), {}
    for number, first_id in ((2, 10), (5, 12)):
        damaged = bytearray(path.read_bytes())
        start = damaged.index(pairs[number].source.encode())
        damaged[start] ^= 4
        path.write_bytes(damaged)
        before = store_at(folder)
        assert "0.journal: 1 record is missing" in before.damage
        assert ids_of(before.learn([new_pair(20 + number)])) == [
            first_id
        ]  # an id that may have been given is not given again
        before.close()
        del pairs[number]
        pairs[first_id] = new_pair(20 + number)
        assert same(store_at(folder), pairs) and not store_at(folder).damage
        files[f"0.journal.damaged-{len(files) + 1}"] = bytes(damaged[start : start + 12])
        for name, content in files.items():
            assert content in (folder / LEARNED / name).read_bytes()
    assert len(list((folder / LEARNED).iterdir())) == 4


def test_without_what_phrases_belong_to_pairs_have_none(with_phrases: Path) -> None:
    pairs, ends = learned_one_by_one(with_phrases, 3)
    whole = journal_path(with_phrases, 0).read_bytes()
    first = whole.index(pairs[1].source.encode()) - 57  # of the record, before its head and its numbers
    journal_path(with_phrases, 0).write_bytes(whole[: ends[0]] + whole[first:])
    found = store_at(with_phrases)
    assert "2 records are missing" in found.damage and same(found, {n: new_pair(n) for n in pairs})
    found.learn([pairs[2]])
    assert same(store_at(with_phrases), {**{n: new_pair(n) for n in pairs}, 2: pairs[2]})


def test_a_record_that_was_cut_out_is_missed_and_one_that_depends_on_it_does_no_harm(folder: Path) -> None:
    pairs, ends = learned_one_by_one(folder, 3)
    store = store_at(folder)
    store.learn([new_pair(2)])
    store.forget([2])
    store.close()
    whole = journal_path(folder, 0).read_bytes()
    journal_path(folder, 0).write_bytes(whole[: ends[1]] + whole[ends[2] :])
    found = store_at(folder)
    assert "1 record is missing" in found.damage and same(found, {1: pairs[1], 3: pairs[3]})
    found = store_at(folder)
    assert ids_of(found.learn([new_pair(2), new_pair(3)])) == [5, 3]
    found.close()
    again = journal_path(folder, 0).read_bytes()
    # what is not complete at the end may never have been acknowledged
    journal_path(folder, 0).write_bytes(again[:-90])
    assert same(store_at(folder), {1: pairs[1], 3: pairs[3]})


def test_records_that_are_missing_at_the_end_are_missed(folder: Path) -> None:
    """Cut off between two records, or with the whole journal put back as it was before."""
    pairs, ends = learned_one_by_one(folder, 4)
    path = journal_path(folder, 0)
    whole = path.read_bytes()
    for end, lost in ((ends[3], 1), (ends[1], 3)):
        path.write_bytes(whole[:end])
        found = store_at(folder)
        assert (
            f"{lost} record{'s are' if lost > 1 else ' is'} missing" in found.damage
            and len(found.pairs) == 4 - lost
        )
    assert ids_of(found.learn([new_pair(9)])) == [5]  # ids of those that are missing are not given again
    found.close()
    assert not store_at(folder).damage and same(store_at(folder), {1: pairs[1], 5: new_pair(9)})


def test_a_pair_whose_forgetting_is_lost_is_there_once(folder: Path) -> None:
    store = store_at(folder)
    store.learn([new_pair(1), new_pair(2)])
    before = journal_path(folder, 0).stat().st_size
    store.forget([1])
    after = journal_path(folder, 0).stat().st_size
    assert ids_of(store.learn([new_pair(1)])) == [3]
    store.close()
    whole = journal_path(folder, 0).read_bytes()
    journal_path(folder, 0).write_bytes(whole[:before] + whole[after:])
    found = store_at(folder)
    assert found.damage and same(found, {2: new_pair(2), 3: new_pair(1)})
    found.forget([3])
    assert list(found.pairs) == [2]


@pytest.mark.parametrize("content", [b"", b"CCPRJNL1", b"something else"])
def test_what_is_no_journal_is_refused(folder: Path, content: bytes) -> None:
    journal_path(folder, 0).parent.mkdir()
    journal_path(folder, 0).write_bytes(content)
    with pytest.raises(
        DatastoreError, match="is damaged from its beginning on, or has format version 1 or 2, and"
    ):
        store_at(folder)
    create_journal(journal_path(folder, 0), [bytes([2]) + bytes(8)])
    with pytest.raises(
        DatastoreError, match="is damaged from its beginning on, or has format version 1 or 2, and"
    ):
        store_at(folder)


def test_only_what_was_written_here_is_removed(folder: Path, tmp_path: Path) -> None:
    store_at(folder).learn([new_pair(1)])
    learned = folder / LEARNED
    for name in (
        "1.journal",
        "1.journal.damaged-1",
        "1.journal.damaged",
        "1.journal.partial",
        "0.journal.damaged-1",
    ):
        shutil.copy(journal_path(folder, 0), learned / name)
    foreign = {
        "backup.tmx",
        "0.journal.old",
        "mine.journal",
        "2.journal",
        "01.journal",
        "1.journal.damaged-x",
        "notes",
    }
    for name in foreign:
        (learned / name).write_text("mine")
    (tmp_path / "elsewhere").write_text("mine")
    (learned / "3.journal").symlink_to(tmp_path / "elsewhere")
    remove_superseded(folder, 0)
    left = {path.name for path in learned.iterdir()}
    assert left == foreign | {"0.journal", "0.journal.damaged-1", "3.journal", "lock"}
    (learned / "lock").unlink()
    (learned / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatastoreError, match="lock is a symbolic link"):
        store_at(folder).learn([new_pair(2)])
    assert (tmp_path / "elsewhere").read_text() == "mine"


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


def test_a_folder_that_cannot_be_written_is_read_and_not_learned_beside(folder: Path) -> None:
    store_at(folder).learn([new_pair(1)])
    with tempfile.TemporaryDirectory(dir="/tmp") as open_to_all:
        Path(open_to_all).chmod(0o755)
        for name in ("with", "without"):
            shutil.copytree(folder, Path(open_to_all) / name)
        shutil.rmtree(Path(open_to_all) / "without" / LEARNED)
        for path in [*Path(open_to_all).rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = contents(Path(open_to_all))
        with as_nobody():
            for name in ("with", "without"):
                store = store_at(Path(open_to_all) / name)
                with pytest.raises(
                    DatastoreError,
                    match=r"learnt cannot be written \(Permission denied\), as learning requires",
                ):
                    store.learn([new_pair(2)])
        assert contents(Path(open_to_all)) == before
        for path in [Path(open_to_all), *Path(open_to_all).rglob("*")]:
            path.chmod(0o755)


@pytest.mark.full
def test_a_kill_at_any_moment_loses_nothing_that_was_acknowledged(
    folder: Path, rng: np.random.Generator
) -> None:
    assert kill_learning(folder, 36, rng) > 0


def test_phrases_are_read_again_and_forgotten_with_their_pairs(with_phrases: Path) -> None:
    store, make = store_at(with_phrases), maker(with_phrases)
    pairs = dict(zip(ids_of(store.learn([make(n) for n in range(1, 9)])), map(make, range(1, 9))))
    assert same(store, pairs) and same(store_at(with_phrases), pairs) and len(store.phrases) == 8
    store.forget([2, 4])
    left = {number: pair for number, pair in pairs.items() if number not in (2, 4)}
    assert same(store, left) and same(store_at(with_phrases), left)
    assert ids_of(store.learn([make(1), make(20), make(20)])) == [1, 9, 9]
    for one in (store, store_at(with_phrases)):
        assert same(one, {**left, 9: make(20)}) and (one.pairs[1].count, one.pairs[9].count) == (2, 2)


def test_pairs_that_were_learned_without_phrases_have_them_once_they_are_learned_again(
    with_phrases: Path,
) -> None:
    store, make = store_at(with_phrases), maker(with_phrases)
    store.learn([new_pair(1), new_pair(2)])
    assert not store.phrases and same(store_at(with_phrases), {1: new_pair(1), 2: new_pair(2)})
    assert ids_of(store.learn([make(2), make(2)])) == [2, 2]
    for one in (store, store_at(with_phrases)):
        assert same(one, {1: new_pair(1), 2: make(2)}) and one.pairs[2].count == 3
    store.forget([2])
    assert not store.phrases and not store_at(with_phrases).phrases


@pytest.mark.parametrize(
    ("version", "what_to_do"),
    [(4, "export the pairs with the version that learned them, move"), (7, "upgrade fairseq-ccpr")],
)
def test_a_journal_of_another_version_is_refused_and_stays(
    folder: Path, version: int, what_to_do: str
) -> None:
    header = {"version": version, "identity": identity(store_at(folder).datastore.section), "first_id": 1}
    path = journal_path(folder, 0)
    path.parent.mkdir()
    create_journal(path, [b"\0" + json.dumps(header).encode()])
    before = path.read_bytes()
    with pytest.raises(
        DatastoreError, match=f"has format version {version}, and this .* reads 5 and 6: {what_to_do}"
    ):
        store_at(folder)
    assert path.read_bytes() == before


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
        DatastoreError,
        match=r"was learned with another phrase encoder than .*both has \(\w{12}, here 000000000000\)",
    ):
        store_at(with_phrases)
    manifest.phrase = None
    manifest.write(with_phrases)
    with pytest.raises(DatastoreError, match=r"another phrase encoder than .*both has \(\w{12}, here None\)"):
        store_at(with_phrases)


@pytest.mark.parametrize("cut", [1, 3, -1])
def test_a_record_whose_parts_do_not_fit_is_refused(with_phrases: Path, cut: int) -> None:
    learned_one_by_one(with_phrases, 1)
    path = journal_path(with_phrases, 0)
    *others, record = Journal(path).read()
    create_journal(path, [*others, record[:-cut] if cut > 0 else record + b"\0"])
    with pytest.raises(
        DatastoreError, match=r"cannot be read .its length is not that of its parts.: upgrade"
    ):
        store_at(with_phrases)
    create_journal(path, [*others, b"\x63"])
    with pytest.raises(DatastoreError, match="kind 99"):
        store_at(with_phrases)


@pytest.mark.full
def test_a_kill_at_any_moment_loses_no_phrases(with_phrases: Path, rng: np.random.Generator) -> None:
    assert kill_learning(with_phrases, 20, rng) > 0


def test_the_last_translation_of_a_source_counts_and_the_earlier_ones_are_kept(
    folder: Path, with_phrases: Path
) -> None:
    for one in (folder, with_phrases):
        store, make = store_at(one), maker(one)
        first, second, other, third = make(1), make(1, 1), make(2), make(1, 2)
        assert [learned[:2] for learned in store.learn([first, other])] == [(1, True), (2, True)]
        before = contents(one)
        (learned,) = store.learn([second])
        assert learned.id == 3 and learned.new and learned.replaced is not None
        assert (learned.replaced.id, learned.replaced.target, learned.replaced.replaced_by) == (
            1,
            first.target,
            3,
        )
        assert same(store, {2: other, 3: second}, {1: first}) and same(
            store_at(one), {2: other, 3: second}, {1: first}
        )
        assert [(pair.id, pair.replaced_by) for pair in store.find("")] == [(3, None), (2, None), (1, 3)]
        assert [pair.id for pair in store.forget([3])] == [1]  # as if it had never been learned
        assert same(store, {1: first, 2: other}) and same(store_at(one), {1: first, 2: other})
        assert list(contents(one)) == list(before)

        learned_together = store.learn([second, third, first])
        assert [(n, new, old and old.id) for n, new, old in learned_together] == [
            (4, True, 1),
            (5, True, 4),
            (1, False, 5),
        ]
        for found in (store, store_at(one)):
            assert same(found, {1: first, 2: other}, {4: second, 5: third}) and found.pairs[1].count == 2
        assert [pair.id for pair in store.forget([1])] == [5]
        assert not store.forget([4]) and same(store_at(one), {2: other, 5: third})
        assert not store.forget([5]) and same(store_at(one), {2: other})


def read_as(pair: NewPair, subwords: int, ids: int) -> NewPair:
    return replace(pair, read_as=ReadAs(subwords, ids))


def test_texts_that_the_model_reads_alike_are_one_source(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where only some pairs say what it reads, as those of an earlier version do not."""
    one, other, alone = read_as(new_pair(1), 7, 70), read_as(new_pair(2), 7, 70), read_as(new_pair(3), 8, 70)
    store = store_at(folder)
    first, second, third = store.learn([one, other, alone])
    assert second.replaced is not None and (second.replaced.id, second.replaced.replaced_by) == (
        first.id,
        second.id,
    )
    for found in (store, store_at(folder)):
        assert same(found, {2: new_pair(2), 3: new_pair(3)}, {1: new_pair(1)}) and not third.replaced
        counting = found.counting(ReadAs(7, 0))
        assert counting is not None and counting.id == 2 and found.counting(ReadAs(9, 70)) is None
    assert [pair.id for pair in store.forget([2])] == [1] and same(
        store_at(folder), {1: new_pair(1), 3: new_pair(3)}
    )

    store.learn([new_pair(4), new_pair(5)])  # of an earlier version
    store.close()
    reader, read = store_at(folder), dict.fromkeys((new_pair(n).source for n in (4, 5)), ReadAs(7, 70))
    before = contents(folder)
    reader.identify(read.__getitem__)
    expected = {3: new_pair(3), 5: new_pair(5)}, {1: new_pair(1), 4: new_pair(4)}
    assert same(reader, *expected) and contents(folder) == before
    reader.lock()
    reader.close()
    assert same(store_at(folder), *expected) and not caplog.text


def test_a_pair_that_was_replaced_before_it_had_phrases_gets_them_when_it_is_brought_back(
    with_phrases: Path,
) -> None:
    store, make = store_at(with_phrases), maker(with_phrases)
    store.learn([new_pair(1), make(1, 1)])
    store.learn([make(1)])
    assert same(store, {1: make(1)}, {2: make(1, 1)}) and same(
        store_at(with_phrases), {1: make(1)}, {2: make(1, 1)}
    )


@pytest.mark.parametrize(
    "name", [LEARNED, f"{LEARNED}/lock", f"{LEARNED}/0.journal", f"{LEARNED}/0.journal.partial"]
)
def test_nothing_is_written_through_symbolic_links(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    if name != LEARNED:
        (folder / LEARNED).mkdir()
    victim = tmp_path / "elsewhere" / "lock"  # what a link to the folder would overwrite
    victim.write_text("mine")
    (folder / name).symlink_to(victim if name != LEARNED else victim.parent)
    if name.endswith("partial"):
        assert ids_of(store_at(folder).learn([new_pair(1)])) == [1] and same(
            store_at(folder), {1: new_pair(1)}
        )
    else:
        with pytest.raises(
            DatastoreError, match=f"{name} is a symbolic link, which nothing is written|is damaged from"
        ):
            store_at(folder).learn([new_pair(1)])
    assert victim.read_text() == "mine" and [path.name for path in victim.parent.iterdir()] == ["lock"]


@pytest.mark.parametrize("name", ["lock", "0.journal"])
@pytest.mark.parametrize("kind", ["hard link", "pipe", "folder"])
def test_what_is_written_to_is_a_file_of_its_own(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    learned_one_by_one(folder, 1)
    path, kept = folder / LEARNED / name, tmp_path / "kept"
    before = path.read_bytes()
    path.rename(kept)
    {"hard link": lambda: path.hardlink_to(kept), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    with pytest.raises(
        DatastoreError, match=f"{name} is (a hard link, which .*put a copy|no file, and .*move it away)"
    ):
        store_at(folder).learn([new_pair(2)])
    assert kept.read_bytes() == before
    if kind == "hard link":
        assert same(store_at(folder), {1: new_pair(1)})  # it may be read


def test_damage_of_any_kind_is_harmless_refused_or_told(
    folder: Path, with_phrases: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost where it hits what the journal and its phrases belong to, which is there twice."""
    for one in (folder, with_phrases):
        assert damage_journals(one, 60, rng)["told, back"] > 0
    assert "0.journal: 1 record is missing, " in caplog.text


def test_a_forgotten_pair_stays_forgotten_where_one_of_its_records_is_damaged(folder: Path) -> None:
    store = store_at(folder)
    store.learn([new_pair(1), new_pair(2)])
    store.forget([1])
    store.learn([new_pair(3)])
    store.close()
    whole, journal = store.path.read_bytes(), Journal(store.path)
    first, second = (journal.end for record in journal.read() if record[0] == Kind.FORGOTTEN)
    for end in (first, second):
        store.path.write_bytes(whole[: end - 1] + b"?" + whole[end:])
        found = store_at(folder)
        assert found.damage and list(found.pairs) == [2, 3]
    store.path.write_bytes(whole[: first - 5] + b"?" * (second - first) + whole[second - 5 :])
    found = store_at(folder)
    assert found.doubtful == [1, 2] and list(found.pairs) == [1, 2, 3]
    assert (
        "a forgotten pair may count again: see 1, 2, learned before the damage, with fairseq-ccpr mem"
        in found.damage
    )


def test_what_was_learned_is_for_its_owner_alone_unless_the_folder_says_otherwise(folder: Path) -> None:
    for others, mode in ((None, 0o600), (0o750, 0o640)):
        if others is not None:
            (folder / LEARNED).chmod(others)
        learned_one_by_one(folder, 1)
        path = journal_path(folder, 0)
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        store = store_at(folder)
        store.lock()
        store.close()
        written = [path, *path.parent.glob("*damaged*")][: None if others is None else 1]
        assert len(written) >= 1 and {S_IMODE(one.stat().st_mode) for one in written} == {mode}
        assert S_IMODE(path.parent.stat().st_mode) == (others or 0o700)
