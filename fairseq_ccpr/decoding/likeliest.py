"""The likeliest token of each distribution, found through the highest of each run of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 64  # neighbouring tokens whose highest is found first


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
