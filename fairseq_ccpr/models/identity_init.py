"""Initialisation as a linear map: a feed-forward network that starts as a rotation or a PCA, and so from good vectors."""

import torch
from torch import Tensor, nn


def can_be_linear(hidden: nn.Linear, output: nn.Linear) -> bool:
    """Check that output(ReLU(hidden(x))) is wide enough inside for a projection of x, and not wider than x outside."""
    return hidden.out_features >= 2 * hidden.in_features and output.out_features <= hidden.in_features


@torch.no_grad()
def init_as_linear(hidden: nn.Linear, output: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Make output(ReLU(hidden(x))) equal to weight x + bias, since x = ReLU(x) - ReLU(-x).

    Further hidden units are unchanged, and do not contribute yet.

    Args:
        hidden: [d] -> [d_f]; `can_be_linear` is true of it and `output`.
        output: [d_f] -> [d_o].
        weight: [d_o, d].
        bias: [d_o].
    """
    d = hidden.in_features
    hidden.weight[: 2 * d] = torch.cat([torch.eye(d), -torch.eye(d)])
    hidden.bias[: 2 * d] = 0
    output.weight.zero_()
    output.weight[:, : 2 * d] = torch.cat([weight, -weight], dim=1)
    output.bias.copy_(bias)


def init_as_identity(hidden: nn.Linear, output: nn.Linear) -> None:
    """Make output(ReLU(hidden(x))) the first dimensions of a random rotation of x, where `can_be_linear`; else keep it."""
    if can_be_linear(hidden, output):
        rotation = nn.init.orthogonal_(torch.empty(output.out_features, hidden.in_features))
        init_as_linear(hidden, output, rotation, torch.zeros(output.out_features))
