"""Preparing data, tuning and comparing."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import PAIRS, World, build, call
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest
from test_bad_input import refused

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.decoding import load, parse_generation
from fairseq_ccpr.evaluation.significance import compare_systems
from fairseq_ccpr.evaluation.tuning import fill_caches
from fairseq_ccpr.extraction.preparation import read_pairs


@pytest.mark.parametrize(("k", "lambda_", "temperature"), [(1, 0.3, 1), (8, 0.6, 10), (64, 0.9, 100)])
def test_tuner_computes_the_likelihood_that_scoring_gives(
    world: World, decode: Callable, k: int, lambda_: float, temperature: float
):
    settings = ["--knn-k", k, "--knn-lambda", lambda_, "--knn-temperature", temperature]
    scored = decode(*settings, "--score-reference")
    wanted = torch.cat([hypotheses[0]["positional_scores"] for hypotheses in scored.values()]).mean()
    cfg = parse_generation(world.options("--no-progress-bar"))
    task, models = load(cfg)
    cache, _, _ = fill_caches(cfg, task, models, task.build_ensemble(models, 1), 64)
    assert cache is not None
    assert abs(cache.log_likelihood(k, temperature, torch.tensor([lambda_]), False).item() - wanted.item()) < 1e-4


def test_tuning_writes_options_that_decoding_takes(world: World, tmp_path: Path):
    build(world, tmp_path / "oracle", "--subset", "valid", "test")
    words = [*world.options("--datastore", tmp_path / "oracle"), "--remove-bpe", "sentencepiece", "--no-progress-bar"]
    shown = call("tune_retrieval", *words, "--output", tmp_path / "options", "--decode", 2).stdout
    assert "700 settings" in shown and "base" in shown
    chosen = (tmp_path / "options").read_text().split()
    assert chosen[::2] == ["--knn-k", "--knn-lambda", "--knn-temperature"]
    assert float(chosen[3]) >= 0.8  # with the answers in the store, much of it is wanted
    assert call("fairseq-generate", *words, *chosen).returncode == 0


def test_comparison_shows_scores_speed_and_examples(world: World, tmp_path: Path):
    words = [*world.options("--knn-lambda", 0.6), "--remove-bpe", "sentencepiece", "--no-progress-bar"]
    shown = call("compare_decoding", *words, "--results-path", tmp_path).stdout
    assert "| base |" in shown and "| retrieval |" in shown and "nrefs:1|case:mixed" in shown
    assert shown.count("\nsource ") == 3 and "retrieval retriever:TokenRetriever|" in shown
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert rows[0]["speed"] == 1 and rows[1]["speed"] > 0
    for name in ("base", "retrieval", "source", "reference"):
        assert len((tmp_path / f"{name}.txt").read_text().splitlines()) == PAIRS["test"]
    tables = [line.split("\t") for line in (world.folder / "test.tsv").read_text(encoding="utf-8").splitlines()]
    assert (tmp_path / "source.txt").read_text(encoding="utf-8").splitlines()[3] == tables[3][0]


def test_base_model_decodes_alone_without_a_datastore(world: World, tmp_path: Path):
    words = [*world.options(), "--remove-bpe", "sentencepiece", "--no-progress-bar"]
    at = words.index("--datastore")
    call("compare_decoding", *words, "--results-path", tmp_path / "both")
    shown = call("compare_decoding", *words[:at], *words[at + 2 :], "--results-path", tmp_path / "alone").stdout
    assert "| base |" in shown and "retrieval" not in shown and not (tmp_path / "alone/retrieval.txt").exists()
    assert (tmp_path / "alone/base.txt").read_bytes() == (tmp_path / "both/base.txt").read_bytes()


def test_pairs_are_read_from_plain_and_compressed_files(tmp_path: Path):
    (tmp_path / "a.tsv").write_text("ä\tb\nc\td\n", encoding="utf-8")
    with lzma.open(tmp_path / "a.tsv.xz", "wt", encoding="utf-8") as stream:
        stream.write("ä\tb\nc\td\n")
    assert list(read_pairs(tmp_path / "a.tsv")) == list(read_pairs(tmp_path / "a.tsv.xz")) == [("ä", "b"), ("c", "d")]


def test_data_are_prepared_alike_from_a_table_and_from_two_files(world: World, tmp_path: Path):
    pairs = list(read_pairs(world.folder / "test.tsv"))
    for side, language in enumerate(("de", "en")):
        (tmp_path / f"text.{language}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    dictionary = world.data_bin / "dict.en.txt"
    words = ["--test", tmp_path / "text", "-s", "de", "-t", "en", "--output", tmp_path / "data"]
    of_fairseq = ["--bpe", "sentencepiece", "--sentencepiece-model", world.spm]
    call("prepare_data", *words, *of_fairseq, "--dict", dictionary, dictionary)
    for name in ("test.de-en.de.bin", "test.de-en.en.bin", "dict.de.txt"):
        assert (tmp_path / "data" / name).read_bytes() == (world.data_bin / name).read_bytes()
    words[-1] = tmp_path / "other"
    for extra, sentence in (
        (["--spm", world.spm], "--dict belongs together"),
        (["--spm", dictionary, "--dict", dictionary], "cannot be had"),
        (
            ["--bpe", "sentencpiece", "--dict", dictionary],
            "fairseq does not take '--bpe sentencpiece': .*invalid choice",
        ),
        (["--spm", world.spm, "--dict", *[dictionary] * 3], "--dict names 3 files"),
        (["--spm", world.spm, "--dict", dictionary, "--valid", "no"], "neither a file no nor no.de"),
    ):
        refused(call("prepare_data", *words, *extra, check=False), sentence)
        assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [(b"a\tb\tc\n", "line 2: 3 columns"), (b"alone\n", "line 2: 1 columns"), (b"\xff\ta\n", "not UTF-8")],
)
def test_bad_pairs_are_named_by_their_line(tmp_path: Path, line: bytes, sentence: str):
    (tmp_path / "a.tsv").write_bytes(b"a\tb\n" + line)
    with pytest.raises(ConfigurationError, match=sentence):
        list(read_pairs(tmp_path / "a.tsv"))


def test_comparing_without_a_model_says_so(world: World):
    words = world.options()
    at = words.index("--path")
    done = call("compare_decoding", *words[:at], *words[at + 2 :], check=False)
    assert done.returncode == 1 and "--path" in done.stderr


def test_significance_is_that_of_sacrebleu_and_differences_lie_in_their_intervals():
    draw = random.Random(1)
    references = [" ".join(draw.choices(["the", "cat", "sat", "on", "a", "mat", "ate"], k=8)) for _ in range(80)]

    def spoiled(share: float) -> list[str]:
        return [" ".join(word if draw.random() > share else "x" for word in line.split()) for line in references]

    systems = {"a": spoiled(0.3), "b": spoiled(0.28), "c": spoiled(0.1)}
    found = compare_systems(systems, [references], 200)
    metrics = {name: kind(references=[references]) for name, kind in (("BLEU", BLEU), ("chrF", CHRF), ("TER", TER))}
    signatures, scores = PairedTest(list(systems.items()), metrics, None, test_type="bs", n_samples=200)()
    for metric, theirs in zip(metrics, ("BLEU", "chrF2", "TER")):
        assert found.signatures[metric] == signatures[theirs].format()
        for row, result in zip(found.rows, scores[theirs]):
            assert row[metric] == pytest.approx(result.score, abs=0.006)
            if result.p_value is not None:
                assert row[f"{metric} p"] == pytest.approx(result.p_value, abs=1e-4)
                low, high = row[f"{metric} interval"]
                assert low < row[f"{metric} difference"] < high
    same = compare_systems({"a": systems["a"], "again": systems["a"]}, [references], 50).rows[1]
    assert same["BLEU difference"] == 0 and same["BLEU interval"] == [0, 0] and same["BLEU p"] == 1
