"""The states of a translation model's encoder, the input of a query head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor, nn

from fairseq_ccpr.device import to_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.fingerprint import of_parameters, of_strings
from fairseq_ccpr.text.subwords import SubwordTokenizer

LAYERS = 3  # whose states are read: the embeddings, the middle layer, the last


@dataclass(frozen=True)
class EncodedSources:
    """Sentences that the translation model has already encoded."""

    tokens: Tensor  # int64 [B, S], the sentences with their ends, padding on either side; on the CPU
    states: Tensor  # fp32 [B, S, hidden], as `TranslationStates.join` makes them
    pad: int

    def states_of(self, tokens: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Look up the states of sentences, which have both markers and padding on the right.

        Args:
            tokens: int64 [n, L], on the CPU.
            rows: which of the B sentences each is.

        Returns:
            [n, L, hidden], 0 at the start markers; None where the model has other subwords.
        """
        own, chosen = tokens[:, 1:], torch.tensor(rows)
        there = self.tokens[chosen]
        real = own.ne(self.pad)
        if not torch.equal(real.sum(dim=1), there.ne(self.pad).sum(dim=1)):
            return None
        first = there.ne(self.pad).int().argmax(dim=1, keepdim=True)
        places = (first + torch.arange(own.size(1))).clamp(max=there.size(1) - 1)
        if not torch.equal(there.gather(1, places)[real], own[real]):
            return None
        chosen, places = to_device([chosen, places], self.states.device)
        return nn.functional.pad(self.states[chosen[:, None], places], (0, 0, 1, 0))


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
        return nn.functional.pad(self.join(found), (0, 0, 1, 0))

    def is_of(self, model: Any) -> bool:
        """Check whether a translation model has this very encoder."""
        return getattr(model, "encoder", None) is self._encoder[0]

    def join(self, output: dict[str, Any]) -> Tensor:
        """Join the layers read from an encoder's output, which has all hidden states, fp32 [B, S, hidden]."""
        layers = output["encoder_states"]
        chosen = [layers[0], layers[len(layers) // 2], output["encoder_out"][0]]
        return torch.cat([layer.transpose(0, 1).float() for layer in chosen], dim=2)

    def fingerprint(self) -> str:
        """Digest the encoder and its tokenizer."""
        weights = of_parameters(self._encoder[0].named_parameters())
        return of_strings([weights, self.tokenizer.content.hex(), *self.tokenizer.symbols])
