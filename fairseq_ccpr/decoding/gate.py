"""A gate: a small network over named features, which begins by changing nothing.

    a = clamp(W2 tanh(W1 z + b1) + b2, -most, most),    z = clamp((x - mean) / scale, -4, 4)

W2 and b2 begin as 0. Trust moves weights by such numbers, and the text memory its alpha. Letters: N tokens, F
features, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError

FARTHEST = 4.0  # of a feature from its mean, in standard deviations
LEAST_SCALE = 1e-3  # in place of the standard deviation of a feature that hardly varies
NAMES = "names"  # of a tensor in files: the features' names, as UTF-8


class Gate(nn.Module):
    """The network described above.

    Args:
        names: of the features, in their order.
        hidden: units; 0: it is linear.
        most: of each output, either way.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, names: Sequence[str], outputs: int, hidden: int, most: float) -> None:
        super().__init__()
        self.names, self.most = tuple(names), most
        self.register_buffer("mean", torch.zeros(len(self.names)))
        self.register_buffer("scale", torch.ones(len(self.names)))
        self.hidden = nn.Linear(len(self.names), hidden) if hidden else None
        self.output = nn.Linear(hidden or len(self.names), outputs)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def prepare(self, features: Tensor) -> None:
        """Take mean and standard deviation of the features of training texts, fp32 [N, F]."""
        self.mean.copy_(features.mean(dim=0))
        self.scale.copy_(features.std(dim=0).clamp_min(LEAST_SCALE))

    def forward(self, features: Tensor) -> Tensor:
        """Compute a, fp32 [N, O], of features fp32 [N, F]."""
        return self._unclamped(self._standardised(features)).clamp(-self.most, self.most)

    @torch.enable_grad()
    def attributions(self, features: Tensor) -> Tensor:
        """Compute how far each feature moves each output, fp32 [N, O, F]: feature times gradient."""
        z = self._standardised(features).requires_grad_()
        each = self._unclamped(z).unbind(dim=1)
        gradients = [torch.autograd.grad(one.sum(), z, retain_graph=True)[0] for one in each]
        return (torch.stack(gradients, dim=1) * z.unsqueeze(1)).detach()

    def _standardised(self, features: Tensor) -> Tensor:
        return ((features - self.mean) / self.scale).clamp(-FARTHEST, FARTHEST)

    def _unclamped(self, z: Tensor) -> Tensor:
        a: Tensor = self.output(self.hidden(z).tanh() if self.hidden is not None else z)
        return a

    def stored(self) -> dict[str, Tensor]:
        """Return what a file keeps of it: the parameters, and the names of its features."""
        names = torch.frombuffer(bytearray("\n".join(self.names).encode()), dtype=torch.uint8)
        return {**self.state_dict(), NAMES: names}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load parameters; where the names of the features are among them, they must be those of this gate.

        Raises:
            ConfigurationError: it was trained with other features.
        """
        parameters = {name: one for name, one in state_dict.items() if name != NAMES}
        if len(parameters) < len(state_dict):
            names = tuple(bytes(state_dict[NAMES].tolist()).decode().split("\n"))
            if names != self.names:
                other = sorted(set(names) ^ set(self.names))
                raise ConfigurationError(
                    "trust was trained with other features than this version has "
                    f"({', '.join(other) or 'in another order'}): tune again, or give --trust none"
                )
        return super().load_state_dict(parameters, strict, assign)
