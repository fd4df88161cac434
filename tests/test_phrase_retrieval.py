"""Phrase datastores: what is found in text, builds that are stopped, what is retrieved, what is refused."""

from __future__ import annotations

import io
import itertools
import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import DEMO, Ccpr, World, build_options, call
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_input import refused

from fairseq_ccpr.building import part, phrase_chunks
from fairseq_ccpr.cli.phrase_prompt import (
    as_json,
    as_prompt,
    as_table,
    marked,
)
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase, RetrievedPhrase
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation, candidate_spans
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.text.subwords import subword_bounds
from fairseq_ccpr.text.words import word_spans
from fairseq_ccpr.version import __version__


@pytest.fixture(scope="module")
def mono(ccpr: Ccpr, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target sentences, some of them twice, and one that is too long for the encoder."""
    lines = [target for _, target in itertools.islice(read_pairs(ccpr.pairs), 90)]
    path = tmp_path_factory.mktemp("mono") / "mono.txt"
    path.write_text("\n".join([*lines, "", *lines[:20], "  ", "so it was " * 70, lines[0]]) + "\n", encoding="utf-8")
    return path


def build(
    ccpr: Ccpr, text: Path | list[Path], output: Path, *extra: object, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Build a phrase datastore with the command, in shards small enough to have several."""
    texts = text if isinstance(text, list) else [text]
    words: list[object] = ["phrases", *texts, "--encoder", ccpr.checkpoint, "--output", output, "--cpu", "--quiet"]
    words += [] if "--threshold" in extra else ["--threshold", 0.5]
    return call("build_datastore", *words, "--chunk-sentences", 32, "--max-words", 5, *extra, check=check)


INDEX = "--index", "IVF4,Flat"


@pytest.fixture(scope="module")
def store(ccpr: Ccpr, mono: Path) -> Path:
    build(ccpr, mono, mono.parent / "store", *INDEX)
    return mono.parent / "store"


@pytest.fixture(scope="module")
def encoder(ccpr: Ccpr) -> PhraseEncoder:
    return PhraseEncoder.load(ccpr.checkpoint)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abdeoth ,.()'-½中文1Ä", max_size=30), fewest=st.integers(1, 3), more=st.sampled_from([0, 1, 99]))
def test_candidates_are_all_spans_of_whole_words(encoder: PhraseEncoder, text: str, fewest: int, more: int):
    subwords = encoder.context.tokenizer.encode(text)
    words, wanted = word_spans(text), []
    for i, j in itertools.combinations_with_replacement(range(len(words)), 2):
        start, end = words[i][0], words[j][1]
        bounds = subword_bounds(subwords, start, end)
        if fewest <= j - i + 1 <= fewest + more and bounds is not None:
            wanted.append([start, end, *bounds])
    assert candidate_spans(subwords, fewest, fewest + more).tolist() == wanted


def entries(store: PhraseDatastore) -> list[tuple[int, str]]:
    """Sentence and string of each entry."""
    return [(number, store.sentence(number)[start:end]) for number, start, end in store.spans.tolist()]


def test_store_holds_the_phrases_of_each_sentence_once(store: Path, mono: Path, encoder: PhraseEncoder):
    made = PhraseDatastore(store)
    lines = [line for line in mono.read_text().splitlines() if line.strip()]
    assert [made.sentence(i) for i in range(made.section.sentences)] == list(dict.fromkeys(lines))
    found = entries(made)
    assert len(set(found)) == len(found) == made.section.size > 200
    assert found == sorted(found, key=lambda entry: entry[0])
    assert made.find_damage() == []
    finder = PhraseFinder(encoder, Segmentation("learned", 0.5, 5))
    for number in (0, 17, 89):
        phrases = finder.find([made.sentence(number)])
        rows = np.flatnonzero(made.spans[:, 0] == number)
        strings = [made.sentence(number)[a:b] for _, a, b in phrases.spans.tolist()]
        assert [found[row][1] for row in rows] == list(dict.fromkeys(strings))
        first = [strings.index(found[row][1]) for row in rows]
        np.testing.assert_allclose(made.keys[rows], phrases.vectors[first].numpy(), atol=2e-3)
        assert (phrases.probabilities > 0.5).all()
    assert not (made.spans[:, 0] == 90).any()  # too long


def test_share_of_a_text(ccpr: Ccpr, mono: Path, store: Path, tmp_path: Path):
    whole = [PhraseDatastore(store).sentence(i) for i in range(PhraseDatastore(store).section.sentences)]
    parts = []
    for share in (0.2, 0.6):
        build(ccpr, mono, output := tmp_path / str(share), "--share", share)
        part = PhraseDatastore(output)
        parts.append([part.sentence(i) for i in range(part.section.sentences)])
        assert part.section.share == share and abs(len(parts[-1]) / len(whole) - share) < 0.15
    assert set(parts[0]) < set(parts[1]) < set(whole)
    refused(build(ccpr, mono, tmp_path / "0.2", check=False), "another fraction: 0.2 there, 1.0 now")
    refused(build(ccpr, mono, tmp_path / "none", "--fraction", 2, check=False), "--fraction is 2")


def test_text_may_be_compressed_and_in_several_files(ccpr: Ccpr, mono: Path, store: Path, tmp_path: Path):
    lines = mono.read_bytes().splitlines(keepends=True)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"".join(lines[:30])))
    (tmp_path / "b.txt").write_bytes(b"".join(lines[10:]))
    done = build(ccpr, [tmp_path / "a.txt.xz", tmp_path / "b.txt"], tmp_path / "s")
    assert "1 sentences longer than the encoder takes have no phrases" in done.stdout
    assert "2 empty lines and 41 repeated sentences were left out" in done.stdout
    assert "sentences/s" in done.stdout and "sentences/s" not in build(ccpr, mono, store, *INDEX).stdout
    made, other = PhraseDatastore(tmp_path / "s"), PhraseDatastore(store)
    assert np.array_equal(made.spans, other.spans) and np.array_equal(made.keys, other.keys)


