"""How a token datastore describes its own text: where its states lie, and how far its own sentences stray from there.

The distance of a state to the datastore's text needs no search, and a few tokens suffice to recognise text of another domain.
Letters: M states in a sample, N states of queries, d decoder width.
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
NEAR, FAR = 0.9, 0.99  # of the datastore's own positions that are less far
SHRINKAGE = 1e-2  # of the mean variance, added to each: few states span few dimensions


@dataclass(frozen=True)
class Domain:
    """Statistics of a datastore's states, before any projection."""

    mean: Tensor  # fp32 [d]
    whitening: Tensor  # fp32 [d, d]; |(h - mean) whitening|^2 / d is the squared Mahalanobis distance per dimension
    # fp32 scalars: the running mean of the log distance is below them at 90% and 99% of the positions of the datastore's
    # own sentences, held out.
    near: Tensor
    far: Tensor
    states: Tensor  # fp16 [M, d], of a sample of whole sentences, from which all else is computed
    lengths: Tensor  # int64, tokens of these sentences
    numbers: Tensor  # int64, of these sentences in the datastore, as provenance counts them

    @classmethod
    def of(cls, states: Tensor, lengths: Tensor, numbers: Tensor) -> Domain:
        """Compute the statistics of whole sentences: [M, d] of any float dtype, int64 lengths that sum to M, and numbers.

        The quantiles are of each half of the sentences by the statistics of the other.
        """
        first = (torch.arange(len(lengths)) % 2 == 0).repeat_interleave(lengths)
        running = []
        for half in (first, ~first):
            known, held_out = states[half], states[~half]
            if len(known) and len(held_out):
                parity = int(half is first)
                mean, whitening = _moments(known)
                distances = _log_distance(held_out.double(), mean @ whitening, whitening)
                running.append(_running_means(distances, lengths[parity::2]))
        mean, whitening = _moments(states)
        if not running:  # a single sentence: nothing is held out
            running = [_running_means(_log_distance(states.double(), mean @ whitening, whitening), lengths)]
        near, far = torch.cat(running).quantile(torch.tensor([NEAR, FAR], dtype=torch.float64)).unbind()
        return cls(mean.float(), whitening.float(), near.float(), far.float(), states.half(), lengths, numbers)

    def to(self, device: torch.device) -> Domain:
        """Move what queries are compared with to another device; the sample stays."""
        moved = {name: getattr(self, name).to(device) for name in ("mean", "whitening", "near", "far")}
        return replace(self, **moved)

    def distance(self, states: Tensor) -> Tensor:
        """Compute the logarithm of the squared Mahalanobis distance per dimension, fp32 [N], of states fp32 [N, d]."""
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

    def familiarity(self, running_distance: Tensor) -> Tensor:
        """How similar hypotheses are to the datastore's own text, by the mean of `distance` so far, [N]: 1 near to 0 far."""
        return ((self.far - running_distance) / self._span).clamp(0, 1)

    @cached_property
    def _span(self) -> Tensor:
        return (self.far - self.near).clamp_min(1e-6)

    def select(self, chosen: Tensor) -> Domain:
        """Keep some sentences of the sample, bool; the statistics stay."""
        rows = chosen.repeat_interleave(self.lengths)
        return replace(self, states=self.states[rows], lengths=self.lengths[chosen], numbers=self.numbers[chosen])

    def save(self, path: Path) -> None:
        """Write to a safetensors file, under its final name only when it is complete."""
        with atomic_file(path) as partial:
            save_file({one.name: getattr(self, one.name).contiguous() for one in fields(self)}, partial)

    @classmethod
    def load(cls, path: Path) -> Domain:
        """Read what `save` wrote; damage is a DatastoreError."""
        try:
            domain = cls(**load_file(path))
            d, m, sentences = len(domain.mean), int(domain.lengths.sum()), (len(domain.lengths),)
            shapes = {"mean": (d,), "whitening": (d, d), "near": (), "far": (), "states": (m, d)}
            dtypes = {"states": torch.float16, "lengths": torch.int64, "numbers": torch.int64}
            for name, shape in (shapes | {"lengths": sentences, "numbers": sentences}).items():
                found, dtype = getattr(domain, name), dtypes.get(name, torch.float32)
                if (found.dtype, tuple(found.shape)) != (dtype, shape):
                    raise ValueError(f"its {name} is {found.dtype} {tuple(found.shape)}, not {dtype} {shape}")
            return domain
        except (SafetensorError, OSError, TypeError, ValueError) as error:
            raise DatastoreError(f"{path} is damaged ({error}): build the datastore again") from None


def _moments(states: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [d] and whitening [d, d] of states [M, d], fp64: the inverse Cholesky factor of the shrunk covariance."""
    exact = states.double()
    mean = exact.mean(dim=0)
    centred = exact - mean
    covariance = centred.T @ centred / max(1, len(exact) - 1)
    mean_variance = covariance.diagonal().mean().clamp_min(1e-12)
    covariance += SHRINKAGE * mean_variance * torch.eye(len(mean), dtype=torch.float64)
    return mean, torch.linalg.inv(torch.linalg.cholesky(covariance)).T.contiguous()


def _log_distance(states: Tensor, shift: Tensor, whitening: Tensor) -> Tensor:
    """log |h W - shift|^2 / d, `shift` being the whitened mean; a step of beam search counts each operation."""
    whitened = torch.addmm(shift, states, whitening, beta=-1)
    return whitened.square_().mean(dim=1).clamp_min_(1e-12).log_()


def _running_means(values: Tensor, lengths: Tensor) -> Tensor:
    """Average [M] values of sentence after sentence from the beginning of each to each token."""
    starts = (lengths.cumsum(dim=0) - lengths).repeat_interleave(lengths)
    sums = values.cumsum(dim=0)
    before = torch.cat([sums.new_zeros(1), sums])[starts]
    return (sums - before) / (torch.arange(len(values)) - starts + 1)
