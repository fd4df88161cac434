"""What one client asks for, or fails to, stops no other: long texts, many sentences, clients that leave, half a request."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.server import app, work
from fairseq_ccpr.server.access import REQUESTS
from fairseq_ccpr.server.parameters import _by_name
from fairseq_ccpr.server.work import BusyError, Work
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.sentences import Segments
from tests.server.conftest import Served, served
from tests.small_models import World

HEADERS = "POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def sources(world: World) -> list[str]:
    return [source for source, _ in read_pairs(world.folder / "test.tsv")]


@pytest.fixture
def counted(server: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All sentences that are translated from now on."""
    done: list[str] = []
    translate = server.translator.translate

    def counting(sentences: Any, *rest: Any, **options: Any) -> Iterator[Any]:
        done.extend(sentences)
        return translate(sentences, *rest, **options)

    monkeypatch.setattr(server.translator, "translate", counting)
    return done


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_the_server_answers_while_a_text_is_divided(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    divide, begun, go_on = Segments.of, threading.Event(), threading.Event()

    def slow(cls: type[Segments], text: str) -> Segments:
        begun.set()
        assert go_on.wait(60)
        return divide(text)

    monkeypatch.setattr(Segments, "of", classmethod(slow))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, "/translate", "POST", q="ja")
        assert begun.wait(60)
        assert server.ask("/health") == (200, {"status": "ok"}) and not answer.done()
        go_on.set()
        assert answer.result()[0] == 200


@pytest.mark.parametrize(
    ("sent", "kind"),
    [("." * 20000, "text"), ("<" * 20000, "html"), ("<a " * 6666, "html"), ("a\n" * 40, "text")],
)
def test_texts_that_are_nothing_but_marks(
    new_translator: Callable[[], Translator], sent: str, kind: str
) -> None:
    with served(new_translator()) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, "/translate", "POST", q=sent, format=kind)
        slowest = 0.0
        while not answer.done():
            start = time.monotonic()
            assert server.ask("/health") == (200, {"status": "ok"})
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.05)
    assert answer.result()[0] in (200, 400) and slowest < 5, answer.result()


def test_a_form_of_many_texts_is_read_at_once() -> None:
    """In a time that grows with their number, and not with its square."""
    start = time.monotonic()
    pairs = [("q", "x"), ("format", "text")] * 76_000
    assert _by_name(pairs) == {"q": ["x"] * 76_000, "format": "text"} and _by_name(pairs[:1]) == {"q": "x"}
    assert time.monotonic() - start < 5


def test_a_request_with_too_many_sentences_is_refused(server: Served) -> None:
    status, answer = server.ask("/translate", "POST", q=["ja"] * 1001)
    assert (status, answer["error"]) == (
        400, "the text has 1,001 sentences, and this server takes 1,000: divide it"
    )  # fmt: skip
    assert server.ask("/explain", "POST", q="a\n" * 1001)[0] == 400