@pytest.mark.parametrize("kind", ["ngram:2", "all"])
def test_other_segmentations(ccpr: Ccpr, mono: Path, tmp_path: Path, encoder: PhraseEncoder, kind: str):
    build(ccpr, mono, tmp_path / "s", "--segmentation", kind)
    made, tokenizer = PhraseDatastore(tmp_path / "s"), encoder.context.tokenizer
    fewest, most = (2, 2) if kind == "ngram:2" else (1, 5)
    wanted = set()
    for number in range(90):
        text = made.sentence(number)
        words = word_spans(text)
        for i, j in itertools.combinations_with_replacement(range(len(words)), 2):
            whole = subword_bounds(tokenizer.encode(text), words[i][0], words[j][1]) is not None
            if fewest <= j - i + 1 <= most and whole:
                wanted.add((number, text[words[i][0] : words[j][1]]))
    assert set(entries(made)) == wanted


def test_bf16_makes_nearly_the_same_keys(ccpr: Ccpr, mono: Path, tmp_path: Path):
    every = "--segmentation", "all"
    build(ccpr, mono, tmp_path / "plain", *every)
    build(ccpr, mono, tmp_path / "bf16", *every, "--bf16")
    plain, made = PhraseDatastore(tmp_path / "plain"), PhraseDatastore(tmp_path / "bf16")
    assert np.array_equal(made.spans, plain.spans) and not np.array_equal(made.keys, plain.keys)
    cosines = (np.asarray(made.keys, np.float64) * plain.keys).sum(axis=1)
    assert cosines.mean() > 0.999 and cosines.min() > 0.99


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


