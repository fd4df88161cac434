"""`--arch marian`: the Transformer of Marian (OPUS-MT), which fairseq's own cannot represent.

Both normalise after each residual. Marian's differs in four ways: SiLU in the feed-forward blocks, a bias on
the vocabulary's logits, sinusoids of other frequencies, and a decoder that does not start from the end of the
sentence. The sinusoids are copied into fairseq's learned positions. The row of <s>, which Marian's vocabulary
does not have, holds what its decoder starts from.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.models.transformer.transformer_legacy import base_architecture
from torch import Tensor, nn
from torch.nn import functional

ARCHITECTURE = "marian"
SILU = "swish"  # as fairseq calls it


class MarianDecoder(TransformerDecoderBase):
    """fairseq's decoder with Marian's start, and a bias on its logits."""

    def given(self, tokens: Tensor) -> Tensor:
        """Return prefixes with <s> in place of their first </s>, which fairseq starts from."""
        return tokens.masked_fill(tokens == self.dictionary.eos(), self.dictionary.bos())

    def extract_features_scriptable(self, prev_output_tokens: Tensor, *args: Any, **named: Any) -> Any:
        """Compute the states [B, T, d] after prefixes."""
        return super().extract_features_scriptable(self.given(prev_output_tokens), *args, **named)

    def build_output_projection(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().build_output_projection(cfg, dictionary, embed_tokens)
        self.output_projection.bias = nn.Parameter(torch.zeros(len(dictionary)))


@register_model(ARCHITECTURE)
class MarianModel(TransformerModel):
    """A translation model of Marian.

    Its options are those of `transformer`, and `swish` is an `activation_fn` that works.
    """

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Any, embed_tokens: nn.Embedding) -> TransformerEncoderBase:
        cfg = TransformerConfig.from_namespace(args)
        return _activated(TransformerEncoderBase(cfg, src_dict, embed_tokens), cfg)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Any, embed_tokens: nn.Embedding) -> MarianDecoder:
        cfg = TransformerConfig.from_namespace(args)
        return _activated(MarianDecoder(cfg, tgt_dict, embed_tokens), cfg)


@register_model_architecture(ARCHITECTURE, ARCHITECTURE)
def marian_architecture(args: Any) -> None:
    """Take Marian's defaults where options are left out."""
    for side in ("encoder", "decoder"):
        setattr(args, f"{side}_learned_pos", getattr(args, f"{side}_learned_pos", True))
    base_architecture(args)


def _activated(stack: Any, cfg: TransformerConfig) -> Any:
    """Give the layers SiLU where requested: fairseq's layers would use the class as the function."""
    if cfg.activation_fn == SILU:
        for layer in stack.layers:
            layer.activation_fn = functional.silu
    return stack
