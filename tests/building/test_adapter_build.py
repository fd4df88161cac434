"""CLKNN datastores: built by the whole chain, decoded with, tuned, measured, refused."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.building import adapter_build, part
from fairseq_ccpr.building.adapter_build import AdapterTraining
from fairseq_ccpr.datastore.token import TokenDatastore, fit_pca
from fairseq_ccpr.decoding.mixture import Distribution, Mixture
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.models.token_adapter import TokenAdapter, default_output
from fairseq_ccpr.settings import as_options
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import (
    USER_DIR,
    begin,
    call,
    equal,
    held_out_text,
    refused,
    run_two_processes,
    token_grid,
    vote,
)
from tests.small_models import World, build, build_options

TRAINING = (
    "--max-update 40 --batch-size 64 --anchors-per-epoch 1280 --valid-queries 300 --nearest-clusters 40 "
)
TRAINING += (
    "--adapter-hidden-dim 64 --adapter-output-dim 24 --lr 3e-3 --total-num-update 40 --warmup-updates 5"
)
ADAPTER = ["--adapter", "clknn", "--adapter-options", TRAINING, "--pca-dim", 16]


@pytest.fixture(scope="session")
def clknn(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build(
        world,
        path := tmp_path_factory.mktemp("clknn") / "clknn",
        *ADAPTER,
        "--raw-datastore",
        world.datastore,
    )
    return path


@pytest.mark.full
def test_chain_makes_unit_keys_and_drops_raw_ones(world: World, clknn: Path, tmp_path: Path) -> None:
    raw, made = TokenDatastore(world.datastore), TokenDatastore(clknn)
    assert made.keys.shape == (raw.section.size, 16) and made.section.index.metric == "ip"
    np.testing.assert_allclose(np.linalg.norm(made.keys.astype(np.float64), axis=1), 1, atol=2e-3)
    assert np.array_equal(made.values, raw.values) and np.array_equal(made.provenance, raw.provenance)
    assert "clknn24+pca, from states 32 wide" in call("inspect", clknn).stdout
    build(world, own := tmp_path / "own", *ADAPTER)
    assert sorted(p.name for p in own.iterdir()) == ["adapter", "manifest.json", "preprocessing", "token"]
    assert np.array_equal(TokenDatastore(own).keys, made.keys)  # the same training, from keys of its own
    stamps = {path: path.stat().st_mtime_ns for path in own.rglob("*")}
    build(world, own, *ADAPTER)
    assert {path: path.stat().st_mtime_ns for path in own.rglob("*")} == stamps
    build(world, own, *ADAPTER, "--index", "IVF8,Flat")
    assert str(TokenDatastore(own).section.index).startswith("IVF8,Flat")
    build(world, kept := tmp_path / "kept", *ADAPTER, "--keep-raw-keys")
    assert TokenDatastore(kept / "raw").section.fingerprints == raw.section.fingerprints
    assert list(TokenDatastore(kept / "valid").section.subsets) == ["valid"]


@pytest.mark.full
def test_without_other_text_sentences_are_held_out(world: World, clknn: Path, tmp_path: Path) -> None:
    build(world, whole := tmp_path / "whole", *ADAPTER, "--subset", "train", "valid")
    assert TokenDatastore(whole).section.projection is not None
    other = TokenDatastore(whole).section.fingerprints["adapter"]
    assert other != TokenDatastore(clknn).section.fingerprints["adapter"]


def test_adapter_from_a_file_makes_the_same_keys(world: World, clknn: Path, tmp_path: Path) -> None:
    best = clknn / "adapter" / "checkpoint_best.pt"
    build(world, tmp_path / "s", "--adapter", best, "--pca-dim", 16, "--raw-datastore", world.datastore)
    assert np.array_equal(TokenDatastore(tmp_path / "s").keys, TokenDatastore(clknn).keys)
    assert not (tmp_path / "s" / "adapter").exists()


@pytest.mark.full
@pytest.mark.parametrize("stage", ["_run", "fit_pca", "fill", "describe_files"])
def test_stopped_chain_resumes(world: World, clknn: Path, tmp_path: Path, stage: str) -> None:
    places = {"_run": adapter_build, "fill": part.TokenPart, "describe_files": part}
    place = places.get(stage, adapter_build)
    options = [*ADAPTER, "--raw-datastore", world.datastore]
    with patch.object(place, stage, side_effect=KeyboardInterrupt):
        assert build(world, tmp_path / "s", *options, check=False).returncode == 130
    assert call("inspect", tmp_path / "s", check=False).returncode == 1
    build(world, tmp_path / "s", *options)
    assert np.array_equal(TokenDatastore(tmp_path / "s").keys, TokenDatastore(clknn).keys)


@pytest.mark.full
def test_killed_training_resumes(world: World, tmp_path: Path) -> None:
    longer = TRAINING.replace("--max-update 40", "--max-update 80")
    words = [
        *build_options(world, out := tmp_path / "s"),
        "--raw-datastore",
        world.datastore,
        "--adapter",
        "clknn",
    ]
    words += ["--adapter-options", longer]
    process = begin("fairseq-ccpr build", *words)
    while process.is_alive() and not (out / "adapter" / "checkpoint_last.pt").exists():
        time.sleep(0.01)
    assert process.is_alive() and process.pid, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    call("build", *words)
    log = (out / "adapter" / "train.log").read_text()  # of both runs
    assert log.count("epoch 001 | valid") == 1 and "epoch 004 | valid" in log
    assert TokenDatastore(out).section.dimension == 24


def test_training_options_are_read_as_fairseq_reads_them() -> None:
    plain, other = AdapterTraining.parse(""), AdapterTraining.parse("--adapter-output-dim 7 --max-update 12")
    assert (plain.output_dim, default_output(40), default_output(4000), other.output_dim) == (
        None,
        40,
        512,
        7,
    )
    assert other.words[:2] == ["--total-num-update", "12"]
    assert plain.fingerprint(["keys"]) not in (other.fingerprint(["keys"]), plain.fingerprint(["other keys"]))
    for wrong in ("--lr nothing", "--arch nothing", "an 'open quote"):
        with pytest.raises(ConfigurationError, match="fairseq-train does not take them"):
            AdapterTraining.parse(wrong)


def test_decoding_is_plain_without_a_share_and_confident_by_default(
    clknn: Path, decode: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = ["--datastore", clknn, "--tokens-temperature", 0.1]
    assert equal(decode(*store, "--tokens-lambda", 0), decode(base=True))
    confident, fixed = (
        decode(*store, "--tokens-lambda", 0.6),
        decode(*store, "--tokens-lambda", 0.6, "--no-tokens-confidence"),
    )
    assert not equal(confident, fixed) and not equal(confident, decode(base=True))
    assert equal(confident, decode(*store, "--tokens-lambda", 0.6, "--tokens-confidence"))
    assert equal(confident, decode(*store, "--tokens-lambda", 0.6, "--batch-size", 3), tolerance=1e-4)
    assert re.search(
        r"keys:decoder_output\+clknn24\+pca\|.*\|lambda:0\.6\|T:0\.1\|lambda\*:yes\|lambda_max:1\.0\|s0:0\.0",
        caplog.text,
    )


def test_mixture_sums_to_one(world: World, clknn: Path) -> None:
    states = torch.from_numpy(TokenDatastore(world.datastore).keys[::7].astype(np.float32))
    states += torch.randn_like(states)
    capture: Any = None
    retriever = TokenRetriever(TokenDatastore(clknn), torch.device("cpu"))
    memory = TokenMemory(capture, retriever, TokenRetrievalSettings(16, 0.9, 0.05, confidence=True), 3)
    log_probs = torch.randn(len(states), int(retriever.values.max()) + 9).log_softmax(1)
    given = vote(memory, states, log_probs)
    assert given.weight.min() < given.weight.max() <= 0.9
    mixed = Mixture().mix(Distribution(log_probs), [given]).log_probs
    torch.testing.assert_close(
        mixed.double().exp().sum(1), torch.ones(len(states)).double(), rtol=0, atol=1e-5
    )


def test_the_log_tells_what_decoding_did(world: World, clknn: Path, decode: Callable, tmp_path: Path) -> None:
    options = [
        "--datastore",
        clknn,
        "--tokens-temperature",
        0.1,
        "--tokens-k",
        4,
        "--tokens-lambda",
        0.8,
        "--tokens-lambda-max",
        0.7,
        "--tokens-min-similarity",
        0.2,
        "--no-tokens-guard",
    ]
    found = decode(*options, "--tokens-log", tmp_path / "log.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, hypotheses in found.items():
        mine = [line for line in lines if line["sentence"] == number]
        scores = hypotheses[0]["positional_scores"]
        assert [line["position"] for line in mine] == list(range(len(scores)))
        np.testing.assert_allclose([line["mixed"] for line in mine], scores, atol=2e-4)
    for line in lines:
        similarities = [max(0, (n["score"] - 0.2) / 0.8) for n in line["neighbours"]]
        assert line["lambda"] == pytest.approx(min(0.7, 0.8 * np.mean(similarities)), abs=1e-5)
        assert (line["retrieval"] is None) == (line["token"] not in [n["token"] for n in line["neighbours"]])


def test_interactive_logs_too(world: World, clknn: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("▁das ▁Haus\n▁der\n", encoding="utf-8")
    words = world.options(
        "--datastore", clknn, "--input", tmp_path / "in", "--tokens-log", tmp_path / "log.jsonl"
    )
    call("fairseq-interactive", *words, "--buffer-size", 2, "--max-tokens", 100)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["sentence"] for line in lines} == {0, 1} and lines[0]["position"] == 0


@pytest.mark.parametrize("kind", [
    {"confidence": True}, {"confidence": True, "min_similarity": 0.4}, {"confidence": True, "lambda_star": "published"},
    {"confidence": False},
], ids=str)  # fmt: skip
def test_tuner_scores_equal_a_direct_computation(
    world: World, clknn: Path, decode: Callable, kind: dict[str, Any]
) -> None:
    store = ["--datastore", clknn, "--tokens-temperature", 0.07, "--tokens-k", 16, "--tokens-lambda", 0.7]
    words = as_options(TokenRetrievalSettings(**kind), ("confidence",)).split()
    scored = decode(*store, *words, "--score-reference")
    wanted = torch.cat([hypotheses[0]["positional_scores"] for hypotheses in scored.values()]).mean()
    cfg = parse_generation(world.options(*store, "--no-progress-bar"))
    task, models = load(cfg)
    ensemble = task.build_ensemble(models)
    text = held_out_text(ensemble, list(batches(cfg, task, models)))
    likeness = ensemble.find(TokenMemory).settings.likeness
    settings = TokenRetrievalSettings(16, 0.7, 0.07, guard=True, likeness=likeness, **kind)
    memory = replace(ensemble.find(TokenMemory), settings=TokenRetrievalSettings(guard=True, **kind))
    grid = token_grid(memory, text, (16,), (0.07,), (kind["confidence"],), (likeness,))
    assert likeness
    assert grid[settings] == pytest.approx(wanted.item(), abs=1e-4)


@pytest.mark.full
def test_tuning_an_adapters_store_tries_both_kinds_of_share(
    world: World, clknn: Path, tmp_path: Path
) -> None:
    words = [*world.options("--datastore", clknn), "--remove-bpe", "sentencepiece", "--no-progress-bar"]
    at = words.index("--tokens-temperature")
    del words[at : at + 2]
    fixed = ["--combiner", "fixed"]
    shown = call("tune", *words, *fixed, "--output", tmp_path / "options", "--decode", 4).stdout
    assert "5,600 settings" in shown and "4 by the mean of BLEU and chrF" in shown
    assert (
        "--tokens-confidence" in (chosen := (tmp_path / "options").read_text())
        or "--no-tokens-confidence" in chosen
    )
    shown = call(
        "tune", *words, *fixed, "--no-tokens-confidence", "--output", tmp_path / "fixed", "--decode", 1
    ).stdout
    assert "2,800 settings" in shown and "--no-tokens-confidence" in (tmp_path / "fixed").read_text()


@pytest.mark.full
def test_retrieval_is_measured_and_drawn(world: World, clknn: Path, tmp_path: Path) -> None:
    build(world, queries := tmp_path / "valid", "--subset", "valid")
    options = [world.datastore, f"clknn={clknn}", "--plots", tmp_path / "out"]
    options += ["--json", tmp_path / "accuracy.json", "--quiet"]
    shown = call("evaluate keys", *options).stdout
    assert "| raw, PCA 16 |" in shown and shown.count("| clknn |") == 4
    accuracy = json.loads((tmp_path / "accuracy.json").read_text())
    for systems in accuracy["precision"].values():
        for values in systems.values():
            assert len(values) == 64 and 0 <= min(values) <= max(values) <= 100
    pictures = sorted((tmp_path / "out").glob("*.png"))
    assert len(pictures) == 5 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert "| raw |" in call("evaluate keys", world.datastore, "--held-out", queries, "--quiet").stdout
    build(world, other := tmp_path / "other", "--subset", "valid", "--key-layer", "last_ffn_input")
    refused(
        call("evaluate keys", world.datastore, "--held-out", other, check=False),
        "of the same model and layer",
    )
    refused(call("evaluate keys", clknn, check=False), "went through an adapter")
    refused(call("evaluate keys", world.datastore, world.datastore, check=False), "not made from the keys of")


def test_chain_refuses_bad_input(world: World, clknn: Path, tmp_path: Path) -> None:
    raw = ["--raw-datastore", world.datastore]
    best = clknn / "adapter" / "checkpoint_best.pt"
    output = tmp_path / "s"

    def says(*options: object, sentence: str) -> None:
        refused(build(world, output, *options, check=False), sentence)
        assert not (output / "token").exists()

    says("--pca-dim", 8, sentence="--pca-dim needs --adapter")
    says(*ADAPTER, "--metric", "l2", sentence="--metric is l2, but the keys of an adapter")
    says("--adapter", "nothing.pt", sentence=r"there is no adapter nothing\.pt")
    says("--adapter", world.model, sentence="is no adapter")
    says(
        "--adapter", best, "--adapter-options", "--seed 2", *raw, sentence="--adapter-options is for training"
    )
    says("--adapter", best, "--valid-subset", "test", *raw, sentence="--valid-subset is for training")
    says(
        *ADAPTER,
        "--valid-subset",
        "train",
        *raw,
        sentence="--valid-subset is train, which the datastore is built from",
    )
    says(*ADAPTER, "--valid-subset", "nothing", *raw, sentence="holds no subset 'nothing'")
    says("--adapter", best, "--pca-dim", 25, *raw, sentence="--pca-dim is 25, .*24 wide")
    says(
        "--adapter",
        "clknn",
        "--adapter-options",
        "--no-such-option 1",
        *raw,
        sentence="fairseq-train does not take them .*no-such-option",
    )
    torch.save(torch.load(best) | {"model": TokenAdapter(40, 8, 6).state_dict()}, tmp_path / "wide.pt")
    says("--adapter", tmp_path / "wide.pt", *raw, sentence="width 40, but those of .* are 32 wide")
    refused(build(world, world.datastore, *ADAPTER, check=False), "holds the decoder's own states as keys")
    says(
        "--adapter",
        "clknn",
        "--adapter-options",
        "--positives 0",
        *raw,
        sentence="ended with exit code 1 .*--positives is 0",
    )
    says("--adapter", best, "--pca-dim", -1, *raw, sentence="--pca-dim is -1")
    says(
        "--adapter",
        best,
        "--key-layer",
        "last_ffn_input",
        sentence="trained for another key layer: decoder_output there",
    )
    refused(
        build(world, clknn, *ADAPTER[:-1], 12, *raw, check=False), "built with another (dimension|projection)"
    )
    refused(build(world, clknn, *ADAPTER, "--keep-raw-keys", check=False), "its raw keys were dropped")
    refused(build(world, clknn, check=False), "built with another (dimension|projection)")


def test_store_too_small_to_train_on_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "one.tsv").write_text("Haus\thouse\n", encoding="utf-8")
    words = ["--train", tmp_path / "one.tsv", "-s", "de", "-t", "en", "--sentencepiece-model", world.spm]
    call("prepare", *words, "--dict", world.data_bin / "dict.en.txt", "--output", tmp_path / "data")
    options = [
        "tokens",
        tmp_path / "data",
        *build_options(world, tmp_path / "s")[2:],
        *ADAPTER,
        "--pca-dim",
        0,
    ]
    refused(call("build", *options, check=False), "too small to train an adapter on: .*--adapter none")


def test_decoding_refuses_or_warns_of_settings_of_the_other_metric(
    world: World, clknn: Path, decode: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    of_unit, of_raw = world.options("--datastore", clknn), world.options()
    decode("--datastore", clknn, "--tokens-temperature", 10)
    assert "--tokens-temperature 10" in caplog.text and "0.01 to 0.5" in caplog.text
    decode("--tokens-temperature", 0.05)
    assert "--tokens-temperature 0.05" in caplog.text and "10 to 100" in caplog.text
    refused(
        call("fairseq-generate", *of_raw, "--tokens-confidence", check=False),
        "--tokens-confidence needs keys of length 1",
    )
    both = ["--tokens-confidence", "--no-tokens-confidence"]
    refused(call("fairseq-generate", *of_unit, *both, check=False), "exclude each other")
    refused(
        call("fairseq-generate", *of_unit, "--tokens-lambda-max", 0, check=False), "--tokens-lambda-max is 0"
    )
    refused(call("fairseq-generate", *of_raw, "--tokens-lambda-max", 0.5, check=False), "which is off")
    refused(call("fairseq-generate", *of_raw, "--tokens-min-similarity", 0.5, check=False), "which is off")
    refused(
        call("fairseq-generate", *of_unit, "--tokens-min-similarity", 1, check=False),
        "--tokens-min-similarity is 1",
    )
    published = ["--tokens-lambda-star", "published"]
    refused(
        call("fairseq-generate", *of_raw, *published, check=False),
        "--tokens-lambda-star is for .* which is off",
    )
    refused(
        call("fairseq-generate", *of_unit, *published, "--tokens-min-similarity", 0.5, check=False), "give 0"
    )
    refused(
        call("fairseq-generate", *of_raw, "--tokens-log", "/nowhere/log", check=False),
        "--tokens-log /nowhere/log cannot",
    )


def test_training_refuses_bad_input(world: World, clknn: Path, tmp_path: Path) -> None:
    words = ["--user-dir", USER_DIR, "--task", "token_contrast", "--arch", "token_adapter", "--cpu"]
    words += [
        "--criterion",
        "supervised_contrastive",
        "--optimizer",
        "adam",
        "--save-dir",
        tmp_path,
        "--batch-size",
        8,
    ]
    tracked = [*words, "--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"]
    refused(
        call("fairseq-train", world.datastore, *words, check=False), "give --best-checkpoint-metric accuracy"
    )
    refused(call("fairseq-train", clknn, *tracked, check=False), "went through an adapter already")
    refused(
        call("fairseq-train", world.datastore, *tracked, "--positives", 0, check=False), "--positives is 0"
    )
    build(world, other := tmp_path / "other", "--subset", "valid", "--key-layer", "last_ffn_input")
    for wrong, sentence in (
        (other, "holds states of another key layer"),
        (clknn, "went through an adapter already"),
    ):
        refused(
            call("fairseq-train", world.datastore, *tracked, "--valid-datastore", wrong, check=False),
            sentence,
        )


@pytest.mark.full
def test_two_processes_train_one_adapter(world: World, tmp_path: Path) -> None:
    words = [
        "--user-dir",
        USER_DIR,
        "--task",
        "token_contrast",
        "--arch",
        "token_adapter",
        "--cpu",
        "--batch-size",
        16,
    ]
    words += [
        "--criterion",
        "supervised_contrastive",
        "--optimizer",
        "adam",
        "--lr",
        1e-3,
        "--save-dir",
        tmp_path,
    ]
    words += ["--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric", "--max-update", 6]
    words += [
        "--anchors-per-epoch",
        192,
        "--valid-queries",
        100,
        "--nearest-clusters",
        40,
        "--log-format",
        "simple",
    ]
    # the first one's log
    log, _ = run_two_processes("fairseq-train", world.datastore, *words, "--log-interval", 1)
    assert len(re.findall(r"train_inner .* loss=([0-9.]+), .*wpb=32", log)) == 6  # of both batches of 16
    assert re.findall("accuracy ([0-9.]+)", log)
    assert TokenAdapter.load(tmp_path / "checkpoint_best.pt").trained_on


def test_systems_are_compared_with_significance(tmp_path: Path) -> None:
    reference = [f"the cat number {i} sat on the mat of house {i % 7}" for i in range(60)]
    better = [line if i % 3 else line.replace("sat", "sits") for i, line in enumerate(reference)]
    worse = [line.replace("mat", "rug").replace("house", "home") for line in reference]
    for name, lines in {"reference": reference, "better": better, "worse": worse, "short": worse[:5]}.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    words = [tmp_path / "reference.txt", f"base={tmp_path / 'worse.txt'}", tmp_path / "better.txt"]
    shown = call("evaluate systems", *words, "--json", tmp_path / "out.json").stdout
    assert (
        "| system | BLEU | BLEU difference | BLEU p | chrF |" in shown
        and "60 sentences; p against base" in shown
    )
    base, other = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (
        base["BLEU p"] is None
        and other["BLEU"] > base["BLEU"]
        and other["BLEU p"] < 0.05
        and other["TER"] < base["TER"]
    )
    refused(
        call("evaluate systems", *words[:2], tmp_path / "short.txt", check=False),
        "'short' has 5 lines, but .* has 60",
    )
    refused(
        call("evaluate systems", *words, tmp_path / "better.txt", check=False),
        "two systems are called 'better'",
    )
    refused(call("evaluate systems", tmp_path / "no.txt", *words[1:], check=False), r"no\.txt cannot be read")
    with pytest.raises(ConfigurationError, match="--pca-dim is 7"):
        fit_pca(torch.randn(10, 6), 7)


def test_what_is_learned_beside_an_adapters_keys(world: World, clknn: Path, tmp_path: Path) -> None:
    """It is projected as they are, counts in text that the guard keeps them from, and moves in beside them."""
    store = Path(shutil.copytree(clknn, tmp_path / "store"))
    pairs = list(read_pairs(world.folder / "test.tsv"))[:2]
    options = {"max_len_b": 45, "device": "cpu", "tokens_k": 2, "tokens_temperature": 0.01}
    translator = Translator(datastore=store, **options)
    before = [one.text for one in translator.translate([source for source, _ in pairs])]
    assert "|guard:yes|" in str(translator.signature)
    number = translator.learn(*pairs[0]).id
    learned = [one.text for one in translator.translate([source for source, _ in pairs])]
    assert learned[0] == pairs[0][1] != before[0]
    translator.close()
    call("compact", store, "--quiet", "--cpu")
    name = "projection.safetensors"
    assert (store / "token-1" / name).read_bytes() == (clknn / "token" / name).read_bytes()
    translator = Translator(datastore=store, **options)
    assert [one.text for one in translator.translate([source for source, _ in pairs])] == learned
    translator.forget(number)
    assert [one.text for one in translator.translate([source for source, _ in pairs])] == before
    translator.close()
