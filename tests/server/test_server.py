"""LibreTranslate's API, by its own client and by hand; learning; what is refused, and that the server outlives it."""

from __future__ import annotations

import gzip
import html
import json
import lzma
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

import pytest
from libretranslatepy import LibreTranslateAPI

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.evaluation.explanation import changes
from fairseq_ccpr.server import service, work
from fairseq_ccpr.server.service import HTML
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.translation_memory import read_memory
from tests.helpers import begin, call, files_up_to, refused
from tests.server.conftest import Served, served
from tests.small_models import World, subword_options

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PARTS = {"Content-Type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="format"\r\n\r\ntext\r\n--b--\r\n'


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


def alone(server: Served, sentence: str) -> str:
    (one,) = server.translator.translate([sentence])
    return one.text


def test_an_unmodified_client_translates(server: Served, pairs: list[tuple[str, str]]) -> None:
    client = LibreTranslateAPI(server.url)
    source = pairs[0][0]
    assert client.translate(source, "de", "en") == alone(server, source)
    assert client.languages() == [
        {"code": "de", "name": "German", "targets": ["en"]}, {"code": "en", "name": "English", "targets": []}
    ]  # fmt: skip
    (detected,) = client.detect(source)
    assert detected["language"] == "de" and detected["confidence"] > 90


def test_texts_lists_lines_and_alternatives(server: Served, pairs: list[tuple[str, str]]) -> None:
    (one, _), (two, _) = pairs[:2]
    first, second = alone(server, one), alone(server, two)
    status, answer = server.ask(
        "/translate", "POST", q=[one, "", f"{one}\n\n {two}"], source="de-AT", target="EN"
    )
    assert status == 200 and answer == {"translatedText": [first, "", f"{first}\n\n {second}"]}
    status, answer = server.ask("/translate", "POST", q=one, source="auto", target="en", alternatives=2)
    assert answer["translatedText"] == first and answer["detectedLanguage"]["language"] == "de"
    assert len(answer["alternatives"]) == 2 and len({first, *answer["alternatives"]}) == 3
    body = urlencode([("q", one), ("q", two), ("source", "de"), ("target", "en")]).encode()
    assert server.send("/translate", body, FORM) == (200, {"translatedText": [first, second]})


def test_forms_in_parts_are_read_as_other_forms(server: Served, pairs: list[tuple[str, str]]) -> None:
    (one, _), (two, _) = pairs[:2]
    part = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    fields = ("q", one), ("q", two), ("source", "de"), ("target", ""), ("format", "text")
    body = "".join(part.format(*field) for field in fields) + "--b--\r\n"
    wanted = server.ask("/translate", "POST", q=[one, two])
    assert server.send("/translate", body.encode(), PARTS) == wanted and len(wanted[1]["translatedText"]) == 2


def test_parameters_that_are_null_or_empty_are_the_defaults(
    server: Served, pairs: list[tuple[str, str]]
) -> None:
    source, names = pairs[0][0], ("source", "target", "format", "alternatives", "api_key")
    wanted = server.ask("/translate", "POST", q=source)
    for empty in (None, ""):
        assert server.ask("/translate", "POST", q=source, **dict.fromkeys(names, empty)) == wanted
    assert server.ask("/translate", "POST", q=source, alternatives=-1) == wanted
    assert (
        server.send("/translate", urlencode({"q": source} | dict.fromkeys(names, "")).encode(), FORM)
        == wanted
    )
    assert server.ask("/memory?limit=&q=") == server.ask("/memory")


def test_languages_are_those_of_clients_however_the_model_calls_them(
    new_translator: Callable[..., Translator], pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = new_translator()
    monkeypatch.setattr(translator.cfg.task, "source_lang", "deu_Latn")
    monkeypatch.setattr(translator.cfg.task, "target_lang", "zho_Hant")
    nbest = translator.cfg.generation.nbest
    with served(translator) as server:
        assert [one["code"] for one in server.ask("/languages")[1]] == ["de", "zh-Hant"]
        assert server.ask("/languages")[1][1]["name"] == "Chinese (traditional)"
        for source, target in (
            ("de", "zh-Hant"),
            ("de-AT", "zh-TW"),
            ("deu_Latn", "zt"),
            ("auto", "zho_Hant"),
        ):
            status, answer = server.ask(
                "/translate", "POST", q="ja", source=source, target=target, alternatives=2
            )
            assert status == 200 and len(answer["alternatives"]) == 2
        status, answer = server.ask("/translate", "POST", q="ja", source="de", target="zh-CN")
        assert answer == {"error": "the target language is zh-CN: this server translates from de to zh-Hant"}
    assert translator.cfg.generation.nbest == nbest, "the translator is as it was"


def test_html_keeps_its_tags(server: Served, pairs: list[tuple[str, str]]) -> None:
    source = pairs[0][0]
    text = f'<!-- {source} --><p class="a">{source}</p>\n<style>p > a {{}}</style>1 &lt; 2<br/>'
    status, answer = server.ask("/translate", "POST", q=text, format=HTML)
    translation = alone(server, source)
    assert status == 200
    assert answer["translatedText"].startswith(
        f'<!-- {source} --><p class="a">{translation}</p>\n<style>p > a {{}}</style>'
    )
    assert (
        answer["translatedText"].endswith("<br/>")
        and "<" not in answer["translatedText"].rpartition("style>")[2][:-5]
    )


def test_html_lands_on_the_right_words(server: Served, pairs: list[tuple[str, str]]) -> None:
    """Whatever the words are: each tag once, what is kept as it was, the text as it would be without markup."""
    source = pairs[0][0]
    first, *others = source.split(" ")
    page = f'<p>{first} <b><code>{others[0]}</code></b> {" ".join(others[1:])}</p><img alt="{source}">'
    status, answer = server.ask("/translate", "POST", q=page, format=HTML, alternatives=2)
    assert status == 200 and len(answer["alternatives"]) == 2
    for text in (answer["translatedText"], *answer["alternatives"]):
        assert re.fullmatch(
            rf'<p>[^<]*<b>[^<]*<code>{others[0]}</code>[^<]*</b>[^<]*</p><img alt="[^<"]+">', text
        ), text
    bold = server.ask("/translate", "POST", q=f"{first} <b>{' '.join(others)}</b>", format=HTML)[1][
        "translatedText"
    ]
    assert html.unescape(re.sub("</?b>", "", bold)) == alone(server, source)


def test_the_same_language_is_copied_and_a_list_detected(
    server: Served, pairs: list[tuple[str, str]]
) -> None:
    for language in ("de", "en"):
        status, answer = server.ask(
            "/translate", "POST", q=["<b>x", ""], source=language, target=language, alternatives=1
        )
        assert status == 200 and answer == {"translatedText": ["<b>x", ""], "alternatives": [[], []]}
    status, answer = server.ask("/translate", "POST", q="x y", source="auto", target="de")
    assert (status, answer["translatedText"], answer["detectedLanguage"]["language"]) == (200, "x y", "de")
    assert server.ask("/translate", "POST", q="x", source="fr", target="fr")[0] == 400
    (one,) = server.ask("/detect", "POST", q=[source for source, _ in pairs[:3]])[1]
    assert one["language"] == "de" and one["confidence"] > 90


def test_pages_of_others_and_a_proxy_may_be_let_in(new_translator: Callable[[], Translator]) -> None:
    origins = ("https://mt.example.org", "moz-extension://2c5e")
    names = ("localhost", "127.0.0.1", "mt.example.org")
    with served(new_translator(), origins=origins, names=names) as server:
        for origin in origins:  # a proxy keeps the name it was asked for, or not
            for host in ({}, {"Host": "mt.example.org"}):
                request = Request(f"{server.url}/translate", b"q=ja", FORM | {"Origin": origin} | host)
                with urlopen(request, timeout=60) as answer:
                    assert answer.headers["Access-Control-Allow-Origin"] == origin
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
        asked = {
            "Access-Control-Request-Method": "DELETE",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        request = Request(f"{server.url}/memory/1", headers={"Origin": origins[0]} | asked, method="OPTIONS")
        with urlopen(request, timeout=60) as answer:
            assert "DELETE" in answer.headers["Access-Control-Allow-Methods"]
        for headers in ({"Origin": "https://example.org"}, {"Host": "example.org"}):
            assert server.send("/translate", b"q=ja", FORM | headers)[0] == 403


def test_what_is_learned_counts_is_shown_and_is_forgotten(
    server: Served, pairs: list[tuple[str, str]]
) -> None:
    source, target = pairs[2]
    before = server.ask("/translate", "POST", q=source)[1]["translatedText"]
    assert before != target
    status, answer = server.ask("/learn", "POST", q=source, s=target, source="de", target="en")
    assert status == 200 and answer["success"]
    number = answer["id"]
    assert server.ask("/translate", "POST", q=source)[1]["translatedText"] == target
    body = urlencode({"q": source, "s": target, "source": "de", "target": "en"}).encode()
    assert server.send("/suggest", body, FORM)[1]["id"] == number
    _, memory = server.ask(f"/memory?q={quote(source.split()[0])}&limit=5")
    learned_pair = {"id": number, "source": source, "target": target, "count": 2, "replaced_by": None}
    learned_pair |= {"time": memory["pairs"][0]["time"], "author": ""}
    assert memory == {"pairs": [learned_pair], "found": 1} and 0 <= time.time() - learned_pair["time"] < 60
    _, explanation = server.ask(f"/explain?q={quote(source)}")
    learned = {
        one["learned"] for token in explanation["sentences"][0]["tokens"] for one in token["neighbours"]
    }
    assert number in learned and explanation["sentences"][0]["translation"] == target
    match = {"likeness": 1.0, "source": source, "target": target, "learned": number}
    assert explanation["sentences"][0]["matches"][0] == match
    other = pairs[3][1]
    _, answer = server.ask("/learn", "POST", q=source, s=other)
    assert answer["replaced"] == {**learned_pair, "replaced_by": answer["id"]} and answer["new"]
    assert server.ask("/translate", "POST", q=source)[1]["translatedText"] == other
    assert server.ask(f"/memory?q={quote(source)}")[1]["pairs"][1] == answer["replaced"]
    assert server.ask(f"/memory/{answer['id']}", "DELETE") == (
        200,
        {"success": True, "restored": [learned_pair]},
    )
    assert server.ask("/translate", "POST", q=source)[1]["translatedText"] == target
    assert server.ask(f"/memory/{number}", "DELETE") == (200, {"success": True, "restored": []})
    assert server.ask("/translate", "POST", q=source)[1]["translatedText"] == before
    _, explanation = server.ask(f"/explain?q={quote(source)}")
    assert not any(one["learned"] for one in explanation["sentences"][0]["matches"])
    status, answer = server.ask(f"/memory/{number}", "DELETE")
    assert status == 404 and answer["error"] == f"there is no pair {number} among what was learned"


def test_matches_say_what_is_otherwise(server: Served, pairs: list[tuple[str, str]]) -> None:
    source, target = "Der kleine Vogel sitzt auf dem hohen Baum.", pairs[0][1]
    number = server.ask("/learn", "POST", q=source, s=target)[1]["id"]
    asked = "Der kleine Vogel singt auf dem Baum."

    def matches(text: str, **more: int) -> list[dict[str, Any]]:
        (found,) = server.ask("/sentences", "POST", q=text, **({"matches": 5} | more))[1]["sentences"]
        return found["matches"]

    found = matches(asked)
    (explained,) = server.ask("/explain", "POST", q=asked)[1]["sentences"]
    assert [{**one, "changes": None} for one in found] == [
        {**one, "changes": None} for one in explained["matches"]
    ]
    (one,) = (one for one in found if one["learned"] == number)
    assert 0.3 < one["likeness"] < 1 and (one["source"], one["target"]) == (source, target)
    expected = [
        ("same", "Der kleine Vogel"),
        ("deleted", "sitzt"),
        ("inserted", "singt"),
        ("same", "auf dem"),
    ]
    assert [tuple(each) for each in one["changes"]] == [*expected, ("deleted", "hohen"), ("same", "Baum.")]
    assert matches(source, matches=1)[0]["changes"] == [["same", source]] and not matches(source, matches=0)
    server.ask(f"/memory/{number}", "DELETE")
    assert number not in [one["learned"] for one in matches(source)]


def test_long_texts_are_compared_in_little_time() -> None:
    start, (old, new) = time.monotonic(), ("a b " * 500, "b b a a " * 250)
    assert [kind for kind, _ in changes(old, new)] == ["deleted", "inserted"]
    assert changes(old, old) == [("same", old.strip())] and time.monotonic() - start < 1


def test_a_sentence_that_is_too_long_is_divided_and_that_is_said(server: Served) -> None:
    long, fits = "Wo, " * 600, server.translator.fits
    assert not fits(long)
    _, answer = server.ask("/translate", "POST", q=[f"Licht. {long}Amen. Ja.", "Licht."], alternatives=1)
    assert answer["divided"] == [1, 0] and answer["translatedText"][0].startswith(answer["translatedText"][1])
    _, parts = server.ask("/sentences", "POST", q=f"Licht. {long}Amen. Ja.", alternatives=2)
    assert [one["continues"] for one in parts["sentences"]] == [False, False, True, False]
    assert all(fits(one["source"]) and one["source"][-1] in ",." for one in parts["sentences"])
    joined = "".join(one["before"] + one["translation"] for one in parts["sentences"])
    assert joined.split() == answer["translatedText"][0].split()
    for one in parts["sentences"]:
        others = one["alternatives"]
        assert len({one["translation"], *others}) == 1 + len(others) and 0 < len(others) <= 2
    assert "divided" not in server.ask("/translate", "POST", q="Licht.")[1]
    _, marked = server.ask("/translate", "POST", q=f"<p>{long}<b>Amen</b></p>", format="html")
    assert marked["divided"] == 1 and re.search("<b>.+</b>", marked["translatedText"])
    assert len(server.ask("/explain", "POST", q=long)[1]["sentences"]) == 2


def test_sentences_come_with_what_was_learned_for_them(server: Served, pairs: list[tuple[str, str]]) -> None:
    (one, target), (two, _) = pairs[2], pairs[3]
    number = server.ask("/learn", "POST", q=one, s=target)[1]["id"]
    text = f" {one}  {two}\n\n{one}\n"
    status, answer = server.ask("/sentences", "POST", q=text)
    assert status == 200 and answer["after"] == "\n"
    found = answer["sentences"]
    assert "".join(each["before"] + each["source"] for each in found) + answer["after"] == text
    assert [each["translation"] for each in found] == [alone(server, source) for source in (one, two, one)]
    assert [each["learned"] and each["learned"]["id"] for each in found] == [number, None, number]
    server.ask(f"/memory/{number}", "DELETE")
    assert not any(each["learned"] for each in server.ask("/sentences", "POST", q=text)[1]["sentences"])
    assert server.ask("/sentences", "POST", q=" \n") == (200, {"sentences": [], "after": " \n"})


def import_file(server: Served, name: str, content: bytes) -> tuple[int, list[dict]]:
    request = Request(f"{server.url}/memory?name={quote(name, safe='&=')}", content, method="POST")
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, [json.loads(line) for line in answer]
    except HTTPError as error:
        with error:
            return error.code, [json.load(error)]


def test_files_are_learned_and_what_was_learned_is_a_file(
    server: Served, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    rows = [f"{source}\t{target}" for source, target in pairs]
    content = "\n".join([*rows, rows[0], f"{pairs[1][0]}\tAnother.", "no pair", ""]).encode()
    for name, sent in (("pairs.tsv", content), ("../../pairs.tsv.gz", gzip.compress(content))):
        status, lines = import_file(server, name, sent)
        assert status == 200 and [line["pairs"] for line in lines] == [22, 22] and lines[-1]["done"]
        assert sum(lines[-1]["skipped"].values()) == 1
        new = 21 if name == "pairs.tsv" else 0
        assert (lines[-1]["learned"], lines[-1]["again"]) == (new, 22 - new) and lines[-1]["replaced"]
    with urlopen(server.url + "/memory.tmx") as answer:
        assert answer.headers["Content-Disposition"] == 'attachment; filename="memory.tmx"'
        exported = answer.read()
    (tmp_path / "memory.tmx").write_bytes(exported)
    found = list(read_memory(tmp_path / "memory.tmx", "de", "en", Counter()))
    assert dict(found) == dict(pairs) | {pairs[1][0]: "Another."} and len(found) == len(dict(pairs))
    _, lines = import_file(server, "memory.tmx", exported[: exported.rindex(b"<tu ")])
    assert "memory.tmx is no well-formed XML (it ends before </tmx>)" in lines[-1]["error"]
    for pair in server.translator.memory():
        server.ask(f"/memory/{pair.id}", "DELETE")
    assert import_file(server, "memory.tmx", exported)[1][-1]["learned"] == 20
    for pair in server.translator.memory():
        server.ask(f"/memory/{pair.id}", "DELETE")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("", b"a\tb\n", "^file is no TSV"),
        ("a/b.doc", b"a\tb\n", "^a_b.doc is no TSV, TMX or XLIFF file by its name"),
        ("..", b"a\tb\n", "^file is no TSV"),
        ("a.tmx", b"<html></html>", "^a.tmx is no TMX: it begins with the element 'html'"),
        ("a.tmx.gz", b"no gzip", "a.tmx.gz"),
        (f"{'ä' * 900}.tmx", b"", "is no well-formed XML"),
    ],
)
def test_what_is_no_translation_memory_is_refused(
    server: Served, name: str, content: bytes, sentence: str
) -> None:
    status, (answer,) = import_file(server, name, content)
    assert status == 400 and re.search(sentence, answer["error"]) and "/tmp" not in answer["error"], answer
    assert not server.translator.memory()


def test_a_client_that_leaves_ends_what_it_imports(server: Served, pairs: list[tuple[str, str]]) -> None:
    rows = "".join(
        f"{source} {number}\t{target}\n" for number in range(100) for source, target in pairs
    ).encode()
    with urlopen(Request(f"{server.url}/memory?name=pairs.tsv", rows, method="POST"), timeout=60) as answer:
        assert json.loads(answer.readline())["pairs"] == work.ROUND_SENTENCES
    end, before = time.monotonic() + 60, -1
    while (now := server.ask("/memory?limit=0")[1]["found"]) != before and time.monotonic() < end:
        before = now
        time.sleep(0.5)
    assert work.ROUND_SENTENCES <= now < 1000
    server.translator.forget(*(pair.id for pair in server.translator.memory()))


def reading() -> bool:
    return any(frame.f_code.co_filename.endswith("pairs.py") for frame in sys._current_frames().values())


def test_a_file_that_grows_is_refused_or_left_where_its_client_leaves_or_the_server_stops(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = lzma.compress(b"\n" * 60_000_000, preset=0)
    monkeypatch.setattr(service, "LEAST_UNPACKED", 1 << 17)
    monkeypatch.setattr(service, "PACKING", 1)
    status, (answer,) = import_file(server, "c.tsv", sent)
    assert status == 400 and re.search(
        r"^the file is more than 128 KiB unpacked: use fairseq-ccpr learn$", answer["error"]
    )
    for name in ("LEAST_UNPACKED", "MOST_UNPACKED"):
        monkeypatch.setattr(service, name, 1 << 40)
    host, port = urlsplit(server.url).netloc.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /memory?name=c.tsv HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b"
            % (len(sent), sent)
        )
        wait_until(reading)
    wait_until(lambda: not reading())
    assert server.ask("/health")[0] == 200


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_not_confirmed_is_learned_where_it_is_asked_for(
    server: Served, pairs: list[tuple[str, str]]
) -> None:
    source, target = map(escape, pairs[0])
    unit = f'<trans-unit><source>{source}</source><target state="needs-translation">{target}</target></trans-unit>'
    content = f'<xliff version="1.2"><file><body>{unit}</body></file></xliff>'.encode()
    assert import_file(server, "a.xlf", content)[1][-1]["skipped"] == {
        "not confirmed: state is needs-translation": 1
    }
    assert import_file(server, "a.xlf&unconfirmed=1", content)[1][-1]["learned"] == 1
    server.translator.forget(*(pair.id for pair in server.translator.memory()))


@pytest.mark.full
def test_much_that_was_learned_is_compacted_while_the_server_answers(
    new_translator: Callable[..., Translator], pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is tried again after it failed, here since the tokens are behind a link."""
    monkeypatch.setattr(work, "COMPACTED_AT", 40)
    monkeypatch.setattr(work, "SHARE_COMPACTED", 10**9)
    monkeypatch.setattr(work, "PAUSE", 0.5)
    with served(new_translator()) as server:
        store = Path(str(server.translator.cfg.task.datastore))
        (store / "token").rename(elsewhere := store.with_name(f"{store.name}.token"))
        (store / "token").symlink_to(elsewhere)
        for source, target in pairs[:6]:
            assert server.ask("/learn", "POST", q=source, s=target)[0] == 200
        end = time.monotonic() + 120
        while "it is tried again" not in caplog.text and time.monotonic() < end:
            server.ask("/translate", "POST", q=pairs[1][0])
        assert "symbolic link" in caplog.text and not TokenDatastore(store).section.generation
        (store / "token").unlink()
        elsewhere.rename(store / "token")
        wanted, end = server.ask("/translate", "POST", q=pairs[1][0]), time.monotonic() + 300
        while not TokenDatastore(store).section.generation and time.monotonic() < end:
            assert server.ask("/translate", "POST", q=pairs[1][0]) == wanted
            time.sleep(0.2)  # which the process that compacts can use
        assert TokenDatastore(store).section.generation
        assert server.ask("/translate", "POST", q=pairs[1][0]) == wanted
        assert server.ask("/memory")[1]["found"] == 6
        assert server.ask("/learn", "POST", q=pairs[6][0], s=pairs[6][1])[1]["id"] == 7


def test_a_full_disk_is_told_and_the_server_goes_on(server: Served, pairs: list[tuple[str, str]]) -> None:
    source, target = pairs[4]
    before, known = server.ask("/translate", "POST", q=source), server.ask("/memory")
    path = next(Path(str(server.translator.cfg.task.datastore)).glob("learnt/*.journal"), None)
    with files_up_to(path.stat().st_size + 100 if path else 100):
        status, answer = server.ask("/learn", "POST", q=source, s=target)
    assert status == 503 and re.search(r"cannot be written \(.*\): nothing was", answer["error"])
    assert (server.ask("/translate", "POST", q=source), server.ask("/memory")) == (before, known)
    status, answer = server.ask("/learn", "POST", q=source, s=target)
    assert status == 200 and server.ask("/translate", "POST", q=source) != before
    server.ask(f"/memory/{answer['id']}", "DELETE")


def test_with_a_glossary_explanations_are_refused(
    new_translator: Callable[..., Translator], pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "terms.tsv").write_text("Xylophon\txylophone\n")
    with served(new_translator(glossary=tmp_path / "terms.tsv")) as server:
        source, target = pairs[2]
        sentence = (
            "--glossary works in beam search alone, which is neither scored nor explained: leave it out"
        )
        assert server.ask("/explain", "POST", q=source) == (400, {"error": sentence})
        server.ask("/learn", "POST", q=source, s=target)
        assert alone(server, source) == target


def test_clients_at_the_same_time_get_what_they_would_alone(
    server: Served, pairs: list[tuple[str, str]]
) -> None:
    sources = [source for source, _ in pairs[:24]]
    wanted = [one.text for one in server.translator.translate(sources)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda source: server.ask("/translate", "POST", q=source)[1], sources))
    assert [one["translatedText"] for one in found] == wanted


@pytest.mark.parametrize(
    ("sent", "status", "sentence"),
    [
        ({"source": "de"}, 400, "the parameter q is missing"),
        ({"q": 3}, 400, "the parameter q is a number: expected a text or a list of texts"),
        ({"q": ["a", 3]}, 400, "the parameter q is a list of other things than texts"),
        ({"q": "a" * 3001}, 400, "has 3,001 characters, and this server takes 3,000: divide it"),
        ({"q": [""] * 3001}, 400, "has 3,001 characters"),
        ({"q": "a", "source": "fr"}, 400, "the source language is fr: this server translates from de to en"),
        (
            {"q": "a", "target": "auto"},
            400,
            "the target language is auto: this server translates from de to en",
        ),
        ({"q": "a", "target": ["en"]}, 400, "the parameter target is a list: expected a text$"),
        ({"q": "a", "format": "pdf"}, 400, "the format pdf is not known: text or html"),
        (
            {"q": "a", "alternatives": 1.5},
            400,
            "the parameter alternatives is '1.5': expected a whole number from 0",
        ),
        ({"q": None}, 400, "the parameter q is missing"),
        ({"q": "a", "alternatives": True}, 400, "expected a whole number from 0"),
        ({"q": "\ud800"}, 400, "half a character"),
        (
            {"q": "zw" * 1000},
            400,
            "the sentence '(zw){20}' … has no translation: [0-9,]+ tokens, and the model takes 1,024: divide it",
        ),
        ({"q": "a" * 200_000}, 413, "the request is longer than the 101,536 bytes"),
    ],
)
def test_what_cannot_be_translated_is_refused(server: Served, sent: dict, status: int, sentence: str) -> None:
    found, answer = server.ask("/translate", "POST", **sent)
    assert found == status and list(answer) == ["error"] and re.search(sentence, answer["error"]), answer
    assert server.ask("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "sentence"),
    [
        (
            "/translate",
            b'{"q": ',
            {"Content-Type": "application/json"},
            400,
            "the body is not valid application/json",
        ),
        ("/translate", b"[1]", {"Content-Type": "application/json"}, 400, "expected {…}, found a list"),
        (
            "/translate",
            b"[" * 100_000,
            {"Content-Type": "application/json"},
            400,
            "not valid application/json",
        ),
        (
            "/translate",
            b'{"q": "\xff"}',
            {"Content-Type": "application/json"},
            400,
            "not valid application/json",
        ),
        ("/translate", b"q=%ff", FORM, 400, "not valid application/x-www-form-urlencoded in UTF-8"),
        (
            "/translate",
            PART,
            {"Content-Type": "multipart/form-data"},
            400,
            "cannot be read (Missing boundary",
        ),
        ("/translate", PART, PARTS, 400, "the parameter q is missing"),
        (
            "/translate",
            PART.replace(b"format", b'f"; filename="g'),
            PARTS,
            400,
            "fields of text, and no file",
        ),
        (
            "/translate",
            PART.replace(b"text", b"\xff"),
            PARTS,
            400,
            "is not valid multipart/form-data in UTF-8",
        ),
        ("/translate", PART[:9], PARTS, 400, "the parameter q is missing"),
        ("/translate", PART * 2000, PARTS, 413, "the request is longer than the 101,536 bytes"),
        (
            "/translate",
            b"q=a",
            {"Content-Type": "text/plain"},
            415,
            "the body is text/plain: send application/json",
        ),
        (
            "/translate",
            b"q=a",
            {"Origin": "https://example.org"},
            403,
            "pages of https://example.org are refused: start",
        ),
        ("/translate", b"q=a", {"Origin": "null"}, 403, "pages of null are refused"),
        (
            "/translate",
            b"q=a",
            {"Sec-Fetch-Site": "cross-site"},
            403,
            "pages of other sites are refused, unless",
        ),
        (
            "/translate",
            b"q=a",
            {"Host": "example.org"},
            403,
            "this server is not example.org: ask for it as localhost, or",
        ),
        ("/translate/", b"q=a", FORM, 404, "there is no path /translate/"),
        ("/nowhere", b"", FORM, 404, "there is no path /nowhere"),
        ("/health", b"", FORM, 405, "POST is not allowed for /health: use GET"),
        ("/learn", b"q=a", FORM, 400, "the parameter s is missing"),
        ("/learn", b"q=+&s=a", FORM, 400, "the pair was not learned: its source is empty"),
        ("/explain", b"q=+", FORM, 400, "the parameter q has no sentence"),
    ],
)
def test_malformed_requests_are_answered_with_an_error(
    server: Served, path: str, body: bytes, headers: dict[str, str], status: int, sentence: str
) -> None:
    found, answer = server.send(path, body, FORM | headers)
    assert found == status and list(answer) == ["error"] and sentence in answer["error"], answer
    assert server.ask("/health") == (200, {"status": "ok"})


def test_methods_that_are_allowed_are_named(server: Served) -> None:
    for path, allowed in (
        ("/health", {"GET", "HEAD"}),
        ("/translate", {"POST"}),
        ("/explain", {"GET", "HEAD", "POST"}),
    ):
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(server.url + path, method="PUT"), timeout=60)
        with refused.value as answer:
            assert answer.code == 405 and {*answer.headers["Allow"].split(", ")} == allowed


def test_bytes_that_are_no_http_and_clients_that_leave_harm_nobody(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for sent in (
        b"\x16\x03\x01\x00",
        b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nq=",
    ):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(sent)
    assert server.ask("/health") == (200, {"status": "ok"})


def test_a_key_keeps_others_out(
    new_translator: Callable[[], Translator], capfd: pytest.CaptureFixture[str], pairs: list[tuple[str, str]]
) -> None:
    key, source = "a key of mine", pairs[0][0]
    with served(new_translator(), keys={key: ()}) as server:
        for given in ({}, {"api_key": "another"}, {"api_key": 3}):
            status, answer = server.ask("/translate", "POST", q=source, **given)
            assert status == 403 and "the API key is missing or wrong" in answer["error"]
        assert server.ask("/memory")[0] == server.ask("/memory/1", "DELETE")[0] == 403
        bearer = {"Authorization": f"Bearer {key}"}
        assert server.ask("/memory", headers=bearer)[0] == 200
        for empty in (None, ""):
            assert server.ask("/translate", "POST", headers=bearer, q=source, api_key=empty)[0] == 200
        assert LibreTranslateAPI(server.url, key).translate(source, "de", "en") == alone(server, source)
        assert server.ask("/languages")[0] == server.ask("/health")[0] == 200
        assert server.ask("/frontend/settings")[1]["keyRequired"] is True


@pytest.mark.full
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_and_ends_when_told(
    world: World, tmp_path: Path, pairs: list[tuple[str, str]], told: signal.Signals
) -> None:
    """No other process learns or compacts while it runs; requests before the signal are answered, the exit
    code is 0, and no log has texts."""
    store = shutil.copytree(world.datastore, tmp_path / "store")
    words = ["--datastore", store, "--cpu", "--max-len-b", 25, "--port", 0, "--log", "requests"]
    process = begin("fairseq-ccpr serve", *words, out=tmp_path / "url", err=tmp_path / "err")
    while not (tmp_path / "url").exists() or not (url := (tmp_path / "url").read_text()).endswith("\n"):
        assert process.is_alive() or (tmp_path / "url").exists()
        time.sleep(0.05)
    server = Served(url.strip(), None)  # type: ignore[arg-type]
    while server.ask("/health")[0] != 200:
        pass
    for command in (["compact", store, "--quiet"], ["serve", "--datastore", store, "--cpu", "--port", 0]):
        refused(call(*command, check=False), f"is being written to by process {process.pid} on ")
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.ask, "/translate", "POST", q=[source for source, _ in pairs])
        growing = pool.submit(import_file, server, "c.tsv", gzip.compress(b"\n" * 4_000_000))
        while not (lines := server.ask("/health")) or lines[0] != 200:
            pass
        assert process.pid is not None
        os.kill(process.pid, told)
        status, answered = answer.result()
        assert growing.result() == (503, [{"error": "the server is stopping"}])
    process.join(60)
    err = (tmp_path / "err").read_text(encoding="utf-8")
    assert status == 200 and len(answered["translatedText"]) == len(pairs)
    assert process.exitcode == 0 and "interrupted" not in err, err
    assert "POST '/translate' 200" in err and pairs[0][0] not in err and "Traceback" not in err


def test_what_cannot_be_served_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["--datastore", world.datastore, "--cpu"]
    refused(
        call("serve", *base, "--host", "0.0.0.0", check=False),
        "--host 0.0.0.0 lets other machines in: give --api-key",
    )
    refused(call("serve", *base, "--port", 70000, check=False), "--port is 70000")
    refused(
        call("serve", *base, "--public-url", "mt.example.org", check=False),
        "--public-url is mt.example.org: expected",
    )
    refused(
        call("serve", *base, "--allow-origin", "*", check=False),
        "--allow-origin . lets every site that is visited here",
    )
    refused(call("serve", *base, "--api-key-file", tmp_path / "none", check=False), "there is no such file")
    (tmp_path / "key").write_text("short\n")
    refused(
        call("serve", *base, "--api-key-file", tmp_path / "key", check=False),
        "has 5 characters: a key is one line of 8",
    )
    monkeypatch.setenv("FAIRSEQ_CCPR_API_KEY", "")
    refused(call("serve", *base, check=False), "FAIRSEQ_CCPR_API_KEY, line 1, has 0 characters")
    monkeypatch.delenv("FAIRSEQ_CCPR_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(call("serve", *base, "--port", port, check=False), f"port {port} of 127.0.0.1 is in use")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "fairseq_ccpr.server.app", raising=False)
    monkeypatch.delattr("fairseq_ccpr.server.app", raising=False)
    refused(
        call("serve", *base, check=False), "the server needs uvicorn, which is not installed: pip install"
    )


def test_the_page_is_one_file_that_asks_this_server_alone(server: Served) -> None:
    with urlopen(server.url) as answer:
        page, headers = answer.read().decode(), answer.headers
    assert (
        "connect-src 'self'" in headers["Content-Security-Policy"]
        and headers["X-Content-Type-Options"] == "nosniff"
    )
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page) and "http" not in page
    settings = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert settings["names"] == {"source": "German", "target": "English"} and settings["learns"]


def test_a_text_memory_alone_is_explained(world: World, pairs: list[tuple[str, str]], tmp_path: Path) -> None:
    text, store = tmp_path / "text", tmp_path / "store"
    text.write_text("\n".join(target for _, target in pairs), encoding="utf-8")
    where = ["--path", world.model, "--data", world.data_bin, *subword_options(world)]
    call("build text", text, *where, "--output", store)
    with served(Translator(datastore=store, device="cpu", max_len_b=25)) as server:
        status, answer = server.ask("/explain", "POST", q=pairs[0][0])
        assert status == 200 and answer["sentences"][0]["tokens"]
        status, answer = server.ask("/explain", "POST", q="zw" * 1000)
        assert (status, answer["error"].split(" has ")[0]) == (400, "sentence 1")
