"""Where in a translation model the keys and queries h_t are read, and the states of a batch at these places."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import utils
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor, nn

from fairseq_ccpr.device import to_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.fingerprint import of_parameters, of_strings
from fairseq_ccpr.text.subwords import SubwordTokenizer

KEY_LAYERS = ("decoder_output", "last_ffn_input")
LAYERS = 3  # whose states are read: the embeddings, the middle layer, the last


class KeyCapture:
    """Keep the vectors h that a Transformer decoder computed in its latest forward pass; each thread has its own.

    `decoder_output`: the input of the vocabulary projection, h_t = f(x, y_<t) of equation 1 of the CLKNN paper.
    `last_ffn_input`: the input of the last layer's feed-forward block, as in kNN-MT (Khandelwal and others, 2021).
    """

    def __init__(self, model: Any, layer: str) -> None:
        self.layer = layer
        module = key_module(model, layer)
        self.dimension: int = module.in_features
        self._model = weakref.ref(model)
        self._of_thread = threading.local()
        # The model outlives its listener, and must not keep the listener or its last states alive.
        keep = weakref.WeakMethod(self._keep)
        handle = module.register_forward_pre_hook(lambda module, inputs: (kept := keep()) and kept(module, inputs))
        weakref.finalize(self, handle.remove)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._of_thread.captured = inputs[0]
        if (listener := getattr(self._of_thread, "listener", None)) is not None:
            listener()

    @contextmanager
    def telling(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` during this thread's forward passes, as soon as there is something to read."""
        self._of_thread.listener = listener
        try:
            yield
        finally:
            self._of_thread.listener = None

    def read(self) -> Tensor:
        """Take the vectors of the latest forward pass, [B, T, d], in the model's dtype and on its device; once each."""
        captured = getattr(self._of_thread, "captured", None)
        if captured is None:
            raise RuntimeError("no forward pass of the model since the keys were last read")
        self._of_thread.captured = None
        # The layers inside a fairseq decoder run time first: [T, B, d] -> [B, T, d]
        return captured.transpose(0, 1) if self.layer == "last_ffn_input" else captured

    def force_decode(self, net_input: dict[str, Any]) -> Tensor:
        """Compute the vectors of given targets, [B, T, d].

        Nothing is projected onto the vocabulary: that would take many times the memory of everything else.
        """
        model: Any = self._model()
        net_input = utils.move_to_cuda(net_input) if next(model.parameters()).is_cuda else net_input
        encoded = model.encoder.forward_torchscript(net_input)  # as in beam search, which every model can do
        states, _ = model.decoder(net_input["prev_output_tokens"], encoder_out=encoded, features_only=True)
        return states if self.layer == "decoder_output" else self.read()


def key_module(model: Any, layer: str) -> Any:
    """Find the module of `model` whose input is the key."""
    if layer not in KEY_LAYERS:
        raise ConfigurationError(f"unknown key layer '{layer}': choose one of {', '.join(KEY_LAYERS)}")
    decoder: Any = getattr(model, "decoder", None)
    if layer == "decoder_output":
        module = getattr(decoder, "output_projection", None)
    else:
        module = getattr(next(reversed(getattr(decoder, "layers", [])), None), "fc1", None)
    if module is None:
        raise ConfigurationError(
            f"the model ({type(model).__name__}) has no {layer} to read keys from: "
            "a fairseq Transformer with an ordinary softmax is needed"
        )
    return module


@dataclass(frozen=True)
class EncodedSources:
    """Sentences that the translation model has already encoded."""

    tokens: Tensor  # int64 [B, S], the sentences with their ends, padding on either side; on the CPU
    states: Tensor  # fp32 [B, S, hidden], as `TranslationStates.join` makes them
    pad: int

    def states_of(self, tokens: Tensor, rows: Sequence[int]) -> Tensor | None:
        """Look up the states [n, L, hidden] of the sentences `rows`, 0 at the start markers; None if subwords differ.

        `tokens` is int64 [n, L] on the CPU, with both markers and padding on the right.
        """
        tokens, chosen = tokens[:, 1:], torch.tensor(rows)
        known = self.tokens[chosen]
        real = tokens.ne(self.pad)
        if not torch.equal(real.sum(dim=1), known.ne(self.pad).sum(dim=1)):
            return None
        first = known.ne(self.pad).int().argmax(dim=1, keepdim=True)
        places = (first + torch.arange(tokens.size(1))).clamp(max=known.size(1) - 1)
        if not torch.equal(known.gather(1, places)[real], tokens[real]):
            return None
        chosen, places = to_device([chosen, places], self.states.device)
        return nn.functional.pad(self.states[chosen[:, None], places], (0, 0, 1, 0))


class TranslationStates(nn.Module):
    """The frozen encoder of a translation model, which takes the place of a context encoder.

    Args:
        encoder: a Transformer encoder of fairseq, in evaluation mode; its weights are no parameters of this module.
        tokenizer: of the model's source language, with the ids of its dictionary.
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
        tokens = tokens[:, 1:]
        # Autocast refuses to join tensors of fp16, as fairseq's attention does with its biases.
        half = next(encoder.parameters()).dtype != torch.float32
        with torch.autocast(tokens.device.type, enabled=False) if half else nullcontext():
            found = encoder(tokens, tokens.ne(self.tokenizer.pad).sum(dim=1), return_all_hiddens=True)
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
