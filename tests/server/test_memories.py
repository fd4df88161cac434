"""A server with three datastores of one model: chosen by name, opened by keys, learning into one; sessions."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
CLOSED = "the API key does not open the memory cars: it opens bikes and empty"
SEVERAL = "the parameter memory has 2 names: expected one, several are for translation"


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("memories")
    (folder / "keys").write_text(f"{OWNER}\n{SHOP}\tbikes, empty\n")
    stores = make_stores(world, folder)
    translator = Translator(datastore=stores, **KEEN | {"max_len_b": 45})
    with served(translator, keys=read_keys(folder / "keys", stores)) as one:
        yield one


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


def ask(server: Served, path: str, method: str = "POST", key: str = OWNER, **sent: object) -> Any:
    status, answer = server.ask(path, method, {"Authorization": f"Bearer {key}"}, **sent)
    assert status == 200, answer
    return answer


def test_requests_name_memories(server: Served, sentences: list[str]) -> None:
    for key, given, memory in (
        (OWNER, {}, ["cars"]), (SHOP, {}, ["bikes"]), (SHOP, {"memory": ","}, ["bikes"]),  # the first that they open
        *((OWNER, {"memory": names}, names.split(",")) for names in ("bikes", "bikes,cars", "cars,empty,bikes")),
    ):  # fmt: skip
        wanted = [one.text for one in server.translator.translate(sentences, memory=memory)]
        assert ask(server, "/translate", key=key, q=sentences, **given)["translatedText"] == wanted
    explained = ask(server, "/explain", q=sentences[0], memory="bikes")
    assert explained["signature"] == server.translator["bikes"].signature


def test_one_memory_learns(server: Served, pairs: list[tuple[str, str]]) -> None:
    (source, target), (_, other), _, (another, text), *_ = pairs

    def translated(memory: str) -> str:
        return ask(server, "/translate", q=source, memory=memory)["translatedText"]

    before = translated("cars")
    number = ask(server, "/learn", q=source, s=target, memory="bikes")["id"]
    ask(server, "/learn", q=source, s=other, memory="empty")
    assert {*map(translated, ("bikes", "bikes,empty", "cars,bikes,empty"))} == {target}
    assert {*map(translated, ("empty", "empty,bikes"))} == {other} and translated("cars") == before
    (sentence,) = ask(server, "/sentences", q=source, memory="empty,bikes")["sentences"]
    assert sentence["learned"]["target"] == sentence["translation"] == other
    found = [ask(server, f"/memory?memory={name}", "GET")["found"] for name in server.translator.named]
    assert found == [0, 1, 1]
    bearer, body = {"Authorization": f"Bearer {SHOP}"}, gzip.compress(f"{another}\t{text}\n".encode())
    assert server.send("/memory?name=a.tsv.gz&memory=cars", body, bearer) == (403, {"error": CLOSED})
    learned = requests.post(f"{server.url}/memory?name=a.tsv.gz", body, headers=bearer, timeout=60)
    assert '"learned": 1' in learned.text
    assert [one.target for one in server.translator["bikes"].memory()] == [text, target]
    assert server.ask(f"/memory/{number}", "DELETE", {"Authorization": f"Bearer {OWNER}"})[0] == 404
    ask(server, f"/memory/{number}?memory=bikes", "DELETE")
    assert translated("cars,bikes") != target


def test_a_session_has_a_memory_of_its_own(server: Served, pairs: list[tuple[str, str]]) -> None:
    (source, target), (_, other) = pairs[5:7]

    def translated(**sent: object) -> str:
        return ask(server, "/translate", q=source, **sent)["translatedText"]

    before = translated()
    assert translated(session="new") == before, "where nothing was confirmed"
    ask(server, "/learn", q=source, s=target, memory="bikes")
    number = ask(server, "/learn", q=source, s=other, session="a doc")["id"]
    assert {translated(memory=memory, session="a doc") for memory in ("cars", "bikes", "bikes,cars")} == {
        other
    }
    (found,) = ask(server, "/v2/translate", text=source, target_lang="EN", session="a doc")["translations"]
    (sentence,) = ask(server, "/sentences", q=source, session="a doc")["sentences"]
    assert found["text"] == sentence["translation"] == sentence["learned"]["target"] == other
    assert translated() == translated(session="another") == before and translated(memory="bikes") == target
    assert translated(session="a doc", key=SHOP, memory="bikes") == target, "of another key"
    found = [ask(server, path, "GET")["found"] for path in ("/memory?session=a%20doc", "/memory")]
    assert found == [1, 0]
    ask(server, f"/memory/{number}?session=a%20doc", "DELETE")
    assert translated(session="a doc") == before
    for text in (target, other):
        ask(server, "/learn", q=source, s=text, session="a doc")
    ended = {"success": True, "pairs": 1, "kept": 0}
    assert ask(server, "/session/a%20doc", "DELETE") == ended and translated(session="a doc") == before
    ask(server, "/learn", q=source, s=other, session="a doc")
    assert ask(server, "/session/a%20doc?keep=1&memory=empty", "DELETE") == ended | {"kept": 1}
    assert translated(memory="empty") == other and translated(session="a doc") == before


def test_what_is_refused(server: Served) -> None:
    for path, key, given, status, sentence in (
        ("/translate", OWNER, {"memory": "trucks"}, 404, "there is no memory trucks: there is cars and bikes and empty"),
        ("/translate", SHOP, {"memory": "bikes,boats"}, 404, "there is no memory boats: there is bikes and empty"),
        ("/translate", SHOP, {"memory": "bikes,cars"}, 403, CLOSED),
        ("/learn", SHOP, {"memory": "cars"}, 403, CLOSED),
        ("/learn", OWNER, {"memory": "cars,bikes"}, 400, SEVERAL),
        ("/explain", OWNER, {"memory": "cars,bikes"}, 400, SEVERAL),
        ("/explain", OWNER, {"session": "a doc"}, 400, "a session is not explained: leave session out"),
        ("/translate", OWNER, {"memory": 3}, 400, "the parameter memory is a number: expected a text"),
    ):  # fmt: skip
        sent = {"q": "ja", "s": "yes", "api_key": key, "opened": ["cars"], "owner": OWNER} | given
        assert server.ask(path, "POST", **sent) == (status, {"error": sentence})


def test_keys_that_cannot_be(tmp_path: Path) -> None:
    for text, sentence in (
        ("short", "line 1, has 5 characters: a key is one line of 8 or more"),
        ("a good key\ncars", "line 2, has 4 characters"),
        ("a good key\na good key\tcars", "line 2, is there twice"),
        ("a good key\ttrucks", "line 1, opens the memory 'trucks', and the server has cars and bikes"),
        ("a good key\t ,", "line 1, opens the memory ''"),
    ):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(ConfigurationError, match=f"--api-key-file .*, {sentence}"):
            read_keys(tmp_path / "keys", ["cars", "bikes"])
