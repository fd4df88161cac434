"""DeepL's API by its public client, and by requests in the shape of Weblate's back ends for DeepL and LibreTranslate."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlencode

import pytest

pytest.importorskip("deepl")

import deepl
import requests

from fairseq_ccpr import Translator
from tests.server.conftest import Served, served

KEY = "a key of DeepL:fx"


@pytest.fixture
def wanted(server: Served, sentences: list[str]) -> dict[str, str]:
    """What the model makes of the first sentences."""
    return {one.source: one.text for one in server.translator.translate(sentences[:3])}


def test_its_client(server: Served, wanted: dict[str, str]) -> None:
    client = deepl.DeepLClient(KEY, server_url=server.url)
    found = client.translate_text([*wanted], source_lang="DE", target_lang="EN-US")
    assert [one.text for one in found] == [*wanted.values()]
    assert [one.billed_characters for one in found] == [*map(len, wanted)]
    source, translation = next(iter(wanted.items()))
    one = client.translate_text(f"{source}\n{source}", target_lang="EN-GB", formality="prefer_more")
    assert (one.text, one.detected_source_lang) == (f"{translation}\n{translation}", "DE")
    for tags in ("html", "xml"):
        text = f'<p id="1">{source}</p><x id="2"/>'
        one = client.translate_text(text, source_lang="DE", target_lang="EN-US", tag_handling=tags)
        assert one.text == f'<p id="1">{translation}</p><x id="2"/>'
    assert [(one.code, one.name) for one in client.get_source_languages()] == [("DE", "German")]
    names = {one.code: one.name for one in client.get_target_languages()}
    assert names == {"EN-GB": "English (British)", "EN-US": "English (American)"}
    for tags in (["Nr", "x"], "nr,x"):
        kept = f"{source} <nr>Haus & Hof</nr>"
        one = client.translate_text(kept, target_lang="EN-US", tag_handling="xml", ignore_tags=tags)
        assert "<nr>Haus & Hof</nr>" in one.text
    assert client.get_glossary_languages() == []
    usage = client.get_usage()
    assert usage.character.valid and not usage.any_limit_reached


def test_its_client_is_told_what_is_wrong(
    server: Served, new_translator: Callable[[], Translator], wanted: dict[str, str]
) -> None:
    client = deepl.DeepLClient(KEY, server_url=server.url)
    for asked, sentence in (
        ({"target_lang": "FR"}, "the target language is FR: this server translates from de to en"),
        (
            {"target_lang": "EN-US", "source_lang": "FR"},
            "the source language is FR: this server translates from de to en",
        ),
        ({"target_lang": "EN-US", "tag_handling": "tex"}, "tag_handling is tex: html or xml"),
        (
            {"target_lang": "EN-US", "extra_body_parameters": {"memory": "x"}},
            "there is no memory x: there is one",
        ),
    ):
        with pytest.raises(deepl.DeepLException, match=sentence):
            client.translate_text("ja", **asked)
    with pytest.raises(deepl.DeepLException, match="there is no path /v3/style_rules"):
        client.get_all_style_rules()
    source, translation = next(iter(wanted.items()))
    with served(new_translator(), keys={KEY: ()}) as closed:
        client = deepl.DeepLClient(KEY, server_url=closed.url)
        assert client.translate_text(source, target_lang="EN-US").text == translation
        with pytest.raises(deepl.AuthorizationException, match="the API key is missing or wrong"):
            deepl.DeepLClient("another key", server_url=closed.url).get_usage()


def test_forms_and_what_is_ignored(server: Served, wanted: dict[str, str]) -> None:
    one, two = [*wanted][:2]
    fields = [
        ("text", one),
        ("text", two),
        ("target_lang", "EN"),
        ("glossary_id", "g1"),
        ("formality", "more"),
        ("ignore_tags", "x"),
    ]
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = server.send("/v2/translate", urlencode(fields).encode(), form)
    assert status == 200 and [each["text"] for each in answer["translations"]] == [wanted[one], wanted[two]]
    assert answer["warning"] == "without effect here: glossary_id, formality, ignore_tags"
    for sent, sentence in (
        ({"text": one}, "the parameter target_lang is missing"),
        (
            {"target_lang": "EN", "text": {}},
            "the parameter text is an object: expected a text or a list of texts",
        ),
        ({"target_lang": "EN", "text": "ja" * 2000}, "the parameter text has 4,000 characters"),
    ):
        status, answer = server.ask("/v2/translate", "POST", **sent)
        assert status == 400 and answer["message"].startswith(sentence)
    assert server.ask("/v2/translate")[1] == {"message": "GET is not allowed for /v2/translate: use POST"}


def test_weblate(server: Served, wanted: dict[str, str]) -> None:
    """Requests in the shape of its back ends', with the addresses SERVER/v2/ and SERVER/ in their settings."""

    def ask(method: str, path: str, **sent: object) -> object:
        answer = requests.request(method, f"{server.url}/{path}", timeout=60, **sent)  # type: ignore[arg-type]
        answer.raise_for_status()
        return answer.json()

    headers = {"Authorization": f"DeepL-Auth-Key {KEY}"}
    for kind, codes in (("source", {"DE"}), ("target", {"EN-GB", "EN-US"})):
        found = ask("get", "v2/languages", params={"type": kind}, headers=headers)
        assert {one["language"] for one in found} == codes  # type: ignore[attr-defined]
    pairs = ask("get", "v2/glossary-language-pairs", headers=headers)
    assert pairs["supported_languages"] == []  # type: ignore[index]
    texts = [*wanted, f'{next(iter(wanted))} <x id="7"></x>', "A &amp; B"]
    sent = {
        "text": texts, "source_lang": "DE", "target_lang": "EN", "formality": "default", "tag_handling": "xml",
        "ignore_tags": ["x"],
    }  # fmt: skip
    found = ask("post", "v2/translate", json=sent, headers=headers)["translations"]  # type: ignore[index]
    assert [one["text"] for one in found[:3]] == [*wanted.values()]
    assert found[3]["text"].count('<x id="7"></x>') == 1 and "&" not in found[4]["text"].replace("&amp;", "")

    assert {one["code"] for one in ask("get", "languages")} == {"de", "en"}  # type: ignore[attr-defined]
    sent = {"api_key": "", "q": [*wanted], "source": "de", "target": "en"}
    assert ask("post", "translate", json=sent) == {"translatedText": [*wanted.values()]}
