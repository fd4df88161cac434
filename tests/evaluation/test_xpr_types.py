"""Phrase types: accuracy by layers and sentences, datastores of them, retrieval and decoding."""

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
from conftest import ROOT, Ccpr, World, Xpr, call, run
from matplotlib.figure import Figure
from test_bad_input import refused
from torch import nn

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.evaluation import type_systems
from fairseq_ccpr.evaluation.phrase_systems import SentenceSystem
from fairseq_ccpr.evaluation.plots import draw_types
from fairseq_ccpr.evaluation.type_accuracy import TypeResult
from fairseq_ccpr.evaluation.type_systems import OrthogonalTypes, TransformerTypes, load_type_system
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.phrases.lexicon_store import Lexicon
from fairseq_ccpr.phrases.subwords import subword_bounds
from fairseq_ccpr.phrases.text_pairs import read_lines, read_pairs
from fairseq_ccpr.phrases.words import word_spans


def evaluate(xpr: Xpr, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    words = ["--task", "xpr", "--data", f"mine={xpr.lexicon / 'test'}", "--cpu", "--quiet", *extra]
    return call("evaluate_phrases", *words, check=check)


def test_evaluation_of_layers_and_sentences(xpr: Xpr, ccpr: Ccpr, tmp_path: Path):
    done = evaluate(
        xpr, "--encoder", f"raw={xpr.context}", f"map=orthogonal:{xpr.context}", f"xpr={xpr.checkpoint}",
        f"ccpr={ccpr.checkpoint}", "--train", xpr.lexicon / "train", "--sentences", 0, 2, 4, "--layers", 1, 2,
        "--json", tmp_path / "found.json", "--plot", tmp_path / "found.png",
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert len(found) == 3 * (2 + 2 + 2 + 1)
    settings = {one["system"]: one["training"] for one in found}
    assert settings == {"raw": "unsupervised", "map": "supervised", "xpr": "supervised", "ccpr": "other"}
    assert done.stdout.count("| mine |") == len(found) and "data mine:" in done.stdout
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    encoder, lexicon = XprEncoder.load(xpr.checkpoint), Lexicon(xpr.lexicon / "test")
    (own,) = (one for one in found if (one["system"], one["layer"], one["sentences"]) == ("xpr", 2, 4))
    assert own["forward"] == pytest.approx(forward_accuracy(encoder, lexicon, 4), abs=0.01)
    again = evaluate(xpr, "--encoder", f"xpr={xpr.checkpoint}", "--sentences", 4)  # the layer it was trained on
    assert f"| {own['forward']:.1f} | {own['backward']:.1f} |" in again.stdout


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ([(2, 0), (2, 4)], ["example sentences"]), ([(1, 4), (2, 4)], ["layer"]), ([(2, 4)], ["example sentences"]),
        ([(1, 0), (1, 4), (2, 0), (2, 4)], ["example sentences", "layer"]),
    ],
)  # fmt: skip
def test_the_picture_shows_what_varies(settings: list[tuple[int, int]], drawn: list[str], tmp_path: Path):
    results = [TypeResult("de-en", "raw", "unsupervised", *setting, 50.0, 60.0) for setting in settings]
    results.append(TypeResult("de-en", "muse", "other", 0, settings[0][1], 40.0, 50.0))
    with patch.object(Figure, "savefig", autospec=True) as saved:
        draw_types(results, tmp_path / "types.png")
    figure = saved.call_args.args[0]
    assert [axes.get_xlabel() for axes in figure.axes] == drawn
    assert [line.get_label() for line in figure.axes[0].lines] == ["de-en, raw", "de-en, muse"]