STAGES = {
    "find": (PhraseFinder, "find"), "join": (phrase_chunks, "check_space"), "index": (part, "build_index"),
    "publish": (part, "describe_files"), "manifest": (Manifest, "write"), "clean": (part, "rmtree"),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_stopped_build_resumes(ccpr: Ccpr, mono: Path, store: Path, tmp_path: Path, stage: str):
    place, name = STAGES[stage]
    real, calls = getattr(place, name), itertools.count()

    def stop(*arguments: Any) -> Any:
        if stage != "find" or next(calls):  # one shard is done before
            raise KeyboardInterrupt
        return real(*arguments)

    with patch.object(place, name, stop):
        assert build(ccpr, mono, tmp_path / "s", *INDEX, check=False).returncode == 130
    if stage != "clean":
        with pytest.raises(DatastoreError, match="unfinished: run the command that was building it again"):
            PhraseDatastore(tmp_path / "s")
    if stage == "find":
        assert len(list((tmp_path / "s").rglob("*.json"))) == 2  # the plan and the first shard
        refused(build(ccpr, mono, tmp_path / "s", "--max-words", 4, check=False), "built with another segmentation")
        refused(build(ccpr, mono, tmp_path / "s", "--chunk-sentences", 9, check=False), "another chunk sentences: 32")
        (tmp_path / "s" / "phrase.partial" / "shards" / "000001.keys.npy").write_bytes(b"torn")
    build(ccpr, mono, tmp_path / "s", *INDEX)
    assert contents(tmp_path / "s") == contents(store)


def test_files_are_on_disk_before_what_vouches_for_them(ccpr: Ccpr, mono: Path, tmp_path: Path):
    synced: list[str] = []
    real = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    with patch.object(os, "fsync", watched):
        build(ccpr, mono, tmp_path / "s")
    for shard in range(3):
        mark = synced.index(f"{shard:06}.json.partial")
        assert {f"{shard:06}.{name}.npy" for name in ("keys", "spans")} <= set(synced[:mark])
    files = Manifest.read(tmp_path / "s").phrase.files
    written = {Path(name).name for name in files} - {"totals.json"}
    assert written == {"keys.npy", "spans.npy", "sentence-offsets.npy", "sentences.txt"}
    assert written <= set(synced[: synced.index("totals.json.partial")])
    assert synced[-1] == "manifest.json.partial"


def test_finished_store_is_left_as_it_is_but_for_its_index(ccpr: Ccpr, mono: Path, store: Path, tmp_path: Path):
    shutil.copytree(store, output := tmp_path / "s")
    stamps = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    build(ccpr, mono, output, *INDEX)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == stamps
    build(ccpr, mono, output, "--index", "exact")
    assert not list(output.rglob("*.faiss")) and PhraseDatastore(output).section.index.backend == "exact"
    build(ccpr, mono, output, *INDEX)
    assert contents(output) == contents(store)


def test_parts_share_a_folder(world: World, ccpr: Ccpr, mono: Path, store: Path, tmp_path: Path):
    shutil.copytree(world.datastore, one := tmp_path / "token-first")
    build(ccpr, mono, one, *INDEX)
    shutil.copytree(store, two := tmp_path / "phrase-first")
    with pytest.raises(DatastoreError, match="has no token part"):
        TokenDatastore(two)
    call("build_datastore", *build_options(world, two))
    assert contents(one / "phrase") == contents(two / "phrase") == contents(store / "phrase")
    assert contents(one / "token") == contents(two / "token") == contents(world.datastore / "token")
    for folder in (one, two):
        assert TokenDatastore(folder).find_damage() == PhraseDatastore(folder).find_damage() == []
    with pytest.raises(DatastoreError, match="has no phrase part"):
        PhraseDatastore(world.datastore)


def other_encoder(ccpr: Ccpr, folder: Path) -> Path:
    """The same encoder with another head, beside its tokenizer."""
    shutil.copytree(ccpr.checkpoint.parent, folder)
    state = torch.load(path := folder / ccpr.checkpoint.name)
    state["model"]["align.bias"] += 1
    torch.save(state, path)
    return path


def test_builds_that_are_refused(ccpr: Ccpr, mono: Path, store: Path, tmp_path: Path):
    before, output = contents(store), tmp_path / "s"
    other = other_encoder(ccpr, tmp_path / "other")
    refused(build(ccpr, mono, store, "--encoder", other, check=False), "built with another encoder")
    (tmp_path / "other.txt").write_text("Other text.\n")
    refused(build(ccpr, tmp_path / "other.txt", store, check=False), "built with another corpus")
    refused(build(ccpr, mono, store, "--threshold", 0.6, check=False), "built with another segmentation")
    refused(build(ccpr, mono, store, "--segmentation", "all", check=False), "built with another segmentation")
    assert contents(store) == before
    refused(build(ccpr, tmp_path / "no.txt", output, check=False), r"there is no text .*no\.txt")
    for kind in ("some", "ngram:", "ngram:x", "ngram:²", "ngram:-1"):
        refused(
            build(ccpr, mono, output, "--segmentation", kind, check=False),
            "give learned, all, ngram:N such as ngram:5, or lexicon:FILE",
        )
    for option, value, pattern in (
        ("--segmentation", "ngram:0", "phrases of 0 to 0 words"), ("--max-words", 0, "phrases of 1 to 0 words"),
        ("--threshold", 1, "--threshold is 1.0: give a probability"), ("--threshold", -0.1, "--threshold is -0.1"),
        ("--threshold", "nan", "--threshold is nan"), ("--chunk-sentences", 0, "--chunk-sentences is 0"),
        ("--index", "Nonsense", "--index"), ("--encoder", tmp_path / "no.pt", "there is no phrase encoder"),
    ):  # fmt: skip
        refused(build(ccpr, mono, output, option, value, check=False), pattern)
    assert not output.exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    refused(build(ccpr, mono, tmp_path / "home", check=False), "exists and is no datastore")
    refused(build(ccpr, mono, tmp_path / "other.txt", check=False), "exists and is no datastore")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def test_what_cannot_become_a_store_leaves_nothing_behind(ccpr: Ccpr, mono: Path, tmp_path: Path):
    output, bad = tmp_path / "s", tmp_path / "bad.txt"
    refused(
        build(ccpr, mono, output, "--threshold", 0.999999, check=False),
        r"no phrase is left of 91 sentences with --segmentation learned and --threshold 0\.999999: lower the threshold",
    )
    lines = mono.read_bytes().splitlines(keepends=True)
    bad.write_bytes(b"".join([*lines[:40], b"Gr\xfc\xdfe\n", *lines[40:]]))
    with patch.object(PhraseFinder, "find", side_effect=AssertionError("nothing is to be encoded in vain")):
        refused(build(ccpr, bad, output, check=False), r"bad\.txt, line 41: the bytes are not UTF-8")
    refused(
        build(ccpr, mono, output, "--segmentation", "ngram:99", check=False),
        "no phrase is left of 91 sentences with --segmentation ngram:99: ask for fewer words",
    )
    bad.write_text("\n  \n")
    refused(build(ccpr, bad, output, check=False), r"bad\.txt: there is no text in it")
    assert not output.exists()
    build(ccpr, mono, output)  # with what was wrong put right, the same output will do


def retrieve(ccpr: Ccpr, store: Path, text: str | bytes, *extra: object, check: bool = True) -> Any:
    """Run the command on a text; the learnt segmentation of so small an encoder is unsure of most phrases."""
    data = text if isinstance(text, bytes) else text.encode()
    words = [
        store,
        "--encoder",
        ccpr.checkpoint,
        "--cpu",
        *(["--threshold", 0.5] if "--threshold" not in extra else []),
    ]
    with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data))):
        return call("retrieve_phrases", *words, *extra, check=check)


