"""What users can get wrong: one sentence on stderr that names it, a non-zero exit code, nothing left behind."""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_ccpr.datastore.manifest import MANIFEST_VERSION, Manifest
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.device import tell_slow_fp16
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.models.checkpoint import embedded_symbols
from fairseq_ccpr.storage import arrays
from fairseq_ccpr.storage.files import describe_files
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import (
    DEMO,
    PROGRAM,
    ROOT,
    USER_DIR,
    Malice,
    call,
    edit_manifest,
    refused,
    run,
    with_option,
    write_lines,
)
from tests.small_models import World, build, build_options


def build_with(options: list[object]) -> subprocess.CompletedProcess[str]:
    """Run the build command in this process, expecting it to fail."""
    return call("build", *options, check=False)


def test_build_refuses_bad_input(world: World, tmp_path: Path) -> None:
    output = tmp_path / "store"
    options = build_options(world, output)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(build_with(with_option(options, "tokens", tmp_path / "nowhere")), "there is no folder .*nowhere")
    refused(build_with(with_option(options, "tokens", empty)), r"has no dict\.de\.txt")
    refused(
        build_with(with_option(options, "tokens", world.spm)),
        "spm.model is a file: give the folder that .*prepare",
    )
    refused(
        build_with(with_option(options, "--path", DEMO / "ccpr/ccpr.pt")),
        "phrase_contrast: it is not a translation",
    )
    refused(build_with([*options, "--subset", "dev"]), "no subset 'dev'")
    refused(build_with([*options, "--subset", "valid", "valid"]), "'valid' twice")
    refused(
        build_with(with_option(options, "--path", tmp_path / "no.pt")), r"there is no checkpoint .*no\.pt"
    )
    refused(build_with(with_option(options, "--path", world.spm)), r"spm\.model")
    both = f"{world.model}:{world.other_model}"
    refused(build_with(with_option(options, "--path", both)), "ensemble of 2 checkpoints.*one model")
    refused(build_with([*options, "--max-tokens", 0]), "--max-tokens is 0")
    refused(build_with(with_option(options, "--index", "IVF99999,Flat")), "99,999 lists")
    refused(build_with(with_option(options, "--output", "/proc/store")), "/proc/store")
    refused(run("fairseq-ccpr build", *with_option(options, "--path", both), check=False), "ensemble of 2")
    assert list(tmp_path.iterdir()) == [empty]


