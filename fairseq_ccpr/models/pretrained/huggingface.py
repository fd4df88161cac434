"""Pretrained encoders from Hugging Face folders: weights, settings and vocabulary of BERT and XLM-R kinds."""

from __future__ import annotations

import json
import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError, describe
from fairseq_ccpr.models.pretrained.context_encoder import TRANSFORMER, ContextEncoder
from fairseq_ccpr.text.sentencepiece import SPECIAL_PIECES, read_pieces
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.tokenizers import SentencePieceTokenizer, WordPieceSettings, WordPieceTokenizer

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ROWS_BEFORE = 2  # of fairseq's position table: position 0 is row pad + 1, and pad is 1
LAYER_PARTS = {
    "attention.self.query.": "self_attn.q_proj.", "attention.self.key.": "self_attn.k_proj.",
    "attention.self.value.": "self_attn.v_proj.", "attention.output.dense.": "self_attn.out_proj.",
    "attention.output.LayerNorm.": "self_attn_layer_norm.", "intermediate.dense.": "fc1.", "output.dense.": "fc2.",
    "output.LayerNorm.": "final_layer_norm.",
}  # fmt: skip
WORDPIECE_VOCABULARY = "vocab.txt"
ROWS_BEFORE_POSITIONS = {"bert": 0, "xlm-roberta": ROWS_BEFORE}  # by model type
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}
LAYERS, HEADS = "num_hidden_layers", "num_attention_heads"  # which a config.json must have
# Models with a head besides the encoder have a prefix; old ones call a LayerNorm's weight gamma, and its bias
# beta.
RENAMED = {
    r"^(bert|roberta)\.": "",
    r"LayerNorm\.gamma$": "LayerNorm.weight",
    r"LayerNorm\.beta$": "LayerNorm.bias",
}
BERT_SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")  # in the order of fairseq's <s> <pad> </s> <unk>
BERT_MASK = "[MASK]"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
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
    """Read all tensors of a folder, by name. No code in a pickle is run: torch's weights_only is on."""
    for kind in ("model*.safetensors", "pytorch_model*.bin"):  # perhaps sharded
        if files := sorted(folder.glob(kind)):
            _check_whole(folder, kind)
            return {name: tensor for path in files for name, tensor in _load(path).items()}
    others = [path.name for kind in ("*.h5", "*.msgpack", "*.bin") for path in sorted(folder.glob(kind))]
    found = f"only {others[0]}" if others else "none"
    raise CheckpointError(
        f"{folder} has no model.safetensors or pytorch_model.bin ({found}): copy the model's whole folder, "
        "or save it again with transformers' save_pretrained"
    )


def _check_whole(folder: Path, kind: str) -> None:
    for index in folder.glob(f"{kind}.index.json"):
        named = read_json(index).get("weight_map")
        for name in sorted(set(named.values())) if isinstance(named, dict) else ():
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has no {name}, which {index.name} names: copy the model's whole folder"
                )


