"""Documents through the server and the command: LibreTranslate's shape, bad input, and clients that leave."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import requests
from libretranslate_aio import LibreTranslate

from fairseq_ccpr import Translator
from fairseq_ccpr.server import parameters as given
from fairseq_ccpr.server import service
from fairseq_ccpr.server.access import Limits
from fairseq_ccpr.server.app import _site
from fairseq_ccpr.server.work import BusyError
from fairseq_ccpr.text import formats
from tests.helpers import call, refused
from tests.server.conftest import Served, served
from tests.small_models import World
from tests.text.test_documents import WORD, texts, zipped


@pytest.fixture
def word(tmp_path: Path) -> Path:
    return zipped(tmp_path / "ein haus.docx", word__document=WORD)


def test_a_client_of_libretranslate(server: Served, word: Path) -> None:
    wanted = {one.source: one.text for one in server.translator.translate(["Zelle", "Ein Satz", "Note"])}
    with LibreTranslate(server.url, timeout=120) as client:
        assert {".docx", ".odt", ".html"} <= {*client.frontend_settings().supported_files_format}
        url = client.translate_file(word, source="de", target="en").translated_file_url
    assert url.startswith(f"{server.url}/download_file/") and url.endswith(".ein%20haus_en.docx")
    answer = requests.get(url, timeout=60)
    assert "filename*=utf-8''ein%20haus_en.docx" in answer.headers["content-disposition"]
    made = word.with_name("made.docx")
    made.write_bytes(answer.content)
    with ZipFile(made) as archive:
        found = texts(archive.read("word/document.xml").decode())
    assert found[3:] == [wanted["Zelle"], wanted["Ein Satz"] + wanted["Note"]]
    text = {"file": ("a.txt", b"Zelle\n\nEin Satz\n")}
    answer = requests.post(f"{server.url}/translate_file", files=text, timeout=60)
    translated = requests.get(answer.json()["translatedFileUrl"], timeout=60).text
    assert translated == f"{wanted['Zelle']}\n\n{wanted['Ein Satz']}\n"


def test_bad_files(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(said: str, status: int = 400, **parts: object) -> None:
        parts = {name: part if isinstance(part, tuple) else (None, part) for name, part in parts.items()}
        answer = requests.post(f"{server.url}/translate_file", files=parts, timeout=60)
        assert answer.status_code == status and re.search(said, answer.json()["error"]), answer.text

    ask("the form has no file", source="de")
    ask("the file is a.pdf: expected a name that ends in one of .docx", file=("a.pdf", b"x"))
    ask("^_a.docx is no readable .docx file: File is not a zip file$", file=("../a.docx", b"x"))
    ask("this server translates from de to en", file=("a.txt", b"x"), source="fr")
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    for suffix in ("po", "md"):
        ask(f"this server translates no .{suffix} files: pip install", 404, file=(f"a.{suffix}", b"x"))
    status, answer = server.ask("/download_file/secret.docx")
    assert (
        status == 404
        and "there is no translated file secret.docx: each is kept for 30 minutes" in answer["error"]
    )
    monkeypatch.setattr(service, "MOST_IN_FILE", 3)
    ask("the file has 4 sentences, and this server takes 3", 413, file=("a.txt", b"a\nb\nc\nd"))
    told = "a sentence of the file, 'Wort .*' …, has 3,499 characters, and this server takes 3,000"
    ask(told, 413, file=("a.txt", b"Zelle\n" + b"Wort " * 700))


def test_translated_files_expire_and_waiting_loses_nothing(
    server: Served, word: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MINUTES_KEPT", 0.5 / 60)
    monkeypatch.setattr(service, "PORTION", 2)
    translate, busy = server.service.work.translate, [False, True, True]

    def refusing(*asked: Any) -> Any:
        if busy and busy.pop(0):
            raise BusyError("others wait")
        return translate(*asked)

    monkeypatch.setattr(server.service.work, "translate", refusing)
    text = {"file": ("a.txt", b"Zelle\n\nEin Satz\nNote")}
    answer = requests.post(f"{server.url}/translate_file", files=text, timeout=60)
    assert answer.status_code == 200 and not busy
    time.sleep(1)
    assert requests.get(answer.json()["translatedFileUrl"], timeout=60).status_code == 404


def test_a_key_is_known_before_the_file_is_read(
    new_translator: Callable[..., Translator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "MOST_UNKNOWN", 1000)
    with served(new_translator(), keys={"a secret": ()}) as one:

        def ask(size: int, key: str = "", **fields: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            sent = {"file": ("a.txt", b"\n" * size)}
            answer = requests.post(
                f"{one.url}/translate_file", files=sent, data=fields, headers=headers, timeout=60
            )
            return answer.status_code, answer.text

        assert ask(10**6, "a secret")[0] == ask(10, api_key="a secret")[0] == 200
        assert ask(10**6, api_key="a secret")[0] == 413 and "send the API key as" in ask(10**6)[1]
        assert ask(10, "another")[0] == ask(10)[0] == 403


def test_a_client_that_leaves_ends_a_long_document(server: Served) -> None:
    many = "\n".join(f"Ein Satz {number}" for number in range(10_000))
    with pytest.raises(requests.ReadTimeout):
        requests.post(f"{server.url}/translate_file", files={"file": ("a.txt", many)}, timeout=1)
    start = time.monotonic()
    status, _ = server.ask("/translate", "POST", q="Zelle", source="de", target="en")
    while server.service.work._asked and time.monotonic() - start < 30:
        time.sleep(0.1)
    assert status == 200 and time.monotonic() - start < 30


def test_links_are_by_the_public_name() -> None:
    asked: Any = SimpleNamespace(headers={"host": "mt.example.org"}, url=SimpleNamespace(scheme="http"))
    shown = Limits(origins=("https://other.org", "https://mt.example.org"))
    assert (_site(asked, shown), _site(asked, Limits())) == (
        "https://mt.example.org",
        "http://mt.example.org",
    )


def test_the_command(world: World, word: Path) -> None:
    words = ["--path", world.model, "--data", world.data_bin, "-s", "de", "-t", "en", "--cpu", "--quiet"]
    made = word.with_name("made.docx")
    call("translate", *words, "--input", word, "--output", made)
    with ZipFile(made) as archive, ZipFile(word) as before:
        assert archive.namelist() == before.namelist()
        xml = archive.read("word/document.xml").decode()
    lines, text = word.with_name("a.txt"), word.with_name("b.txt")
    lines.write_text("Zelle\n\nNote\n", encoding="utf-8")
    alone = call("translate", *words, "--input", lines).stdout.splitlines()
    assert texts(xml)[-1].endswith(alone[2]) and alone[0] in texts(xml)[3]
    words_only = call(
        "translate", *words, "--input", word, "--output", made, "--output-format", "jsonl", check=False
    )
    refused(words_only, "has translations alone: leave out --output-format and --confidence")
    call("translate", *words, "--input", lines, "--output", text)
    assert text.read_text(encoding="utf-8").splitlines() == alone
    refused(
        call("translate", *words, "--input", word, check=False),
        "is translated by itself, to --output FILE.docx",
    )
    refused(
        call("translate", *words, "--output", made, check=False),
        "--output is for documents: expected --input FILE of .docx",
    )
    word.write_bytes(b"no archive")
    refused(
        call("translate", *words, "--input", word, "--output", made, check=False), "is no readable .docx file"
    )
