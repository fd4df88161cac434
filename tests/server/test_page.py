"""The page in the system's Chromium: a text is translated, corrected and copied, and what was learned is looked after."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.inference.confidence import Confidence
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.sentences import Segments
from fairseq_ccpr.text.translation_memory import read_memory
from tests.server.conftest import KEEN, Served, served
from tests.small_models import World
from tests.test_memories import make_stores

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: a package manager installs it"),
]
expect = sync_api.expect
PATIENCE = 120_000  # ms, of a machine that does other work as well
expect.set_options(timeout=PATIENCE)
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 800}
Pair = tuple[str, str]

DROP = """([name, content]) => {
    const files = new DataTransfer();
    files.items.add(new File([content], name));
    for (const type of ["dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: files }));
}"""
XLIFF = """<xliff version="1.2"><file source-language="de" target-language="en" original="a" datatype="plaintext"><body>
<trans-unit id="1"><source>{}</source><target>{}</target></trans-unit></body></file></xliff>"""


@pytest.fixture(scope="module")
def server(new_translator: Callable[[], Translator]) -> Iterator[Served]:
    with served(new_translator()) as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_learned(server: Served) -> None:
    for pair in server.ask("/memory?limit=999")[1]["pairs"]:
        server.ask(f"/memory/{pair['id']}", "DELETE")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pairs(world: World) -> list[Pair]:
    return list(read_pairs(world.folder / "test.tsv"))


class Shown:
    """The page in a tab; what goes wrong in it is kept. It may ask its own server alone."""

    def __init__(self, browser: Any, url: str, **settings: Any) -> None:
        self.page = browser.new_page(**({"viewport": DESK} | settings))
        self.page.set_default_timeout(PATIENCE)
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        own = url, "data:", "blob:"
        self.page.on(
            "request", lambda sent: None if sent.url.startswith(own) else self.faults.append(sent.url)
        )
        self.page.goto(url)
        self.boxes, self.sentence = self.page.locator("#rows textarea"), self.page.locator("#sentence")
        self.pairs, self.memory = self.page.locator("#pairs li"), self.page.locator("#memory")

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def said(self, words: str | re.Pattern[str], lane: str = "translating") -> None:
        """Wait until a task is done, and said so."""
        expect(self.page.locator(f"#{lane} [role=status]")).to_contain_text(words)
        expect(self.page.locator(f"#{lane} button")).to_be_hidden()

    def translate(self, text: str) -> list[str]:
        self.page.get_by_label("German", exact=True).fill(text)
        self.button("Translate").click()
        self.said("Ctrl + Enter confirms one.")
        return self.texts

    def translate_halfway(self, text: str) -> list[Any]:
        """Begin a translation whose second request is held back; return its requests as they come."""
        held: list[Any] = []

        def hold_second(route: Any) -> None:
            held.append(route)
            if len(held) != 2:
                route.continue_()

        self.page.route("**/sentences", hold_second)
        self.page.get_by_label("German", exact=True).fill(text)
        self.button("Translate").click()
        return held

    @property
    def texts(self) -> list[str]:
        """The translations as they are shown, behind which the same texts stand."""
        found = [box.input_value() for box in self.boxes.all()]
        assert self.page.locator(".box > div").all_text_contents() == [f"{text}\u200b" for text in found]
        return found

    @property
    def copied(self) -> str:
        self.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.button("Copy").click()
        expect(self.button("Copied")).to_be_focused()
        found: str = self.page.evaluate("navigator.clipboard.readText()")
        return found

    def correct(self, number: int, text: str) -> None:
        self.boxes.nth(number).fill(text)
        self.boxes.nth(number).press("Control+Enter")
        self.said("Remembered")

    def marked(self, kind: str) -> list[str]:
        return [box.input_value() for box in self.page.locator(f"#rows .{kind} textarea").all()]

    def close(self) -> None:
        assert not self.faults
        self.page.close()


def alone(server: Served, sentence: str) -> str:
    (one,) = server.translator.translate([sentence])
    return one.text


def test_sentences_stand_beside_their_translations_which_are_edited_and_copied(
    server: Served, browser: Any, pairs: list[Pair], tmp_path: Path
) -> None:
    sources = [source for source, _ in pairs[:3]]
    shown = Shown(browser, server.url)
    assert shown.page.title() == "German → English"
    made = [alone(server, source) for source in sources]
    assert shown.translate(f"{sources[0]} {sources[1]}\n\n  {sources[2]}\n") == made
    assert shown.page.locator("#rows > li > p:first-child").all_text_contents() == sources
    shown.boxes.nth(0).fill(made[0].replace(" ", "\u00a0", 1))
    assert len(shown.marked("edited")) == 1
    shown.boxes.nth(0).fill(f" {made[0]}")
    assert not shown.marked("edited")
    shown.boxes.nth(1).fill("In other words.")
    assert shown.marked("edited") == ["In other words."]
    shown.page.screenshot(path=tmp_path / "desk.png", full_page=True)
    assert shown.copied == f" {made[0]} In other words.\n\n  {made[2]}\n"
    assert not server.translator.memory()
    shown.boxes.nth(2).fill("To be kept.")
    expect(shown.sentence).to_contain_text(made[2])
    shown.boxes.nth(1).focus()
    shown.button("Discard").click()
    expect(shown.boxes.nth(1)).to_be_focused()
    assert shown.texts[1:] == [made[1], "To be kept."]
    assert shown.translate(f"{sources[2]} {sources[0]}") == [
        "To be kept.",
        made[0],
    ]  # what was edited is not lost
    shown.close()


def test_confirming_goes_on_and_improves_what_follows(
    server: Served, browser: Any, pairs: list[Pair]
) -> None:
    """The first corrections are confirmed while nothing was answered yet; what is being typed stays."""
    (source, target), (other, its), (third, _) = pairs[2], pairs[4], pairs[6]
    shown, held = Shown(browser, server.url), list[Any]()
    shown.translate(f"{source}\n{other}\n{source[:-1]}!\n{third}")
    before = shown.texts

    def hold_first(route: Any) -> None:
        held.append(route)
        if len(held) > 1:
            route.continue_()

    shown.page.route("**/learn", hold_first)
    shown.boxes.nth(0).fill(target)
    shown.page.keyboard.press("Control+Enter")
    expect(shown.boxes.nth(1)).to_be_focused()
    shown.boxes.nth(1).fill(its)
    shown.page.keyboard.press("Control+Enter")
    expect(shown.boxes.nth(2)).to_be_focused()
    shown.page.keyboard.press("Alt+ArrowDown")
    expect(shown.boxes.nth(3)).to_be_focused()
    shown.page.keyboard.press("Alt+ArrowUp")
    shown.boxes.nth(3).fill("I am being typed")
    assert len(held) == 1 and not server.translator.memory()  # one after the other
    held[0].continue_()
    shown.said("Remembered.")
    assert [one.target for one in server.translator.memory()] == [its, target]
    assert shown.marked("remembered") == [target, its] and shown.texts[2] != before[2]
    assert shown.marked("changed") == [shown.texts[2]] and shown.texts[3] == "I am being typed"
    expect(shown.boxes.nth(3)).to_be_focused()
    shown.page.unroute("**/learn")
    shown.page.route("**/learn", lambda route: route.abort())
    shown.page.keyboard.press("Control+Enter")
    expect(shown.page.get_by_role("alert")).to_have_text("The server does not answer.")
    assert shown.marked("edited") == ["I am being typed"]
    shown.faults.clear()  # a console tells of what is aborted
    shown.page.unroute("**/learn")
    shown.page.keyboard.press("Control+Enter")
    shown.said("Remembered.")
    assert shown.marked("remembered")[2:] == ["I am being typed"]
    shown.close()


def test_what_is_composed_is_not_confirmed(server: Served, browser: Any, pairs: list[Pair]) -> None:
    shown, learned = Shown(browser, server.url), list[Any]()
    shown.page.on("request", lambda sent: learned.append(sent.url) if sent.url.endswith("/learn") else None)
    shown.translate(pairs[0][0])
    shown.boxes.nth(0).evaluate("""(box) => box.dispatchEvent(new KeyboardEvent("keydown", {
        key: "Enter", ctrlKey: true, isComposing: true, bubbles: true }))""")
    shown.boxes.nth(0).evaluate("""(box) => box.dispatchEvent(new KeyboardEvent("keydown", {
        key: "Enter", ctrlKey: true, keyCode: 229, bubbles: true }))""")
    assert shown.page.evaluate("fetch('health').then((answer) => answer.ok)")  # as long as a request takes
    assert not learned
    shown.close()


def test_edits_outlive_what_fails_and_equal_sentences_have_their_own(
    server: Served, browser: Any, pairs: list[Pair]
) -> None:
    """They come back with the text that has them, whatever was asked for between."""
    source = pairs[2][0]
    shown, held = Shown(browser, server.url), list[Any]()
    (first, *_) = shown.translate(f"{source}\n{source}\n{source}")
    shown.boxes.nth(0).fill("One.")
    shown.boxes.nth(2).fill("Three.")
    shown.page.route("**/sentences", lambda route: held.append(route))
    shown.button("Translate").click()
    shown.button("Translate").click()  # before there is an answer
    expect(shown.boxes).to_have_count(0)
    shown.page.reload()
    shown.page.unroute_all()
    shown.button("Translate").click()
    shown.said("3 sentences.")
    assert shown.texts == ["One.", first, "Three."] and len(shown.marked("edited")) == 2
    shown.boxes.nth(0).focus()
    shown.button("Discard").click()
    assert shown.translate(f"{source}\n{source}\n{source}") == [first, first, "Three."]
    shown.page.close()


def test_a_confirm_that_fails_or_comes_twice_stops_nothing(
    server: Served, browser: Any, pairs: list[Pair]
) -> None:
    """A key that is held down confirms what was read, and not what follows."""
    text, shown = "\n".join(source for source, _ in pairs * 3), Shown(browser, server.url)

    shown.translate_halfway(text)
    expect(shown.page.locator("#translating [role=status]")).to_contain_text(re.compile(r"… [1-9]\d*%"))
    shown.boxes.nth(0).fill(" ")
    shown.page.keyboard.press("Control+Enter")
    expect(shown.page.get_by_role("alert")).to_contain_text("its target is empty")
    shown.said("Not done: see below the sentence.")
    assert len(shown.texts) == len(Segments.of(text).sentences)
    shown.faults.clear()  # a console tells of what is refused
    shown.page.unroute_all()
    learned = list[Any]()
    shown.page.route(
        "**/learn", lambda route: (learned.append(route), len(learned) > 1 and route.continue_())
    )
    shown.boxes.nth(1).focus()
    shown.page.keyboard.down("Control")
    for _ in range(4):
        shown.page.keyboard.down("Enter")
    shown.page.keyboard.up("Enter")
    shown.page.keyboard.up("Control")
    shown.boxes.nth(1).press("Control+Enter")
    assert len(learned) == 1
    learned[0].continue_()
    shown.said("Remembered.")
    assert [one.count for one in server.translator.memory()] == [1]
    learned.clear()
    asked = list[str]()
    shown.page.on("request", lambda sent: asked.append(sent.url) if "sentences" in sent.url else None)
    shown.boxes.nth(2).fill("It is being learned.")
    shown.page.keyboard.press("Control+Enter")
    shown.button("Translate").click()
    expect(shown.boxes).to_have_count(0)
    assert shown.page.evaluate("fetch('health').then((answer) => answer.ok)")  # as long as a request takes
    assert not asked  # as what is answered would lack what is being learned
    learned[0].continue_()
    shown.said("sentences. Ctrl + Enter confirms one.")
    assert "It is being learned." in shown.marked("remembered") and shown.marked("edited") == [" "]
    shown.page.unroute_all()
    shown.close()


def test_alternatives_and_what_is_alike_are_chosen_by_a_click(
    server: Served, browser: Any, pairs: list[Pair]
) -> None:
    (source, target), (other, _) = pairs[2], pairs[4]
    server.ask("/learn", "POST", q=f"{source[:-1]} heute.", s=target)
    shown = Shown(browser, server.url)
    (first, _) = shown.translate(f"{source}\n{other}")
    shown.boxes.nth(0).focus()
    choices = shown.page.get_by_role("list", name="Alternatives").get_by_role("button")
    other_words = choices.first.text_content()
    assert other_words != first
    choices.first.click()
    expect(shown.boxes.nth(0)).to_be_focused()
    assert shown.marked("edited") == [other_words] and first in choices.all_text_contents()
    shown.page.keyboard.press("Control+Z")
    assert shown.texts[0] == first and not shown.marked("edited")
    alike = shown.page.get_by_role("list", name="In the memory").get_by_role("listitem").first
    expect(alike).to_contain_text(re.compile(r"^\d+% "))
    assert alike.locator("del").all_text_contents() == [f"{source.split()[-1][:-1]} heute."]
    assert alike.locator("ins").all_text_contents() == [source.split()[-1]]
    alike.get_by_role("button").click()
    assert shown.texts[0] == target
    shown.close()


def test_the_last_correction_counts_and_undo_brings_back_the_one_before(
    server: Served, browser: Any, pairs: list[Pair]
) -> None:
    (source, target), (other, _) = pairs[2], pairs[4]
    shown = Shown(browser, server.url)
    before = shown.translate(f"{source}\n{other}\n{source[:-1]}!")
    shown.correct(0, other_words := "He said so.")
    assert alone(server, source) == other_words and shown.marked("remembered") == [other_words]
    shown.correct(0, target)
    shown.said(f"Remembered, in place of “{other_words}”.")
    assert alone(server, source) == target and shown.marked("remembered") == [target]
    assert shown.marked("changed") and before[2] not in shown.texts
    shown.boxes.nth(0).focus()
    match = shown.page.get_by_role("list", name="In the memory").get_by_role("listitem").first
    expect(match).to_have_text(re.compile(rf"^100% {re.escape(source)} {re.escape(target)}$"))
    shown.button("Where from?").click()
    shown.page.locator(".token").first.click()
    expect(shown.page.locator(".panel")).to_contain_text("learned:")
    shown.button("Hide tokens").click()
    expect(shown.page.locator(".token")).to_have_count(0)
    shown.button("Undo").click()
    shown.said("Undone.")
    assert shown.marked("remembered") == [other_words] and alone(server, source) == other_words
    shown.button("Undo").click()
    shown.said("Undone. 2 translations changed.")
    assert shown.texts == before and not server.translator.memory()
    shown.close()


def test_a_long_text_is_stopped_and_is_corrected_before_its_end(
    server: Served, browser: Any, pairs: list[Pair]
) -> None:
    text = "\n".join(source for source, _ in pairs * 3)
    shown = Shown(browser, server.url)

    held = shown.translate_halfway(text)
    status = shown.page.locator("#translating [role=status]")
    expect(status).to_contain_text(re.compile(r"Translating … [1-9]\d*%"))
    begun = shown.texts
    shown.button("Stop").click()
    shown.said("Stopped.")
    assert shown.texts == begun and 0 < len(begun) < len(pairs) * 3
    held.clear()
    shown.button("Translate").click()
    expect(status).to_contain_text(re.compile(r"Translating … [1-9]\d*%"))
    shown.correct(0, pairs[0][1])
    assert (
        len(shown.texts) == len(Segments.of(text).sentences)
        and shown.marked("remembered") == [pairs[0][1]] * 3
    )
    shown.page.unroute_all()
    shown.close()


def test_any_line_end_and_lines_of_any_length(
    server: Served, browser: Any, new_translator: Callable[[], Translator]
) -> None:
    """U+2028 and U+2029 part lines as others do; a line that is longer than the server takes is divided at sentences."""
    text = "Es werde Licht.\u2028Gott sprach.\u2029Und es ward Licht.\n Und Gott sah.\n"
    with served(new_translator(), most_characters=100) as small:
        for one, url in (
            (text, server.url),
            (text * 2, small.url),
            ("Es werde Licht! Gott 😀 sprach. " * 9 + "Ja", small.url),
        ):
            shown = Shown(browser, url)
            shown.translate(one)
            wanted = Segments.of(one)
            translations = [one.text for one in server.translator.translate(wanted.sentences)]
            assert shown.texts == translations and shown.copied == wanted.join(translations)
            shown.close()


def test_a_reload_and_another_tab_know_what_was_done(server: Served, browser: Any, pairs: list[Pair]) -> None:
    (one, target), (two, _), (three, _) = pairs[5:8]
    shown = Shown(browser, server.url)
    first, *_ = shown.translate(f"{one}\n{two}\n{three}")
    shown.correct(0, target)
    shown.boxes.nth(2).fill("To be looked at again.")
    texts = shown.texts
    shown.page.reload()
    assert shown.texts == texts
    shown.said("3 sentences.")
    assert shown.texts == texts and shown.marked("remembered") == [target]
    assert shown.marked("edited") == ["To be looked at again."]
    another = Shown(browser, server.url)
    assert another.translate(one) == [target] and another.marked("remembered") == [target]
    another.close()
    server.ask(f"/memory/{server.translator.memory()[0].id}", "DELETE")
    shown.page.reload()
    shown.said("changed.")
    assert first in shown.texts and not shown.marked("remembered")
    shown.close()


def test_what_was_learned_is_searched_edited_deleted_and_brought_back(
    server: Served, browser: Any, pairs: list[Pair], tmp_path: Path
) -> None:
    (source, target), (other, its) = pairs[16:18]
    for pair in pairs[16:18]:
        server.ask("/learn", "POST", q=pair[0], s=pair[1])
    shown = Shown(browser, server.url)
    shown.translate(source)
    shown.page.get_by_text("What was learned").click()
    expect(shown.pairs).to_have_count(2)
    shown.page.get_by_label("Search").fill(f"{source.split()[0]} {source.split()[-1]}")
    expect(shown.pairs).to_have_count(1)
    expect(shown.pairs.locator(".small")).to_have_text(re.compile(r"^\d+ \w+ 20\d\d, \d\d:\d\d$"))
    box = shown.page.get_by_label(f"Translation of “{source}”")
    expect(shown.button("Save")).to_be_hidden()
    box.fill("Another.")
    expect(shown.button("Save")).to_be_visible()
    box.press("Control+Enter")
    expect(shown.pairs).to_have_count(2)
    shown.said("1 translation changed.")
    assert shown.texts == [alone(server, source)] == ["Another."]
    expect(shown.page.locator("#pairs .replaced")).to_contain_text(
        re.compile(f"{re.escape(target)}.*replaced · ")
    )
    shown.button("Bring back").click()
    shown.said("It counts again.", "learning")
    shown.said("1 translation changed.")
    assert shown.texts == [alone(server, source)] == [target]
    shown.page.get_by_label("Search").fill("")
    row = shown.pairs.filter(has_text=other)
    row.get_by_role("button", name="Delete").click()
    expect(row).to_have_class("deleted")
    assert its not in [pair.target for pair in server.translator.memory()]
    shown.page.screenshot(path=tmp_path / "memory.png", full_page=True)
    row.get_by_role("button", name="Undo").click()
    expect(row.get_by_role("textbox")).to_have_text(its)
    replaced = shown.pairs.filter(has_text="Another.")
    replaced.get_by_role("button", name="Delete").click()
    replaced.get_by_role("button", name="Undo").click()
    expect(replaced).to_have_class("replaced")
    assert alone(server, source) == target and len(server.translator.memory()) == 3
    shown.close()


def test_files_are_dropped_in_and_come_out(
    server: Served, browser: Any, pairs: list[Pair], tmp_path: Path
) -> None:
    (one, its), (two, theirs), (three, its_own) = pairs[10:13]
    shown = Shown(browser, server.url)
    shown.translate(f"{one}\n{two}")
    shown.page.evaluate(DROP, ["project.xlf", XLIFF.format(one, its)])
    shown.said("project.xlf: learned 1 pair.", "importing")
    shown.said("1 translation changed.")
    assert shown.texts[0] == its and shown.marked("remembered") == [its]
    expect(shown.pairs).to_have_count(1)
    (tmp_path / "pairs.tsv").write_text(
        f"{two}\t{theirs}\n{one}\tAnother.\nno pair\n{three}\t{its_own}\n", "utf-8"
    )
    (tmp_path / "page.html").write_text("<p>")
    shown.page.locator("#files").set_input_files([tmp_path / "pairs.tsv", tmp_path / "page.html"])
    expect(shown.page.locator("#importing.fault")).to_contain_text(
        re.compile(
            r"learned 3 pairs; 1 in place of .*; left out 1: .*page\.html is no TSV, TMX or XLIFF file by its name"
        )
    )
    shown.said("2 translations changed.")
    assert shown.texts == ["Another.", theirs]
    shown.faults.clear()  # a console tells of what is refused
    shown.page.locator("#files").set_input_files(tmp_path / "pairs.tsv")
    shown.said("pairs.tsv: learned 0 pairs; 3 known already; left out 1:", "importing")
    with shown.page.expect_download() as download:
        shown.button("Export TMX").click()
    path = Path(shutil.copy(download.value.path(), tmp_path / download.value.suggested_filename))
    exported = [(two, theirs), (one, "Another."), (three, its_own)]
    assert list(read_memory(path, "de", "en", Counter())) == exported
    for pair in server.translator.memory():
        server.ask(f"/memory/{pair.id}", "DELETE")
    shown.page.evaluate(DROP, [path.name, path.read_text("utf-8")])
    shown.said("memory.tmx: learned 3 pairs.", "importing")
    assert len(server.translator.memory()) == 3
    shown.close()


def test_keys_are_enough_on_a_phone_in_the_dark(
    server: Served, browser: Any, pairs: list[Pair], tmp_path: Path
) -> None:
    source, target = pairs[5]
    shown = Shown(browser, server.url, viewport=PHONE, color_scheme="dark", has_touch=True)
    press = shown.page.keyboard.press
    press("Tab")
    shown.page.keyboard.insert_text(source)
    press("Control+Enter")
    shown.said("1 sentence.")
    for _ in range(3):  # to the buttons, and on to the translation
        press("Tab")
    expect(shown.boxes.first).to_be_focused()
    press("Control+A")
    shown.page.keyboard.insert_text(target)
    press("Control+Enter")
    shown.said("Remembered.")
    expect(shown.boxes.first).to_be_focused()
    for name in ("Undo", "Where from?"):
        press("Tab")
        expect(shown.button(name)).to_be_focused()
    press("Enter")
    expect(shown.page.locator(".token").first).to_be_visible()
    shown.page.locator(".token").first.focus()
    press("ArrowRight")
    assert shown.page.locator(".token").nth(1).get_attribute("aria-expanded") == "true"
    shown.page.screenshot(path=tmp_path / "phone.png", full_page=True)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    press("Escape")
    expect(shown.page.locator(".panel")).to_have_count(0)
    shown.button("Undo").focus()
    press("Enter")
    shown.said("Undone.")
    assert not server.translator.memory()
    shown.close()


def test_a_key_is_asked_for_and_with_a_glossary_nothing_is_explained(
    new_translator: Callable[..., Translator], browser: Any, pairs: list[Pair], tmp_path: Path
) -> None:
    (tmp_path / "terms.tsv").write_text("Xylophon\txylophone\n")
    source, target = pairs[2]
    with served(new_translator(glossary=tmp_path / "terms.tsv"), keys={"a key of mine": ()}) as server:
        shown = Shown(browser, server.url)
        shown.page.get_by_label("German", exact=True).fill(source)
        shown.button("Translate").click()
        shown.said("the API key is missing or wrong")
        shown.faults.clear()  # a console tells of what is refused
        shown.page.get_by_label("API key").fill("a key of mine")
        shown.translate(source)
        shown.correct(0, target)
        assert shown.texts == [alone(server, source)] == [target]
        assert not shown.button("Where from?").count()
        shown.page.evaluate(DROP, ["pairs.tsv", f"{source}\tAnother.\n"])
        shown.said("pairs.tsv: learned 1 pair; 1 in place of earlier ones.", "importing")
        shown.said("changed.")
        with shown.page.expect_download():
            shown.button("Export TMX").click()
        assert shown.texts == ["Another."]
        shown.close()


def test_what_was_learned_is_undone_where_it_was_learned(
    world: World, browser: Any, pairs: list[Pair], tmp_path: Path
) -> None:
    """Also where the field has another name by then: ids are of each memory its own."""
    source, target = pairs[2]
    translator = Translator(datastore=make_stores(world, tmp_path), **KEEN)
    cars, bikes = translator["cars"], translator["bikes"]
    bikes.learn(source, "Another.")
    with served(translator) as server:
        shown = Shown(browser, server.url)
        field = shown.page.get_by_role("textbox", name="Memory")
        shown.translate(source)
        shown.correct(0, target)
        shown.page.get_by_text("What was learned").click()
        expect(shown.pairs).to_contain_text([target])
        field.fill("bikes")
        shown.button("Undo").first.dispatch_event("click")  # before the field tells that it has changed
        shown.said("Undone.")
        assert (cars.memory(), [one.target for one in bikes.memory()]) == ([], ["Another."])
        field.press("Tab")
        expect(shown.pairs).to_contain_text(["Another."])
        assert shown.texts == ["Another."] and shown.marked("remembered") == ["Another."]
        shown.button("Delete").click()
        shown.said("Deleted.", "learning")
        assert not bikes.memory()
        field.fill("cars")
        field.press("Tab")
        expect(shown.pairs).to_have_count(0)  # and what was deleted elsewhere is not brought back here
        shown.close()


def test_doubtful_words_are_underlined_until_they_are_edited(
    new_translator: Callable[[], Translator], browser: Any, pairs: list[Pair]
) -> None:
    translator, source = new_translator(), pairs[0][0]
    translator.confidence = Confidence((0.0, 0.0, 0.0), (0.5, 1.0, 0.0), 50.0)
    (one,) = translator.translate([source], confidence=True)
    doubtful = [word for word, confidence in one.word_confidences if confidence < 0.3]
    assert 0 < len(doubtful) < len(one.word_confidences)
    with served(translator) as server:
        shown = Shown(browser, server.url)
        shown.translate(source)
        assert shown.page.locator("#rows .doubtful").all_text_contents() == doubtful
        expect(shown.page.locator("#legend")).to_be_visible()
        shown.boxes.first.press_sequentially("!")
        expect(shown.page.locator("#rows .doubtful")).to_have_count(0)
        assert shown.texts and not shown.faults


def test_faults_are_told_and_text_is_never_markup(server: Served, browser: Any) -> None:
    shown = Shown(browser, server.url)
    shown.translate("<img src=x onerror=alert(1)> Licht")
    shown.correct(0, "<img src=x onerror=alert(2)>")
    shown.page.get_by_text("What was learned").click()
    expect(shown.pairs).to_have_count(1)
    assert not shown.page.locator("main img").count()
    shown.close()
    shown = Shown(browser, server.url)
    shown.translate("Wo, " * 600)
    shown.said(re.compile(r"^\d+ sentences\..* 1 was longer than the model takes, and divided\.$"))
    assert len(shown.texts) == 2
    shown.page.get_by_label("German", exact=True).fill("zw" * 1000)
    shown.button("Translate").click()
    expect(shown.page.locator("#translating.fault")).to_contain_text("the model takes")
    expect(shown.button("Translate")).to_be_enabled()
    shown.page.close()
