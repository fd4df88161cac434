"""The projection from a decoder state h to the key g(h) of a CLKNN datastore: adapter, PCA and scaling to length 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr import timing

PCA_ROWS = 1 << 18  # a random sample of so many rows fits a PCA of a few hundred dimensions


@dataclass(frozen=True)
class ProjectionDescription:
    """A projection as the manifest describes it."""

    query_dimension: int  # d, of the decoder's states
    adapter_dimension: int  # d_o, before PCA; 0: there is no adapter, and states are but scaled to length 1
    pca: bool
    normalize_before_pca: bool

    def __str__(self) -> str:
        if not self.adapter_dimension:
            return "unit"
        before = "norm+" if self.normalize_before_pca else ""
        return f"clknn{self.adapter_dimension}{f'+{before}pca' if self.pca else ''}"


class KeyProjection(nn.Module):
    """g(h) = Norm(PCA(FFN(h))), section 3 of the CLKNN paper: unit vectors, whose inner products are cosines.

    PCA is linear, so it folds into the last layer of the adapter, and g is two matrices however wide the adapter's
    output. With vectors scaled to length 1 before PCA as well, it cannot, and g is three.
    """

    def __init__(self, hidden: nn.Linear, output: nn.Linear, pca: nn.Linear | None = None) -> None:
        super().__init__()
        self.hidden, self.output, self.pca = hidden, output, pca

    @classmethod
    def fold(cls, hidden: nn.Linear, output: nn.Linear, pca: Pca | None, normalize_before_pca: bool) -> KeyProjection:
        """Fold a PCA of an adapter's output into the adapter's two layers."""
        if pca is None:
            return cls(hidden, output)
        rotation = _linear(pca.components, -pca.components @ pca.mean)
        if normalize_before_pca:
            return cls(hidden, output, rotation)
        weight, bias = output.weight.double(), output.bias.double()
        components = pca.components
        return cls(hidden, _linear(components @ weight, components @ (bias - pca.mean)))

    @classmethod
    def scaling(cls, dimension: int) -> KeyProjection:
        """Scale states to length 1 and do nothing else: relu(h) - relu(-h) = h."""
        identity = torch.eye(dimension, dtype=torch.float64)
        both = torch.cat([identity, -identity])
        return cls(_linear(both, both.new_zeros(2 * dimension)), _linear(both.T, both.new_zeros(dimension)))

    @timing.phase(timing.PROJECTION)
    def forward(self, states: Tensor) -> Tensor:
        """Compute g(h), [H, d] of any float dtype -> fp32 [H, d_key], each of length 1."""
        z = self.output(torch.relu(self.hidden(states.to(self.hidden.weight.dtype))))
        if self.pca is not None:
            z = self.pca(nn.functional.normalize(z, dim=-1))
        return nn.functional.normalize(z, dim=-1)

    @property
    def dimension(self) -> int:
        """Width of the keys."""
        return (self.pca or self.output).out_features

    def save(self, path: Path) -> None:
        """Write to a safetensors file."""
        save_file({name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}, path)

    @classmethod
    def load(cls, path: Path) -> KeyProjection:
        """Read what `save` wrote.

        Raises:
            DatastoreError: the file is damaged.
        """
        try:
            tensors = load_file(path)
            layers = [
                _linear(tensors[f"{name}.weight"], tensors[f"{name}.bias"])
                for name in ("hidden", "output", "pca")
                if f"{name}.weight" in tensors
            ]
            return cls(*layers)
        except (SafetensorError, KeyError, TypeError) as error:
            raise DatastoreError(f"{path} is damaged ({error}): build the datastore again") from None


@dataclass
class Pca:
    """A principal component analysis: x -> components (x - mean)."""

    mean: Tensor  # fp64 [d]
    components: Tensor  # fp64 [dimension, d], rows of length 1, by falling variance


def fit_pca(rows: Tensor, dimension: int) -> Pca:
    """Compute principal components of `rows` [n, d], in fp64.

    Raises:
        ConfigurationError: `dimension` is above d.
    """
    if not 1 <= dimension <= rows.size(1):
        raise ConfigurationError(
            f"--pca-dim is {dimension}, but the adapter's vectors are {rows.size(1)} wide: give 1 to {rows.size(1)}"
        )
    mean = rows.mean(dim=0, dtype=torch.float64)
    covariance = torch.zeros(rows.size(1), rows.size(1), dtype=torch.float64, device=rows.device)
    for block in rows.split(1 << 14):
        centred = block.double() - mean
        covariance += centred.T @ centred
    _, vectors = torch.linalg.eigh(covariance)  # by rising variance
    return Pca(mean, vectors.T.flip(0)[:dimension].contiguous())


def sample_rows(count: int, seed: int = 1, most: int = PCA_ROWS) -> np.ndarray:
    """Draw which of `count` rows to fit a PCA on, in order."""
    return np.sort(np.random.default_rng(seed).choice(count, min(most, count), replace=False))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Make a layer of given weights, in fp32, that is not trained."""
    layer = nn.Linear(weight.size(1), weight.size(0), device=weight.device)
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    return layer.requires_grad_(False)
