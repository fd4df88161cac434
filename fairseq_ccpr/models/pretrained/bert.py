"""Converts the weights of a BERT or XLM-R from Hugging Face's names to those of fairseq's RoBERTa.

Both are the same Transformer: learned positions, normalised embeddings, layers that normalise after each residual, and
GELU. BERT adds a token-type row to each embedding; that of type 0 goes into the positions. BERT counts positions from
0, fairseq from pad + 1 = 2, with two rows before them that no subword has.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.pretrained.context_encoder import TRANSFORMER

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
