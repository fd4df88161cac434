"""What retrieval brings back for text with references: counted as plainly as can be; how fast it is."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever
from fairseq_ccpr.lab.accuracy.retrieved import (
    MEASURES,
    Reference,
    count_held,
    count_retrieved,
    distinct_strings,
    lettered_words,
    make_references,
    measure,
)
from fairseq_ccpr.lab.accuracy.significance import resample
from fairseq_ccpr.lab.commands import benchmark, evaluate
from fairseq_ccpr.lab.speed.phrase_speed import bytes_per_entry
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.text.words import word_spans
from tests.helpers import call, refused
from tests.small_models import VERSES, random_encoders

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_encoders(tmp_path_factory.mktemp("encoders"))["ccpr"]


@pytest.fixture(autouse=True, scope="module")
def unlikely_phrases() -> Iterator[None]:
    """An encoder of random weights takes few words for phrases."""
    with patch.object(evaluate, "REFERENCE_THRESHOLD", 0.3):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Verses and themselves but for a few words, since an encoder of random weights knows no other language."""
    folder = tmp_path_factory.mktemp("text")
    source, target = folder / "source.txt", folder / "target.txt"
    lines = VERSES[:40]
    source.write_text("\n".join([*lines[:5], "", *lines[5:], " "]) + "\n", encoding="utf-8")
    changed = [line.replace(" and ", " but ") for line in lines]
    target.write_text("\n".join([*changed[:5], "x", *changed[5:], ""]) + "\n", encoding="utf-8")
    return source, target


