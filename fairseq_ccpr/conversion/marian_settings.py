"""The settings of a Marian model as Hugging Face stores it, and which of them can be converted."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.marian import ARCHITECTURE, SILU
from fairseq_ccpr.models.pretrained.hub_folder import CONFIG, read_json

MARIAN = "marian"  # the model_type of config.json
POSITIONS = 512  # where a config does not say
ACTIVATIONS = {
    "swish": SILU, "silu": SILU, "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}  # fmt: skip
SIZES = (
    "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim",
    "decoder_ffn_dim",
)  # fmt: skip
# Options by which older configs describe other Transformer variants; off if absent.
OTHERWISE = ("normalize_before", "normalize_embedding", "add_final_layer_norm")


@dataclass(frozen=True)
class MarianSettings:
    """The settings in config.json.

    Attributes:
        sizes: of the Transformer, by the names of `SIZES`.
        activation: of the feed-forward blocks, by fairseq's name.
        scaled: whether embeddings are multiplied by the root of their width.
        shared: whether encoder and decoder share their embeddings.
        tied: whether the decoder's embeddings are the weights of its projection to the vocabulary.
        start: the id that the decoder starts from.
    """

    sizes: Mapping[str, int]
    activation: str
    scaled: bool
    shared: bool
    tied: bool
    start: int
    max_positions: int
    dropouts: Mapping[str, float]

    def fairseq_arguments(self) -> Namespace:
        """Return fairseq's settings of the model."""
        sides = {
            f"{side}_{ours}": self.sizes[f"{side}_{theirs}"]
            for side in ("encoder", "decoder")
            for ours, theirs in (
                ("layers", "layers"), ("attention_heads", "attention_heads"), ("ffn_embed_dim", "ffn_dim"),
            )
        }  # fmt: skip
        width = self.sizes["d_model"]
        return Namespace(
            arch=ARCHITECTURE,
            encoder_embed_dim=width,
            decoder_embed_dim=width,
            activation_fn=self.activation,
            no_scale_embedding=not self.scaled,
            share_all_embeddings=self.shared and self.tied,
            share_decoder_input_output_embed=self.tied,
            encoder_learned_pos=True,
            decoder_learned_pos=True,
            max_source_positions=self.max_positions,
            max_target_positions=self.max_positions,
            **sides,
            **self.dropouts,
        )


def is_marian(folder: Path) -> bool:
    """Tell whether a folder holds a Marian model as Hugging Face stores it."""
    return (folder / CONFIG).is_file() and read_json(folder / CONFIG).get("model_type") == MARIAN


def read_settings(folder: Path) -> MarianSettings:
    """Read config.json.

    Raises:
        CheckpointError: it is missing or damaged, or describes a Transformer that cannot be converted.
    """
    path = folder / CONFIG
    config = read_json(path)
    if (kind := config.get("model_type")) != MARIAN:
        raise CheckpointError(
            f"{folder} holds a model of type '{kind}': give one of type '{MARIAN}', such as OPUS-MT's"
        )
    if different := [name for name in OTHERWISE if config.get(name)]:
        raise CheckpointError(
            f"{path} asks for {different[0]}, with which Marian's own models are not built: it cannot be converted"
        )
    activation = config.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{path} asks for the activation '{activation}': only {', '.join(ACTIVATIONS)} can be converted"
        )
    sizes = {name: _size(path, config, name) for name in SIZES}
    for side in ("encoder", "decoder"):
        if sizes["d_model"] % sizes[f"{side}_attention_heads"]:
            raise CheckpointError(
                f"{path} has a d_model of {sizes['d_model']}, which {sizes[f'{side}_attention_heads']} heads cannot share: "
                "copy the model's whole folder again"
            )
    dropouts = {name: float(config.get(name) or 0.0) for name in ("dropout", "attention_dropout", "activation_dropout")}
    return MarianSettings(
        sizes, ACTIVATIONS[activation], bool(config.get("scale_embedding", False)),
        bool(config.get("share_encoder_decoder_embeddings", True)), bool(config.get("tie_word_embeddings", True)),
        _size(path, config, "decoder_start_token_id", least=0),
        _size(path, config, "max_position_embeddings") if "max_position_embeddings" in config else POSITIONS, dropouts,
    )  # fmt: skip


def _size(path: Path, config: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < least:
        raise CheckpointError(f"{path} has no {name}, or none that is a number: copy the model's whole folder again")
    return value
