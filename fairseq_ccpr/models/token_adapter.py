"""CLKNN's adapter: a feed-forward network over keys, which starts as a rotation or a PCA."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor, nn

from fairseq_ccpr.errors import CheckpointError, ConfigurationError
from fairseq_ccpr.models.checkpoint import reading

HIDDEN_TIMES = 4  # the paper's 4096 for a decoder of 1024
WIDEST_OUTPUT = 512  # the paper's, for that decoder


def can_be_linear(hidden: nn.Linear, output: nn.Linear) -> bool:
    """Check that output(ReLU(hidden(x))) is wide enough inside for a projection of x, and no wider than x."""
    return hidden.out_features >= 2 * hidden.in_features and output.out_features <= hidden.in_features


@torch.no_grad()
def init_as_linear(hidden: nn.Linear, output: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Make output(ReLU(hidden(x))) equal to weight x + bias, since x = ReLU(x) - ReLU(-x).

    Further hidden units are unchanged, and do not contribute yet.
    """
    d = hidden.in_features
    hidden.weight[: 2 * d] = torch.cat([torch.eye(d), -torch.eye(d)])
    hidden.bias[: 2 * d] = 0
    output.weight.zero_()
    output.weight[:, : 2 * d] = torch.cat([weight, -weight], dim=1)
    output.bias.copy_(bias)


def init_as_identity(hidden: nn.Linear, output: nn.Linear) -> None:
    """Make output(ReLU(hidden(x))) the first dimensions of a random rotation of x, where `can_be_linear`."""
    if can_be_linear(hidden, output):
        rotation = nn.init.orthogonal_(torch.empty(output.out_features, hidden.in_features))
        init_as_linear(hidden, output, rotation, torch.zeros(output.out_features))


@dataclass
class TokenAdapterConfig(FairseqDataclass):
    """Options of `--arch token_adapter`."""

    adapter_hidden_dim: int = field(
        default=0, metadata={"help": f"width inside the adapter; 0: {HIDDEN_TIMES} times that of the keys"}
    )
    adapter_output_dim: int = field(
        default=0, metadata={"help": f"width of its output; 0: that of the keys, {WIDEST_OUTPUT} at most"}
    )


@register_model("token_adapter", dataclass=TokenAdapterConfig)
class TokenAdapter(BaseFairseqModel):
    """z = ReLU(h W1 + b1) W2 + b2: equation 5 of the CLKNN paper; widths d of h, d_f inside, d_o of z."""

    def __init__(self, dimension: int, hidden: int, output: int) -> None:
        super().__init__()
        self.trained_on: dict[str, str] = {}
        self.hidden = nn.Linear(dimension, hidden)
        self.output = nn.Linear(hidden, output)
        init_as_identity(self.hidden, self.output)

    @classmethod
    def build_model(cls, cfg: TokenAdapterConfig, task: Any) -> "TokenAdapter":
        for name in ("adapter_hidden_dim", "adapter_output_dim"):
            if (value := getattr(cfg, name)) < 0:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} is {value}: give a width, or 0 for the default"
                )
        d = task.dimension
        return cls(d, cfg.adapter_hidden_dim or HIDDEN_TIMES * d, cfg.adapter_output_dim or default_output(d))

    def forward(self, keys: Tensor) -> Tensor:
        """Compute z of each key, [..., d] -> [..., d_o]."""
        return self.output(torch.relu(self.hidden(keys.to(self.hidden.weight.dtype))))

    @classmethod
    def load(cls, path: Path) -> "TokenAdapter":
        """Load the adapter of a checkpoint that fairseq-train wrote, on the CPU in fp32.

        Its sizes are those of the weights. Its `trained_on` says which model's states it was trained on, and
        of which layer, where the checkpoint does.
        """
        if not path.is_file():
            raise CheckpointError(
                f"there is no adapter {path}: give clknn, none, or the checkpoint of a trained one"
            )
        with reading(path, "no adapter", "give a checkpoint of fairseq-train --task token_contrast"):
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
            weights = state["model"]
            hidden, width = weights["hidden.weight"].shape
            adapter = cls(width, hidden, weights["output.weight"].shape[0])
            adapter.load_state_dict(weights)
            adapter.trained_on = dict(state.get("task_state") or {})
            return adapter.float().eval()


def default_output(dimension: int) -> int:
    """Return the default width of z for keys of width `dimension`."""
    return min(dimension, WIDEST_OUTPUT)
