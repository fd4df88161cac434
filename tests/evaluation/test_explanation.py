"""The page that explains translations: where each token came from, in numbers that add up and text that stays text."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.source_index import SentenceMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.evaluation.explanation import Explanation, Match, SentenceExplanation, as_page
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, refused, run
from tests.small_models import PAIRS, World, build, subword_options

HOSTILE = '</script><b>&"<!-- <script>\u2028\u2029]]>&lt;/script><img src=x onerror=alert(1)>'


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.scripts: list[str] = []
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements[-1:] == ["script"]:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def explained(
    world: World, phrase_store: Path, both: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """The data in the page of a kind of datastore, made once each."""
    folder = tmp_path_factory.mktemp("pages")
    stores = {"tokens": world.datastore, "phrases": phrase_store, "both": both}
    made: dict[str, dict[str, Any]] = {}

    def explain(kind: str) -> dict[str, Any]:
        if kind not in made:
            path = folder / f"{kind}.html"
            done = explain_with(world, path, "--datastore", stores[kind], "--sentences", 12)
            assert str(path) in done.stdout and "12 of 20 of test" in done.stdout
            assert [p.name for p in folder.iterdir() if p.suffix == ".partial"] == []
            made[kind] = Page(path).data
        return made[kind]

    return explain


def explain_with(world: World, output: Path, *extra: object, check: bool = True) -> Any:
    words = [
        *world.options("--no-progress-bar"),
        *subword_options(world),
        "--phrases-k",
        3,
        "--output",
        output,
        *extra,
    ]
    return call("explain", *words, check=check)


@pytest.mark.parametrize("kind", ["tokens", "phrases", "both"])
def test_numbers_add_up(explained: Callable[..., Any], kind: str) -> None:
    data = explained(kind)
    assert data["memories"] == {"both": ["tokens", "phrases"]}.get(kind, [kind])
    tokens = [token for sentence in data["sentences"] for token in sentence["tokens"]]
    assert len(tokens) > 100
    for token in tokens:
        parts = [weight * p for weight, p in zip(token["weights"], token["probabilities"])]
        assert sum(token["shares"]) == pytest.approx(1, abs=1e-5)
        assert sum(token["weights"]) == pytest.approx(1, abs=1e-5)
        assert token["probability"] == pytest.approx(sum(parts), rel=1e-3, abs=1e-9)
        assert token["shares"] == pytest.approx([part / sum(parts) for part in parts], abs=1e-4)
        assert (token["favourite"] is None) or token["favourite"]["probability"] >= token["probabilities"][0]
    for part in range(1, 1 + len(data["memories"])):
        assert any(token["shares"][part] > 0.1 for token in tokens)


@pytest.mark.parametrize("kind", ["tokens", "phrases", "both"])
def test_sentences_are_those_of_the_subset_and_tokens_make_up_the_translation(
    world: World, decode: Callable, explained: Callable[..., Any], kind: str
) -> None:
    data = explained(kind)
    sentences = data["sentences"]
    assert [sentence["number"] for sentence in sentences] == list(range(12))
    plain = decode(base=True)
    for sentence, (source, target) in zip(sentences, read_pairs(world.folder / "test.tsv")):
        assert sentence["source"].split()[-1] == source.split()[-1] and "▁" not in sentence["source"]
        assert sentence["reference"].split()[-1] == target.split()[-1]
        text, end = sentence["translation"], 0
        for token in sentence["tokens"]:
            assert text[end : token["start"]].strip() == "" and end <= token["end"]
            assert text[token["start"] : token["end"]] in (token["symbol"].replace("▁", ""), "")
            end = max(end, token["end"])
        assert end == len(text) and sentence["tokens"][-1]["symbol"] == "</s>"
        assert len(plain[sentence["number"]][0]["tokens"]) >= len(sentence["plain"].split())
        assert (sentence["changed"] > 0) == (sentence["plain"] != text)
    assert data["bleu"].keys() == {"base", "retrieval"}


def test_neighbours_are_marked_in_their_sentences(world: World, explained: Callable[..., Any]) -> None:
    data = explained("tokens")
    assert data["score_name"] == "squared distance"
    targets = [target for _, target in read_pairs(world.folder / "train.tsv")]
    neighbours = [
        n for sentence in data["sentences"] for token in sentence["tokens"] for n in token["neighbours"]
    ]
    assert len(neighbours) > 500
    for one in neighbours:
        text = data["texts"][one["sentence"]]
        assert text in targets or "⁇" in text or "<unk>" in text
        assert text[one["start"] : one["end"]] == one["symbol"].replace("▁", "").replace("</s>", "")
        assert one["end"] == len(text) or one["symbol"] != "</s>"
    for sentence in data["sentences"]:
        for token in sentence["tokens"]:
            assert len(token["neighbours"]) == token["neighbours_found"] == 8
            assert [-n["score"] for n in token["neighbours"]] == sorted(
                -n["score"] for n in token["neighbours"]
            )
            named = {said["symbol"]: said["probability"] for said in token["says"][0]}
            assert (
                token["probabilities"][1] == pytest.approx(named.get(token["symbol"], 0), abs=1e-4)
                or len(named) == 5
            )


@pytest.fixture
def translator(world: World, tmp_path: Path) -> Translator:
    """Over a datastore that it may write to. What sentence a neighbour is from does not count, and is shown."""
    store = shutil.copytree(world.datastore, tmp_path / "store")
    return Translator(datastore=store, device="cpu", max_len_b=25, tokens_likeness=0)


def long_pair(world: World) -> tuple[str, str]:
    return next(pair for pair in read_pairs(world.folder / "train.tsv") if len(pair[0].split()) > 6)


def matches_of(translator: Translator, source: str) -> list[Match]:
    (explained,) = translator.explain(source).sentences
    assert explained.matches is not None
    return explained.matches


def test_the_sentences_most_like_the_source_are_shown_with_their_translations(
    translator: Translator, world: World, sentences: list[str]
) -> None:
    rows, known = list(read_pairs(world.folder / "train.tsv")), Counter[bool]()
    index = translator.find_memory(TokenMemory).retriever.datastore.source_index
    everything = SentenceMemory(index, [], np.empty(0, np.int64))
    for source in sentences[:6]:
        explanation = translator.explain(source)
        (explained,) = explanation.sentences
        read = np.array(translator.task.read_as(source).ids)
        wanted = np.sort(everything.likeness([read]).sims[0])[::-1][:5]
        assert explained.matches is not None
        found = {one.target: one.likeness for one in explained.matches}
        np.testing.assert_allclose([*found.values()], wanted[wanted >= 0.3], rtol=1e-4)
        known.update((one.source, one.target) in rows for one in explained.matches)
        neighbours = [one for token in explained.tokens for one in token.neighbours]
        assert len({one.likeness for one in neighbours}) > 3
        for one in neighbours:
            assert one.likeness is not None
            likeness = found.get(explanation.texts[one.sentence])
            assert one.likeness == likeness if likeness else one.likeness <= max(wanted[-1], 0.3) + 1e-5
    assert known[True] > known[False], known  # of the others the model knows not every character


def test_only_the_same_sentence_is_100_percent_like(translator: Translator, world: World) -> None:
    source, _ = long_pair(world)
    best = matches_of(translator, source)[0]
    assert (best.likeness, best.source) == (1, source)
    first, *others = source.split()
    for changed in (f"{' '.join(others)} {first}", f"{source} {source}", " ".join(others)):
        other = matches_of(translator, changed)[0]
        assert (other.source, other.target) == (best.source, best.target) and 0.5 < other.likeness <= 0.99, (
            changed
        )


def test_what_is_learned_is_shown_at_once_and_what_does_not_count_never(
    translator: Translator, world: World
) -> None:
    source, _ = long_pair(world)
    before = matches_of(translator, source)
    first = translator.learn(source, "In other words.").id
    (learned, *rest) = matches_of(translator, source)
    assert learned == Match(1, source, "In other words.", first) and before[0] not in rest
    last = translator.learn(source, "Once more.").id
    assert matches_of(translator, source) == [Match(1, source, "Once more.", last), *rest]
    translator.compact()
    moved, *others = matches_of(translator, source)
    assert moved == Match(1, source, "Once more.", last) and [one.source for one in others] == [
        one.source for one in rest
    ]
    translator.forget(last, first)
    assert [one.target for one in matches_of(translator, source)] == [one.target for one in before]


def test_of_equal_sentences_the_newest_comes_first_and_each_pair_once(
    translator: Translator, world: World, tmp_path: Path
) -> None:
    for number, source in enumerate(("da sprach er sofort", "sofort sprach er da")):
        translator.learn(source, f"He spoke {number}.")
    found = matches_of(translator, "er sprach sofort da")
    assert [(one.target, one.likeness) for one in found[:2]] == [("He spoke 1.", 0.99), ("He spoke 0.", 0.99)]
    build(world, tmp_path / "both", "--subset", "valid", "train")
    call("merge", world.datastore, tmp_path / "both", "--output", tmp_path / "twice", "--quiet")
    twice = matches_of(Translator(datastore=tmp_path / "twice", device="cpu"), long_pair(world)[0])
    assert len({(one.source, one.target) for one in twice}) == len(twice) == 5


@pytest.mark.parametrize("likeness", [0, 3])
def test_an_empty_datastore_shows_what_it_learns(world: World, tmp_path: Path, likeness: float) -> None:
    where = ["--path", world.model, "--data", world.data_bin, *subword_options(world)]
    call("build memory", *where, "--output", tmp_path / "empty", "--cpu")
    translator = Translator(
        datastore=tmp_path / "empty", device="cpu", max_len_b=25, tokens_likeness=likeness
    )
    assert matches_of(translator, "Er kam.") == [] and next(translator.translate(["Er kam."])).text
    number = translator.learn("Er kam.", "He came.").id
    assert matches_of(translator, "Er kam.") == [Match(1, "Er kam.", "He came.", number)]


def test_unknown_characters_are_not_taken_for_others(translator: Translator) -> None:
    """The model reads both alike."""
    source, other = "Preis: 5 €", "Preis: 5 $"
    assert translator.task.read_as(source).ids == translator.task.read_as(other).ids
    number = translator.learn(source, "Price: 5 €").id
    assert matches_of(translator, source)[0] == Match(1, source, "Price: 5 €", number)
    assert matches_of(translator, other)[0] == Match(0.99, source, "Price: 5 €", number)


def test_phrases_that_wanted_a_token_are_those_that_have_it_next(explained: Callable[..., Any]) -> None:
    data = explained("both")
    found: Counter[str] = Counter()
    for sentence in data["sentences"]:
        for position, token in enumerate(sentence["tokens"]):
            assert (token["votes_found"] > 0) == (token["probabilities"][2] > 0)
            assert [vote["weight"] for vote in token["votes"]] == sorted(
                (v["weight"] for v in token["votes"]), reverse=True
            )
            for vote in token["votes"]:
                one = sentence["phrases"][vote["query"]]["retrieved"][vote["retrieved"]]
                text = data["texts"][one["sentence"]]
                string = text[one["start"] : one["end"]]
                assert one["usable"] and token["symbol"].strip("▁") in string
                if vote["place"] != "begins":
                    before = sentence["tokens"][position - 1]
                    assert before["symbol"].strip("▁") in string
                found[vote["place"]] += 1
    assert min(found[place] for place in ("begins", "continues")) > 5, found


def test_ids_choose_sentences_and_their_order(world: World, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    explain_with(world, output, "--ids", 17, 3, 17, "--neighbours", 2, "--batch-size", 1)
    data = Page(output).data
    assert [sentence["number"] for sentence in data["sentences"]] == [17, 3]
    assert all(len(token["neighbours"]) == 2 for token in data["sentences"][0]["tokens"])
    assert data["sentences_in_subset"] == PAIRS["test"]
    explain_with(world, output, "--gen-subset", "valid", "--ids", 0)
    assert Page(output).data["subset"] == "valid"


def test_neighbours_have_the_sentences_of_the_datastore_whatever_the_data_folder_holds(
    world: World, tmp_path: Path
) -> None:
    build(world, tmp_path / "valid", "--subset", "valid")
    folder, output = tmp_path / "data-bin", tmp_path / "page.html"
    shutil.copytree(world.data_bin, folder)
    for path in folder.glob("valid.*"):
        path.unlink()
    words = [str(folder), *world.options("--no-progress-bar")[1:], "--datastore", tmp_path / "valid"]
    call("explain", *words, "--ids", 0, "--output", output)
    data = Page(output).data
    targets = [target for _, target in read_pairs(world.folder / "valid.tsv")]
    texts = {data["texts"][n["sentence"]] for t in data["sentences"][0]["tokens"] for n in t["neighbours"]}
    assert len(texts) > 5 and all(text in targets or "⁇" in text or "<unk>" in text for text in texts)


def test_a_subset_without_references_has_no_bleu(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "data-bin"
    shutil.copytree(world.data_bin, folder)
    for path in folder.glob("test.de-en.en.*"):
        path.unlink()
    words = [str(folder), *world.options("--no-progress-bar")[1:], *map(str, subword_options(world))]
    call("explain", *words, "--sentences", 3, "--output", tmp_path / "page.html")
    data = Page(tmp_path / "page.html").data
    assert data["bleu"] is None and [sentence["reference"] for sentence in data["sentences"]] == [None] * 3


def hostile() -> Explanation:
    sentence = SentenceExplanation(0, HOSTILE, HOSTILE, HOSTILE, [], HOSTILE, [], [], 0.0, 0.0)
    return Explanation(HOSTILE, HOSTILE, HOSTILE, 1, HOSTILE, True, True, HOSTILE, [sentence], [HOSTILE])


def test_text_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    hostile().save(tmp_path / "hostile.html")
    page = Page(tmp_path / "hostile.html")
    assert page.data == json.loads(json.dumps(asdict(hostile())))
    assert page.elements.count("script") == 2 and not {"b", "img"} & set(page.elements)
    assert not re.search(r"[<>&\u2028\u2029]", page.scripts[0])


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    page = as_page(asdict(hostile()))
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert all(link.startswith("#") for link in Page(tmp_path / "page.html").links)
    assert "default-src 'none'" in page
    code = Page(tmp_path / "page.html").scripts[1]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|fetch\(|eval\(|import\b", code
    )


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "page.html"
    output.write_text("old")

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        hostile().save(output)
    assert output.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_what_cannot_be_explained_is_refused(world: World, phrase_store: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"

    def explain(*extra: object) -> Any:
        return explain_with(world, output, *extra, check=False)

    refused(explain("--output", tmp_path / "no" / "page.html"), "there is no folder .*no")
    refused(explain("--output", tmp_path), "is a folder: give a file")
    refused(explain("--ids", 3, 20), "the subset 'test' has no sentence 20, only 0 to 19")
    refused(explain("--ids", -1), "no sentence -1")
    refused(
        explain("--ids", 3, "--max-source-positions", 2), "longer than the model takes|has no sentence that"
    )
    refused(explain("--sentences", 0), "--sentences is 0")
    refused(explain("--neighbours", -1), "--neighbours is -1")
    refused(explain("--gen-subset", "dev"), "dev")
    refused(explain("--datastore", tmp_path / "nowhere"), "no datastore at .*nowhere")
    refused(explain("--path", tmp_path / "no.pt"), r"no\.pt")
    refused(explain("--score-reference"), "--score-reference is for fairseq-generate alone")
    refused(explain("--tokens-log", tmp_path / "log"), "--tokens-log is for fairseq-generate alone")
    refused(explain("--datastore", phrase_store, "--phrases-encoder", tmp_path / "none.pt"), r"none\.pt")
    words = [word for word in world.options() if word not in ("--datastore", str(world.datastore))]
    refused(call("explain", *words, "--output", output, check=False), "give --datastore DIR")
    assert call("explain", *world.options(), check=False).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_the_script_runs() -> None:
    assert "--neighbours" in run("fairseq-ccpr explain", "--help").stdout
