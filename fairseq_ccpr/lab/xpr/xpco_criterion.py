"""`--criterion xpco`: the cross-lingual phrase contrast of XPR."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.training.phrase_contrast import alignment_losses, all_gather_rows


@dataclass
class XpcoConfig(FairseqDataclass):
    """Options of `--criterion xpco`."""

    contrast_temperature: float = field(default=0.06, metadata={"help": "T, temperature of the softmax"})


@register_criterion("xpco", dataclass=XpcoConfig)
class XpcoCriterion(FairseqCriterion):
    """L = L(P -> Q*) + L(Q -> P*), equations 3 and 4 of the XPR paper, * by the momentum encoder; a sum over pairs.

    Candidates are the phrases of all processes and those of the queue, where there is one.
    """

    def __init__(self, cfg: XpcoConfig, task: Any) -> None:
        super().__init__(task)
        if not cfg.contrast_temperature > 0:
            raise ConfigurationError(f"--contrast-temperature is {cfg.contrast_temperature}: give a number above 0")
        self.scale = 1 / cfg.contrast_temperature

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss summed over pairs, their number, and the values to log."""
        count = sample["nsentences"]
        vectors, candidates = model(sample["tables"], 2 * count)
        sides = [all_gather_rows(side_vectors) for side_vectors in vectors.chunk(2)]
        others = (
            sides if candidates is vectors else [all_gather_rows(side_vectors) for side_vectors in candidates.chunk(2)]
        )
        strings = all_gather_rows(sample["strings"].T.contiguous())
        momentum = model.momentum
        loss = vectors.new_zeros(())
        for one, other in ((0, 1), (1, 0)):
            targets, candidate_strings = others[other], strings
            if momentum is not None:
                queued, queued_strings = momentum.queued(other)
                targets, candidate_strings = torch.cat([targets, queued]), torch.cat([strings, queued_strings])
            loss = (
                loss
                + alignment_losses(sides[one], targets, self.scale, false_negatives(strings, candidate_strings)).sum()
            )
        if momentum is not None and model.training:
            momentum.enqueue((others[0].detach(), others[1].detach()), strings)
        logged = {
            "loss": loss.detach() * count / len(strings),  # the loss covers all processes: each logs its part of it
            "ntokens": sample["ntokens"],
            "nsentences": count,
            "sample_size": count,
        }
        return loss, count, logged

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over pairs, and over the validation queries."""
        count = sum(log.get("sample_size", 0) for log in logging_outputs)
        total = sum(float(log.get("loss", 0)) for log in logging_outputs)
        metrics.log_scalar("loss", total / max(count, 1), count, round=3)
        if queries := sum(log.get("queries", 0) for log in logging_outputs):
            right = sum(float(log.get("accuracy", 0)) for log in logging_outputs)
            metrics.log_scalar("accuracy", 100 * right / queries, queries, round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True


def false_negatives(own: Tensor, candidates: Tensor) -> Tensor:
    """Mark the candidates that are not negatives of a pair, since they share a string with it, bool [K, C].

    An equal string on the candidates' side is the right answer itself, one on the other side another translation. If
    language pairs are mixed, a source in one may be a target in another.

    Args:
        own: int64 [K, 2], numbers of source and target string.
        candidates: int64 [C, 2].
    """
    return (own[:, None, :, None] == candidates[None, :, None, :]).flatten(2).any(dim=2)
