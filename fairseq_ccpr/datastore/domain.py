"""How a token datastore describes its own text: where its states lie.

The distance of a state to the datastore's text needs no search, and a few tokens suffice to recognise text of
another domain. Letters: M states in a sample, N states of queries, d decoder width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.files import atomic_file

STATES = 8192  # M, about: a covariance of a few hundred dimensions needs no more
OLDER = ("near", "far")  # that files of earlier versions have as well
SHRINKAGE = 1e-2  # of the mean variance, added to each: few states span few dimensions


@dataclass(frozen=True)
class Domain:
    """Statistics of a datastore's states, before any projection."""

    mean: Tensor  # fp32 [d]
    # fp32 [d, d]; |(h - mean) whitening|^2 / d is the squared Mahalanobis distance per dimension
    whitening: Tensor
    states: Tensor  # fp16 [M, d], of a sample of whole sentences, from which all else is computed
    lengths: Tensor  # int64, tokens of these sentences
    numbers: Tensor  # int64, of these sentences in the datastore, as provenance counts them

    @classmethod
    def of(cls, states: Tensor, lengths: Tensor, numbers: Tensor) -> Domain:
        """Compute the statistics of whole sentences: states [M, d], int64 lengths that sum to M, and numbers."""
        mean, whitening = _moments(states)
        return cls(mean.float(), whitening.float(), states.half(), lengths, numbers)

    def to(self, device: torch.device) -> Domain:
        """Move what queries are compared with to another device; the sample stays."""
        return replace(self, mean=self.mean.to(device), whitening=self.whitening.to(device))

    def distance(self, states: Tensor) -> Tensor:
        """Compute the log squared Mahalanobis distance per dimension, fp32 [N], of states fp32 [N, d]."""
        return _log_distance(states, self._shift, self.whitening)

    def cosine(self, states: Tensor, norms: Tensor) -> Tensor:
        """Compare states fp32 [N, d], of these norms, with the mean: cosines, fp32 [N]."""
        return states @ self._direction / norms

    @cached_property
    def _shift(self) -> Tensor:
        return self.mean @ self.whitening

    @cached_property
    def _direction(self) -> Tensor:
        return torch.nn.functional.normalize(self.mean, dim=0)

    def select(self, chosen: Tensor) -> Domain:
        """Keep some sentences of the sample, bool; the statistics stay."""
        rows = chosen.repeat_interleave(self.lengths)
        return replace(
            self, states=self.states[rows], lengths=self.lengths[chosen], numbers=self.numbers[chosen]
        )

    def save(self, path: Path) -> None:
        with atomic_file(path) as partial:
            save_file({one.name: getattr(self, one.name).contiguous() for one in fields(self)}, partial)

    @classmethod
    def load(cls, path: Path) -> Domain:
        try:
            domain = cls(**{name: tensor for name, tensor in load_file(path).items() if name not in OLDER})
            d, m, sentences = len(domain.mean), int(domain.lengths.sum()), (len(domain.lengths),)
            shapes = {"mean": (d,), "whitening": (d, d), "states": (m, d)}
            dtypes = {"states": torch.float16, "lengths": torch.int64, "numbers": torch.int64}
            for name, shape in (shapes | {"lengths": sentences, "numbers": sentences}).items():
                found, dtype = getattr(domain, name), dtypes.get(name, torch.float32)
                if (found.dtype, tuple(found.shape)) != (dtype, shape):
                    raise ValueError(f"its {name} is {found.dtype} {tuple(found.shape)}, not {dtype} {shape}")
            return domain
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise DatastoreError(f"{path} is damaged ({error}): build the datastore again") from None


def _moments(states: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [d] and whitening [d, d] of states [M, d], fp64: the inverse Cholesky of the shrunk covariance."""
    exact = states.double()
    mean = exact.mean(dim=0)
    centred = exact - mean
    covariance = centred.T @ centred / max(1, len(exact) - 1)
    mean_variance = covariance.diagonal().mean().clamp_min(1e-12)
    covariance += SHRINKAGE * mean_variance * torch.eye(len(mean), dtype=torch.float64)
    return mean, torch.linalg.inv(torch.linalg.cholesky(covariance)).T.contiguous()


def _log_distance(states: Tensor, shift: Tensor, whitening: Tensor) -> Tensor:
    """log |h W - shift|^2 / d, `shift` being the whitened mean; beam search counts each operation."""
    whitened = torch.addmm(shift, states, whitening, beta=-1)
    return whitened.square_().mean(dim=1).clamp_min_(1e-12).log_()