def queries_of(ccpr: Ccpr) -> list[str]:
    return [source for source, _ in itertools.islice(read_pairs(ccpr.pairs), 5)]


@pytest.mark.parametrize("k", [1, 5])
def test_retrieval_equals_comparing_with_every_key(
    ccpr: Ccpr, mono: Path, tmp_path: Path, encoder: PhraseEncoder, k: int
):
    build(ccpr, mono, tmp_path / "s")
    store, sentences = PhraseDatastore(tmp_path / "s"), ["", *queries_of(ccpr)]
    segmentation = Segmentation("learned", 0.5, 7)
    found = PhraseFinder(encoder, segmentation).find(sentences)
    keys, strings = torch.from_numpy(store.keys.astype(np.float32)), entries(store)
    wanted: list[list[Any]] = [[] for _ in sentences]
    for (number, start, end), vector in zip(found.spans.tolist(), found.vectors):
        scores = keys @ vector
        best: dict[str, tuple[int, float]] = {}
        order = scores.argsort(descending=True, stable=True)
        for entry, score in zip(order.tolist(), scores[order].tolist()):
            if score >= 0.3:
                best.setdefault(strings[entry][1], (entry, score))
        wanted[number].append((sentences[number][start:end], start, list(best.items())[:k]))
    retriever = PhraseRetriever(store, encoder, segmentation, k, 0.3, torch.device("cpu"))
    results = retriever.retrieve(sentences)
    assert results[0] == [] and sum(len(q.retrieved) for of_sentence in results for q in of_sentence) > 20
    for of_sentence, expected in zip(results, wanted, strict=True):
        assert [(q.string, q.start) for q in of_sentence] == [(string, start) for string, start, _ in expected]
        for query, (_, _, phrases) in zip(of_sentence, expected, strict=True):
            assert [(r.string, r.entry) for r in query.retrieved] == [(string, entry) for string, (entry, _) in phrases]
            assert [r.score for r in query.retrieved] == pytest.approx([score for _, (_, score) in phrases], abs=1e-5)
            assert all(r.sentence[r.start : r.end] == r.string for r in query.retrieved)
            scores = [r.score for r in query.retrieved]
            assert scores == sorted(scores, reverse=True) and len({r.string for r in query.retrieved}) == len(scores)


