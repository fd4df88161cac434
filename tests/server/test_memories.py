"""A server with three datastores of one model: chosen by name, opened by keys, learning into one; sessions."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from fairseq_ccpr import Translator
from fairseq_ccpr.cli.serve import read_keys
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.server import service
from fairseq_ccpr.text.pairs import read_pairs
from tests.server.conftest import KEEN, Served, served
from tests.small_models import World
from tests.test_memories import make_stores

OWNER, SHOP = "the owner's key", "the key of a shop"
CLOSED = "there is no memory cars: there is bikes and empty"
SEVERAL = "the parameter memory has 2 names: expected one, several are for translation"


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("memories")
    (folder / "keys").write_text(f"{OWNER}\n{SHOP}\tbikes, empty\tAnna Muster\nthe owner's key other\n")
    stores = make_stores(world, folder)
    translator = Translator(datastore=stores, **KEEN | {"max_len_b": 45})
    keys, authors = read_keys(folder / "keys", stores)
    with served(translator, keys=keys, authors=authors) as one:
        yield one


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


def ask(server: Served, path: str, method: str = "POST", key: str = OWNER, **sent: object) -> Any:
    status, answer = server.ask(path, method, {"Authorization": f"Bearer {key}"}, **sent)
    assert status == 200, answer
    return answer


def test_requests_name_memories(server: Served, sentences: list[str]) -> None:
    found = []
    for key, given, memory in (
        (OWNER, {}, ["cars"]), (SHOP, {}, ["bikes"]), (SHOP, {"memory": ","}, ["bikes"]),  # the first that they open
        *((OWNER, {"memory": names}, names.split(",")) for names in ("bikes", "bikes,cars", "cars,empty,bikes")),
    ):  # fmt: skip
        wanted = [one.text for one in server.translator.translate(sentences, memory=memory)]
        assert ask(server, "/translate", key=key, q=sentences, **given)["translatedText"] == wanted
        found.append(wanted)
    assert found[0] != found[1] == found[2] == found[3] and found[4] not in found[:4]
    explained = ask(server, "/explain", q=sentences[0], memory="bikes")
    assert explained["signature"] == server.translator["bikes"].signature


def test_one_memory_learns(server: Served, pairs: list[tuple[str, str]]) -> None:
    (source, target), (_, other), _, (another, text), *_ = pairs

    def translated(memory: str) -> str:
        return ask(server, "/translate", q=source, memory=memory)["translatedText"]

    before = translated("cars")
    learned = ask(server, "/learn", q=source, s=target, memory="bikes")
    number = learned["id"]
    assert learned["memory"] == "bikes"
    ask(server, "/learn", q=source, s=other, memory="empty")
    assert {*map(translated, ("bikes", "bikes,empty", "cars,bikes,empty"))} == {target}
    assert {*map(translated, ("empty", "empty,bikes"))} == {other} and translated("cars") == before
    (sentence,) = ask(server, "/sentences", q=source, memory="empty,bikes")["sentences"]
    assert sentence["learned"]["target"] == sentence["translation"] == other
    assert sentence["learned"]["memory"] == "empty", "whose id it is"
    found = [ask(server, f"/memory?memory={name}", "GET")["found"] for name in server.translator.named]
    assert found == [0, 1, 1]
    bearer, body = {"Authorization": f"Bearer {SHOP}"}, gzip.compress(f"{another}\t{text}\n".encode())
    assert server.send("/memory?name=a.tsv.gz&memory=cars", body, bearer) == (404, {"error": CLOSED})
    learned = requests.post(f"{server.url}/memory?name=a.tsv.gz&api_key=", body, headers=bearer, timeout=60)
    assert '"learned": 1' in learned.text
    assert [one.target for one in server.translator["bikes"].memory()] == [text, target]
    assert server.ask(f"/memory/{number}", "DELETE", {"Authorization": f"Bearer {OWNER}"})[0] == 404
    ask(server, "/learn", q=source, s=other, memory="bikes")
    (listed, *_) = ask(server, "/memory?memory=bikes", "GET")["pairs"]
    (restored,) = ask(server, f"/memory/{listed['id']}?memory=bikes", "DELETE")["restored"]
    assert (restored["id"], restored["memory"], listed["memory"]) == (number, "bikes", "bikes")
    ask(server, f"/memory/{number}?memory=bikes", "DELETE")
    assert translated("cars,bikes") != target


def test_a_session_has_a_memory_of_its_own(server: Served, pairs: list[tuple[str, str]]) -> None:
    (source, target), (_, other) = pairs[5:7]

    def translated(**sent: object) -> str:
        return ask(server, "/translate", q=source, **sent)["translatedText"]

    before = translated()
    assert translated(session="new") == before, "where nothing was confirmed"
    ask(server, "/learn", q=source, s=target, memory="bikes")
    learned = ask(server, "/learn", q=source, s=other, session="a doc", memory="cars,bikes")
    number = learned["id"]
    assert learned["session"] == "a doc" and "memory" not in learned
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
    ended = {"success": True, "pairs": 1, "kept": 0, "skipped": {}}
    assert ask(server, "/session/a%20doc", "DELETE") == ended and translated(session="a doc") == before
    ask(server, "/learn", q=source, s=other, session="a doc")
    assert ask(server, "/session/a%20doc?keep=1&memory=empty", "DELETE") == ended | {"kept": 1}
    assert translated(memory="empty") == other and translated(session="a doc") == before


def test_a_session_is_of_its_key_and_only_learning_begins_it(
    server: Served, pairs: list[tuple[str, str]]
) -> None:
    source, target = pairs[8]
    ask(server, "/learn", q=source, s=target, session="other a/b.docx")
    (name,) = server.translator._sessions
    assert ask(server, "/memory?session=other a/b.docx".replace(" ", "%20"), "GET")["found"] == 1
    none = {"error": "there is no session a/b.docx: it begins when it first learns"}
    for path, method in (
        ("/memory?session=a/b.docx", "GET"), ("/memory.tmx?session=a/b.docx", "GET"), ("/session/a/b.docx", "DELETE"),
        ("/memory/1?session=a/b.docx", "DELETE"),
    ):  # fmt: skip
        for key in (OWNER, "the owner's key other", SHOP):
            assert server.ask(path, method, {"Authorization": f"Bearer {key}"}) == (404, none)
    refused = {"q": source, "s": " ", "session": "a/b.docx", "api_key": OWNER}
    assert server.ask("/learn", "POST", **refused)[1] == {
        "error": "the pair was not learned: its target is empty"
    }
    assert [*server.translator._sessions] == [name]
    ask(server, "/session/other%20a%2Fb.docx", "DELETE")
    assert not server.translator._sessions


def test_terms_of_a_session_come_first_in_it(server: Served) -> None:
    source, session = "Wo ist das Haus?", {"session": "terms", "term": 1}

    def translated(**sent: object) -> str:
        return ask(server, "/translate", q=source, **sent)["translatedText"]

    before = translated()
    learned = [ask(server, "/learn", q="Haus", s=term, **session) for term in ("palace", "ark")]
    assert "ark" in translated(session="terms") and "palace" not in translated(session="terms")
    assert translated() == translated(session="another") == before and "ark" not in before
    pairs = ask(server, "/memory?session=terms", "GET")["pairs"]
    assert [(one["target"], one["term"]) for one in pairs] == [("ark", True), ("palace", True)]
    ask(server, f"/memory/{learned[1]['id']}?session=terms", "DELETE")
    assert "palace" in translated(session="terms"), "which counts again"
    other = ask(server, "/learn", q="HAUS", s="ark", **session)
    assert "ark" in translated(session="terms"), "the later one, however it is written"
    ask(server, f"/memory/{other['id']}?session=terms", "DELETE")
    ask(server, "/learn", q="Haus", s="house", session="terms")
    assert "palace" not in translated(session="terms"), "what replaced it is no term"
    sent = {"q": "Haus", "s": "house ☃", "api_key": OWNER, "term": True}
    for given, sentence in (
        ({}, "a term is learned in a session: name one, or give the server a --glossary"),
        (
            {"session": "terms", "q": "ein " * 13},
            f"the pair was not learned: '{('ein ' * 13).strip()}' has 13 words, expected 1 to 12: learn it without term, as "
            "a sentence",
        ),
        (
            {"session": "terms"},
            "the pair was not learned: 'house ☃' has characters that the model cannot write: learn it without term, as a "
            "sentence",
        ),
        (
            {"session": "terms", "s": "house " * 49},
            f"the pair was not learned: '{('house ' * 49)[:60]}' has 147 subwords, expected at most 48: learn it without "
            "term, as a sentence",
        ),
        ({"session": "terms", "s": " "}, "the pair was not learned: its target is empty"),
    ):
        assert server.ask("/learn", "POST", **sent | given) == (400, {"error": sentence})
    assert "ark" not in translated(session="terms")
    assert ask(server, "/session/terms?keep=1&memory=empty", "DELETE")["kept"] == 1
    assert "palace" not in translated(session="terms")


def test_a_session_takes_files_and_is_kept_in_batches(
    server: Served, pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bearer, address = {"Authorization": f"Bearer {OWNER}"}, f"{server.url}/memory?name=a.tsv&session=a"
    lines = [f"{source}\t{target}\n" for source, target in pairs]
    monkeypatch.setattr(service, "MOST_OF_SESSION", len(pairs))
    monkeypatch.setattr(service, "ROUND_SENTENCES", 8)
    body = "".join(lines).encode()
    assert '"learned": 20' in requests.post(address, body, headers=bearer, timeout=60).text
    full = "a session has at most 20 pairs: end it"
    assert full in requests.post(address, lines[0].encode(), headers=bearer, timeout=60).text
    sent = {"q": "ja", "s": "yes", "session": "a"}
    assert server.ask("/learn", "POST", bearer, **sent) == (400, {"error": full})
    ended = ask(server, "/session/a?keep=1&memory=empty", "DELETE")
    assert ended == {"success": True, "pairs": 20, "kept": 20, "skipped": {}}
    after = {one.target for one in server.translator["empty"].memory() if one.replaced_by is None}
    assert after >= {target for _, target in pairs}


def test_what_is_refused(server: Served) -> None:
    for path, key, given, status, sentence in (
        ("/translate", OWNER, {"memory": "trucks"}, 404, "there is no memory trucks: there is cars and bikes and empty"),
        ("/translate", SHOP, {"memory": "bikes,boats"}, 404, "there is no memory boats: there is bikes and empty"),
        *(
            (path, SHOP, {"memory": "cars", "text": "ja", "target_lang": "en"}, 404, CLOSED)
            for path in ("/translate", "/learn", "/sentences", "/v2/translate", "/explain")
        ),
        ("/learn", OWNER, {"memory": "cars,bikes"}, 400, SEVERAL),
        ("/explain", OWNER, {"memory": "cars,bikes"}, 400, SEVERAL),
        ("/explain", OWNER, {"session": "a doc"}, 400, "a session is not explained: leave session out"),
        ("/translate", OWNER, {"memory": 3}, 400, "the parameter memory is a number: expected a text"),
    ):  # fmt: skip
        sent = {"q": "ja", "s": "yes", "api_key": key, "opened": ["cars"], "owner": OWNER} | given
        found, answer = server.ask(path, "POST", **sent)
        assert (found, [*answer.values()]) == (status, [sentence])
    for path, method in (("/memory", "GET"), ("/memory.tmx", "GET"), ("/memory/1", "DELETE")):
        refused = server.ask(f"{path}?memory=cars", method, {"Authorization": f"Bearer {SHOP}"})
        assert refused == (404, {"error": CLOSED})


def test_pairs_say_who_has_learned_them_and_when(server: Served) -> None:
    for key, author in ((SHOP, "Anna Muster"), (OWNER, "")):
        learned = ask(server, "/learn", key=key, q="Wer ist da?", s=f"Who is {author}?", memory="bikes")
        (pair, *_) = ask(server, "/memory?memory=bikes&q=Wer", "GET", key)["pairs"]
        assert (
            pair["id"] == learned["id"] and pair["author"] == author and 0 <= time.time() - pair["time"] < 60
        )
    ask(server, "/learn", key=SHOP, q="Wer ist da?", s="Who is ?", memory="bikes")  # again, by another
    (pair, *_) = (one for one in server.translator["bikes"].memory("Wer") if one.replaced_by is None)
    assert (pair.count, pair.author) == (2, "Anna Muster")
    server.translator["bikes"].forget(*(one.id for one in server.translator["bikes"].memory("Wer")))


def test_an_ensemble_has_no_sessions(world: World) -> None:
    with served(Translator(f"{world.model}:{world.model}", datastore=world.datastore, **KEEN)) as server:
        sentence = "a session is for one model, and --path names several: leave session out"
        assert server.ask("/translate", "POST", q="ja", session="a") == (400, {"error": sentence})


def test_keys_that_cannot_be(tmp_path: Path) -> None:
    for text, sentence in (
        ("short", "line 1, has 5 characters: a key is one line of 8 or more"),
        ("a good key\ncars", "line 2, has 4 characters"),
        ("a good key\na good key\tcars", "line 2, is there twice"),
        ("a good key\ttrucks", "line 1, opens the memory 'trucks', and the server has cars and bikes"),
        ("a good key\t ,", "line 1, opens the memory ''"),
        ("another key\na good key\t", "line 2, opens the memory ''"),
        ("a good key\t\n", "line 1, opens the memory ''"),
        ("a good key\t\tbikes", "line 1, opens the memory ''"),
        ("a good key\tbikes\tAn\u202ena", r"line 1, the author is 'An\\u202ena': give a name of at most 100"),
    ):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(ConfigurationError, match=f"--api-key-file .*, {sentence}"):
            read_keys(tmp_path / "keys", ["cars", "bikes"])
