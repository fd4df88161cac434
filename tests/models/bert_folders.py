"""Random BERTs in folders, written as Hugging Face writes them, and the states of an encoder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.text.subwords import collate

WIDTH, INNER, HEADS, LAYERS, POSITIONS = 16, 24, 2, 3, 200
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


def write_folder(folder: Path, kind: str, weights: dict[str, Tensor], **settings: object) -> None:
    folder.mkdir()
    config = {
        "model_type": kind,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(config | settings))
    save_file(weights, folder / "model.safetensors")


@torch.no_grad()
def states_of(encoder: ContextEncoder, texts: list[str]) -> list[list[Tensor]]:
    """Of each text the states of each layer, all texts in one padded batch."""
    subwords = [encoder.tokenizer.encode(text) for text in texts]
    tokens = collate(subwords, encoder.tokenizer.pad)
    layers = [encoder.states(tokens, layer) for layer in range(encoder.layers + 1)]
    return [[layer[row, : len(s.ids)] for layer in layers] for row, s in enumerate(subwords)]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return all(
        (a.double() - b.double()).abs().max() <= tolerance for a, b in zip(found, expected, strict=True)
    )
