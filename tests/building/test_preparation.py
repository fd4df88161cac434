"""Binarised data made from text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sentencepiece

from fairseq_ccpr.building import preparation
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.data_bin import check_data_bin
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import DEMO, call, refused, write_lines
from tests.small_models import World


def test_data_are_prepared_alike_from_a_table_and_from_two_files(world: World, tmp_path: Path) -> None:
    pairs = list(read_pairs(world.folder / "test.tsv"))
    for side, language in enumerate(("de", "en")):
        (tmp_path / f"text.{language}").write_text(
            "".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8"
        )
    dictionary = world.data_bin / "dict.en.txt"
    words = ["--test", tmp_path / "text", "-s", "de", "-t", "en", "--output", tmp_path / "data"]
    of_fairseq = ["--bpe", "sentencepiece", "--sentencepiece-model", world.spm]
    call("prepare", *words, *of_fairseq, "--dict", dictionary, dictionary)
    for name in ("test.de-en.de.bin", "test.de-en.en.bin", "dict.de.txt"):
        assert (tmp_path / "data" / name).read_bytes() == (world.data_bin / name).read_bytes()
    words[-1] = tmp_path / "other"
    for extra, sentence in (
        (["--sentencepiece-model", world.spm], "--dict belongs together"),
        (["--sentencepiece-model", dictionary, "--dict", dictionary], "cannot be loaded"),
        (
            ["--bpe", "sentencpiece", "--dict", dictionary],
            "fairseq does not take '--bpe sentencpiece': .*invalid choice",
        ),
        (["--sentencepiece-model", world.spm, "--dict", *[dictionary] * 3], "--dict names 3 files"),
        (
            ["--sentencepiece-model", world.spm, "--dict", dictionary, "--valid", "no"],
            "neither a file no nor no.de",
        ),
    ):
        refused(call("prepare", *words, *extra, check=False), sentence)
        assert not list(tmp_path.glob("other*"))
    model = tmp_path / "lonely.pt"
    refused(call("prepare", *words, "--path", model, check=False), f"--path: there is no checkpoint {model}")
    words[3], words[5] = "en", "de"
    swapped = call("prepare", *words, "--path", DEMO / "model.pt", check=False)
    refused(swapped, "translates from de to en, but -s is en and -t is de: exchange them")
    words[3], words[5] = "eng_Latn", "deu_Latn"
    refused(
        call("prepare", *words, "--path", DEMO / "model.pt", check=False), "-t is deu_Latn: exchange them"
    )
    with pytest.raises(
        ConfigurationError, match=r"has no dict\.deu_Latn\.txt, but dict\.de\.txt, dict\.en\.txt: give"
    ):
        check_data_bin(world.data_bin, "deu_Latn", "eng_Latn")


def test_what_is_too_little_or_too_much_is_told(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = (world.folder / "test.tsv").read_text(encoding="utf-8").splitlines()
    empty, few = write_lines(tmp_path / "empty.tsv"), write_lines(tmp_path / "few.tsv", *rows[:10])
    words = ["-s", "de", "-t", "en", "--output", tmp_path / "data"]
    subwords = ["--sentencepiece-model", world.spm, "--dict", world.data_bin / "dict.en.txt"]
    refused(
        call("prepare", *words, *subwords, "--train", empty, check=False), "--train .*empty.tsv has no pair"
    )
    refused(
        call("prepare", *words, "--train", few, check=False),
        "few.tsv is too little text for --pieces 10000: give [0-9]+ or fewer",
    )
    assert not list(tmp_path.glob("data*"))
    call("prepare", *words, *subwords, "--train", few, "--valid", world.folder / "test.tsv")
    assert "10 of the 20 different pairs of --valid are in --train as well" in caplog.text
    caplog.clear()
    write_lines(tmp_path / "others.tsv", *rows[9:])
    words[-1] = tmp_path / "other"
    call("prepare", *words, *subwords, "--train", few, "--test", tmp_path / "others.tsv")
    assert "in --train" not in caplog.text  # one of 11


def test_pairs_stay_pairs(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends = "\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"
    rows = (world.folder / "test.tsv").read_text(encoding="utf-8").splitlines()[:4]
    lines = [
        *rows,
        f"Der Hund{'x'.join(ends)}bellt.\tThe dog barks\rloudly.",
        rows[0],
        "",
        "a\t\u200b",
        "a\tb\tc",
        "alone",
        "\tx",
    ]
    (tmp_path / "train.tsv").write_bytes("\n".join(lines).encode() + b"\n\xff\tx\n")
    for number, language in enumerate(("de", "en")):
        sides = [line.split("\t")[number] if line.count("\t") == 1 else "" for line in lines]
        (tmp_path / f"test.{language}").write_bytes("\n".join(sides).encode() + b"\n\xff\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(world.folder / "test.tsv"), model_prefix=str(tmp_path / "spm"), vocab_size=250, minloglevel=2,
        normalization_rule_name="identity",
    )  # fmt: skip
    preparation.write_dictionary(tmp_path / "spm.model", tmp_path / "dict.txt")
    words = [
        "-s",
        "de",
        "-t",
        "en",
        "--sentencepiece-model",
        tmp_path / "spm.model",
        "--dict",
        tmp_path / "dict.txt",
    ]
    done = call(
        "prepare",
        *words,
        "--train",
        tmp_path / "train.tsv",
        "--test",
        tmp_path / "test",
        "--output",
        tmp_path / "data",
    )
    assert "train 7, test 7 pairs" in done.stdout  # identity keeps the invisible space
    for reason in ("1: a line is empty", "1: a line has 3 columns", "1: a line has 1 columns", "1: its source is empty",
                   "1: a line is not UTF-8"):  # fmt: skip
        assert re.search(f"train.tsv: left out .*{reason}", caplog.text)
    assert "1 pairs are there again, and are kept" in caplog.text
    text = (tmp_path / "data/text/train.de").read_bytes()
    assert text.count(b"\n") == len(text.decode().splitlines()) == 7


def test_other_numbers_of_sentences_than_pairs_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "train.tsv", "eins\tone", "zwei\ttwo")
    monkeypatch.setattr(preparation, "splitters", lambda *_: [lambda text: text.replace("w", "\r")] * 2)
    words = [
        "-s",
        "de",
        "-t",
        "en",
        "--sentencepiece-model",
        world.spm,
        "--dict",
        world.data_bin / "dict.en.txt",
    ]
    done = call(
        "prepare", *words, "--train", tmp_path / "train.tsv", "--output", tmp_path / "data", check=False
    )
    refused(done, "fairseq made 3 sentences of the de side of --train .*train.tsv, which has 2 pairs")
    assert not list(tmp_path.glob("data*"))
