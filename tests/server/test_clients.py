"""Programs that were written for LibreTranslate work unchanged: its clients, and the requests of its own page."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libretranslate_aio")
pytest.importorskip("deep_translator")
pytest.importorskip("transpolibre")

import polib
import requests
from deep_translator import LibreTranslator
from libretranslate_aio import AsyncLibreTranslate, LibreTranslate
from libretranslatepy import LibreTranslateAPI

from fairseq_ccpr.text.pairs import read_pairs
from tests.server.conftest import Served
from tests.small_models import World

NODE = """
import translate from "translate";
const [url, ...texts] = process.argv.slice(2);
translate.engine = "libre";
translate.url = url;
console.log(JSON.stringify(await Promise.all(texts.map((text) => translate(text, { from: "de", to: "en" })))));
"""


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


@pytest.fixture(scope="module")
def wanted(server: Served, pairs: list[tuple[str, str]]) -> dict[str, str]:
    """What the model makes of the first sentences."""
    sources = [source for source, _ in pairs[:4]]
    return {one.source: one.text for one in server.translator.translate(sources)}


def test_libretranslatepy(server: Served, wanted: dict[str, str]) -> None:
    client = LibreTranslateAPI(server.url)
    for source, translation in wanted.items():
        assert client.translate(source, "de", "en") == translation
    assert client.detect(next(iter(wanted)))[0]["language"] == "de"
    assert [one["code"] for one in client.languages()] == ["de", "en"]


def test_libretranslate_aio(server: Served, wanted: dict[str, str]) -> None:
    with LibreTranslate(server.url, timeout=120) as client:
        found = client.translate([*wanted], "auto", "en", alternatives=2)
        assert found.translated_text == [*wanted.values()]
        assert [len(others) for others in found.alternatives] == [2] * len(wanted)
        assert {one.language for one in found.detected_language} == {"de"}
        assert client.translate("<b>x</b>", "en", "en", format="html").translated_text == "<b>x</b>"
        assert client.health() and client.detect(next(iter(wanted)))[0].language == "de"
        settings = client.frontend_settings()
        assert settings.suggestions and ".docx" in settings.supported_files_format

    async def ask() -> list[str]:
        async with AsyncLibreTranslate(server.url, timeout=120) as client:
            return [
                one.translated_text
                for one in await asyncio.gather(*(client.translate(q, "de", "en") for q in wanted))
            ]

    assert asyncio.run(ask()) == [*wanted.values()]


def test_deep_translator(server: Served, wanted: dict[str, str]) -> None:
    client = LibreTranslator("de", "en", api_key="unused", custom_url=f"{server.url}/")
    assert client.translate_batch([*wanted]) == [*wanted.values()]


def test_transpolibre(server: Served, wanted: dict[str, str], tmp_path: Path) -> None:
    po = polib.POFile()
    po.extend(polib.POEntry(msgid=source) for source in wanted)
    po.save(str(tmp_path / "a.po"))
    options = ["-s", "de", "-t", "en", "-u", server.url, "-f", "a.po"]
    command = [sys.executable, "-c", "from transpolibre.main import main; main()", *options]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    assert {one.msgid: one.msgstr for one in polib.pofile(str(tmp_path / "a.po"))} == wanted


def test_translate_of_npm(server: Served, wanted: dict[str, str], tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no Node.js")
    installed = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "translate@3.1.0"],
        cwd=tmp_path,
        capture_output=True,
        timeout=300,
    )
    if installed.returncode:
        pytest.skip("npm cannot install its package translate")
    (tmp_path / "ask.mjs").write_text(NODE)
    done = subprocess.run(
        ["node", "ask.mjs", f"{server.url}/translate", *wanted],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert json.loads(done.stdout) == [*wanted.values()]


def test_the_page_of_libretranslate(
    server: Served, wanted: dict[str, str], pairs: list[tuple[str, str]]
) -> None:
    """It sends multipart forms, with a key that is empty where there is none."""

    def send(path: str, **fields: object) -> dict[str, object]:
        parts = {name: (None, str(value)) for name, value in fields.items()}
        answer = requests.post(server.url + path, files=parts, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    source, translation = next(iter(wanted.items()))
    found = send(
        "/translate", q=source, source="auto", target="en", format="text", alternatives=3, api_key=""
    )
    assert found["translatedText"] == translation and found["detectedLanguage"]["language"] == "de"
    assert len(found["alternatives"]) == 3
    found = send(
        "/translate",
        q=f"<p>{source}</p>",
        source="de",
        target="en",
        format="html",
        alternatives=3,
        api_key="",
    )
    assert found["translatedText"] == f"<p>{translation}</p>"
    source, target = pairs[5]
    learned = send("/suggest", q=source, s=target, source="de", target="en", api_key="undefined")
    assert learned["success"] is True
    assert requests.delete(f"{server.url}/memory/{learned['id']}", timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/spec", "/docs"])
def test_what_is_not_ours_is_said(server: Served, path: str) -> None:
    for ask in (requests.get, requests.post):
        answer = ask(server.url + path, timeout=60)
        assert answer.status_code == 404
        assert answer.json() == {"error": f"there is no path {path}, which LibreTranslate has"}