@torch.no_grad()
def forward_accuracy(encoder: XprEncoder, lexicon: Lexicon, count: int) -> float:
    """acc@1 of the source phrases, one by one, each of their first sentences by itself."""
    sides = []
    for types in lexicon.sides:
        vectors = []
        for number in range(len(types)):
            means = []
            for place in range(types.counts[number]):
                text, start, end = types.example(number, place)
                subwords = encoder.context.tokenizer.encode(text)
                if len(means) < count and (bounds := subword_bounds(subwords, start, end)) is not None:
                    states = encoder.states(torch.tensor([subwords.ids]))
                    means.append(states[0, bounds[0] : bounds[1] + 1].mean(0))
            assert means
            vectors.append(encoder.project(torch.stack(means).mean(0, keepdim=True))[0])
        sides.append(torch.stack(vectors))
    gold = {(p, q) for p, q in lexicon.pairs.tolist()}
    nearest = (sides[0] @ sides[1].T).argmax(1).tolist()
    return 100 * sum((p, q) in gold for p, q in enumerate(nearest)) / len(nearest)


def test_orthogonal_mapping_undoes_a_rotation(xpr: Xpr):
    rotation, _ = torch.linalg.qr(torch.randn(32, 32))

    class Rotated(TransformerTypes):
        def __init__(self) -> None:
            self.fingerprint = "x"

        def encode(self, lexicon, counts, show):
            generator = torch.Generator().manual_seed(1)
            y = nn.functional.normalize(torch.randn(len(lexicon.sides[1]), 32, generator=generator), dim=1)
            x = torch.zeros(len(lexicon.sides[0]), 32)
            rows = torch.from_numpy(lexicon.pairs.astype(np.int64))
            x[rows[:, 0]] = y[rows[:, 1]] @ rotation
            return {(1, 4): (x, y)}

    lexicon = Lexicon(xpr.lexicon / "valid")
    source, target = OrthogonalTypes(Rotated(), [Lexicon(xpr.lexicon / "train")]).encode(lexicon, [4], False)[1, 4]
    last = dict(lexicon.pairs.tolist())
    assert all(float(source[p] @ target[q]) > 0.7 for p, q in last.items())


def test_a_sentence_encoder_sees_the_phrase_or_its_sentences(xpr: Xpr, monkeypatch: pytest.MonkeyPatch):
    def encode(texts: list[str]) -> np.ndarray:
        assert len(texts) <= 64
        return np.array([[len(text), ord(text[0]), text.count("e")] for text in texts])

    monkeypatch.setattr(type_systems, "load_muse", lambda device: SentenceSystem(encode, "fake", device))
    lexicon = Lexicon(xpr.lexicon / "valid")
    found = load_type_system("muse", None, [], torch.device("cpu"), False).encode(lexicon, [0, 1, 3], False)
    types = lexicon.sides[0]
    for number in range(0, len(types), 5):
        texts = [types.example(number, place)[0] for place in range(types.counts[number])]
        for count in (0, 1, 3):
            wanted = encode(texts[:count] or [types.phrases[number]]).sum(axis=0)
            np.testing.assert_allclose(found[0, count][0][number], wanted / np.linalg.norm(wanted), rtol=1e-5)


def test_evaluation_refuses_bad_input(xpr: Xpr, tmp_path: Path):
    def fails(*extra: object) -> subprocess.CompletedProcess[str]:
        return evaluate(xpr, *extra, check=False)

    refused(fails("--encoder", tmp_path / "no"), "there is no encoder '.*no': give a checkpoint")
    refused(fails("--encoder", f"orthogonal:{xpr.context}"), "learns from phrase pairs: give --train")
    refused(fails("--encoder", xpr.context, "--sentences", -1), "--sentences has -1")
    refused(fails("--encoder", xpr.context, "--layers", 3), "layer 3 of an encoder of 2 layers")
    refused(fails("--encoder", xpr.context, "--json", tmp_path / "no" / "a.json"), "--json .*there is no folder")
    refused(fails("--encoder", xpr.context, "--train", xpr.lexicon), "give one of its folders, such as train")


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
        "build_datastore", "phrases", xpr.texts[1], "--encoder", xpr.checkpoint, "--output", output, "--segmentation",
        f"lexicon:{dictionary}", "--cpu", "--quiet", "--shard-sentences", 64,
    )  # fmt: skip
    return output


