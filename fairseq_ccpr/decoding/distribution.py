"""What the model says at a step: its distribution, the likeliest token of it, and what it says of some tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fairseq_ccpr.decoding.trust_features import ModelEvidence

RUN = 64  # neighbouring tokens whose highest is found first


@dataclass
class Distribution:
    """The model's distribution at N tokens. All that look at a step share it, so its likeliest token is found once.

    Args:
        log_probs: fp32 [N, V], log p_NMT.
    """

    log_probs: Tensor

    @cached_property
    def likeliest(self) -> ModelEvidence:
        """The likeliest token, and its log p_NMT; must first be read before `log_probs` is mixed in place."""
        return ModelEvidence(*likeliest(self.log_probs))

    def at(self, values: Tensor) -> DistributionView:
        """Look at the tokens int64 [N, k]."""
        return DistributionView(self, values)


@dataclass
class DistributionView:
    """A `ModelView` of a whole distribution.

    Args:
        values: int64 [N, k], the neighbours' tokens.
    """

    distribution: Distribution
    values: Tensor

    @cached_property
    def neighbours(self) -> Tensor:
        """log p_NMT of the neighbours' tokens, fp32 [N, k]."""
        return self.distribution.log_probs.gather(1, self.values)

    @property
    def best(self) -> Tensor:
        """log p_NMT of the likeliest token, fp32 [N]."""
        return self.distribution.likeliest.best

    @property
    def favourite(self) -> Tensor:
        """The likeliest token, int64 [N]."""
        return self.distribution.likeliest.favourite


def likeliest(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Find what `log_probs.max(dim=1)` finds, fp32 [N] and int64 [N]: of equal ones the first.

    On a CPU torch tracks the place of a maximum number by number, which takes five times as long as the maxima of runs; only
    one run of each row is then looked through for its place.

    Args:
        log_probs: fp32 [N, V].
    """
    rows, words = log_probs.shape
    if log_probs.is_cuda or words < 2 * RUN or not rows:
        best, favourite = log_probs.max(dim=1)
        return best, favourite
    # The last run ends with the row: it may share tokens with the one before, which then is found first.
    whole = words // RUN * RUN
    last = log_probs[:, words - RUN :]
    runs = log_probs[:, :whole].unflatten(1, (-1, RUN)).amax(dim=2)
    best, run = torch.cat([runs, last.amax(dim=1, keepdim=True)], dim=1).max(dim=1)
    begins = (run * RUN).clamp_max(words - RUN)
    inside = log_probs.gather(1, begins.unsqueeze(1) + torch.arange(RUN, device=run.device)).argmax(dim=1)
    return best, begins + inside
