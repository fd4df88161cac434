"""A Transformer with adapter layers, which alone are trained: a rival of full fine-tuning and of datastores.

    fairseq-train DATA_BIN --user-dir scripts/recipes/adapter_layers --arch transformer_adapters \
      --finetune-from-model model.pt --lr 2e-3 ...
    fairseq-ccpr translate --user-dir scripts/recipes/adapter_layers --path checkpoint_best.pt ...

After each layer, x + W2 relu(W1 LayerNorm(x)), with W2 = 0 at first (Bapna and Firat, 2019). The other options are those of
--arch transformer. A plain checkpoint of the same sizes is what training starts from.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, cast

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, base_architecture
from torch import Tensor, nn

import fairseq_ccpr  # noqa: F401 - its tasks, and which checkpoints may be loaded


class Adapter(nn.Module):
    """A bottleneck after a layer, which adds nothing until it is trained.

    Args:
        width: of the layer's states.
        bottleneck: of the adapter.
    """

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Add the adapter's output to states [..., width]."""
        adapted: Tensor = states + self.up(torch.relu(self.down(self.norm(states))))
        return adapted


def _adapt(layer: nn.Module, _: Any, output: Any) -> Any:
    adapter = cast("Adapter", layer.adapter)
    if isinstance(output, Tensor):
        return adapter(output)
    states, *others = output
    return (adapter(states), *others)


@register_model("transformer_adapters")
class AdapterTransformer(TransformerModel):
    """fairseq's Transformer with an `Adapter` after each layer; nothing else is trained."""

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        TransformerModel.add_args(parser)
        parser.add_argument(
            "--adapter-width", type=int, default=64, metavar="N", help="bottleneck of each adapter (64)"
        )

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> AdapterTransformer:
        model: AdapterTransformer = super().build_model(args, task)
        model.requires_grad_(False)
        for layers, width in (
            (model.encoder.layers, args.encoder_embed_dim),
            (model.decoder.layers, args.decoder_embed_dim),
        ):
            for layer in layers:
                layer.adapter = Adapter(width, args.adapter_width)
                layer.register_forward_hook(_adapt)
        return model

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        super().upgrade_state_dict_named(state_dict, name)
        for key, value in self.state_dict().items():
            if ".adapter." in key:
                state_dict.setdefault(key, value)


@register_model_architecture("transformer_adapters", "transformer_adapters")
def transformer_adapters(args: Namespace) -> None:
    base_architecture(args)
