"""Building token datastores: right, resumable, the same whoever builds them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.building import part
from fairseq_ccpr.building.part import launched
from fairseq_ccpr.building.token_build import load_model, load_task
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.models.key_layer import KEY_LAYERS, KeyCapture
from tests.helpers import PROGRAM, ROOT, as_torchrun, begin, call, contents, refused
from tests.small_models import PAIRS, World, build, build_options

SMALL_SHARDS = ("--chunk-tokens", 400, "--index", "IVF16,Flat")
BUILD = "fairseq-ccpr build"


@pytest.mark.parametrize("layer", ["decoder_output", "last_ffn_input"])
def test_keys_values_and_provenance_equal_a_plain_loop(world: World, tmp_path: Path, layer: str) -> None:
    """Equation 3, sentence by sentence, with the decoder taken apart by hand."""
    output = world.datastore
    if layer != "decoder_output":
        build(world, output := tmp_path / "store", "--key-layer", layer)
    store = TokenDatastore(output)
    task = load_task(world.data_bin, "de", "en")
    task.load_dataset("train")
    dataset = task.dataset("train")
    model = load_model(str(world.model), task, torch.device("cpu"), fp16=False)
    inputs: list[torch.Tensor] = []
    model.decoder.layers[-1].fc1.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    row = 0
    for sentence in range(len(dataset)):
        target = dataset[sentence]["target"]
        stop = row + len(target)
        assert (
            store.values[row:stop].tolist() == target.tolist() and target[-1] == task.target_dictionary.eos()
        )
        assert store.provenance[row:stop].tolist() == [
            [sentence, position] for position in range(len(target))
        ]
        if sentence % 50 == 0:
            sample = dataset.collater([dataset[sentence]])
            with torch.no_grad():
                features, _ = model(**sample["net_input"], features_only=True)
            wanted = features[0] if layer == "decoder_output" else inputs.pop()[:, 0]
            np.testing.assert_allclose(store.keys[row:stop].astype(np.float32), wanted, atol=5e-3, rtol=5e-3)
        row = stop
    assert row == store.section.size == len(store.values)
    assert task.target_dictionary.pad() not in store.values


def test_capturing_reads_what_the_projection_gets(world: World) -> None:
    task = load_task(world.data_bin, "de", "en")
    task.load_dataset("test")
    model = load_model(str(world.model), task, torch.device("cpu"), fp16=False)
    capture = KeyCapture(model, "decoder_output")
    sample = task.dataset("test").collater([task.dataset("test")[i] for i in range(3)])
    heard: list[torch.Tensor] = []
    with capture.telling(heard.append):
        logits, _ = model(**sample["net_input"])
    model(**sample["net_input"])  # which nobody listens to
    (states,) = heard
    assert torch.equal(torch.nn.functional.linear(states, model.decoder.output_projection.weight), logits)


@pytest.mark.parametrize("layer", KEY_LAYERS)
def test_force_decoding_for_keys_never_projects_onto_the_vocabulary(world: World, layer: str) -> None:
    task = load_task(world.data_bin, "de", "en")
    task.load_dataset("test")
    model = load_model(str(world.model), task, torch.device("cpu"), fp16=False)
    capture = KeyCapture(model, layer)
    sample = task.dataset("test").collater([task.dataset("test")[i] for i in range(3)])
    heard: list[torch.Tensor] = []
    with capture.telling(heard.append):
        model(**sample["net_input"])
    projected: list[object] = []
    model.decoder.output_projection.register_forward_hook(lambda *call: projected.append(call))
    with patch.object(type(model), "forward", None):  # whose arguments are not those of each architecture
        assert torch.equal(capture.force_decode(sample["net_input"]), heard[0])
    assert not projected


@pytest.fixture(scope="module")
def whole(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore that was built in one go, in small shards."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    build(world, folder, *SMALL_SHARDS)
    return folder


@pytest.mark.full
def test_killed_build_resumes_and_equals_an_uninterrupted_one(
    world: World, whole: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    kills = 0
    for marks in (3, 8, 14):
        process = begin(BUILD, *build_options(world, killed), *SMALL_SHARDS)
        done = killed / "token.partial" / "done"
        while process.is_alive() and (not done.exists() or len(list(done.iterdir())) < marks):
            time.sleep(0.001)
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
            refused = call("inspect", killed, check=False)
            assert refused.returncode == 1 and "unfinished" in refused.stderr
            refused = call("fairseq-generate", *world.options("--datastore", killed), check=False)
            assert refused.returncode == 1 and "unfinished" in refused.stderr
    assert kills >= 2
    build(world, killed, *SMALL_SHARDS)
    assert contents(killed) == contents(whole)


@pytest.mark.full
def test_killed_while_indexing_resumes_with_the_index(world: World, whole: Path, tmp_path: Path) -> None:
    with patch("fairseq_ccpr.building.part.build_index", side_effect=KeyboardInterrupt):
        done = build(world, stopped := tmp_path / "stopped", *SMALL_SHARDS, check=False)
    assert done.returncode == 130
    written = (stopped / "token.partial" / "keys.npy").stat().st_mtime_ns
    build(world, stopped, *SMALL_SHARDS)
    assert (stopped / "token" / "keys.npy").stat().st_mtime_ns == written
    assert contents(stopped) == contents(whole)


def test_stopped_while_publishing_resumes(world: World, tmp_path: Path) -> None:
    build(world, whole := tmp_path / "whole")
    with patch.object(Manifest, "write", side_effect=KeyboardInterrupt):
        done = build(world, stopped := tmp_path / "stopped", check=False)
    assert done.returncode == 130
    assert (stopped / "token").exists()
    assert "unfinished" in call("inspect", stopped, check=False).stderr
    build(world, stopped)
    assert contents(stopped) == contents(whole)


def test_stopped_while_cleaning_up_is_complete_and_cleaned_up_next_time(world: World, tmp_path: Path) -> None:
    build(world, whole := tmp_path / "whole")
    with patch("fairseq_ccpr.building.part.rmtree", side_effect=KeyboardInterrupt):
        done = build(world, stopped := tmp_path / "stopped", check=False)
    assert done.returncode == 130 and (stopped / "token" / "done").exists()
    assert call("inspect", stopped).returncode == 0
    build(world, stopped)
    assert contents(stopped) == contents(whole)


def test_two_processes_equal_one(world: World, whole: Path, tmp_path: Path) -> None:
    begun = as_torchrun(BUILD, *build_options(world, tmp_path / "two"), *SMALL_SHARDS)
    for process in begun:
        process.join()
    assert not any(process.exitcode for process in begun)
    assert contents(tmp_path / "two") == contents(whole)


@pytest.mark.full
def test_killed_workers_start_again_and_end_with_a_killed_launcher(
    world: World, whole: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    done = killed / "token.partial" / "done"
    words = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", 2, "--max-restarts", 1]
    words += ["--no-python", *PROGRAM, "build", *build_options(world, killed), *SMALL_SHARDS]

    def marks() -> int:
        return len(list(done.iterdir())) if done.exists() else 0

    def workers() -> list[int]:
        return [
            int(child)
            for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        ]

    def running(worker: int) -> bool:
        try:  # one that has ended, and let go of its locks, is a zombie until it is waited for
            return Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def wait_for(happened: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 300
        while not happened():
            assert time.monotonic() < give_up
            time.sleep(0.001)

    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen([str(word) for word in words], cwd=ROOT, stdout=log, stderr=log)
    try:
        wait_for(lambda: marks() > 0)
        first = workers()
        os.kill(first[1], signal.SIGKILL)
        wait_for(lambda: not any(map(running, first)))
        before = marks()
        wait_for(lambda: marks() > before)
        second = workers()
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not any(map(running, second)))
    assert len(second) == 2 and done.exists()
    build(world, killed, *SMALL_SHARDS)
    assert contents(killed) == contents(whole)


def test_two_builds_of_one_folder_are_refused(world: World, tmp_path: Path) -> None:
    with launched(store := tmp_path / "store"), patch.object(part, "PATIENCE", 0.2):
        refused(
            build(world, store, check=False),
            f"{store} is being built by another process: wait for it, or end it",
        )
    assert not store.exists()
    build(world, store)


def test_several_subsets_count_sentences_through(world: World, tmp_path: Path) -> None:
    build(world, tmp_path / "store", "--subset", "valid", "test")
    store = TokenDatastore(tmp_path / "store")
    assert store.section.subsets == {"valid": PAIRS["valid"], "test": PAIRS["test"]}
    assert sorted(set(store.provenance[:, 0].tolist())) == list(range(PAIRS["valid"] + PAIRS["test"]))


def test_finished_datastore_is_reused_and_reindexed(world: World, tmp_path: Path) -> None:
    build(world, store := tmp_path / "store")
    before = contents(store)
    build(world, store)
    assert contents(store) == before
    keys_written = (store / "token/keys.npy").stat().st_mtime_ns
    build(world, store, "--index", "IVF16,Flat", "--index-parameters", "nprobe=3")
    assert (store / "token/keys.npy").stat().st_mtime_ns == keys_written
    opened = TokenDatastore(store)
    assert (
        str(opened.section.index) == "IVF16,Flat;nprobe=3" and opened.open_index().size == opened.section.size
    )
    build(world, store, "--index", "IVF32,PQ8x4")
    assert [p.name for p in (store / "token").glob("*.faiss")] == [TokenDatastore(store).section.index.file]
    build(world, store)
    assert contents(store) == before
    assert call("inspect", store).returncode == 0


def test_fp16_model_makes_the_same_datastore_but_for_rounding(world: World, tmp_path: Path) -> None:
    build(world, tmp_path / "store", "--fp16")
    half, full = TokenDatastore(tmp_path / "store"), TokenDatastore(world.datastore)
    assert half.section.fingerprints == full.section.fingerprints
    np.testing.assert_allclose(half.keys.astype(np.float32), full.keys.astype(np.float32), atol=0.1)
    assert np.array_equal(half.values, full.values)


def test_inspect_shows_sizes_tokens_and_health(world: World) -> None:
    shown = call("inspect", world.datastore).stdout
    store = TokenDatastore(world.datastore)
    assert f"{store.section.size:,}" in shown and store.section.fingerprints["model"] in shown
    assert shown.count("top token") == 10 and "</s>" in shown and "health         good" in shown


def test_share_draws_sentences_and_a_larger_one_holds_a_smaller(world: World, tmp_path: Path) -> None:
    whole = TokenDatastore(world.datastore)
    sentences = {}
    for share in (0.1, 0.3):
        build(world, output := tmp_path / str(share), "--fraction", share)
        store = TokenDatastore(output)
        sentences[share] = np.unique(store.provenance[:, 0])
        rows = np.isin(whole.provenance[:, 0], sentences[share])
        assert (
            np.array_equal(store.values, whole.values[rows])
            and store.section.subsets == whole.section.subsets
        )
        np.testing.assert_allclose(store.keys.astype(np.float32), whole.keys[rows], atol=2e-2)
        assert abs(len(sentences[share]) / whole.section.subsets["train"] - share) < 0.05
    assert set(sentences[0.1]) < set(sentences[0.3])
    assert "fraction       0.1 of them" in call("inspect", tmp_path / "0.1").stdout
    refused = build(world, tmp_path / "0.1", "--fraction", 0.3, check=False)
    assert refused.returncode == 1 and "another fraction: 0.1 there, 0.3 now" in refused.stderr
    refused = build(world, tmp_path / "none", "--fraction", 0, check=False)
    assert (
        refused.returncode == 1 and "--fraction is 0" in refused.stderr and not (tmp_path / "none").exists()
    )
