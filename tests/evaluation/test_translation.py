"""Tuning and comparing systems."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.significance import PairedTest

from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.evaluation.grids import log_likelihood
from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.lab.accuracy.significance import compare_systems
from tests.helpers import call, held_out_text, refused
from tests.small_models import PAIRS, World, build


@pytest.mark.parametrize(("k", "lambda_", "temperature"), [(1, 0.3, 1), (8, 0.6, 10), (64, 0.9, 100)])
def test_tuner_computes_the_likelihood_that_scoring_gives(
    world: World, decode: Callable, k: int, lambda_: float, temperature: float
) -> None:
    options = ["--tokens-k", k, "--tokens-lambda", lambda_, "--tokens-temperature", temperature]
    options += ["--tokens-likeness", 4, "--no-tokens-guard"]
    scored = decode(*options, "--score-reference")
    wanted = torch.cat([hypotheses[0]["positional_scores"] for hypotheses in scored.values()]).mean()
    cfg = parse_generation(world.options("--no-progress-bar"))
    task, models = load(cfg)
    ensemble = task.build_ensemble(models)
    text = held_out_text(ensemble, list(batches(cfg, task, models)))
    settings = TokenRetrievalSettings(k, lambda_, temperature, confidence=False, likeness=4.0)
    said = text.said(replace(ensemble.find(TokenMemory), settings=settings))
    assert abs(log_likelihood(text.mixture, text.log_probs, [said]).mean().item() - wanted.item()) < 1e-4


def test_tuning_writes_options_that_decoding_takes(world: World, tmp_path: Path) -> None:
    build(world, tmp_path / "oracle", "--subset", "valid", "test")
    words = [
        *world.options("--datastore", tmp_path / "oracle"),
        "--remove-bpe",
        "sentencepiece",
        "--no-progress-bar",
    ]
    shown = call("tune", *words, "--output", tmp_path / "options").stdout
    assert (
        "280 settings" in shown and "base" in shown and "valid is small: trust is a linear function" in shown
    )
    chosen = (tmp_path / "options").read_text().split()
    # 0 is the default of so small a datastore
    likeness = ["--tokens-likeness"] if "--tokens-likeness" in chosen else []
    assert chosen[::2] == ["--tokens-k", "--tokens-lambda", "--tokens-temperature", *likeness, "--trust"]
    with patch("fairseq_ccpr.evaluation.test_set.bleu_tokenizer", lambda language: "char"):
        shown = call(
            "tune", *words, "--combiner", "fixed", "--decode", 2, "--output", tmp_path / "fixed"
        ).stdout
    assert "2 by chrF" in shown
    # with the answers in the store, much is wanted
    assert float((tmp_path / "fixed").read_text().split()[3]) >= 0.8
    assert call("fairseq-generate", *words, *chosen).returncode == 0


def test_comparison_shows_scores_speed_and_examples(world: World, tmp_path: Path) -> None:
    words = [*world.options("--tokens-lambda", 0.6), "--remove-bpe", "sentencepiece", "--no-progress-bar"]
    shown = call("compare", *words, "--results-path", tmp_path).stdout
    assert "| base |" in shown and "| retrieval |" in shown and "nrefs:1|case:mixed" in shown
    assert shown.count("\nsource ") == 3 and "retrieval retriever:TokenRetriever|" in shown
    found = json.loads((tmp_path / "comparison.json").read_text())
    rows, command = found.pop("rows"), found.pop("command")
    assert found.keys() == {"date", "versions", "commit", "machine", "retrieval_signature"}
    assert command[:2] == ["fairseq-ccpr", "compare"] and not any(word.startswith("/") for word in command)
    assert rows[0]["speed"] == 1 and rows[1]["speed"] > 0
    for name in ("base", "retrieval", "source", "reference"):
        assert len((tmp_path / f"{name}.txt").read_text().splitlines()) == PAIRS["test"]
    tables = [
        line.split("\t") for line in (world.folder / "test.tsv").read_text(encoding="utf-8").splitlines()
    ]
    assert (tmp_path / "source.txt").read_text(encoding="utf-8").splitlines()[3] == tables[3][0]


def test_base_model_decodes_alone_without_a_datastore(world: World, tmp_path: Path) -> None:
    words = [*world.options(), "--remove-bpe", "sentencepiece", "--no-progress-bar"]
    at = words.index("--datastore")
    call("compare", *words, "--results-path", tmp_path / "both")
    without = [*words[:at], *words[at + 2 :]]
    refused(call("compare", *without, check=False), "--tokens-temperature has no effect without a datastore")
    at = without.index("--tokens-temperature")
    shown = call("compare", *without[:at], *without[at + 2 :], "--results-path", tmp_path / "alone").stdout
    assert (
        "| base |" in shown and "retrieval" not in shown and not (tmp_path / "alone/retrieval.txt").exists()
    )
    assert (tmp_path / "alone/base.txt").read_bytes() == (tmp_path / "both/base.txt").read_bytes()


def test_copying_unknown_characters_is_refused(world: World) -> None:
    done = call("compare", *world.options("--no-progress-bar", "--replace-unk"), check=False)
    refused(
        done, "--replace-unk copies unknown characters of a text, and .* has them no longer: leave it out"
    )


def test_a_subset_that_is_missing_is_named(world: World) -> None:
    done = call("compare", *world.options("--no-progress-bar", "--gen-subset", "test1"), check=False)
    refused(
        done, "has no subset 'test1', but test, train, valid: prepare the data with --test, or name another"
    )


def test_comparing_without_a_model_says_so(world: World, tmp_path: Path) -> None:
    data = tmp_path / "data-bin"
    shutil.copytree(world.data_bin, data)
    refused(call("compare", data, "--cpu", check=False), "or the model's checkpoint with --path")


def test_significance_is_that_of_sacrebleu_and_differences_lie_in_their_intervals() -> None:
    draw = random.Random(1)
    references = [
        " ".join(draw.choices(["the", "cat", "sat", "on", "a", "mat", "ate"], k=8)) for _ in range(80)
    ]

    def spoiled(share: float) -> list[str]:
        return [
            " ".join(word if draw.random() > share else "x" for word in line.split()) for line in references
        ]

    systems = {"a": spoiled(0.3), "b": spoiled(0.28), "c": spoiled(0.1)}
    found = compare_systems(systems, [references], 200)
    metrics = {
        name: kind(references=[references]) for name, kind in (("BLEU", BLEU), ("chrF", CHRF), ("TER", TER))
    } | {"chrF++": CHRF(references=[references], word_order=2)}
    signatures, scores = PairedTest(list(systems.items()), metrics, None, test_type="bs", n_samples=200)()
    for metric, theirs in zip(metrics, ("BLEU", "chrF2", "TER", "chrF2++"), strict=True):
        assert found.signatures[metric] == signatures[theirs].format()
        for row, result in zip(found.rows, scores[theirs]):
            assert row[metric] == pytest.approx(result.score, abs=0.006)
            if result.p_value is not None:
                assert row[f"{metric} p"] == pytest.approx(result.p_value, abs=1e-4)
                low, high = row[f"{metric} interval"]
                assert low < row[f"{metric} difference"] < high
    short = [line[:-4] for line in references]
    (row,), bleu = (
        compare_systems({"short": short}, [references], 5).rows,
        BLEU().corpus_score(short, [references]),
    )
    assert (row["brevity"], row["length"]) == (round(bleu.bp, 3), round(bleu.sys_len / bleu.ref_len, 3))
    assert row["brevity"] < 1
    same = compare_systems({"a": systems["a"], "again": systems["a"]}, [references], 50).rows[1]
    assert same["BLEU difference"] == 0 and same["BLEU interval"] == [0, 0] and same["BLEU p"] == 1