@torch.no_grad()
def test_store_has_one_entry_a_string(xpr: Xpr, dictionary: Path, store: Path):
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
    words = ["scripts/retrieve_phrases.py", store, "--encoder", xpr.checkpoint, "--cpu", *extra]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_store_of_types_is_neither_built_in_shards_nor_merged(xpr: Xpr, store: Path, tmp_path: Path):
    out = "--output", tmp_path / "new"
    words = "phrases", xpr.texts[1], "--encoder", xpr.checkpoint, *out, "--num-shards", 2, "--shard-id", 0, "--cpu"
    refused(call("build_datastore", *words, check=False), "makes one entry of all places of a string")
    refused(call("merge_datastores", store, store, *out, check=False), "two datastores are called 'store'")
    refused(call("merge_datastores", store, f"again={store}", *out, check=False), "one entry a string")
    assert not (tmp_path / "new").exists()


def test_retrieval_asks_for_the_words_of_the_lexicon(xpr: Xpr, dictionary: Path, store: Path):
    wanted = {phrase for pair in read_pairs(dictionary) for phrase in pair}
    done = retrieve(xpr, store, "--format", "json")
    queries = [query for line in done.splitlines() if line.startswith("{") for query in json.loads(line)["phrases"]]
    assert queries and {query["string"] for query in queries} <= wanted
    assert re.search(r"query:lexicon:[0-9a-f]{12}>", done) and str(dictionary) not in done


def test_decoder_uses_a_store_of_types(xpr: Xpr, world: World, store: Path):
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
    words += [world.model, "--datastore", store, "--cpu", "--bpe", "sentencepiece", "--sentencepiece-model", world.spm]
    done = call("fairseq-generate", *words, "--max-tokens", 2000, "--beam", 2)
    other = call("fairseq-generate", *words, "--max-tokens", 2000, "--beam", 2, "--phrase-segmentation", "all")
    assert other.stdout != done.stdout
    refused(
        call("fairseq-generate", *words, "--phrase-segmentation", "learned", check=False),
        "--segmentation learned asks for an encoder that has learnt what a phrase is",
    )


def test_stores_of_types_that_are_refused(xpr: Xpr, tmp_path: Path):
    def fails(kind: str) -> subprocess.CompletedProcess[str]:
        words = ["phrases", xpr.texts[1], "--encoder", xpr.checkpoint, "--output", tmp_path / "out", "--cpu", "--quiet"]
        return call("build_datastore", *words, "--segmentation", kind, check=False)

    refused(fails("learned"), "has not: give lexicon:FILE, all or ngram:N")
    refused(fails(f"lexicon:{tmp_path / 'no'}"), "there is no lexicon .*no")
    (tmp_path / "empty").write_text("\n\t\n")
    refused(fails(f"lexicon:{tmp_path / 'empty'}"), "is empty: give a file of one phrase a line")
    (tmp_path / "other").write_text("xyzzy\n")
    refused(fails(f"lexicon:{tmp_path / 'other'}"), "no phrase is left .*give a lexicon of its language")
    refused(fails("lexicon:"), "give learned, all, ngram:N such as ngram:5, or lexicon:FILE")
    assert not (tmp_path / "out").exists()


def test_the_recipe(xpr: Xpr, tmp_path: Path):
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ENCODER": str(xpr.context)}
    words = ["/bin/bash", ROOT / "scripts" / "recipes" / "train_xpr.sh", tmp_path / "out", xpr.lexicon, "--"]
    options = "--max-subwords", 60, "--phrase-dim", 8, "--sentences", 2
    run(*words, *options, UPDATES="2", PAIRS="32", **where)
    trained = XprEncoder.load(tmp_path / "out" / "checkpoints" / "checkpoint_best.pt")
    kept = XprEncoder.load(tmp_path / "out" / "phrase-encoder" / "xpr.pt")
    assert kept.dimension == 8 and kept.fingerprint() == trained.fingerprint() and kept.trained_on == ["de-en"]
