"""Compacting while a translator keeps working: nothing that comes meanwhile is lost, and no more is left than usual."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.building.live_compact import LiveCompaction
from fairseq_ccpr.datastore.learned import LEARNED
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.text import TextDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.text.pairs import read_pairs
from tests.building.test_compacting import find_anywhere
from tests.helpers import call, contents, files_up_to, refused, write_lines
from tests.killing import count_text, index_again
from tests.small_models import World, build
from tests.test_child_process import FORKED, running

SHORT: dict[str, Any] = {"max_len_b": 45, "device": "cpu", "tokens_temperature": 5}
KEEN: dict[str, Any] = {**SHORT, "tokens_lambda": 0.95, "tokens_k": 4, "tokens_temperature": 0.5}


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


def before_it_is_adopted(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something when the copy is compacted, and not yet the datastore's next generation."""
    compact = LiveCompaction._compact

    def and_then(self: LiveCompaction, copy: Path) -> bool:
        done = compact(self, copy)
        work()
        return done

    monkeypatch.setattr(LiveCompaction, "_compact", and_then)


def texts(translator: Translator, sentences: list[str]) -> list[tuple[str, tuple[float, ...]]]:
    return [
        (one.text, tuple(round(s, 3) for s in one.token_scores)) for one in translator.translate(sentences)
    ]


