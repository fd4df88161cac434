"""The states of a translation model's encoder, for what a query head makes of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.fingerprint import of_parameters, of_strings
from fairseq_ccpr.text.subwords import SubwordTokenizer

LAYERS = 3  # whose states are read: the embeddings, the middle layer, the last


class TranslationStates(nn.Module):
    """The frozen encoder of a translation model, which takes the place of a context encoder.

    Args:
        encoder: a Transformer encoder of fairseq, in evaluation mode; its weights are no parameters of this module.
        tokenizer: of the model's source language, with the ids of its dictionary.
        bf16: whether to compute in bfloat16.

    Raises:
        ConfigurationError: another kind of encoder.
    """

    def __init__(self, encoder: Any, tokenizer: SubwordTokenizer, bf16: bool = False) -> None:
        super().__init__()
        if not isinstance(encoder, TransformerEncoderBase):
            raise ConfigurationError(
                f"a query head reads the states of a Transformer encoder, and the translation model has a "
                f"{type(encoder).__name__}: find phrases with the phrase encoder"
            )
        self._encoder = (encoder,)
        self.tokenizer, self.bf16 = tokenizer, bf16
        self.hidden = LAYERS * int(encoder.layers[0].embed_dim)

    @property
    def max_positions(self) -> int:
        """Subwords that a sentence may have, its end not counted."""
        return int(self._encoder[0].max_positions()) - 1

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the states of `LAYERS` layers, int64 [S, L] with both markers -> [S, L, hidden].

        Translation models have no start marker: its state is 0.
        """
        encoder = self._encoder[0].to(tokens.device)
        own = tokens[:, 1:]
        # Autocast refuses to join tensors of fp16, as fairseq's attention does with its biases.
        half = next(encoder.parameters()).dtype != torch.float32
        with torch.autocast(tokens.device.type, enabled=False) if half else nullcontext():
            found = encoder(own, own.ne(self.tokenizer.pad).sum(dim=1), return_all_hiddens=True)
        layers = found["encoder_states"]
        chosen = [layers[0], layers[len(layers) // 2], found["encoder_out"][0]]
        states = torch.cat([layer.transpose(0, 1).float() for layer in chosen], dim=2)
        return nn.functional.pad(states, (0, 0, 1, 0))

    def fingerprint(self) -> str:
        """Digest the encoder, and what makes its subwords."""
        weights = of_parameters(self._encoder[0].named_parameters())
        return of_strings([weights, self.tokenizer.content.hex(), *self.tokenizer.symbols])