def test_queries_in_bf16_are_nearly_the_same(ccpr: Ccpr, store: Path):
    def by_query(*extra: object) -> dict[tuple[int, int, int], dict[str, float]]:
        lines = retrieve(ccpr, store, "\n".join(queries_of(ccpr)), "--format", "json", *extra).stdout.splitlines()
        return {
            (row, query["start"], query["end"]): {found["string"]: found["score"] for found in query["retrieved"]}
            for row, line in enumerate(lines)
            for query in json.loads(line)["phrases"]
        }

    whole, half = by_query("--threshold", 0), by_query("--threshold", 0, "--bf16")
    assert whole.keys() == half.keys()
    pairs = [
        (whole[at][string], score)
        for at, found in half.items()
        for string, score in found.items()
        if string in whole[at]
    ]
    assert len(pairs) > 0.8 * sum(map(len, whole.values()))
    assert max(abs(a - b) for a, b in pairs) < 0.05
    assert pairs != [(a, a) for a, _ in pairs]  # it is in effect


def test_sentences_are_read_once_a_batch(store: Path, encoder: PhraseEncoder, ccpr: Ccpr):
    datastore, segmentation = PhraseDatastore(store), Segmentation("learned", 0.5, 7)
    retriever = PhraseRetriever(datastore, encoder, segmentation, 2, 0.0, torch.device("cpu"))
    read, real = [], datastore.sentence
    with patch.object(datastore, "sentence", lambda number: read.append(number) or real(number)):
        results = retriever.retrieve(queries_of(ccpr))
    kept = [r.sentence for of_sentence in results for query in of_sentence for r in query.retrieved]
    assert len(kept) > len(set(kept)) > 5 and len(set(read)) == len(read)


def test_encoder_of_the_demo_finds_translations(tmp_path: Path):
    verses = [pair for pair in read_pairs(DEMO / "bible.test.tsv.xz") if len(pair[1]) < 120][:60]
    (tmp_path / "english.txt").write_text("".join(f"{target}\n" for _, target in verses), encoding="utf-8")
    checkpoint = DEMO / "ccpr" / "ccpr.pt"
    words = [tmp_path / "english.txt", "--encoder", checkpoint, "--output", tmp_path / "store", "--cpu", "--quiet"]
    call("build_datastore", "phrases", *words)
    retriever = PhraseRetriever(
        PhraseDatastore(tmp_path / "store"), PhraseEncoder.load(checkpoint), Segmentation(), 1, 0.0, torch.device("cpu")
    )
    found = retriever.retrieve([source for source, _ in verses])
    right = [phrase.retrieved[0].sentence == verses[number][1] for number, of in enumerate(found) for phrase in of]
    assert len(right) > 300 and sum(right) / len(right) > 0.8


