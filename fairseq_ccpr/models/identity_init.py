"""Identity initialisation: a feed-forward network that starts as a rotation of its input, and so from good vectors."""

import torch
from torch import nn


@torch.no_grad()
def init_as_identity(hidden: nn.Linear, output: nn.Linear) -> None:
    """Make output(ReLU(hidden(x))) the first dimensions of a rotation of x, since x = ReLU(x) - ReLU(-x).

    Further hidden units stay random, and do not contribute yet. A network too narrow for this stays random.

    Args:
        hidden: [d] -> [d_f], where d_f is at least 2 d.
        output: [d_f] -> [d_o], where d_o is at most d.
    """
    d = hidden.in_features
    if hidden.out_features < 2 * d or output.out_features > d:
        return
    rotation = nn.init.orthogonal_(torch.empty(output.out_features, d))
    hidden.weight[: 2 * d] = torch.cat([torch.eye(d), -torch.eye(d)])
    hidden.bias[: 2 * d] = 0
    output.weight.zero_()
    output.weight[:, : 2 * d] = torch.cat([rotation, -rotation], dim=1)
    output.bias.zero_()