def test_build_refuses_an_output_that_is_something_else(world: World, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    refused(build(world, tmp_path, check=False), "exists and is not a datastore")
    refused(build(world, tmp_path / "thesis.tex", check=False), "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_build_refuses_to_mix_with_another_datastore(world: World) -> None:
    before = (world.datastore / "manifest.json").read_bytes()
    other = with_option(build_options(world, world.datastore), "--path", world.other_model)
    refused(build_with(other), r"built with another model: \w{12} there, \w{12} now")
    refused(build(world, world.datastore, "--key-layer", "last_ffn_input", check=False), "another key layer")
    assert (world.datastore / "manifest.json").read_bytes() == before


@pytest.mark.full
def test_full_disk_is_noticed_before_and_while_writing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DatastoreError, match=r"too full: 1,000,000\.00 GB needed"):
        arrays.check_space(tmp_path / "a" / "b", 10**15)
    words = [str(word) for word in (*PROGRAM, "build", *build_options(world, tmp_path / "store"))]
    limit = 300_000  # bytes a file may have: less than the keys need
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    refused(done, "File too large")
    assert not (tmp_path / "store").exists()


def test_model_that_computes_nan_is_refused(world: World, tmp_path: Path) -> None:
    state = torch.load(world.model)
    state["model"]["decoder.layers.1.fc2.weight"].fill_(3e38)
    torch.save(state, tmp_path / "nan.pt")
    refused(
        build_with(with_option(build_options(world, tmp_path / "store"), "--path", tmp_path / "nan.pt")),
        "NaN, or beyond fp16's range",
    )
    assert not (tmp_path / "store" / "token.partial").exists()


@pytest.fixture
def copied(world: World, tmp_path: Path) -> Path:
    """A copy of the datastore, to be damaged."""
    return Path(shutil.copytree(world.datastore, tmp_path / "copy"))


def generate(world: World, datastore: Path, *extra: object) -> subprocess.CompletedProcess[str]:
    """fairseq-generate with a datastore."""
    return call("fairseq-generate", *world.options("--datastore", datastore, *extra), check=False)


def test_decoding_refuses_a_datastore_that_is_missing_or_foreign(
    world: World, tmp_path: Path, copied: Path
) -> None:
    refused(generate(world, tmp_path / "nowhere"), "no datastore at .*nowhere")
    refused(generate(world, world.data_bin), "has no manifest.json")
    refused(generate(world, copied / "token"), f"did you mean {copied}[?]")
    refused(generate(world, copied.parent), f"did you mean {copied}[?]")
    words = world.options("--path", world.other_model)
    refused(
        call("fairseq-generate", *words, check=False), r"another model: it needs \w{12}, --path gives \w{12}"
    )
    without = [word for word in world.options() if word not in ("--datastore", str(world.datastore))]
    refused(call("fairseq-generate", *without, check=False), "needs --datastore")
    edit_manifest(copied, format_version=99)
    refused(generate(world, copied), f"format version 99.*reads {MANIFEST_VERSION}.*upgrade")
    (copied / "manifest.json").write_text("{")
    refused(generate(world, copied), "manifest.json is damaged")


def test_decoding_refuses_what_is_missing(world: World, tmp_path: Path) -> None:
    nowhere = [str(tmp_path / "nowhere"), *world.options()[1:]]
    empty = [str(tmp_path), *world.options()[1:]]
    for command in ("fairseq-generate", "compare", "tune"):
        extra = ["--output", tmp_path / "options"] if command == "tune" else []
        refused(call(command, *nowhere, *extra, check=False), "there is no folder .*nowhere")
        refused(call(command, *empty, *extra, check=False), r"has no dict\.de\.txt")
        missing = world.options("--path", tmp_path / "no.pt")
        refused(call(command, *missing, *extra, check=False), r"no\.pt")
    refused(call("fairseq-generate", *world.options("--gen-subset", "dev"), check=False), "dev")
    assert list(tmp_path.iterdir()) == []


def test_decoding_refuses_another_width_backend_or_index(world: World, copied: Path, tmp_path: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())["token"]
    edit_manifest(copied, token=manifest | {"dimension": 16})
    refused(
        generate(world, copied),
        r"keys\.npy holds float16 \(\d+, 32\), but the manifest says float16 \(\d+, 16\)",
    )
    edit_manifest(copied, token=manifest | {"index": manifest["index"] | {"backend": "quantum"}})
    refused(generate(world, copied), "index backend 'quantum', unknown here")
    build(world, tmp_path / "valid", "--subset", "valid", "--index", "Flat")
    index = TokenDatastore(tmp_path / "valid").section.index
    shutil.copy(tmp_path / "valid" / "token" / index.file, copied / "token")
    edit_manifest(copied, token=manifest | {"index": vars(index)})
    refused(generate(world, copied), r"indexes [\d,]+ keys of width 32, but there are [\d,]+")


def test_decoding_refuses_another_dictionary(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.data_bin, tmp_path / "data-bin")
    path = tmp_path / "data-bin" / "dict.en.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    words = [str(tmp_path / "data-bin"), *world.options()[1:]]
    refused(call("fairseq-generate", *words, check=False), "another target dictionary")


def test_damaged_files_are_refused(world: World, copied: Path) -> None:
    keys = copied / "token" / "keys.npy"
    good = keys.read_bytes()
    keys.write_bytes(good[:-100])
    refused(generate(world, copied), r"keys\.npy is damaged: [\d,]+ bytes found, [\d,]+ expected")
    keys.write_bytes(b"\x00" * 64 + good[64:])
    refused(generate(world, copied), r"keys\.npy is damaged")
    keys.write_bytes(good[:-100] + bytes(100))
    inspected = call("inspect", copied, check=False)
    assert inspected.returncode == 1 and "keys.npy: the bytes have changed" in inspected.stdout
    keys.unlink()
    refused(generate(world, copied), r"keys\.npy is missing")


@pytest.mark.parametrize(
    "name", ["keys.npy", "values.npy", "provenance.npy", "symbols.txt", "source-subwords.npy"]
)
def test_a_flipped_byte_is_found_in_every_file(copied: Path, name: str) -> None:
    path = copied / "token" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
    inspected = call("inspect", copied, check=False)
    assert inspected.returncode == 1 and f"{name}: the bytes have changed" in inspected.stdout


def test_rebuilding_does_not_hide_damage(world: World, copied: Path) -> None:
    """The same command on a finished datastore, and another index, leave the checksums of what is there alone."""
    keys = copied / "token" / "keys.npy"
    keys.write_bytes(keys.read_bytes()[:-100] + bytes(100))
    for index in ("exact", "Flat"):
        build(world, copied, "--index", index)
        assert call("inspect", copied, check=False).returncode == 1


def test_keys_that_are_not_numbers_are_found(copied: Path) -> None:
    """Whoever makes a datastore with tools of their own may get the checksums right and the keys wrong."""
    path = copied / "token" / "keys.npy"
    keys = np.load(path)
    keys[7, 3] = np.inf
    np.save(path, keys)
    manifest = Manifest.read(copied)
    assert manifest.token is not None
    manifest.token.files = describe_files(copied, list(manifest.token.files))
    manifest.write(copied)
    inspected = call("inspect", copied, check=False)
    assert inspected.returncode == 1 and "NaN or infinite" in inspected.stdout


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--tokens-k", 0, "--tokens-k is 0"),
        ("--tokens-lambda", 1.5, "--tokens-lambda is 1.5"),
        ("--tokens-lambda", "nan", "--tokens-lambda is nan"),
        ("--tokens-temperature", 0, "--tokens-temperature is 0"),
        ("--tokens-temperature", -1, "--tokens-temperature is -1"),
    ],
)
def test_settings_out_of_range_are_refused(world: World, option: str, value: object, sentence: str) -> None:
    refused(generate(world, world.datastore, option, value), sentence)