def test_formats_say_the_same(ccpr: Ccpr, store: Path):
    text = "\n".join([*queries_of(ccpr)[:3], ""]) + "\n"
    rows = [json.loads(line) for line in retrieve(ccpr, store, text, "--format", "json").stdout.splitlines()]
    assert [row["sentence"] for row in rows] == text.split("\n")[:4] and rows[3]["phrases"] == []
    table = retrieve(ccpr, store, text).stdout
    prompt = retrieve(ccpr, store, text, "--format", "prompt", "--target-language", "Elvish").stdout
    assert prompt.count("Translate from German to Elvish.") == 4
    for row in rows:
        for query in row["phrases"]:
            for found in query["retrieved"]:
                assert f"| {query['string']} | {query['probability']:.2f} | {found['string']} |" in table
                assert f'- "{query["string"]}" may be "{found["string"]}", as in: ' in prompt
    few = [json.loads(line) for line in retrieve(ccpr, store, text, "--format", "json", "--k", 1).stdout.splitlines()]
    assert max(len(query["retrieved"]) for row in few for query in row["phrases"]) == 1
    certain = retrieve(ccpr, store, text, "--format", "json", "--min-similarity", 0.999).stdout
    assert sum(map(certain.count, ('"entry"',))) < sum(len(q["retrieved"]) for row in rows for q in row["phrases"])


def test_every_setting_is_in_the_signature(ccpr: Ccpr, store: Path, mono: Path, tmp_path: Path):
    def signature(*extra: object, folder: Path = store) -> str:
        lines = retrieve(ccpr, folder, queries_of(ccpr)[0], "--format", "json", *extra).stderr.splitlines()
        (line,) = (line for line in lines if line.startswith("retrieval signature: "))
        return line

    section = PhraseDatastore(store).section
    digests = section.files["phrase/keys.npy"]["sha256"][:12], section.fingerprints["encoder"][:12]
    assert signature() == (
        f"retrieval signature: phrases:{digests[0]}|entries:{section.size}|encoder:{digests[1]}|index:{section.index}|"
        f"query:learned>0.5<=5words|k:4|s0:0.0|v:{__version__}"  # as many words as in the datastore
    )
    changes: list[list[object]] = [
        ["--k", 3], ["--min-similarity", 0.1], ["--segmentation", "all"], ["--threshold", 0.4], ["--max-words", 6],
        ["--bf16"],
    ]  # fmt: skip
    build(ccpr, mono, tmp_path / "other", "--threshold", 0.4)
    build(ccpr, mono, tmp_path / "exact")
    others = [signature(folder=tmp_path / name) for name in ("other", "exact")]
    assert len({signature(), *others, *(signature(*change) for change in changes)}) == 9


SENTENCE = "In the beginning God created the heavens and the earth. | Now the earth was formless and empty."
QUERIES = [
    QueryPhrase("Himmel und Erde", 20, 35, 0.95, [
        RetrievedPhrase(7, "the heavens and the earth", SENTENCE, 29, 54, 0.8125),
        RetrievedPhrase(3, "the earth", SENTENCE, 62, 71, 0.5),
    ]),
    QueryPhrase("Am Anfang", 0, 9, 0.91, []),
]  # fmt: skip


