"""Who waits for whom: nobody for a long text, and what is to be learned for no more than the round that has begun."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.inference.learning import learned_memory
from fairseq_ccpr.server import service
from fairseq_ccpr.server import work as working
from fairseq_ccpr.server.work import Work
from fairseq_ccpr.text.pairs import read_pairs
from tests.server.conftest import served
from tests.small_models import World
from tests.test_memories import make_stores


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


@pytest.fixture
def work(new_translator: Callable[[], Translator], monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    monkeypatch.setattr(working, "ROUND_SENTENCES", 4)
    made = Work(new_translator())
    yield made
    made.close()


def in_order(**futures: Future[Any]) -> list[str]:
    """Wait for all; returns their names as they came to an end."""
    ended: list[str] = []
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: ended.append(name))
    assert not wait(futures.values(), timeout=120).not_done
    return ended


def shown(explanation: dict[str, Any]) -> list[Any]:
    return [
        (
            *(one[name] for name in ("number", "source", "translation", "plain")),
            [
                (token["symbol"], explanation["texts"][token["neighbours"][0]["sentence"]])
                for token in one["tokens"]
            ],
        )
        for one in explanation["sentences"]
    ]


def test_a_long_text_keeps_nobody_waiting(work: Work, pairs: list[tuple[str, str]]) -> None:
    sentences = [source for source, _ in pairs[:7]]
    wanted = [one.text for one in work.translator.translate(sentences)]
    long, short = work.translate(sentences * 3), work.translate(sentences[:1])
    assert in_order(long=long, short=short) == ["short", "long"]
    assert [one.text for one in long.result()] == wanted * 3


def test_a_long_text_is_explained_in_turns_and_as_a_whole(
    new_translator: Callable[[], Translator], pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is explained by parts is what it would be at once."""
    monkeypatch.setattr(service, "EXPLAINED", 2)
    sentences = [source for source, _ in pairs[:7]]
    begun, explain = Event(), service.explain_encoded
    with served(new_translator()) as server, ThreadPoolExecutor() as clients:

        def begin_alone(*given: Any, **named: Any) -> Any:
            """Explain the first sentences of the long text when the short one has come and waits."""
            if not begun.is_set():
                begun.set()
                end = time.monotonic() + 60
                while not server.service.work._calls:
                    assert time.monotonic() < end
                    time.sleep(0.01)
            return explain(*given, **named)

        wanted = asdict(server.translator.explain(sentences))
        monkeypatch.setattr(service, "explain_encoded", begin_alone)
        long = clients.submit(server.ask, "/explain", "POST", q="\n".join(sentences))
        assert begun.wait(60)
        short = clients.submit(server.ask, "/explain", "POST", q=sentences[0])
        assert in_order(long=long, short=short) == ["short", "long"]
    _, explained = long.result()
    assert shown(explained) == shown(wanted) and len(explained["texts"]) == len(wanted["texts"])


def test_all_that_is_to_be_learned_counts_before_the_next_round(
    work: Work, pairs: list[tuple[str, str]]
) -> None:
    long = work.translate([source for source, _ in pairs[:20]])
    learned = {
        f"learn{n}": work.call(lambda t, pair=pair: t.learn(*pair)) for n, pair in enumerate(pairs[:3])
    }
    after = work.translate([pairs[2][0]])
    ended = in_order(long=long, **learned, after=after)
    assert set(ended[:3]) == set(learned) and ended[-1] == "long"
    assert after.result()[0].text == pairs[2][1]


def test_a_compaction_that_is_refused_is_told_once(
    both: Path,
    pairs: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(working, "COMPACTED_AT", 1)
    monkeypatch.setattr(working, "SHARE_COMPACTED", 10**9)
    store = shutil.copytree(both, tmp_path / "store")
    work = Work(Translator(datastore=store, device="cpu", max_len_b=25))
    for pair in pairs[:3]:
        work.call(lambda t, pair=pair: t.learn(*pair)).result(60)
        work.translate([pair[0]]).result(60)
    work.close()
    assert caplog.text.count("has phrases as well, and can be compacted while nothing uses it to learn") == 1
    assert "this server does not try again" in caplog.text and "tried again" not in caplog.text


@pytest.mark.full
def test_each_memory_is_compacted_and_let_go(
    world: World, pairs: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working, "COMPACTED_AT", 1)
    monkeypatch.setattr(working, "SHARE_COMPACTED", 10**9)
    stores = make_stores(world, tmp_path)
    work = Work(translator := Translator(datastore=stores, device="cpu", max_len_b=25))
    (source, target), (_, other) = sorted(pairs, key=lambda pair: len(pair[1]))[:2]
    for name, text in (("cars", target), ("bikes", other)):
        work.call(lambda one, name=name, text=text: one[name].learn(source, text)).result(60)
        end = time.monotonic() + 300
        while learned_memory(translator[name]).entries.index.size:  # until they are the datastore's own
            assert time.monotonic() < end
            work.call(lambda one: None).result(60)
            time.sleep(0.5)
        (one,) = work.translate([source], memory=(name,)).result(60)
        assert one.text == text
    work.close()
    for name, text in (("cars", target), ("bikes", other)):
        with Translator(datastore=stores[name], device="cpu") as after:
            assert [one.target for one in after.memory()] == [text]
            after.lock()
