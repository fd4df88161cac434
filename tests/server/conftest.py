"""A server on loopback in this process, over a datastore of its own."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fairseq_ccpr import Translator
from fairseq_ccpr.server.access import Limits
from fairseq_ccpr.server.app import listen, make_server
from tests.small_models import World

KEEN: dict[str, Any] = {
    "max_len_b": 25,
    "device": "cpu",
    "tokens_lambda": 0.95,
    "tokens_k": 4,
    "tokens_temperature": 0.5,
}


@dataclass
class Served:
    """A server that answers."""

    url: str
    translator: Translator
    service: Any = None

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None, **sent: Any
    ) -> tuple[int, Any]:
        """Ask with a JSON body, if any; returns status and what the answer's JSON says."""
        body = json.dumps(sent).encode() if sent else b"" if method == "POST" else None
        return self.send(path, body, {"Content-Type": "application/json"} | (headers or {}), method)

    def send(
        self, path: str, body: bytes | None, headers: dict[str, str], method: str = "POST"
    ) -> tuple[int, Any]:
        """Ask with any bytes."""
        try:
            with urlopen(Request(self.url + path, body, headers, method=method), timeout=60) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)


@contextmanager
def served(translator: Translator, **limits: Any) -> Iterator[Served]:
    """Serve until the end of the block."""
    server = make_server(translator, Limits(**limits))
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield Served(
                f"http://127.0.0.1:{listening.getsockname()[1]}", translator, vars(server)["service"]
            )
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def new_translator(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Translator]:
    """Makes translators, each over a copy of the datastore that it may write to."""

    def make(**options: Any) -> Translator:
        store = shutil.copytree(world.datastore, tmp_path_factory.mktemp("served") / "store")
        return Translator(datastore=store, **KEEN, **options)

    return make


@pytest.fixture(scope="module")
def server(new_translator: Callable[[], Translator]) -> Iterator[Served]:
    with served(new_translator(), most_characters=3000) as one:
        yield one
