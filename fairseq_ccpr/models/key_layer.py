"""Where in a translation model the keys and queries h_t are read, and the states of a batch at these places."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fairseq import utils
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError

KEY_LAYERS = ("decoder_output", "last_ffn_input")


class KeyCapture:
    """Tells whoever listens the vectors h that a Transformer decoder computes; each thread hears its own.

    `decoder_output`: the input of the vocabulary projection, h_t = f(x, y_<t) of equation 1 of the CLKNN
    paper. `last_ffn_input`: the input of the last layer's feed-forward block, as in kNN-MT (Khandelwal and
    others, 2021).
    """

    def __init__(self, model: Any, layer: str) -> None:
        self.layer = layer
        module = key_module(model, layer)
        self.dimension: int = module.in_features
        self._model = weakref.ref(model)
        self._of_thread = of_thread = threading.local()
        # The layers inside a fairseq decoder run time first.
        time_first = layer == "last_ffn_input"

        def tell(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if (listener := getattr(of_thread, "listener", None)) is not None:
                listener(inputs[0].transpose(0, 1) if time_first else inputs[0])

        # The model outlives its listeners, and does not keep them alive.
        weakref.finalize(self, module.register_forward_pre_hook(tell).remove)

    @contextmanager
    def telling(self, listener: Callable[[Tensor], object]) -> Iterator[None]:
        """Call `listener` in this thread's forward passes with the vectors [B, T, d], as soon as they are known."""
        self._of_thread.listener = listener
        try:
            yield
        finally:
            self._of_thread.listener = None

    def force_decode(self, net_input: dict[str, Any]) -> Tensor:
        """Compute the vectors of given targets, [B, T, d].

        Nothing is projected onto the vocabulary: that would take many times the memory of everything else.
        """
        model: Any = self._model()
        net_input = utils.move_to_cuda(net_input) if next(model.parameters()).is_cuda else net_input
        encoded = model.encoder.forward_torchscript(net_input)  # as in beam search, which every model can do
        heard: list[Tensor] = []
        with self.telling(heard.append):
            states, _ = model.decoder(
                net_input["prev_output_tokens"], encoder_out=encoded, features_only=True
            )
        return states if self.layer == "decoder_output" else heard[-1]


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