def _load(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with path.open("rb") as stream:
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {describe(error)}") from None
    except (SafetensorError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is damaged ({message}): copy it again") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no weights by name: copy the model's whole folder again")
    return content


def fairseq_encoder(
    bert: dict[str, Tensor],
    rows: list[int],
    tokenizer: SubwordTokenizer,
    layers: int,
    rows_before: int,
    bf16: bool = False,
    **settings: Any,
) -> ContextEncoder:
    """Make an encoder of the weights of a BERT or XLM-R.

    Args:
        bert: by Hugging Face's names, from `embeddings.` and `encoder.layer.` on.
        rows: for each entry of the tokenizer's dictionary its row in the embeddings.
        layers: how many.
        rows_before: of the position table: 0 in BERT, `ROWS_BEFORE` in XLM-R.
        settings: by fairseq's names, what the weights do not reveal.
    """
    try:
        words = bert["embeddings.word_embeddings.weight"]
        if max(rows) >= len(words):
            raise CheckpointError(
                f"the embeddings have {len(words):,} rows, and the tokenizer {max(rows) + 1:,} entries: "
                "give the tokenizer that belongs to the weights"
            )
        positions = bert["embeddings.position_embeddings.weight"].float()[rows_before:]
        if (token_types := bert.get("embeddings.token_type_embeddings.weight")) is not None:
            positions = positions + token_types[0].float()
        table = torch.cat([positions.new_zeros(ROWS_BEFORE, positions.size(1)), positions])
        found = {"embed_tokens.weight": words[rows].float(), "embed_positions.weight": table}
        found["version"] = torch.tensor([3.0])  # of fairseq's encoder: its layers are as they are here
        renamed = {"embeddings.LayerNorm.": "layernorm_embedding."}
        for layer in range(layers):
            renamed |= {
                f"encoder.layer.{layer}.{old}": f"layers.{layer}.{new}" for old, new in LAYER_PARTS.items()
            }
        for old, new in renamed.items():
            for kind in ("weight", "bias"):
                found[new + kind] = bert[old + kind].float()
    except KeyError as error:
        raise CheckpointError(f"the weights have no {error}: they are of no BERT or XLM-R") from None
    arguments = Namespace(
        encoder_layers=layers,
        encoder_embed_dim=positions.size(1),
        max_positions=len(positions),
        encoder_ffn_embed_dim=found["layers.0.fc1.weight"].size(0),
        **settings,
    )
    return ContextEncoder(
        arguments, tokenizer, {TRANSFORMER + name: one for name, one in found.items()}, bf16
    ).eval()


def read_huggingface(folder: Path) -> ContextEncoder:
    """Read the encoder of a folder with config.json, weights, and a tokenizer's files."""
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if kind not in ROWS_BEFORE_POSITIONS:
        raise CheckpointError(
            f"{folder} holds a model of type '{kind}': give a translation model of type marian, or an "
            f"encoder of type {' or '.join(ROWS_BEFORE_POSITIONS)}"
        )
    activation, positions = (
        config.get("hidden_act", "gelu"),
        config.get("position_embedding_type", "absolute"),
    )
    if activation not in ACTIVATIONS or positions != "absolute":
        raise CheckpointError(
            f"{folder / CONFIG} asks for activation '{activation}' and {positions} positions, and fairseq "
            f"has {', '.join(ACTIVATIONS)} and absolute ones"
        )
    for name in (LAYERS, HEADS):
        if not isinstance(config.get(name), int):
            raise CheckpointError(f"{folder / CONFIG} has no {name}: copy the model's whole folder again")
    tokenizer, rows = _read_tokenizer(folder)
    weights = read_weights(folder)
    for old, new in RENAMED.items():
        weights = {re.sub(old, new, name): tensor for name, tensor in weights.items()}
    return fairseq_encoder(
        weights,
        rows,
        tokenizer,
        config[LAYERS],
        ROWS_BEFORE_POSITIONS[kind],
        encoder_attention_heads=config[HEADS],
        layer_norm_eps=config.get("layer_norm_eps", 1e-12),
        activation_fn=ACTIVATIONS[activation],
        dropout=config.get("hidden_dropout_prob", 0.1),
        attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
    )


def _read_tokenizer(folder: Path) -> tuple[SubwordTokenizer, list[int]]:
    model = folder / SentencePieceTokenizer.filename
    if model.is_file():
        return _read_sentencepiece(model)
    if (folder / WORDPIECE_VOCABULARY).is_file():
        return _read_wordpiece(folder)
    raise CheckpointError(
        f"{folder} has no tokenizer: it needs {model.name} (XLM-R, multilingual-e5) or "
        f"{WORDPIECE_VOCABULARY} (BERT, LaBSE)"
    )


def _read_sentencepiece(path: Path) -> tuple[SubwordTokenizer, list[int]]:
    content = path.read_bytes()
    try:
        pieces = read_pieces(content)
        tokenizer = SentencePieceTokenizer(pieces[len(SPECIAL_PIECES) :], content)
    except RuntimeError as error:
        raise CheckpointError(f"{path} is no SentencePiece model ({error})") from None
    if pieces[: len(SPECIAL_PIECES)] != SPECIAL_PIECES:
        raise CheckpointError(
            f"{path} begins with the pieces {pieces[:3]}: give the model of an XLM-R, <unk> <s> </s>"
        )
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
        WordPieceSettings(
            lower, lower if accents is None else accents, settings.get("tokenize_chinese_chars", True)
        ),
    )
    return tokenizer, [row[piece] for piece in (*BERT_SPECIALS, *symbols, BERT_MASK)]
