"""The losses of CCPR: which phrase translates which, and which spans are phrases. Pure tensor maths.

Letters: K phrase pairs, C candidates, o width of a phrase vector.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alignment_losses(sources: Tensor, targets: Tensor, scale: Tensor | float, excluded: Tensor) -> Tensor:
    """Compute L_{x->y} of each phrase: equation 2 of the CCPR paper, its pair being the target of the same number.

    Args:
        sources, targets: vectors, [K, o] and [C, o], C at least K; swapped, they give L_{y->x}.
        scale: factor for inner products, 1 / temperature.
        excluded: bool [K, C], targets that are not negatives of a source. The diagonal is ignored.

    Returns:
        [K], fp32, or fp64 where that was given.

    >>> alignment_losses(torch.eye(2), torch.eye(2), 1.0, torch.zeros(2, 2, dtype=torch.bool))
    tensor([0.3133, 0.3133])
    """
    dtype = torch.promote_types(sources.dtype, torch.float32)
    with torch.autocast(sources.device.type, enabled=False):
        logits = (sources.to(dtype) @ targets.to(dtype).T) * scale
        own = torch.eye(*logits.shape, dtype=torch.bool, device=logits.device)
        logits = logits.masked_fill(excluded & ~own, float("-inf"))
        return logits.logsumexp(dim=1) - logits.diagonal()


def equal_candidates(strings: Tensor, contexts: Tensor) -> Tensor:
    """Mark the candidates that are the same phrase as each other, and so are not negatives, bool [K, K].

    The same string in another context is another phrase: telling the two apart is what CCPR learns.

    Args:
        strings: int64 [K], equal where the strings are.
        contexts: int64 [K], equal where the sentences are.
    """
    return (strings.unsqueeze(0) == strings.unsqueeze(1)) & (contexts.unsqueeze(0) == contexts.unsqueeze(1))


def segmentation_losses(logits: Tensor, are_phrases: Tensor) -> Tensor:
    """Compute the binary cross-entropy of each span, equation 6 of the CCPR paper, fp32 [spans]."""
    with torch.autocast(logits.device.type, enabled=False):
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logits.float(), are_phrases.float(), reduction="none"
        )