def test_malicious_checkpoint_is_refused_and_nothing_runs(world: World, tmp_path: Path) -> None:
    state = torch.load(world.model)
    state["extra_state"] = Malice(tmp_path / "ran")
    torch.save(state, tmp_path / "bad.pt")
    options = with_option(build_options(world, tmp_path / "store"), "--path", tmp_path / "bad.pt")
    refused(build_with(options), "refused and nothing in it was run", "system")
    words = world.options("--path", tmp_path / "bad.pt")
    refused(run("fairseq-generate", *words, check=False), "nothing in it was run", "system")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.pt"]


@pytest.mark.parametrize("zipped", [True, False])
def test_numbers_of_numpy_in_a_checkpoint_are_read(world: World, tmp_path: Path, zipped: bool) -> None:
    numbers = {
        "best": np.float64(7.25),
        "step": np.int64(3),
        "done": np.bool_(True),
        "name": np.str_("x"),
        "loss": np.float32(0.5),
    }
    path = tmp_path / "model.pt"
    torch.save(
        torch.load(world.model) | {"extra_state": numbers}, path, _use_new_zipfile_serialization=zipped
    )
    assert checkpoint_utils.load_checkpoint_to_cpu(str(path))["extra_state"].items() >= numbers.items()
    if not zipped:  # as NumPy 1 wrote it
        path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
        assert checkpoint_utils.load_checkpoint_to_cpu(str(path))["extra_state"].items() >= numbers.items()
    assert embedded_symbols(path) == embedded_symbols(world.model)


def test_dictionaries_are_compared_with_the_model_where_data_are_prepared(
    world: World, tmp_path: Path
) -> None:
    for file in (world.model, *world.data_bin.glob("dict.*.txt"), world.spm):
        shutil.copy(
            file,
            tmp_path
            / ("model.pt" if file == world.model else "spm.model" if file == world.spm else file.name),
        )
    words = [
        "prepare",
        "--test",
        world.folder / "test.tsv",
        "--path",
        tmp_path / "model.pt",
        "--output",
        tmp_path / "out",
    ]
    call(*words, "-s", "de", "-t", "en")
    refused(
        call(*words, "-s", "fr", "-t", "en", check=False),
        r"there is no dict\.fr\.txt, but dict\.de\.txt, dict\.en\.txt: put",
    )
    lines = (tmp_path / "dict.en.txt").read_text("utf-8").splitlines()
    write_lines(tmp_path / "dict.en.txt", *lines[:-7])
    shutil.rmtree(tmp_path / "out")
    refused(
        call(*words, "-s", "de", "-t", "en", check=False),
        rf"embeddings of .*, but .* and dict\.en\.txt {len(lines) - 3:,}: put",
    )
    assert not (tmp_path / "out").exists()


