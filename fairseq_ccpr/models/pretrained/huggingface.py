"""Pretrained encoders from Hugging Face folders and names: weights, settings and vocabulary of BERT and XLM-R kinds."""

from __future__ import annotations

import json
import pickle
import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError, describe
from fairseq_ccpr.models.pretrained.context_encoder import TRANSFORMER, ContextEncoder
from fairseq_ccpr.text.sentencepiece import SPECIALS, read_pieces
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.tokenizers import SentencePieceTokenizer, WordPieceSettings, WordPieceTokenizer

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SAFETENSORS, PICKLED = "model*.safetensors", "pytorch_model*.bin"  # sharded ones have numbers in their names


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}: copy the model's whole folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged (it holds no settings): copy it again")
    return content


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, by name. No code in a pickle is run: torch's weights_only is on.

    Raises:
        CheckpointError: there are none, a file of them is missing or damaged, or would run code.
    """
    for kind, load in ((SAFETENSORS, _load_safetensors), (PICKLED, _load_pickled)):
        if files := sorted(folder.glob(kind)):
            _check_whole(folder, kind)
            return {name: tensor for path in files for name, tensor in load(path).items()}
    others = [path.name for kind in ("*.h5", "*.msgpack", "*.bin") for path in sorted(folder.glob(kind))]
    found = f"only {others[0]}" if others else "none"
    raise CheckpointError(
        f"{folder} has no model.safetensors or pytorch_model.bin ({found}): copy the model's whole folder, or save it "
        "again with transformers' save_pretrained"
    )


def _check_whole(folder: Path, kind: str) -> None:
    """Check that all files listed in the index of a sharded model exist."""
    for index in folder.glob(f"{kind}.index.json"):
        named = read_json(index).get("weight_map")
        for name in sorted(set(named.values())) if isinstance(named, dict) else ():
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has no {name}, which {index.name} names: copy the model's whole folder"
                )


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy it again") from None


def _load_pickled(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as stream:
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {describe(error)}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({_first_line(error)}): copy it again") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no weights by name: copy the model's whole folder again")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


ROWS_BEFORE = 2  # of fairseq's position table: position 0 is row pad + 1, and pad is 1
EMBEDDINGS = "embeddings."
NORMS = {"embeddings.LayerNorm.": "layernorm_embedding."}
LAYER = {
    "attention.self.query.": "self_attn.q_proj.", "attention.self.key.": "self_attn.k_proj.",
    "attention.self.value.": "self_attn.v_proj.", "attention.output.dense.": "self_attn.out_proj.",
    "attention.output.LayerNorm.": "self_attn_layer_norm.", "intermediate.dense.": "fc1.", "output.dense.": "fc2.",
    "output.LayerNorm.": "final_layer_norm.",
}  # fmt: skip


@dataclass(frozen=True)
class BertShape:
    """The settings of a BERT or XLM-R that its weights do not reveal."""

    layers: int
    heads: int
    layer_norm_eps: float
    activation: str  # fairseq's name
    position_rows_before: int  # of its own table: 0 in BERT, ROWS_BEFORE in XLM-R
    dropout: float = 0.1
    attention_dropout: float = 0.1


def fairseq_arguments(shape: BertShape, weights: dict[str, Tensor]) -> Namespace:
    """Return fairseq's settings of the converted `weights`."""
    positions, width = weights[TRANSFORMER + "embed_positions.weight"].shape
    return Namespace(
        encoder_layers=shape.layers,
        encoder_embed_dim=width,
        encoder_ffn_embed_dim=weights[TRANSFORMER + "layers.0.fc1.weight"].size(0),
        encoder_attention_heads=shape.heads,
        max_positions=positions - ROWS_BEFORE,
        activation_fn=shape.activation,
        dropout=shape.dropout,
        attention_dropout=shape.attention_dropout,
        layer_norm_eps=shape.layer_norm_eps,
    )


def fairseq_weights(bert: dict[str, Tensor], shape: BertShape, rows: list[int]) -> dict[str, Tensor]:
    """Return the weights in fp32, by fairseq's names.

    Args:
        bert: by Hugging Face's names, from `embeddings.` and `encoder.layer.` on.
        shape: its settings.
        rows: for each entry of fairseq's dictionary its row in the embeddings.

    Raises:
        CheckpointError: a tensor is missing, or has not enough rows.
    """
    try:
        words = bert[EMBEDDINGS + "word_embeddings.weight"]
        if max(rows) >= len(words):
            raise CheckpointError(
                f"the embeddings have {len(words):,} rows, and the tokenizer {max(rows) + 1:,} entries: "
                "give the tokenizer that belongs to the weights"
            )
        positions = bert[EMBEDDINGS + "position_embeddings.weight"].float()[shape.position_rows_before :]
        token_types = bert.get(EMBEDDINGS + "token_type_embeddings.weight")
        if token_types is not None:
            positions = positions + token_types[0].float()
        table = torch.cat([positions.new_zeros(ROWS_BEFORE, positions.size(1)), positions])
        found = {"embed_tokens.weight": words[rows].float(), "embed_positions.weight": table}
        found["version"] = torch.tensor([3.0])  # of fairseq's encoder: its layers are as they are here
        renamed = dict(NORMS)
        for layer in range(shape.layers):
            renamed |= {f"encoder.layer.{layer}.{old}": f"layers.{layer}.{new}" for old, new in LAYER.items()}
        for old, new in renamed.items():
            for kind in ("weight", "bias"):
                found[new + kind] = bert[old + kind].float()
    except KeyError as error:
        raise CheckpointError(f"the weights have no {error}: they are of no BERT or XLM-R") from None
    return {TRANSFORMER + name: tensor for name, tensor in found.items()}


