"""Folders, names, locales, disks and files as people have them: they work, or one sentence names what does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from safetensors.torch import save_file

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.paths import configuration, literal, split_paths
from tests.helpers import call, files_up_to, refused, write_lines
from tests.small_models import World, build, build_options


@pytest.fixture
def data_bin(world: World, tmp_path: Path) -> Path:
    """The folder of the world's data, to be changed."""
    return Path(shutil.copytree(world.data_bin, tmp_path / "data-bin"))


def rename(data_bin: Path, subset: str, new: str) -> None:
    for path in list(data_bin.glob(f"{subset}.de-en.*")):
        path.rename(data_bin / path.name.replace(subset, new, 1))


def build_from(
    world: World, data_bin: object, output: Path, *extra: object
) -> subprocess.CompletedProcess[str]:
    words = [
        "-s",
        "de",
        "-t",
        "en",
        "--path",
        world.model,
        "--output",
        output,
        "--index",
        "exact",
        "--cpu",
        "--quiet",
    ]
    return call("build tokens", data_bin, *words, *extra, check=False)


def test_train_is_joined_with_what_continues_it_and_told(
    world: World, data_bin: Path, tmp_path: Path
) -> None:
    rename(data_bin, "test", "train1")
    rename(data_bin, "valid", "train10")
    done = build_from(world, data_bin, tmp_path / "store")
    assert "train 600 sentences, train1 20 sentences, train10 24 sentences" in done.stdout
    store = TokenDatastore(tmp_path / "store")
    assert (
        store.section.subsets == {"train": 600, "train1": 20, "train10": 24}
        and store.provenance[-1, 0] == 643
    )
    before = store.section.fingerprints["corpus"]
    # which says the same
    again = build_from(world, data_bin, tmp_path / "store", "--subset", "train", "train1")
    assert (
        again.returncode == 0 and TokenDatastore(tmp_path / "store").section.fingerprints["corpus"] == before
    )
    adapter = ["--adapter", "clknn", "--valid-subset", "train1"]
    refused(build_from(world, data_bin, tmp_path / "other", *adapter), "--valid-subset train1 shares train1")
    for path in data_bin.glob("train1.de-en.en.*"):
        path.unlink()
    refused(build_from(world, data_bin, tmp_path / "other"), "no subset 'train1' .*not all there")


