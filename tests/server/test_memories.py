"""A server with three datastores of one model: chosen by name, opened by keys, learning into one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from fairseq_ccpr import Translator
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.server.access import read_keys
from fairseq_ccpr.text.pairs import read_pairs
from tests.server.conftest import KEEN, Served, served
from tests.small_models import World
from tests.test_memories import make_stores

OWNER, SHOP = "the owner's key", "the key of a shop"
SEVERAL = "the parameter memory has 2 names: expected one, several are for translation"


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("memories")
    (folder / "keys").write_text(f"{OWNER}\n{SHOP}\tbikes, empty\n")
    stores = make_stores(world, folder)
    with served(
        Translator(datastore=stores, **KEEN | {"max_len_b": 45}), keys=read_keys(folder / "keys", stores)
    ) as one:
        yield one


def test_requests_name_memories(server: Served, world: World, sentences: list[str]) -> None:
    for memory in (["cars"], ["bikes"], ["bikes", "cars"], ["cars", "empty", "bikes"]):
        wanted = [one.text for one in server.translator.translate(sentences, memory=memory)]
        sent = {"q": sentences, "api_key": OWNER, "memory": ",".join(memory)}
        assert server.ask("/translate", "POST", **sent) == (200, {"translatedText": wanted})
    for key, first in ((OWNER, "cars"), (SHOP, "bikes")):
        wanted = [one.text for one in server.translator.translate(sentences, memory=[first])]
        sent = {"q": sentences, "api_key": key}
        assert server.ask("/translate", "POST", **sent) == (200, {"translatedText": wanted}), (
            "the first it opens"
        )
    status, explained = server.ask("/explain", "POST", q=sentences[0], api_key=OWNER, memory="bikes")
    assert status == 200 and explained["signature"] == server.translator["bikes"].signature


def test_one_memory_learns(server: Served, world: World) -> None:
    (source, target), (_, other) = list(read_pairs(world.folder / "test.tsv"))[:2]

    def ask(path: str, method: str = "POST", **sent: str) -> dict[str, object]:
        status, answer = server.ask(path, method, api_key=OWNER, **sent)
        assert status == 200, answer
        return answer

    def translated(*memory: str) -> object:
        return ask("/translate", q=source, memory=",".join(memory))["translatedText"]

    before = translated("cars")
    number = ask("/learn", q=source, s=target, memory="bikes")["id"]
    ask("/learn", q=source, s=other, memory="empty")
    assert (
        translated("bikes") == translated("bikes", "empty") == translated("cars", "bikes", "empty") == target
    )
    assert translated("empty") == translated("empty", "bikes") == other
    assert translated("cars") == before
    bearer = {"Authorization": f"Bearer {OWNER}"}
    found = {
        name: server.ask(f"/memory?memory={name}", headers=bearer)[1]["found"]
        for name in server.translator.named
    }
    assert found == {"cars": 0, "bikes": 1, "empty": 1}
    (sentence,) = ask("/sentences", q=source, memory="empty,bikes")["sentences"]  # type: ignore[misc]
    assert sentence["learned"]["target"] == sentence["translation"] == other
    assert server.ask(f"/memory/{number}", "DELETE", bearer)[0] == 404, "that of the first memory"
    assert server.ask(f"/memory/{number}?memory=bikes", "DELETE", bearer)[0] == 200
    assert translated("cars", "bikes") != target


def test_rows_of_a_file_go_into_the_memory_named(server: Served, world: World) -> None:
    source, target = list(read_pairs(world.folder / "test.tsv"))[3]
    bearer, body = {"Authorization": f"Bearer {SHOP}"}, gzip.compress(f"{source}\t{target}\n".encode())
    status, _ = server.send("/memory?name=a.tsv.gz&memory=cars", body, bearer)
    assert status == 403 and not server.translator["cars"].memory()
    learned = requests.post(f"{server.url}/memory?name=a.tsv.gz", body, headers=bearer, timeout=60)
    assert json.loads(learned.text.splitlines()[-1])["learned"] == 1
    assert [one.target for one in server.translator["bikes"].memory()] == [target]


@pytest.mark.parametrize(
    ("path", "key", "memory", "status", "sentence"),
    [
        ("/translate", OWNER, "trucks", 404, "there is no memory trucks: there is cars and bikes and empty"),
        ("/translate", SHOP, "bikes,boats", 404, "there is no memory boats: there is bikes and empty"),
        ("/translate", SHOP, "bikes,cars", 403, "the API key does not open the memory cars: it opens bikes and empty"),
        ("/learn", SHOP, "cars", 403, "the API key does not open the memory cars: it opens bikes and empty"),
        ("/learn", OWNER, "cars,bikes", 400, SEVERAL),
        ("/explain", OWNER, "cars,bikes", 400, SEVERAL),
        ("/translate", OWNER, 3, 400, "the parameter memory is a number: expected a text"),
    ],
)  # fmt: skip
def test_what_is_refused(
    server: Served, path: str, key: str, memory: object, status: int, sentence: str
) -> None:
    sent = {"q": "ja", "s": "yes", "api_key": key, "memory": memory, "opened": ["cars"]}
    assert server.ask(path, "POST", **sent) == (status, {"error": sentence})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("short", ", line 1, has 5 characters: a key is one line of 8 or more"),
        ("a good key\ncars", ", line 2, has 4 characters"),
        ("a good key\na good key\tcars", ", line 2, is there twice"),
        ("a good key\ttrucks", ", line 1, opens the memory 'trucks', and the server has cars and bikes"),
        ("a good key\t ,", ", line 1, opens the memory ''"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigurationError, match=f"--api-key-file .*{sentence}"):
        read_keys(tmp_path / "keys", ["cars", "bikes"])


def test_a_session_has_a_memory_of_its_own(server: Served, world: World) -> None:
    (source, target), (_, other) = list(read_pairs(world.folder / "test.tsv"))[5:7]

    def ask(path: str, method: str = "POST", key: str = OWNER, **sent: object) -> dict[str, object]:
        status, answer = server.ask(path, method, {"Authorization": f"Bearer {key}"}, **sent)
        return answer if status == 200 else {"status": status} | answer

    def translated(**sent: object) -> object:
        return ask("/translate", q=source, **sent)["translatedText"]

    before = translated()
    assert translated(session="new") == before, "where nothing was confirmed"
    ask("/learn", q=source, s=target, memory="bikes")
    number = ask("/learn", q=source, s=other, session="a doc")["id"]
    for memory in ("cars", "bikes", "bikes,cars"):
        assert translated(memory=memory, session="a doc") == other
    found = ask("/v2/translate", text=source, target_lang="EN", session="a doc")["translations"]
    assert (
        found[0]["text"]
        == ask("/sentences", q=source, session="a doc")["sentences"][0]["translation"]
        == other
    )  # type: ignore[index]
    assert translated() == translated(session="another") == before and translated(memory="bikes") == target
    assert translated(session="a doc", key=SHOP, memory="bikes") == target, "of another key"
    listed = ask("/memory?session=a%20doc", "GET")
    assert listed["found"] == 1 and ask("/memory", "GET")["found"] == 0
    assert (
        ask("/explain", q=source, session="a doc")["error"] == "a session is not explained: leave session out"
    )

    ask(f"/memory/{number}?session=a%20doc", "DELETE")
    assert translated(session="a doc") == before
    ask("/learn", q=source, s=target, session="a doc")
    ask("/learn", q=source, s=other, session="a doc")
    assert ask("/session/a%20doc", "DELETE") == {"success": True, "pairs": 1, "kept": 0}
    assert translated(session="a doc") == before
    ask("/learn", q=source, s=other, session="a doc")
    assert ask("/session/a%20doc?keep=1&memory=empty", "DELETE") == {"success": True, "pairs": 1, "kept": 1}
    assert translated(memory="empty") == other and translated(session="a doc") == before
