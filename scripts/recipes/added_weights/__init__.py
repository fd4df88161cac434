"""A Transformer with added weights, which alone are trained: rivals of full fine-tuning and of datastores.

    fairseq-train DATA_BIN --user-dir scripts/recipes/added_weights --arch transformer_adapters \
      --finetune-from-model model.pt --lr 2e-3 ...
    fairseq-ccpr translate --user-dir scripts/recipes/added_weights --path checkpoint_best.pt ...

`transformer_adapters` has a bottleneck after each layer (Bapna and Firat, 2019), `transformer_lora` a low-rank update of each
linear layer of attention and feed-forward (Hu et al., 2021). Both add nothing at first. The other options are those of
--arch transformer. A plain checkpoint of the same sizes is what training starts from.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, cast

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, base_architecture
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import fairseq_ccpr  # noqa: F401 - its tasks, and which checkpoints may be loaded

PLAIN = ".parametrizations.weight.original"  # how torch names a weight that has an update


class AddedWeights(TransformerModel):
    """fairseq's Transformer, with what `add` gives each of its layers; nothing else is trained."""

    @staticmethod
    def add(layer: nn.Module, width: int, args: Namespace) -> None:
        """Add trainable weights to a layer whose states have this width."""
        raise NotImplementedError

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> AddedWeights:
        model: AddedWeights = super().build_model(args, task)
        model.requires_grad_(False)
        for part, width in ((model.encoder, args.encoder_embed_dim), (model.decoder, args.decoder_embed_dim)):
            for layer in part.layers:
                cls.add(layer, width, args)
        return model

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        super().upgrade_state_dict_named(state_dict, name)
        for key, parameter in self.named_parameters():
            if key.endswith(PLAIN) and (plain := key.removesuffix(PLAIN) + ".weight") in state_dict:
                state_dict[key] = state_dict.pop(plain)
            if parameter.requires_grad:
                state_dict.setdefault(key, parameter.detach())


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
class AdapterTransformer(AddedWeights):
    """fairseq's Transformer with an `Adapter` after each layer."""

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        TransformerModel.add_args(parser)
        parser.add_argument(
            "--adapter-width", type=int, default=64, metavar="N", help="bottleneck of each adapter (64)"
        )

    @staticmethod
    def add(layer: nn.Module, width: int, args: Namespace) -> None:
        layer.adapter = Adapter(width, args.adapter_width)
        layer.register_forward_hook(_adapt)


class LowRank(nn.Module):
    """An update of a weight [rows, columns] as a product of two thin matrices, nothing until it is trained."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, weight.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.down, 5**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with its update."""
        return weight + self.up @ self.down


@register_model("transformer_lora")
class LoraTransformer(AddedWeights):
    """fairseq's Transformer with a `LowRank` update of all linear layers but embeddings."""

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        TransformerModel.add_args(parser)
        parser.add_argument("--lora-rank", type=int, default=16, metavar="N", help="rank of each update (16)")

    @staticmethod
    def add(layer: nn.Module, width: int, args: Namespace) -> None:
        for linear in [each for each in layer.modules() if isinstance(each, nn.Linear)]:
            register_parametrization(linear, "weight", LowRank(linear.weight, args.lora_rank))


for name in ("transformer_adapters", "transformer_lora"):
    register_model_architecture(name, name)(base_architecture)
