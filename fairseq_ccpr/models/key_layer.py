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
    """Keep the vectors h that a Transformer decoder computed in its latest forward pass; each thread has its own.

    `decoder_output`: the input of the vocabulary projection, h_t = f(x, y_<t) of equation 1 of the CLKNN
    paper. `last_ffn_input`: the input of the last layer's feed-forward block, as in kNN-MT (Khandelwal and
    others, 2021).
    """

    def __init__(self, model: Any, layer: str) -> None:
        self.layer = layer
        module = key_module(model, layer)
        self.dimension: int = module.in_features
        self._model = weakref.ref(model)
        self._of_thread = threading.local()
        # The model outlives its listener, and must not keep the listener or its last states alive.
        keep = weakref.WeakMethod(self._keep)
        handle = module.register_forward_pre_hook(
            lambda module, inputs: (kept := keep()) and kept(module, inputs)
        )
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