def test_what_comes_meanwhile_is_there_afterwards(
    store: Path, rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator(datastore=store, **KEEN)
    learned = translator.learn_all(rows[:6])
    assert [one.id for one in learned if not isinstance(one, str)] == [1, 2, 3, 4, 5, 6]
    translator.forget(2)
    sentences = [source for source, _ in rows[:10]]
    begun = translator.ensemble.now().find(TokenMemory)  # type: ignore[union-attr]
    assert begun is not None
    states = torch.randn(3, 32)
    found = begun.searched.search(states, 8)
    before: list[Any] = []

    def meanwhile() -> None:
        assert (
            translator.learn(*rows[6]).id == 7
            and translator.learn(*rows[7]).id == 8
            and translator.learn(*rows[0]).id == 1
        )
        translator.forget(3, 7)
        assert translator.learn(rows[4][0], rows[8][1]).replaced == translator.memory(rows[4][1])[0]
        before.extend(texts(translator, sentences))

    before_it_is_adopted(monkeypatch, meanwhile)
    assert translator.compact()
    assert texts(translator, sentences) == before == texts(Translator(datastore=store, **KEEN), sentences)
    assert [(one.id, one.count) for one in translator.memory()] == [
        (9, 1),
        (8, 1),
        (6, 1),
        (5, 1),
        (4, 1),
        (1, 2),
    ]
    assert [one.replaced_by for one in translator.memory()] == [None, None, None, 9, None, None]
    assert all(map(torch.equal, begun.searched.search(states, 8)[:3], found[:3]))  # with files that are gone
    section = TokenDatastore(store).section
    assert section.generation == 1 and [one.name for one in section.sources] == ["store", "store-learnt"]
    assert {path.name for path in store.iterdir()} == {LEARNED, "manifest.json", "preprocessing", "token-1"}
    assert not find_anywhere(store, rows[1][0].encode(), rows[1][1].encode())
    learned = {
        n.learned for one in translator.explain(sentences).sentences for t in one.tokens for n in t.neighbours
    }
    assert {8, 6, 1} <= learned and not {2, 3, 5, 7} & learned
    # it still has the right to write, and does
    refused(call("compact", store, "--quiet", check=False), "is being written to by process")
    assert translator.learn(*rows[9]).id == 10 and texts(translator, sentences)[9][0] == rows[9][1]
    translator.close()
    call("compact", store, "--quiet", "--cpu")
    assert not find_anywhere(store, rows[2][0].encode(), rows[6][1].encode())
    assert "health         good" in call("inspect", store).stdout


@pytest.mark.full
def test_what_is_learned_after_a_failure_at_the_end_is_kept(
    store: Path, rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new part was in force already; there is no memory left to search it."""
    translator = Translator(datastore=store, **KEEN)
    translator.learn(*rows[0])
    made = LiveCompaction.__init__

    def without_memory(self: LiveCompaction, memory: Any, open_retriever: Any) -> None:
        def fail(datastore: TokenDatastore) -> Any:
            raise MemoryError

        made(self, memory, fail)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(LiveCompaction, "__init__", without_memory)
        translator.compact()
    translator.learn(*rows[1])
    assert translator.compact() and TokenDatastore(store).section.generation == 1
    translator.close()
    with Translator(datastore=store, **KEEN) as again:
        assert [one.id for one in again.memory()] == [2, 1]


def test_what_is_published_meanwhile_stays(
    store: Path, rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator(datastore=store, **SHORT)
    translator.learn(*rows[0])
    write_lines(store.parent / "text", *(" ".join(map(str, range(4, 10 + n))) for n in range(20)))
    before_it_is_adopted(monkeypatch, lambda: count_text(store))
    assert translator.compact()
    manifest = Manifest.read(store)
    assert manifest.token is not None and manifest.text is not None and manifest.token.generation == 1
    assert not TextDatastore(store).find_damage()


@pytest.mark.full
def test_an_index_that_is_replaced_meanwhile_stays_and_so_does_what_was_learned(
    store: Path, rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator(datastore=store, **SHORT)
    translator.learn(*rows[0])
    with (
        monkeypatch.context() as patch,
        pytest.raises(DatastoreError, match="by another process meanwhile, and stays"),
    ):
        before_it_is_adopted(patch, lambda: index_again(store))
        translator.compact()
    section = TokenDatastore(store).section
    assert (
        section.index.factory == "IVF4,Flat" and section.generation == 0 and not list(store.glob("*.partial"))
    )
    assert translator.learn(*rows[1]).id == 2 and translator.compact()  # from that index on
    section = TokenDatastore(store).section
    assert (section.index.factory, section.generation) == ("IVF4,Flat", 1) and len(translator.memory()) == 2


@pytest.mark.full
def test_it_ends_with_a_program_that_is_killed(store: Path, rows: list[tuple[str, str]]) -> None:
    def compact() -> None:
        translator = Translator(datastore=store, **SHORT)
        translator.learn(*rows[0])
        thread = threading.Thread(target=translator.compact)  # as in a server
        thread.start()
        thread.join()

    program = FORKED.Process(target=compact)
    program.start()
    assert program.pid
    tasks = Path(f"/proc/{program.pid}/task")
    while not (begun := [one for task in tasks.glob("*/children") for one in task.read_text().split()]):
        time.sleep(0.01)
    program.kill()
    program.join()
    for _ in range(100):
        if not any(running(int(one)) for one in begun):
            break
        time.sleep(0.02)
    assert not any(running(int(one)) for one in begun)
    call("compact", store, "--quiet", "--cpu")
    assert TokenDatastore(store).section.generation == 1 and not list(store.glob("*.partial"))


def test_a_full_disk_changes_nothing(store: Path, rows: list[tuple[str, str]]) -> None:
    translator = Translator(datastore=store, **SHORT)
    translator.learn(*rows[0])
    before = contents(store)
    with files_up_to(len(before["token/keys.npy"]) // 2), pytest.raises(DatastoreError, match="as it was"):
        translator.compact()
    assert contents(store) == before and translator.learn(*rows[1]).id == 2


def test_what_is_on_another_disk_is_refused_in_a_true_sentence(
    store: Path, rows: list[tuple[str, str]], tmp_path: Path
) -> None:
    translator = Translator(datastore=store, **SHORT)
    translator.learn(*rows[0])
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as other:
        shutil.move(store / "token", other)
        (store / "token").symlink_to(Path(other) / "token")
        before, sentence = (
            contents(store),
            r"store/token is a symbolic link, and compacting replaces it: move it into",
        )
        with pytest.raises(DatastoreError, match=sentence):
            translator.compact()
        translator.close()
        refused(call("compact", store, "--quiet", check=False), sentence)
        assert contents(store) == before and not list(store.glob("*.partial"))


def test_it_ends_when_told(store: Path, rows: list[tuple[str, str]]) -> None:
    translator = Translator(datastore=store, **SHORT)
    translator.learn(*rows[0])
    before, done = contents(store), []
    thread = threading.Thread(target=lambda: done.append(translator.compact()))
    thread.start()
    while not any(store.glob("*.partial")):
        pass
    translator.close()
    thread.join()
    assert done == [False] and contents(store) == before
    call("compact", store, "--quiet", "--cpu")
    assert TokenDatastore(store).section.generation == 1


def test_without_a_memory_there_is_nothing_to_compact(world: World) -> None:
    with pytest.raises(ConfigurationError, match="learning needs a token datastore"):
        Translator(world.model, data=world.data_bin, device="cpu").compact()
