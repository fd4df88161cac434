"""The page in the system's Chromium: translate, correct, remember, undo; with keys alone, on a phone, in the dark."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.text.pairs import read_pairs
from tests.server.conftest import Served, served
from tests.small_models import World

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: a package manager installs it")
sync_api.expect.set_options(timeout=60_000)  # of a machine that does other work as well
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 740}


@pytest.fixture(scope="module")
def server(new_translator: Callable[[], Translator]) -> Iterator[Served]:
    with served(new_translator()) as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pairs(world: World) -> list[tuple[str, str]]:
    return list(read_pairs(world.folder / "test.tsv"))


def open_page(browser: Any, url: str, **settings: Any) -> tuple[Any, list[str]]:
    """The page, and what went wrong in it; it may ask this server alone."""
    page, faults = browser.new_page(**settings), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, "data:")) else faults.append(request.url))
    page.goto(url)
    return page, faults


def test_a_correction_is_remembered_and_undone(
    server: Served, browser: Any, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    (source, target), (other, _) = pairs[3], pairs[4]
    page, faults = open_page(browser, server.url, viewport=DESK)
    assert page.title() == "German → English"
    page.get_by_label("Text").fill(f"{source}\n{other}\n{source[:-1]}!")
    page.get_by_role("button", name="Translate").click()
    cards = page.get_by_role("article")
    sync_api.expect(cards).to_have_count(3)
    before = cards.nth(2).locator(".tokens").inner_text()
    assert cards.nth(0).locator(".token.by-token").count()
    cards.nth(0).get_by_role("button", name="Correct").click()
    box = cards.nth(0).get_by_label("Correct translation")
    sync_api.expect(box).to_be_focused()
    box.fill(target)
    page.get_by_role("button", name="Remember").click()
    sync_api.expect(page.get_by_role("status")).to_contain_text("Remembered.")
    (alone,) = server.translator.translate([source])
    assert alone.text == target
    sync_api.expect(cards.nth(0).locator(".badge").first).to_contain_text("remembered:")
    profits = cards.nth(2).locator(".tokens").inner_text()
    assert profits != before and "changed" in cards.nth(2).inner_text()
    page.get_by_text("What was learned").click()
    sync_api.expect(page.locator("#pairs li")).to_have_count(1)
    cards.nth(0).locator(".token").first.click()
    sync_api.expect(page.locator(".panel")).to_contain_text("learned:")
    page.screenshot(path=tmp_path / "desk.png", full_page=True)
    page.locator("#pairs").get_by_role("button").click()
    sync_api.expect(page.get_by_role("status")).to_contain_text("Forgotten.")
    sync_api.expect(page.locator("#pairs li")).to_have_count(0)
    assert cards.nth(2).locator(".tokens").inner_text() == before and not server.translator.memory()
    assert not faults
    page.close()


def test_keys_are_enough_on_a_phone_in_the_dark(
    server: Served, browser: Any, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    source, target = pairs[5]
    page, faults = open_page(browser, server.url, viewport=PHONE, color_scheme="dark", has_touch=True)
    press, type_in = page.keyboard.press, page.keyboard.insert_text
    press("Tab")
    type_in(source)
    press("Control+Enter")
    sync_api.expect(page.get_by_role("article")).to_have_count(1)
    page.get_by_role("button", name="Correct").focus()
    press("Enter")
    press("Control+A")
    type_in(target)
    press("Control+Enter")
    sync_api.expect(page.get_by_role("status")).to_contain_text("Remembered.")
    sync_api.expect(page.get_by_role("button", name="Correct")).to_be_focused()
    page.locator(".token").first.focus()
    press("ArrowRight")
    assert page.locator(".token").nth(1).get_attribute("aria-expanded") == "true"
    page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    press("Escape")
    sync_api.expect(page.locator(".panel")).to_have_count(0)
    page.get_by_role("button", name="Undo").focus()
    press("Enter")
    sync_api.expect(page.get_by_role("status")).to_contain_text("Forgotten.")
    assert not server.translator.memory() and not faults
    page.close()


def test_with_a_glossary_a_correction_is_seen_as_well(
    new_translator: Callable[..., Translator], browser: Any, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "terms.tsv").write_text("Xylophon\txylophone\n")
    source, target = pairs[3]
    with served(new_translator(glossary=tmp_path / "terms.tsv")) as server:
        page, faults = open_page(browser, server.url, viewport=DESK)
        page.get_by_label("Text").fill(source)
        page.get_by_role("button", name="Translate").click()
        card = page.get_by_role("article")
        sync_api.expect(card).to_have_count(1)
        assert not card.locator(".token").count() and target not in card.inner_text()
        card.get_by_role("button", name="Correct").click()
        card.get_by_label("Correct translation").fill(target)
        page.get_by_role("button", name="Remember").click()
        sync_api.expect(page.get_by_role("status")).to_contain_text("Remembered. 1 translation has changed.")
        sync_api.expect(card.locator(".plain")).to_have_text(target)
        assert not faults
        page.close()


def test_faults_are_told_and_text_is_never_markup(server: Served, browser: Any) -> None:
    page, _ = open_page(browser, server.url, viewport=DESK)
    page.get_by_label("Text").fill("<img src=x onerror=alert(1)> Licht")
    page.get_by_role("button", name="Translate").click()
    sync_api.expect(page.get_by_role("article")).to_have_count(1)
    assert not page.locator("main img").count()
    page.get_by_label("Text").fill("ja " * 1500)
    page.get_by_role("button", name="Translate").click()
    sync_api.expect(page.locator("#status.fault")).to_contain_text("the model takes")
    sync_api.expect(page.get_by_role("button", name="Translate")).to_be_enabled()
    page.close()