def test_output_is_as_documented():
    source = "Am Anfang schuf Gott Himmel und Erde."
    assert as_prompt(source, QUERIES, "German", "English") == (
        "Translate from German to English.\n\n"
        "Phrases that may help, each with a sentence in which it stands in [[ ]]:\n"
        '- "Himmel und Erde" may be "the heavens and the earth", as in: In the beginning God created '
        "[[the heavens and the earth]]. | Now the earth was formless and empty.\n"
        '- "Himmel und Erde" may be "the earth", as in: In the beginning God created the heavens and the earth. | Now '
        "[[the earth]] was formless and empty.\n\n"
        "German: Am Anfang schuf Gott Himmel und Erde.\nEnglish:\n"
    )
    long = f"{SENTENCE} {SENTENCE} {SENTENCE}"
    cut = [QueryPhrase("Erde", 31, 35, 0.9, [RetrievedPhrase(7, "the earth", long, 141, 150, 0.5)])]
    context = "In the beginning God created the heavens and [[the earth]]. | Now the earth was formless and empty. In t"
    (line,) = (line for line in as_prompt(source, cut, "German", "English").split("\n") if line.startswith("- "))
    assert line == f'- "Erde" may be "the earth", as in: ...{context}...'
    assert len(context.replace("[[", "").replace("]]", "")) == 100
    assert as_prompt("Ja.", QUERIES[1:], "German", "English") == (
        "Translate from German to English.\n\nGerman: Ja.\nEnglish:\n"
    )
    assert as_table(source, QUERIES).splitlines() == [
        "### Am Anfang schuf Gott Himmel und Erde.", "", "| phrase | p | retrieved | score | in |", "|---|---|---|---|---|",
        "| Himmel und Erde | 0.95 | the heavens and the earth | 0.812 | In the beginning God created "
        "[[the heavens and the earth]]. \\| Now the earth was formless and empty. |",
        "| Himmel und Erde | 0.95 | the earth | 0.500 | In the beginning God created the heavens and the earth. \\| Now "
        "[[the earth]] was formless and empty. |",
    ]  # fmt: skip
    parsed = json.loads(as_json("Grüße", QUERIES[:1]))
    assert parsed["sentence"] == "Grüße" and parsed["phrases"][0]["retrieved"][1] == {
        "entry": 3, "string": "the earth", "sentence": SENTENCE, "start": 62, "end": 71, "score": 0.5,
    }  # fmt: skip
    assert "Grüße" in as_json("Grüße", [])


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 60))
def test_contexts_are_cut_around_the_phrase(before: int, inside: int, after: int, most: int):
    sentence = "<" * before + "p" * inside + ">" * after
    shown = marked(RetrievedPhrase(0, "p" * inside, sentence, before, before + inside, 1.0), most)
    left, right = shown.split(f"[[{'p' * inside}]]")
    kept = left.removeprefix("..."), right.removesuffix("...")
    assert (kept[0] == left) == (len(kept[0]) == before) and (kept[1] == right) == (len(kept[1]) == after)
    assert len(kept[0]) + len(kept[1]) == min(before + after, max(0, most - inside))
    assert set(kept[0]) <= {"<"} and set(kept[1]) <= {">"}


def test_retrieval_refuses_bad_input(ccpr: Ccpr, store: Path, tmp_path: Path):
    text = queries_of(ccpr)[0] + "\n"

    def fails(*extra: object, data: str | bytes = text, folder: Path = store) -> subprocess.CompletedProcess[str]:
        return retrieve(ccpr, folder, data, *extra, check=False)

    other = other_encoder(ccpr, tmp_path / "other")
    refused(
        fails("--encoder", other), "built with another encoder: they need [0-9a-f]{12}, the one given is [0-9a-f]{12}"
    )
    refused(fails("--k", 0), "--k is 0")
    refused(fails("--segmentation", "half"), "--segmentation is 'half'")
    refused(fails("--threshold", 0.9999999), r"no phrase was found in the input .*--threshold 0\.9999999: lower")
    refused(fails(data="\n\n"), "no phrase was found in the input")
    refused(fails("--segmentation", "ngram:99"), "with --segmentation ngram:99: ask for fewer words")
    refused(fails("--min-similarity", 2), r"nothing was retrieved for any of \d+ phrases: no entry scores 2\.0 or more")
    long = retrieve(ccpr, store, "so war es " * 100 + "\n" + text, "--format", "json")
    assert "1 sentences longer than the encoder takes have no phrases" in long.stderr
    assert [bool(json.loads(line)["phrases"]) for line in long.stdout.splitlines()] == [False, True]
    refused(fails(data=b"gut\nsch\xf6n\n"), "the standard input, line 2: the bytes are not UTF-8")
    refused(fails(folder=tmp_path / "nowhere"), "no datastore at .*nowhere")
    refused(
        fails(folder=ccpr.phrases / "train"), r"train is no datastore: its manifest\.json is that of something else"
    )
    shutil.copytree(store, damaged := tmp_path / "damaged")
    (damaged / "phrase" / "keys.npy").write_bytes((store / "phrase" / "keys.npy").read_bytes()[:-2])
    refused(fails(folder=damaged), r"keys\.npy is damaged: .* bytes found")