WORDPIECE_VOCABULARY = "vocab.txt"
ROWS_BEFORE_POSITIONS = {"bert": 0, "xlm-roberta": ROWS_BEFORE}  # by model type
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate"}
LAYERS, HEADS = "num_hidden_layers", "num_attention_heads"  # which a config.json must have
# Models with a head besides the encoder have a prefix; old ones call a LayerNorm's weight gamma, and its bias beta.
RENAMED = {r"^(bert|roberta)\.": "", r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
BERT_SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")  # in the order of fairseq's <s> <pad> </s> <unk>
BERT_MASK = "[MASK]"
XLMR_SPECIALS = 4  # <s> <pad> </s> <unk> come before the pieces there too


def read_huggingface(folder: Path) -> ContextEncoder:
    """Read the encoder of a folder with config.json, weights, and a tokenizer's files.

    Raises:
        CheckpointError: another architecture, no weights, no tokenizer, or files that do not match.
    """
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if kind not in ROWS_BEFORE_POSITIONS:
        raise CheckpointError(
            f"{folder} holds a model of type '{kind}': give a translation model of type marian, or an encoder of type "
            f"{' or '.join(ROWS_BEFORE_POSITIONS)}"
        )
    activation, positions = config.get("hidden_act", "gelu"), config.get("position_embedding_type", "absolute")
    if activation not in ACTIVATIONS or positions != "absolute":
        raise CheckpointError(
            f"{folder / CONFIG} asks for activation '{activation}' and {positions} positions, and fairseq has "
            f"{', '.join(ACTIVATIONS)} and absolute ones"
        )
    for name in (LAYERS, HEADS):
        if not isinstance(config.get(name), int):
            raise CheckpointError(f"{folder / CONFIG} has no {name}: copy the model's whole folder again")
    tokenizer, rows = _read_tokenizer(folder)
    shape = BertShape(
        config[LAYERS], config[HEADS], config.get("layer_norm_eps", 1e-12), ACTIVATIONS[activation],
        ROWS_BEFORE_POSITIONS[kind], config.get("hidden_dropout_prob", 0.1),
        config.get("attention_probs_dropout_prob", 0.1),
    )  # fmt: skip
    weights = fairseq_weights(_renamed(read_weights(folder)), shape, rows)
    return ContextEncoder(fairseq_arguments(shape, weights), tokenizer, weights).eval()


def _read_tokenizer(folder: Path) -> tuple[SubwordTokenizer, list[int]]:
    """Read the tokenizer, and for each entry of its dictionary the row of the folder's embeddings."""
    model = folder / SentencePieceTokenizer.filename
    if model.is_file():
        return _read_sentencepiece(model)
    if (folder / WORDPIECE_VOCABULARY).is_file():
        return _read_wordpiece(folder)
    raise CheckpointError(
        f"{folder} has no tokenizer: it needs {model.name} (XLM-R, multilingual-e5) or {WORDPIECE_VOCABULARY} (BERT, LaBSE)"
    )


def _read_sentencepiece(path: Path) -> tuple[SubwordTokenizer, list[int]]:
    content = path.read_bytes()
    try:
        pieces = read_pieces(content)
        tokenizer = SentencePieceTokenizer(pieces[len(SPECIALS) :], content)
    except RuntimeError as error:
        raise CheckpointError(f"{path} is no SentencePiece model ({error})") from None
    if pieces[: len(SPECIALS)] != SPECIALS:
        raise CheckpointError(f"{path} begins with the pieces {pieces[:3]}: give the model of an XLM-R, <unk> <s> </s>")
    return tokenizer, list(range(len(tokenizer.dictionary)))


def _read_wordpiece(folder: Path) -> tuple[SubwordTokenizer, list[int]]:
    path = folder / WORDPIECE_VOCABULARY
    pieces = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    row = {piece.rstrip("\r"): at for at, piece in enumerate(pieces)}
    if missing := [special for special in (*BERT_SPECIALS, BERT_MASK) if special not in row]:
        raise CheckpointError(f"{path} has no {missing[0]}: give the vocabulary of a BERT")
    settings = read_json(folder / TOKENIZER_CONFIG)
    lower = bool(settings.get("do_lower_case", True))
    accents = settings.get("strip_accents")
    symbols = [piece for piece in row if piece and piece not in (*BERT_SPECIALS, BERT_MASK)]
    tokenizer = WordPieceTokenizer(
        symbols,
        WordPieceSettings(lower, lower if accents is None else accents, settings.get("tokenize_chinese_chars", True)),
    )
    return tokenizer, [row[piece] for piece in (*BERT_SPECIALS, *symbols, BERT_MASK)]


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by today's names without a prefix."""
    for old, new in RENAMED.items():
        weights = {re.sub(old, new, name): tensor for name, tensor in weights.items()}
    return weights