def test_text_in_another_language_and_half_precision_on_a_cpu_are_warned_of(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tell_slow_fp16.cache_clear()  # of other tests
    german, english = (tmp_path / f"text.{language}" for language in ("de", "en"))
    rows = [*islice(read_pairs(DEMO / "bible.valid.tsv.xz"), 40)]
    write_lines(german, *(row[0] for row in rows))
    write_lines(english, *(row[1] for row in rows))
    words = ["--data", world.data_bin, "--path", world.model, "--cpu", "--fp16"]
    for text, warned in ((english, False), (german, True)):
        call("build", "text", text, *words, "--output", tmp_path / f"store{text.suffix}")
        assert ("text.de looks German, where English is expected" in caplog.text) == warned
    assert caplog.text.count("--fp16 makes a CPU many times slower") == 1
    table = write_lines(tmp_path / "table.tsv", *("\t".join(cell[:30] for cell in row) for row in rows[:12]))
    for file, told in (
        (table, "the input has tabs: "),
        (english, "looks English: it is translated from German"),
        (german, ""),
    ):
        done = call(
            "translate",
            "--data",
            world.data_bin,
            "--path",
            world.model,
            "--cpu",
            "--beam",
            1,
            "--max-len-b",
            3,
            "--input",
            file,
        )
        assert told in done.stderr and ("tabs" in done.stderr, "looks" in done.stderr) == (
            "tabs" in told,
            "looks" in told,
        )


def trusting(load: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load as fairseq's main branch calls it, which asks for whatever a checkpoint holds."""
    return lambda *args, **options: load(*args, **options | {"weights_only": False})


def test_malicious_checkpoint_is_refused_though_fairseq_asks_for_all_of_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.load(world.model) | {"extra_state": Malice(tmp_path / "ran")}
    torch.save(state, tmp_path / "bad.pt")
    monkeypatch.setattr(torch, "load", trusting(torch.load))
    with pytest.raises(pickle.UnpicklingError, match="system"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "bad.pt"))
    refused(
        generate(world, world.datastore, "--path", tmp_path / "bad.pt"), "nothing in it was run", "system"
    )
    assert checkpoint_utils.load_checkpoint_to_cpu(str(world.model))["model"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.full
def test_environment_that_lets_checkpoints_run_code_is_refused(tmp_path: Path) -> None:
    words = ["fairseq-generate", tmp_path, "--user-dir", USER_DIR, "--task", "translation_retrieval"]
    refused(
        run(*words, check=False, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
        "unset",
    )


def test_what_does_not_lie_where_it_was_said_is_named(world: World, tmp_path: Path) -> None:
    words = [
        "prepare",
        "-s",
        "de",
        "-t",
        "en",
        "--test",
        world.folder / "test.tsv",
        "--output",
        tmp_path / "out",
    ]
    shutil.copy(world.model, tmp_path / "model.pt")
    refused(
        call(*words, "--path", tmp_path / "model.pt", check=False),
        r"there are no dict\.de\.txt and dict\.en\.txt: put",
    )
    for language in ("de", "en"):
        shutil.copy(world.data_bin / f"dict.{language}.txt", tmp_path)
    refused(
        call(*words, "--path", tmp_path / "model.pt", check=False),
        "there is no subword model such as spm.model",
    )
    done = call("translate", "--path", world.model, "--datastore", world.model, check=False)
    refused(done, "is a file, and a datastore is a folder: give the folder that was --output")


def test_exchanged_columns_are_noticed(world: World, tmp_path: Path) -> None:
    pairs = [line.split("\t") for line in (world.folder / "train.tsv").read_text("utf-8").splitlines()]
    exchanged = write_lines(tmp_path / "train.tsv", *("\t".join(reversed(pair)) for pair in pairs))
    words = ["prepare", "-s", "de_AT", "-t", "eng", "--pieces", 500, "--output", tmp_path / "out"]
    refused(
        call(*words, "--train", exchanged, check=False),
        r"train\.tsv has English before German, .* source language is de_AT",
    )
    assert call(*words, "--train", world.folder / "train.tsv").returncode == 0


def test_a_dictionary_whose_lines_were_moved_is_warned_of(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As subword models order it, as fairseq does, by counts, and in no order."""
    rows = [
        line.rsplit(" ", 1)[0] for line in (world.data_bin / "dict.de.txt").read_text("utf-8").splitlines()
    ]
    counted = [f"{row} {len(rows) - at}" for at, row in enumerate(random.sample(rows, len(rows)))]
    for lines, warned in (
        (counted, False),
        (random.sample(counted, len(rows)), True),
        ([f"{row} 1" for row in rows], False),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name in ("dict.de.txt", "dict.en.txt"):
            write_lines(folder / name, *lines)
        caplog.clear()
        words = ["-s", "de", "-t", "en", "--data", folder, "--path", world.model, "--max-len-b", 3]
        words += ["--bpe", "sentencepiece", "--sentencepiece-model", world.spm]
        call("translate", *words, "--input", write_lines(tmp_path / "in", "Hallo."))
        assert (f"{folder}: the symbols of dict.de.txt are neither" in caplog.text) == warned
        (tmp_path / "in").unlink()
