"""XPR's phrase encoder: one vector per phrase, pooled from its subwords in its example sentences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_ccpr.models.phrase_encoder import ENCODER_CLASSES, SpanEncoder
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.token_adapter import init_as_identity

NAME = "phrase_encoder_xpr"


class XprEncoder(SpanEncoder):
    """f(p, X) = Norm(W2 ReLU(W1 x + b1) + b2), x the mean over sentences of means over subwords.

    Equations 1 and 2 of the XPR paper, pooled before the head. Without a `dimension` there is no head.
    """

    segments = False
    heads = ("head.",)

    def __init__(self, context: ContextEncoder, layer: int, dimension: int) -> None:
        super().__init__()
        self.context, self.layer, self.kind = context, layer, f"{NAME} layer={layer}"
        self.dimension = dimension or context.hidden
        hidden = context.hidden
        self.head: nn.Module = nn.Identity()
        if dimension:
            first, last = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, dimension)
            init_as_identity(first, last)
            self.head = nn.Sequential(first, nn.ReLU(), last)

    @classmethod
    def restore(
        cls, context: ContextEncoder, weights: dict[str, Tensor], settings: dict[str, Any]
    ) -> XprEncoder:
        head = weights.get("head.2.weight")
        layer = context.layers if settings["layer"] is None else int(settings["layer"])
        model = cls(context, layer, 0 if head is None else len(head))
        model.load_state_dict(weights)
        return model

    def states(self, tokens: Tensor) -> Tensor:
        return self.context.states(tokens, self.layer)

    def vectors(self, states: Tensor, spans: Tensor) -> Tensor:
        return self.project(span_means(states, spans))

    def project(self, pooled: Tensor) -> Tensor:
        """Compute vectors of length 1 from means [K, H], fp32 [K, o]."""
        return project(self.head, pooled)


ENCODER_CLASSES[NAME] = XprEncoder


def project(head: nn.Module, pooled: Tensor) -> Tensor:
    """Compute Norm(head(x)), [K, H] -> fp32 [K, o]."""
    weights = next(head.parameters(), pooled)
    return nn.functional.normalize(head(pooled.to(weights.dtype)).float(), dim=1)


def span_means(states: Tensor, spans: Tensor) -> Tensor:
    """Average the states [S, L, H] of each span's subwords, fp32 (or fp64) [K, H]: equation 2 of XPR."""
    sentence, first, last = spans.unbind(dim=1)
    dtype = torch.promote_types(states.dtype, torch.float32)
    sums = nn.functional.pad(states.to(dtype).cumsum(dim=1), (0, 0, 1, 0))  # [S, L + 1, H], of all before
    return (sums[sentence, last + 1] - sums[sentence, first]) / (last + 1 - first).unsqueeze(1)
