"""Phrase datastores of XPR's types: built, searched, decoded with, refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.building import type_merge
from fairseq_ccpr.building.type_merge import mean_of_types, number_types
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.storage.equal_strings import first_of_equal_numbers
from fairseq_ccpr.text.pairs import read_lines, read_pairs
from fairseq_ccpr.text.subwords import subword_bounds
from fairseq_ccpr.text.words import word_spans
from tests.helpers import PROGRAM, ROOT, call, refused, run
from tests.small_models import World, Xpr

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def dictionary(xpr: Xpr, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phrases of both languages."""
    path = tmp_path_factory.mktemp("dictionary") / "pairs.tsv"
    path.write_bytes(xpr.pairs.read_bytes())
    return path


@pytest.fixture(scope="module")
def store(xpr: Xpr, dictionary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("types") / "store"
    call(
        "build phrases", xpr.texts[1], "--encoder", xpr.checkpoint, "--output", output, "--segmentation",
        f"lexicon:{dictionary}", "--cpu", "--quiet", "--chunk-sentences", 64,
    )  # fmt: skip
    return output


@torch.no_grad()
def test_store_has_one_entry_a_string(xpr: Xpr, dictionary: Path, store: Path) -> None:
    datastore, encoder = PhraseDatastore(store), XprEncoder.load(xpr.checkpoint)
    wanted = {phrase for pair in read_pairs(dictionary) for phrase in pair}
    means, first = defaultdict(list), {}
    for text in dict.fromkeys(read_lines(xpr.texts[1])):
        subwords = encoder.context.tokenizer.encode(text)
        states, seen = encoder.states(torch.tensor([subwords.ids]))[0], set()
        words = word_spans(text)
        for i, j in itertools.combinations_with_replacement(range(len(words)), 2):
            start, end = words[i][0], words[j][1]
            bounds = subword_bounds(subwords, start, end)
            if j - i < 7 and (string := text[start:end]) in wanted - seen and bounds is not None:
                seen.add(string)
                means[string].append(states[bounds[0] : bounds[1] + 1].mean(0))
                first.setdefault(string, (string, text, start, end))
    entries = [datastore.phrase(row) for row in range(datastore.section.size)]
    assert {entry[0] for entry in entries} == set(means) and len(entries) == len(means) > 100
    assert all(entry == first[entry[0]] for entry in entries)
    assert max(map(len, means.values())) > 5
    for row, (string, *_) in enumerate(entries):
        vector = encoder.project(torch.stack(means[string]).mean(0, keepdim=True))[0]
        torch.testing.assert_close(torch.from_numpy(datastore.keys[row]).float(), vector, rtol=0, atol=3e-3)
    assert not datastore.find_damage()


def retrieve(xpr: Xpr, store: Path, *extra: object) -> str:
    text = "\n".join(list(read_lines(xpr.texts[0]))[:8])
    words = [*PROGRAM, "retrieve", store, "--phrases-encoder", xpr.checkpoint, "--cpu", *extra]
    done = subprocess.run(
        [*map(str, words)],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_store_of_types_is_neither_built_in_shards_nor_merged(
    xpr: Xpr, store: Path, tmp_path: Path
) -> None:
    out = "--output", tmp_path / "new"
    words = (
        "phrases",
        xpr.texts[1],
        "--encoder",
        xpr.checkpoint,
        *out,
        "--num-shards",
        2,
        "--shard-id",
        0,
        "--cpu",
    )
    refused(call("build", *words, check=False), "makes one entry of all places of a string")
    refused(call("merge", store, store, *out, check=False), "two datastores are called 'store'")
    refused(call("merge", store, f"again={store}", *out, check=False), "one entry a string")
    assert not (tmp_path / "new").exists()


def test_retrieval_asks_for_the_words_of_the_lexicon(xpr: Xpr, dictionary: Path, store: Path) -> None:
    wanted = {phrase for pair in read_pairs(dictionary) for phrase in pair}
    done = retrieve(xpr, store, "--output-format", "jsonl")
    queries = [
        query for line in done.splitlines() if line.startswith("{") for query in json.loads(line)["phrases"]
    ]
    assert queries and {query["string"] for query in queries} <= wanted
    assert re.search(r"query:lexicon:[0-9a-f]{12}>", done) and str(dictionary) not in done


def test_decoder_uses_a_store_of_types(xpr: Xpr, world: World, store: Path) -> None:
    words = [
        world.data_bin,
        "--user-dir",
        "fairseq_ccpr",
        "--task",
        "translation_retrieval",
        "-s",
        "de",
        "-t",
        "en",
        "--path",
    ]
    words += [
        world.model,
        "--datastore",
        store,
        "--cpu",
        "--bpe",
        "sentencepiece",
        "--sentencepiece-model",
        world.spm,
    ]
    done = call("fairseq-generate", *words, "--max-tokens", 2000, "--beam", 2)
    other = call(
        "fairseq-generate", *words, "--max-tokens", 2000, "--beam", 2, "--phrases-segmentation", "all"
    )
    assert other.stdout != done.stdout
    refused(
        call("fairseq-generate", *words, "--phrases-segmentation", "learned", check=False),
        "the segmentation learned asks for an encoder that has learned what a phrase is",
    )


def test_stores_of_types_that_are_refused(xpr: Xpr, tmp_path: Path) -> None:
    def fails(kind: str) -> subprocess.CompletedProcess[str]:
        words = [
            "phrases",
            xpr.texts[1],
            "--encoder",
            xpr.checkpoint,
            "--output",
            tmp_path / "out",
            "--cpu",
            "--quiet",
        ]
        return call("build", *words, "--segmentation", kind, check=False)

    refused(fails("learned"), "has not: give lexicon:FILE, all or ngram:N")
    refused(fails(f"lexicon:{tmp_path / 'no'}"), "there is no lexicon .*no")
    (tmp_path / "empty").write_text("\n\t\n")
    refused(fails(f"lexicon:{tmp_path / 'empty'}"), "is empty: give a file of one phrase per line")
    (tmp_path / "other").write_text("xyzzy\n")
    refused(fails(f"lexicon:{tmp_path / 'other'}"), "no phrase is left .*give a lexicon of its language")
    refused(fails("lexicon:"), "give learned, all, ngram:N such as ngram:5, or lexicon:FILE")
    assert not (tmp_path / "out").exists()


def test_the_recipe(xpr: Xpr, tmp_path: Path) -> None:
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ENCODER": str(xpr.context)}
    words = ["/bin/bash", ROOT / "scripts" / "recipes" / "train_xpr.sh", tmp_path / "out", xpr.lexicon, "--"]
    options = "--max-subwords", 60, "--phrase-dim", 8, "--sentences", 2
    run(*words, *options, UPDATES="2", PAIRS="32", **where)
    trained = XprEncoder.load(tmp_path / "out" / "checkpoints" / "checkpoint_best.pt")
    kept = XprEncoder.load(tmp_path / "out" / "phrase-encoder" / "xpr.pt")
    assert (
        kept.dimension == 8 and kept.fingerprint() == trained.fingerprint() and kept.trained_on == ["de-en"]
    )


def test_means_of_types_against_a_loop(rng: np.random.Generator, tmp_path: Path) -> None:
    """Numbered by first coming, and added up over blocks, which memory need not hold together."""
    strings = rng.integers(0, 30, 500)
    means = rng.normal(size=(500, 6)).astype(np.float16)
    hashes = rng.integers(0, 2**63, 30).astype(np.uint64)[strings]
    firsts = first_of_equal_numbers(iter(np.array_split(hashes, 9)), tmp_path)
    assert firsts.tolist() == [strings.tolist().index(string) for string in strings]
    with patch.object(type_merge, "TYPED_ROWS", 7):
        types, count = number_types(firsts, tmp_path / "types.npy")
        found = np.concatenate([*mean_of_types(means, types, count, tmp_path)])
    order = [*dict.fromkeys(strings.tolist())]
    assert types.tolist() == [order.index(string) for string in strings] and count == len(order)
    wanted = np.stack([means[strings == string].astype(np.float32).mean(axis=0) for string in order])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
