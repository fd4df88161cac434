"""Small Transformers of random weights, whose translations differ in length, and sources for them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerModel, base_architecture

WORDS = 149  # as many as two runs and a part of one
SMALL = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 2}.items()
}


def dictionary_of(words: int) -> Dictionary:
    """A dictionary of so many words, of which four are fairseq's own."""
    dictionary = Dictionary()
    for number in range(words - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    return dictionary


@torch.no_grad()
def transformer(
    words: int = WORDS,
    kind: type[TransformerModel] = TransformerModel,
    architecture: Callable[[Any], None] = base_architecture,
    **settings: object,
) -> Any:
    """Build a model that would end a good part of all hypotheses at each step."""
    dictionary = dictionary_of(words)
    arguments = Namespace(**{**SMALL, "max_source_positions": 64, "max_target_positions": 64, **settings})
    architecture(arguments)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = kind.build_model(arguments, task).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases are 0, and norms 1, before a training
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        elif "embed_positions" not in name:
            parameter.mul_(1.5)
    if model.decoder.output_projection is not None:
        end_some(model, words)
    return model


def end_some(model: Any, words: int, share: float = 0.3) -> None:
    """Let </s> be the likeliest token in about this share of states, by a part of its row that all states have."""
    output, targets = model.decoder.output_projection, torch.randint(4, words, (14, 12))
    given = sources([*range(1, 15)], words)
    encoded = model.encoder.forward_torchscript(given)
    states = model.decoder(targets, encoder_out=encoded, features_only=True)[0].flatten(0, 1)
    logits, mean = output(states), states.mean(dim=0)
    lacking = (logits[:, 4:].amax(dim=1) - logits[:, 2]).quantile(share)
    output.weight[2] += lacking * mean / mean.square().sum()


def sources(lengths: list[int], words: int = WORDS, left_pad: bool = True) -> dict[str, torch.Tensor]:
    """Random sources as fairseq pads them: `src_tokens` int64 [B, S] and `src_lengths`."""
    rows = [torch.cat([torch.randint(4, words, (length - 1,)), torch.tensor([2])]) for length in lengths]
    return {
        "src_tokens": collate_tokens(rows, pad_idx=1, left_pad=left_pad),
        "src_lengths": torch.tensor(lengths),
    }
