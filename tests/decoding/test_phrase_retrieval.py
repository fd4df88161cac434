"""Phrases retrieved for text: against every key, in every format, and what is refused."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.cli.retrieve import as_json, as_prompt, as_table, marked
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.tuned import write_tuned
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase, RetrievedPhrase
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation
from fairseq_ccpr.text.pairs import read_pairs
from fairseq_ccpr.version import __version__
from tests.helpers import DEMO, call, refused
from tests.small_models import Ccpr, build_phrases, entries, other_encoder


@pytest.fixture(scope="module")
def encoder(ccpr: Ccpr) -> PhraseEncoder:
    return PhraseEncoder.load(ccpr.checkpoint)


def retrieve(ccpr: Ccpr, store: Path, text: str | bytes, *extra: object, check: bool = True) -> Any:
    """Run the command on a text; the learned segmentation of so small an encoder is unsure of most phrases."""
    data = text if isinstance(text, bytes) else text.encode()
    words = [
        store,
        "--phrases-encoder",
        ccpr.checkpoint,
        "--cpu",
        *(["--phrases-threshold", 0.5] if "--phrases-threshold" not in extra else []),
    ]
    with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data))):
        return call("retrieve", *words, *extra, check=check)


def queries_of(ccpr: Ccpr) -> list[str]:
    return [source for source, _ in itertools.islice(read_pairs(ccpr.pairs), 5)]


@pytest.mark.parametrize("k", [1, 5])
def test_retrieval_equals_comparing_with_every_key(
    ccpr: Ccpr, repeated_text: Path, tmp_path: Path, encoder: PhraseEncoder, k: int
) -> None:
    build_phrases(ccpr, repeated_text, tmp_path / "s")
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
        assert [(q.string, q.start) for q in of_sentence] == [
            (string, start) for string, start, _ in expected
        ]
        for query, (_, _, phrases) in zip(of_sentence, expected, strict=True):
            assert [(r.string, r.entry) for r in query.retrieved] == [
                (string, entry) for string, (entry, _) in phrases
            ]
            assert [r.score for r in query.retrieved] == pytest.approx(
                [score for _, (_, score) in phrases], abs=1e-5
            )
            assert all(r.sentence[r.start : r.end] == r.string for r in query.retrieved)
            scores = [r.score for r in query.retrieved]
            assert scores == sorted(scores, reverse=True) and len({r.string for r in query.retrieved}) == len(
                scores
            )


@pytest.mark.usefixtures("without_bf16")
def test_bf16_is_left_out_where_it_is_slower(
    ccpr: Ccpr, sharded_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n".join(queries_of(ccpr))
    plain = retrieve(ccpr, sharded_store, text).stdout
    assert "bfloat16" not in caplog.text
    assert retrieve(ccpr, sharded_store, text, "--bf16").stdout == plain
    assert "bfloat16 is many times slower on a processor with AVX2 alone" in caplog.text


@pytest.mark.usefixtures("with_bf16")
def test_queries_in_bf16_are_nearly_the_same(ccpr: Ccpr, sharded_store: Path) -> None:
    def by_query(*extra: object) -> dict[tuple[int, int, int], dict[str, float]]:
        lines = retrieve(
            ccpr, sharded_store, "\n".join(queries_of(ccpr)), "--output-format", "jsonl", *extra
        ).stdout.splitlines()
        return {
            (row, query["start"], query["end"]): {
                found["string"]: found["score"] for found in query["retrieved"]
            }
            for row, line in enumerate(lines)
            for query in json.loads(line)["phrases"]
        }

    whole, half = by_query("--phrases-threshold", 0), by_query("--phrases-threshold", 0, "--bf16")
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


def test_sentences_are_read_once_a_batch(sharded_store: Path, encoder: PhraseEncoder, ccpr: Ccpr) -> None:
    datastore, segmentation = PhraseDatastore(sharded_store), Segmentation("learned", 0.5, 7)
    retriever = PhraseRetriever(datastore, encoder, segmentation, 2, 0.0, torch.device("cpu"))
    read, real = [], datastore.sentence
    with patch.object(datastore, "sentence", lambda number: read.append(number) or real(number)):
        results = retriever.retrieve(queries_of(ccpr))
    kept = [r.sentence for of_sentence in results for query in of_sentence for r in query.retrieved]
    assert len(kept) > len(set(kept)) > 5 and len(set(read)) == len(read)


def test_encoder_of_the_demo_finds_translations(tmp_path: Path) -> None:
    verses = [pair for pair in read_pairs(DEMO / "bible.test.tsv.xz") if len(pair[1]) < 120][:60]
    (tmp_path / "english.txt").write_text("".join(f"{target}\n" for _, target in verses), encoding="utf-8")
    checkpoint = DEMO / "ccpr" / "ccpr.pt"
    words = [
        tmp_path / "english.txt",
        "--encoder",
        checkpoint,
        "--output",
        tmp_path / "store",
        "--cpu",
        "--quiet",
    ]
    call("build phrases", *words)
    retriever = PhraseRetriever(
        PhraseDatastore(tmp_path / "store"),
        PhraseEncoder.load(checkpoint),
        Segmentation(),
        1,
        0.0,
        torch.device("cpu"),
    )
    found = retriever.retrieve([source for source, _ in verses])
    right = [
        phrase.retrieved[0].sentence == verses[number][1] for number, of in enumerate(found) for phrase in of
    ]
    assert len(right) > 300 and sum(right) / len(right) > 0.8


def test_formats_say_the_same(ccpr: Ccpr, sharded_store: Path) -> None:
    text = "\n".join([*queries_of(ccpr)[:3], ""]) + "\n"
    rows = [
        json.loads(line)
        for line in retrieve(ccpr, sharded_store, text, "--output-format", "jsonl").stdout.splitlines()
    ]
    assert [row["sentence"] for row in rows] == text.split("\n")[:4] and rows[3]["phrases"] == []
    table = retrieve(ccpr, sharded_store, text).stdout
    languages = "--source-language", "German", "--target-language", "Elvish"
    prompt = retrieve(ccpr, sharded_store, text, "--output-format", "prompt", *languages).stdout
    assert prompt.count("Translate from German to Elvish.") == 4
    for row in rows:
        for query in row["phrases"]:
            for found in query["retrieved"]:
                assert f"| {query['string']} | {query['probability']:.2f} | {found['string']} |" in table
                assert f'- "{query["string"]}" may be "{found["string"]}", as in: ' in prompt
    few = [
        json.loads(line)
        for line in retrieve(
            ccpr, sharded_store, text, "--output-format", "jsonl", "--phrases-k", 1
        ).stdout.splitlines()
    ]
    assert max(len(query["retrieved"]) for row in few for query in row["phrases"]) == 1
    certain = retrieve(
        ccpr, sharded_store, text, "--output-format", "jsonl", "--phrases-min-similarity", 0.999
    ).stdout
    assert sum(map(certain.count, ('"entry"',))) < sum(
        len(q["retrieved"]) for row in rows for q in row["phrases"]
    )


def test_every_setting_is_in_the_signature(
    ccpr: Ccpr, sharded_store: Path, repeated_text: Path, tmp_path: Path
) -> None:
    def signature(*extra: object, folder: Path = sharded_store) -> str:
        lines = retrieve(
            ccpr, folder, queries_of(ccpr)[0], "--output-format", "jsonl", *extra
        ).stderr.splitlines()
        (line,) = (line for line in lines if line.startswith("retrieval signature: "))
        return line

    section = PhraseDatastore(sharded_store).section
    digests = section.files["phrase/keys.npy"]["sha256"][:12], section.fingerprints["encoder"][:12]
    assert signature() == (
        f"retrieval signature: phrases:{digests[0]}|entries:{section.size}|encoder:{digests[1]}|index:{section.index}|"
        f"query:learned>0.5<=5words,edges:own>0.02|k:16|"  # as many words as in the datastore
        f"min_similarity:0.3|v:{__version__}"
    )
    changes: list[list[object]] = [
        ["--phrases-k", 3], ["--phrases-min-similarity", 0.1], ["--phrases-segmentation", "all"],
        ["--phrases-threshold", 0.4], ["--bf16"],
    ]  # fmt: skip
    build_phrases(ccpr, repeated_text, tmp_path / "other", "--threshold", 0.4)
    build_phrases(ccpr, repeated_text, tmp_path / "exact")
    others = [signature(folder=tmp_path / name) for name in ("other", "exact")]
    assert len({signature(), *others, *(signature(*change) for change in changes)}) == 8


def test_what_tuning_left_is_what_is_retrieved(ccpr: Ccpr, sharded_store: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded_store, store := tmp_path / "store")
    text = queries_of(ccpr)[0]
    write_tuned({"phrase": PhraseDatastore(store)}, {"phrases": {"k": 2, "min_similarity": 0.1}}, "signature")
    assert "|k:2|min_similarity:0.1|" in retrieve(ccpr, store, text).stderr
    assert "|k:3|min_similarity:0.1|" in retrieve(ccpr, store, text, "--phrases-k", 3).stderr


SENTENCE = "In the beginning God created the heavens and the earth. | Now the earth was formless and empty."
QUERIES = [
    QueryPhrase("Himmel und Erde", 20, 35, 0.95, [
        RetrievedPhrase(7, "the heavens and the earth", SENTENCE, 29, 54, 0.8125),
        RetrievedPhrase(3, "the earth", SENTENCE, 62, 71, 0.5),
    ]),
    QueryPhrase("Am Anfang", 0, 9, 0.91, []),
]  # fmt: skip


def test_output_is_as_documented() -> None:
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
    (line,) = (
        line for line in as_prompt(source, cut, "German", "English").split("\n") if line.startswith("- ")
    )
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
        "entry": 3, "string": "the earth", "sentence": SENTENCE, "start": 62, "end": 71, "score": 0.5, "learned": 0,
    }  # fmt: skip
    assert "Grüße" in as_json("Grüße", [])


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 60))
def test_contexts_are_cut_around_the_phrase(before: int, inside: int, after: int, most: int) -> None:
    sentence = "<" * before + "p" * inside + ">" * after
    shown = marked(RetrievedPhrase(0, "p" * inside, sentence, before, before + inside, 1.0), most)
    left, right = shown.split(f"[[{'p' * inside}]]")
    kept = left.removeprefix("..."), right.removesuffix("...")
    assert (kept[0] == left) == (len(kept[0]) == before) and (kept[1] == right) == (len(kept[1]) == after)
    assert len(kept[0]) + len(kept[1]) == min(before + after, max(0, most - inside))
    assert set(kept[0]) <= {"<"} and set(kept[1]) <= {">"}


def test_retrieval_refuses_bad_input(ccpr: Ccpr, sharded_store: Path, tmp_path: Path) -> None:
    text = queries_of(ccpr)[0] + "\n"

    def fails(
        *extra: object, data: str | bytes = text, folder: Path = sharded_store
    ) -> subprocess.CompletedProcess[str]:
        return retrieve(ccpr, folder, data, *extra, check=False)

    other = other_encoder(ccpr, tmp_path / "other")
    refused(
        fails("--phrases-encoder", other),
        "built with another encoder: they need [0-9a-f]{12}, the one given is [0-9a-f]{12}",
    )
    refused(fails("--phrases-k", 0), "--phrases-k is 0")
    refused(fails("--phrases-segmentation", "half"), "there is no segmentation 'half'")
    refused(
        fails("--phrases-threshold", 0.9999999),
        r"no phrase was found in the input .*threshold 0\.9999999: lower",
    )
    refused(fails(data="\n\n"), "no phrase was found in the input")
    refused(
        fails("--phrases-segmentation", "ngram:99"), "with the segmentation ngram:99: ask for fewer words"
    )
    refused(
        fails("--phrases-min-similarity", 0.99999),
        r"nothing was retrieved for any of \d+ phrases: no entry scores 0\.99999 or",
    )
    refused(
        fails("--output-format", "prompt"),
        "names the languages: give --source-language and --target-language",
    )
    refused(fails("--source-language", "German"), "are for --output-format prompt: leave them out")
    long = retrieve(ccpr, sharded_store, "so war es " * 100 + "\n" + text, "--output-format", "jsonl")
    assert "1 sentences longer than the encoder reads were read in windows" in long.stderr
    assert [bool(json.loads(line)["phrases"]) for line in long.stdout.splitlines()] == [True, True]
    refused(fails(data=b"gut\nsch\xf6n\n"), "the standard input, line 2: the bytes are not UTF-8")
    refused(fails(folder=tmp_path / "nowhere"), "no datastore at .*nowhere")
    refused(
        fails(folder=ccpr.phrases / "train"),
        r"train holds no datastore: its manifest\.json is that of something else",
    )
    shutil.copytree(sharded_store, damaged := tmp_path / "damaged")
    (damaged / "phrase" / "keys.npy").write_bytes((sharded_store / "phrase" / "keys.npy").read_bytes()[:-2])
    refused(fails(folder=damaged), r"keys\.npy is damaged: .* bytes found")