def build(encoder: Path, lines: list[str], folder: Path, segmentation: str) -> Path:
    folder.mkdir()
    (folder / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [
        folder / "text",
        "--encoder",
        encoder,
        "--output",
        folder / segmentation,
        "--segmentation",
        segmentation,
    ]
    call("build phrases", *words, "--max-words", 3, "--cpu", "--quiet")
    return folder / segmentation


@pytest.fixture(scope="module")
def stores(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("stores")
    return build(encoder, VERSES[:70], folder / "a", "all"), build(
        encoder, VERSES[20:], folder / "b", "ngram:2"
    )


def sentences() -> st.SearchStrategy[str]:
    return st.text("ab .,'-中", max_size=25)


def plain_measure(reference: Reference, strings: set[str]) -> list[tuple[int, int]]:
    """Every run of words of the reference is looked for among the strings."""
    text, words = reference.text, word_spans(reference.text)
    runs = list(itertools.combinations_with_replacement(range(len(words)), 2))
    found, inside, by_several = set(), set(), set()
    for first, last in runs:
        if (string := text[words[first][0] : words[last][1]]) in strings:
            found.add(string)
            inside |= set(range(first, last + 1))
            if sum(any(map(str.isalnum, text[a:b])) for a, b in words[first : last + 1]) > 1:
                by_several |= set(range(first, last + 1))
    lettered = {n for n, (start, end) in enumerate(words) if any(map(str.isalnum, text[start:end]))}
    return [
        (len(found), len(strings)),
        (len(inside & lettered), len(lettered)),
        (len(by_several & lettered), len(lettered)),
        (sum(phrase in strings for phrase in reference.phrases), len(reference.phrases)),
    ]


@given(text=sentences(), others=st.lists(sentences(), max_size=3), seed=st.integers(0, 2**31))
def test_measures_equal_plain_ones(text: str, others: list[str], seed: int) -> None:
    rng = random.Random(seed)
    runs = [
        line[start:end]
        for line in (text, *others)
        for (start, _), (_, end) in itertools.combinations_with_replacement(word_spans(line), 2)
    ]
    lettered = [run for run in runs if any(map(str.isalnum, run))]
    strings, phrases = (set(rng.sample(lettered, rng.randint(0, len(lettered)))) for _ in range(2))
    reference = Reference(text, lettered_words(text), frozenset(phrases))
    assert measure(reference, strings) == plain_measure(reference, strings)


@pytest.mark.parametrize("number", [0, 1])
def test_counts_of_a_store_whatever_the_batch(
    encoder: Path, stores: tuple[Path, Path], files: tuple[Path, Path], number: int
) -> None:
    loaded = PhraseEncoder.load(encoder)
    sources, targets = ([line for line in path.read_text().split("\n") if len(line) > 1] for path in files)
    references, too_long = make_references(PhraseFinder(loaded, Segmentation(threshold=0.3)), targets, True)
    encode = loaded.context.tokenizer.encode
    # its 120 places cannot take them
    assert too_long == sum(len(encode(text).ids) > 122 for text in targets) > 0
    assert sum(bool(reference.phrases) for reference in references) > 20
    store = PhraseDatastore(stores[number])
    segmentation = Segmentation(store.section.segmentation["kind"], 0.5, 3)
    retriever = PhraseRetriever(store, loaded, segmentation, 3, 0.0, CPU)
    one = count_retrieved(retriever, sources, references, [1, 3], [targets, sources], "one", True)
    asked, retrieved = retriever.phrases, retriever.retrieved
    two = count_retrieved(retriever, sources, references, [1, 3], [targets, sources], "two", True, batch=3)
    assert (retriever.phrases, retriever.retrieved) == (2 * asked, 2 * retrieved)
    assert np.array_equal(one.actual, two.actual) and np.array_equal(one.chance, two.chance)
    assert one.actual.shape == (2, len(MEASURES), 2, 40)
    results = retriever.retrieve(sources)
    for i, queries in enumerate(results):
        for row, top in enumerate((1, 3)):
            strings = {
                r.string
                for query in queries
                for r in query.retrieved[:top]
                if any(map(str.isalnum, r.string))
            }
            assert strings == distinct_strings(queries, top)
            assert one.actual[row, :, :, i].tolist() == [
                list(m) for m in plain_measure(references[i], strings)
            ]
            for column, lines in enumerate((targets, sources)):
                there = {
                    string
                    for string in strings
                    if plain_measure(Reference(lines[i], [], frozenset()), {string})[0][0]
                }
                wanted = plain_measure(references[i], there)[1:3]
                assert one.written[row, column, :, :, i].tolist() == [list(m) for m in wanted]
            other = plain_measure(references[(i + 20) % 40], strings)
            assert one.chance[row, :, :, i].tolist() == [list(m) for m in other]
    everything = {store.phrase(entry)[0] for entry in range(store.section.size)}
    held = count_held(store, references)
    for i, reference in enumerate(references):
        expected = plain_measure(
            reference, {string for string in everything if any(map(str.isalnum, string))}
        )
        assert held[1:, :, i].tolist() == [list(m) for m in expected[1:]]
    assert (held[1:, 0] >= one.actual[-1, 1:, 0]).all()
    assert one.actual[0, 0, 0].sum() > 5 * one.chance[0, 0, 0].sum()  # the same words in both languages


def test_bootstrap_of_shares(rng: np.random.Generator) -> None:
    totals = rng.integers(0, 4, (3, 50))
    hits = rng.binomial(totals, 0.4)
    shares = resample(hits, totals, [np.arange(50)], 2000)
    assert shares.mean(axis=0) == pytest.approx(hits.sum(axis=1) / totals.sum(axis=1), abs=0.02)
    sets, ones = [np.arange(20), np.arange(20, 50)], np.ones_like(hits)
    of_sets = np.mean([hits[:, of_set].mean(axis=1) for of_set in sets], axis=0)
    assert resample(hits, ones, sets, 2000).mean(axis=0) == pytest.approx(of_sets, abs=0.1)
    assert not resample(hits * 0, totals * 0, sets, 5).any()
    alone = resample(hits[[1, 1]], totals[[1, 1]], sets, 50)[:, 0]
    assert np.array_equal(alone, resample(hits, totals, sets, 50)[:, 1])


def test_a_sample_has_the_entries_of_whole_sentences(stores: tuple[Path, Path]) -> None:
    whole = PhraseDatastore(stores[0])
    places = {tuple(span): row for row, span in enumerate(whole.spans.tolist())}
    before: set[int] = set()
    for size in (1, 40, 1000, whole.section.size):
        sample = whole.sample(size)
        rows = [places[tuple(span)] for span in sample.spans.tolist()]
        assert sample.section.size == len(set(rows)) == size and before < set(rows)
        assert np.array_equal(sample.keys, whole.keys[rows]) and sample.open_index().size == size
        counts = [
            np.bincount(store.spans[:, 0], minlength=whole.section.sentences) for store in (sample, whole)
        ]
        assert ((counts[0] > 0) & (counts[0] < counts[1])).sum() <= 1
        before = set(rows)
    assert len(set(whole.sample(1000).spans[:, 0])) < whole.section.sentences / 2
    parts = bytes_per_entry(whole.section)
    assert (
        list(parts) == ["keys", "spans", "sentences"] and 16 < parts["keys"] < 17 and 12 < parts["spans"] < 13
    )
    assert sum(parts.values()) * whole.section.size == pytest.approx(
        sum(f["bytes"] for f in whole.section.files.values())
    )


def command(files: tuple[Path, Path], *extra: object) -> list[Any]:
    words = ["--source", files[0], "--target", files[1], "--cpu", "--quiet", "--phrases-k", 3]
    return ["evaluate retrieved", *words, "--phrases-min-similarity", 0, *extra]


def test_the_command(stores: tuple[Path, Path], files: tuple[Path, Path], tmp_path: Path) -> None:
    words = command(files, "--datastore", stores[0], f"pairs={stores[1]}", f"again={stores[0]}")
    shown = call(*words, "--json", tmp_path / "r.json").stdout
    assert (
        "|  | all | pairs | again |" in shown
        and "40 sentences; " in shown
        and "2 lines with an empty" in shown
    )
    assert shown.count("longer than the encoder reads were read in windows") == 2
    done = json.loads((tmp_path / "r.json").read_text())
    first, pairs, again = done["stores"]
    assert done["signature"] in shown and all(store["signature"] in shown for store in done["stores"])
    assert "query:ngram:2>" in pairs["signature"] and "query:all>" in first["signature"]
    assert [top["top"] for top in first["tops"]] == [1, 3]
    for one, two, three in zip(first["tops"], pairs["tops"], again["tops"], strict=True):
        for name in MEASURES:
            a, b, c = (top["measures"][name] for top in (one, two, three))
            assert (
                "p" not in a
                and a["share"] >= a["chance"]
                and b["interval"][0] <= b["interval"][1]
                and b["p"] <= 1
            )
            assert b["difference"] == pytest.approx(b["share"] - a["share"], abs=0.011)
            assert (c["share"], c["difference"], c["interval"], c["p"]) == (a["share"], 0, [0, 0], 1)
    more, fewer = (top["measures"]["coverage"]["share"] for top in reversed(first["tops"]))
    assert (
        more >= fewer and first["tops"][1]["strings per sentence"] > first["tops"][0]["strings per sentence"]
    )
    assert call(*words).stdout == shown
    assert "held: coverage" in shown and 0 < pairs["held"]["coverage"] <= 100
    small = call(*words, "--entries", 300, "--phrases-segmentation", "learned", "--phrases-k", 1).stdout
    assert (
        "| entries | 300 | 300 | 300 |" in small
        and small.count("query:learned>0.5") == 3
        and "top 3" not in small
    )


def test_what_translations_have_of_what_was_retrieved(
    stores: tuple[Path, Path], files: tuple[Path, Path], tmp_path: Path
) -> None:
    """The references themselves have all that is right, a text in which every line is another word nothing."""
    nothing, short = tmp_path / "nothing.txt", tmp_path / "short.txt"
    nothing.write_text("".join("zzz\n" for _ in files[1].read_text().splitlines()))
    short.write_text("zzz\n")
    words = command(files, "--datastore", stores[1])
    call(*words, "--hypotheses", f"gold={files[1]}", f"none={nothing}", "--json", tmp_path / "r.json")
    [store] = json.loads((tmp_path / "r.json").read_text())["stores"]
    for top in store["tops"]:
        for name in ("coverage", "coverage by several words"):
            assert top["written"]["gold"][name] == top["measures"][name]["share"]
            assert top["written"]["none"][name] == 0
    done = call(*words, "--hypotheses", short, check=False)
    refused(done, "short.txt has 1 lines, and .* give a translation of each")


def test_text_and_datastores_that_cannot_work(
    encoder: Path, stores: tuple[Path, Path], files: tuple[Path, Path], tmp_path: Path
) -> None:
    def fails(*extra: object, target: Path = files[1]) -> Any:
        words = command((files[0], target), "--datastore", stores[0], *extra)
        return call(*words, check=False)

    short = tmp_path / "short.txt"
    short.write_text("\n".join(VERSES[:7]) + "\n", encoding="utf-8")
    refused(
        fails(target=short), r"source\.txt has 42 lines and .*short\.txt has 7: give files in which line n"
    )
    short.write_text("x\n" + "\n" * 41, encoding="utf-8")
    refused(fails(target=short), "have 1 sentence pairs without an empty side: give at least 2")
    short.write_bytes(b"x\n\xff\n")
    refused(fails(target=short), r"short\.txt, line 2: the bytes are not UTF-8")
    refused(fails(target=tmp_path / "no.txt"), r"no\.txt: No such file")
    unlikely = "--phrases-threshold", 0.9999999, "--phrases-segmentation", "learned"
    refused(fails(*unlikely), r"no phrase was found in .*source\.txt with")
    refused(fails("--phrases-min-similarity", 2), "--phrases-min-similarity is 2.0: a cosine")
    with patch.object(evaluate, "REFERENCE_THRESHOLD", 0.9999999):
        refused(fails(), "no phrase was found in the references")
    refused(
        fails("--entries", 10**6), "--entries is 1,000,000, but the datastore .* has .*: give a number from 1"
    )
    refused(fails("--phrases-segmentation", "some"), "no segmentation 'some'")
    refused(fails("--phrases-k", 0), "--phrases-k is 0: at least 1")
    refused(fails("--json", tmp_path / "no" / "r.json"), "--json .*r.json: there is no folder .*no")
    refused(
        fails("--datastore", stores[0], stores[0]), "two datastores are called 'all': name them, as in NAME="
    )
    refused(fails("--datastore", tmp_path), "is not a datastore")
    other = tmp_path / "other"
    shutil.copytree(encoder.parent, other)
    state = torch.load(path := other / encoder.name)
    state["model"]["align.bias"] += 1
    torch.save(state, path)
    refused(fails("--phrases-encoder", path), "were built with another encoder: they need")


def test_the_benchmark(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n".join(VERSES[:30]) + "\n", encoding="utf-8")
    words = ["benchmark phrases", "--text", tmp_path / "text", "--encoder", encoder, "--sentences", 20, 10]
    words += ["--cpu", "--quiet", "--sizes", 300, 200, "--index", "exact", "IVF4,Flat"]
    shown = call(*words, "--json", tmp_path / "b.json", "--plot", tmp_path / "b.png").stdout
    assert (
        "| index | phrases | queries/s |" in shown and "| IVF4,Flat | 300 |" in shown and "| 20 | " in shown
    )
    done = json.loads((tmp_path / "b.json").read_text())
    assert {"torch", "numpy", "faiss"} <= done["versions"].keys() and "--sizes" in shown
    assert done["command"][:6] == ["fairseq-ccpr", "benchmark", "phrases", "--text", "text", "--encoder"]
    assert done["settings"] == {"dimension": 128, "queries": 512, "k": 32, "repeats": 5}
    assert [row["sentences"] for row in done["building"]] == [10, 20]
    for row in done["building"]:
        parts = row["bytes_per_phrase"]
        assert set(parts) == {"keys", "spans", "sentences"} and 16 < parts["keys"] < 18
        per_sentence = row["phrases_per_second"] / row["sentences_per_second"]
        assert per_sentence == pytest.approx(row["phrases"] / row["sentences"])
    runs = [(row["index"], row["phrases"]) for row in done["search"]]
    assert runs == [("exact", 200), ("IVF4,Flat", 200), ("exact", 300), ("IVF4,Flat", 300)]
    for row in done["search"]:
        assert 0 < row["slowest"] <= row["queries_per_second"] <= row["fastest"] and row["peak_bytes"] > 1e7
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    for extra, pattern in (
        (["--sizes", 10, 0], r"--sizes has 0: at least 1"),
        (["--plot", tmp_path / "no" / "b.png"], "--plot .*b.png: there is no folder .*no"),
        (["--sentences", 31], "--sentences has 31, and .*text 30 different sentences: give fewer"),
        (["--sizes", 200, 3], "IVF4,Flat has 4 lists"),
        (["--index", "exact", "Nonsense"], "FAISS cannot make an index 'Nonsense'"),
    ):
        with patch.object(benchmark, "measure_search", side_effect=AssertionError("work in vain")):
            refused(call(*words, *extra, check=False), pattern)
    refused(
        call("benchmark phrases", "--text", tmp_path / "text", check=False), "--text needs --encoder to build"
    )