def test_subset_beside_the_measured_one_is_told(
    world: World, data_bin: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rename(data_bin, "valid", "test1")
    call("compare", data_bin, *world.options()[5:])
    assert "holds test1 beside 'test', and only 'test' is read" in caplog.text
    for path in data_bin.glob("test.de-en.en.*"):
        path.unlink()
    refused(call("compare", data_bin, *world.options()[5:], check=False), "'test' in de alone")


def test_data_that_cannot_be_read_are_refused(world: World, data_bin: Path, tmp_path: Path) -> None:
    output = tmp_path / "store"
    refused(build_from(world, f"{data_bin}:{world.data_bin}", output), "several folders.*fairseq-ccpr merge")
    for name in ("train.de-en.de.idx", "train.de-en.en.bin"):
        whole = (data_bin / name).read_bytes()
        for size in (0, 20, len(whole) - 2):
            (data_bin / name).write_bytes(whole[:size])
            refused(build_from(world, data_bin, output), "files of 'train' are damaged or truncated")
        (data_bin / name).write_bytes(whole)
    rename(data_bin, "train", "train1")
    refused(build_from(world, data_bin, output), "no subset 'train' .*but test, train1, valid")
    write_lines(data_bin / "train.de-en.de", "x")
    refused(build_from(world, data_bin, output), "as raw text .*--dataset-impl raw")
    (data_bin / "preprocessing.json").unlink(missing_ok=True)
    (data_bin / "dict.de.txt").write_text("a b\n", encoding="utf-16")
    refused(build_from(world, data_bin, output), r"dict\.de\.txt")
    assert not output.exists()


@pytest.mark.full
@pytest.mark.parametrize("name", ["${a}", "a:b", r"\${b}:${c.d}", "a\nb", "%~ ü"])
def test_folders_of_any_name_work(world: World, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    data_bin = Path(shutil.copytree(world.data_bin, folder / "bin"))
    model = shutil.copy(world.model, folder)
    options = ["--path", model, "--datastore", folder / "new", "--cpu"]
    done = call(
        "build tokens",
        data_bin,
        *options[:2],
        "--output",
        folder / "new",
        "--index",
        "exact",
        "--cpu",
        "--quiet",
    )
    assert done.returncode == 0
    source = write_lines(folder / "in.txt", "Im Anfang war das Wort.")
    assert call("translate", "--datastore", folder / "new", "--input", source, "--cpu").stdout.strip()
    assert "retrieval" in call("compare", data_bin, *options).stdout
    subwords = ["--sentencepiece-model", data_bin / "spm.model", "--dict", data_bin / "dict.de.txt"]
    call(
        "prepare",
        "--test",
        world.folder / "test.tsv",
        "-s",
        "de",
        "-t",
        "en",
        *subwords,
        "--output",
        folder / "made",
    )


def test_paths_are_split_but_not_names_of_what_exists(tmp_path: Path) -> None:
    colon, other = tmp_path / "a:b", tmp_path / "c"
    colon.mkdir()
    assert split_paths(f"{other}:{colon}:{other}") == [str(other), str(colon), str(other)]
    assert split_paths(f"{colon}/x:{other}") == [str(tmp_path / "a"), "b/x", str(other)]
    assert literal("${common.seed}", 2) == "${common.seed}"  # as fairseq's own defaults are written


@pytest.mark.filterwarnings("ignore")  # Hydra's, about how fairseq uses it
@pytest.mark.parametrize(
    "words",
    [
        [],
        [
            "--beam",
            "7",
            "--lenpen",
            ".5",
            "--fp16",
            "--seed",
            "5",
            "--sampling-topp",
            ".9",
            "--constraints",
            "ordered",
        ],
        [
            "-s",
            "de",
            "-t",
            "en",
            "--tokenizer",
            "moses",
            "--bpe",
            "subword_nmt",
            "--bpe-codes",
            "it's \\ a:b/${x}",
        ],
        ["--task", "translation_retrieval_multi", "--lang-pairs", "de-en", "--datastore", "a:b"],
        ["--task", "multilingual_translation", "--lang-pairs", "de-en"],  # a task without a dataclass
    ],
)
def test_configuration_is_that_of_fairseq(words: list[str]) -> None:
    parser = options.get_generation_parser(default_task="translation_retrieval")
    args = options.parse_args_and_arch(parser, input_args=["x", *words])
    theirs = convert_namespace_to_omegaconf(
        Namespace(**{name: literal(value, 2) for name, value in vars(args).items()})
    )
    found, wanted = (
        {
            name: vars(part) if isinstance(part, Namespace) else part
            for name, part in OmegaConf.to_container(cfg).items()
        }
        for cfg in (configuration(args), theirs)
    )
    del wanted["_name"]
    assert not found["criterion"].pop(
        "sentence_avg"
    )  # which fairseq makes True, as it is a reference to another option
    del wanted["criterion"]["sentence_avg"]
    assert found == wanted


def test_fairseq_says_which_names_it_cannot_read(world: World, tmp_path: Path) -> None:
    folder = shutil.copytree(world.data_bin, tmp_path / "${a}")
    refused(call("fairseq-generate", folder, *world.options()[1:], check=False), "a path has .*rename")


@pytest.mark.full
def test_every_command_speaks_utf8_in_any_locale(world: World, tmp_path: Path) -> None:
    store = shutil.copytree(world.datastore, tmp_path / "größe")
    table = write_lines(tmp_path / "Öl.tsv", "Grüße\tGreetings ä")
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    call("learn", table, "--datastore", store, "--path", world.model, "--cpu")
    for words, environment in (
        (["-m", "fairseq_ccpr"], plain),
        (["-X", "utf8=0", "-c", "from fairseq_ccpr.cli import main; main()"], plain),
        (["-m", "fairseq_ccpr"], os.environ | {"PYTHONIOENCODING": "ascii"}),
    ):
        command = [sys.executable, *words, "memory", store, "Grüße"]
        done = subprocess.run(command, capture_output=True, env=environment, check=True)
        assert "Grüße\tGreetings ä" in done.stdout.decode("utf-8")
    with Path("/dev/full").open("w") as full:
        buffered = os.environ | {"PYTHONUNBUFFERED": ""}
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, env=buffered)
    assert told.returncode == 1
    assert told.stderr.decode().splitlines() == [
        "fairseq-ccpr memory: error: the standard output: No space left on device"
    ]


@pytest.mark.parametrize("most", [200, 1_000, 50_000])
def test_full_disk_names_the_file_and_leaves_nothing(world: World, tmp_path: Path, most: int) -> None:
    train = ["--train", world.folder / "train.tsv", "-s", "de", "-t", "en", "--pieces", 500]
    with files_up_to(most):
        refused(
            call("prepare", *train, "--output", tmp_path / "made", check=False),
            f"{tmp_path}/made.*File too large",
        )
        refused(build(world, tmp_path / "store", check=False), r"keys\.npy: File too large")
        explain = [
            "explain",
            world.data_bin,
            *world.options()[5:],
            "--sentences",
            8,
            "--output",
            tmp_path / "page.html",
        ]
        refused(call(*map(str, explain), check=False), r"page\.html: File too large")
    assert not list(tmp_path.iterdir())


def test_checkpoints_that_are_none_say_what_they_are(world: World, tmp_path: Path) -> None:
    whole, path = world.model.read_bytes(), tmp_path / "model.pt"
    save_file({"one": torch.zeros(3)}, tmp_path / "weights")
    for content, sentence in (
        (whole[: len(whole) // 2], "truncated"),
        (whole[:-10], "truncated"),
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        ((tmp_path / "weights").read_bytes(), "safetensors"),
    ):
        path.write_bytes(content)
        options = build_options(world, tmp_path / "store")
        options[options.index("--path") + 1] = path
        refused(call("build", *options, check=False), rf"model\.pt .*{sentence}")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_of_wide_characters_is_refused_by_name(world: World, tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.tsv").write_bytes("Wort\tword\nLicht\tlight\n".encode(encoding))
    remedy = rf"a\.tsv is UTF-.*iconv -f {encoding[:6]}"
    words = ["--path", world.model, "--datastore", world.datastore, "--cpu"]
    refused(call("translate", *words, "--input", tmp_path / "a.tsv", check=False), remedy)
    refused(
        call("translate", *words, "--input", world.spm, "--glossary", tmp_path / "a.tsv", check=False), remedy
    )
    made = ["-s", "de", "-t", "en", "--output", tmp_path / "made"]
    refused(call("prepare", "--train", tmp_path / "a.tsv", *made, check=False), remedy)


@pytest.mark.parametrize(
    ("content", "reason"), [("", "codes is empty"), ("#version: 0.2\na\n", "invalid line 2")]
)
def test_damaged_codes_give_file_and_reason(world: World, tmp_path: Path, content: str, reason: str) -> None:
    codes = tmp_path / "codes"
    codes.write_text(content)
    words = ["--bpe", "subword_nmt", "--bpe-codes", codes]
    refused(
        call("translate", *world.options()[7:], *words, "--input", codes, check=False), reason, str(codes)
    )
    made = ["-s", "de", "-t", "en", "--dict", world.data_bin / "dict.de.txt", "--output", tmp_path / "made"]
    refused(
        call("prepare", "--test", world.folder / "test.tsv", *words, *made, check=False), reason, str(codes)
    )


def test_devices_are_written_to_and_not_replaced(tmp_path: Path, world: World) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    call("memory", world.datastore, "--export", pipe)
    assert os.read(reader, 1000).startswith(b"<?xml") and pipe.is_fifo()
    os.close(reader)
    refused(call("memory", world.datastore, "--export", tmp_path, check=False), "is a folder: give a file")