def test_what_waits_is_counted_in_sentences(
    new_translator: Callable[[], Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MAX_WAITING", 5)
    made, go_on = Work(new_translator()), threading.Event()
    try:
        call = made.call(lambda translator: go_on.wait(60))
        while not call.running():
            time.sleep(0.01)
        first, second = made.translate(["ja"] * 3), made.translate(["ja"] * 3)
        with pytest.raises(BusyError, match="5 sentences are waiting already: try again later"):
            made.translate(["ja"])
        go_on.set()
        assert len(first.result(60)) == len(second.result(60)) == 3
        assert len(made.translate(["ja"]).result(60)) == 1
    finally:
        go_on.set()
        made.close()


def test_the_work_of_a_client_that_has_left_is_dropped(
    server: Served, counted: list[str], sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "ROUND_SENTENCES", 4)
    body = json.dumps({"q": [f"{n} {sources[n % 7]}"[:20] for n in range(120)]}).encode()
    with connect(server) as client:
        client.sendall(f"{HEADERS}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not counted:
            time.sleep(0.01)
    for _ in range(2):  # of which the first may share a batch with it
        assert server.ask("/translate", "POST", q="ja")[0] == 200
    before = len(counted)
    assert server.ask("/translate", "POST", q="ja")[0] == 200
    assert len(counted) == before + 1 < 120


def test_what_a_client_that_has_left_asked_to_learn_is_not_learned(
    server: Served, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer said that it was; a client that wants it asks again."""
    waiting = threading.Event()
    found = server.ask("/memory")[1]["found"]
    memory = server.translator.memory

    def slow(*words: Any) -> Any:
        waiting.wait(60)
        return memory(*words)

    body = json.dumps({"q": sources[6], "s": "never"}).encode()
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(server.translator, "memory", slow)
        pool.submit(server.ask, "/memory")
        time.sleep(0.5)
        with connect(server) as client:
            head = HEADERS.replace("translate", "learn")
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(0.5)
        time.sleep(0.5)
        waiting.set()
    assert server.ask("/memory")[1]["found"] == found


@pytest.mark.parametrize("sent", ["", "GET /hea", "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"])
def test_half_a_request_is_not_waited_for(server: Served, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SECONDS_OF_HEADERS", 0.5)
    with connect(server) as client:
        client.sendall(sent.encode())
        start, received = time.monotonic(), b""
        try:
            while some := client.recv(4096):
                received += some
        except ConnectionResetError:
            pass
        assert time.monotonic() - start < 30
        assert (b"200 OK" in received) == ("\r\n\r\n" in sent)
    assert server.ask("/health") == (200, {"status": "ok"})


def test_an_answer_that_takes_longer_than_headers_may_is_given(
    server: Served, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SECONDS_OF_HEADERS", 0.05)
    status, answer = server.ask("/translate", "POST", q=sources[:12])
    assert status == 200 and len(answer["translatedText"]) == 12


def test_too_many_connections_end_and_others_are_answered_later(
    new_translator: Callable[[], Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 5)
    monkeypatch.setattr(app, "SECONDS_OF_HEADERS", 3)
    with served(new_translator()) as server:
        idle = [connect(server) for _ in range(5)]
        assert server.ask("/health") == (503, {"error": "too many connections are open: try again later"})
        monkeypatch.setattr(app, "MOST_REFUSED", 0)
        with pytest.raises(OSError):
            server.ask("/health")
        for one in idle:
            one.close()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                assert server.ask("/health") == (200, {"status": "ok"})
                break
            except OSError:
                time.sleep(0.1)
        else:
            pytest.fail("the server does not answer again")


def test_one_address_cannot_hold_all_connections(
    new_translator: Callable[[], Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy on this machine may; the other machine is this one, under a name that is not known to be so."""
    monkeypatch.setattr(app, "MOST_OF_ADDRESS", 3)
    with served(new_translator()) as server:
        idle = [connect(server) for _ in range(4)]
        assert server.ask("/health")[0] == 200
        assert app._host(SimpleNamespace(client=("::ffff:127.0.0.1", 1))) in app.LOOPBACK
        monkeypatch.setattr(app, "LOOPBACK", ())
        assert server.ask("/health")[0] == 503
        for one in idle:
            one.close()


def test_the_log_has_nothing_that_a_user_wrote_unless_asked(
    new_translator: Callable[[], Translator],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*words: object) -> None:
        raise ValueError(f"cannot do {words}")

    for log, quotes in ((REQUESTS, False), ("texts", True)):
        caplog.clear()
        with served(new_translator(), log=log) as server, caplog.at_level("INFO", "fairseq_ccpr.server"):
            monkeypatch.setattr(server.translator, "learn_all", fails)
            status, answer = server.ask("/learn", "POST", q="Geheim", s="secret")
            assert (status, answer["error"]) == (500, "the server has a fault, which its log tells")
            assert server.ask("/translate", "POST", q="Text <![ Geheim", format="html")[0] == 200
        assert ("eheim" in caplog.text) == quotes
        assert "ValueError" in caplog.text and "in fails" in caplog.text
