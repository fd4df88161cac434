"""`--criterion ccpr`: the alignment loss in both directions and the segmentation loss of CCPR."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from fairseq_ccpr.training.all_gather import all_gather_rows, divide_gradient
from fairseq_ccpr.training.phrase_contrast_loss import alignment_losses, equal_candidates, segmentation_losses

SPANS_A_PAIR = 4  # a phrase and another span, on either side


@dataclass
class CcprConfig(FairseqDataclass):
    """Options of `--criterion ccpr`."""

    segmentation_weight: float = field(default=1.0, metadata={"help": "beta, weight of the segmentation loss"})


@register_criterion("ccpr", dataclass=CcprConfig)
class CcprCriterion(FairseqCriterion):
    """L = L_{x->y} + L_{y->x} + beta L_seg, equation 7 of the CCPR paper, a sum over phrase pairs.

    Candidates are the phrases of all processes, except other right translations: those whose pair has, on either side, the
    very same phrase as the right pair. Word alignment gives a phrase several translations if a word next to them has no
    links. The mean of L_seg is over the number of spans that K phrase pairs should have, so that the sum over processes
    equals that of one process with the whole batch.
    """

    def __init__(self, cfg: CcprConfig, task: Any) -> None:
        super().__init__(task)
        self.cfg = cfg

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss summed over phrase pairs, their number, and the values to log."""
        sides, count = (sample["source"], sample["target"]), sample["phrases"]
        outputs, scale = model(*sides)
        scale = divide_gradient(scale)
        vectors = [all_gather_rows(side_vectors) for side_vectors, _ in outputs]
        strings, contexts = ([all_gather_rows(side[name]) for side in sides] for name in ("strings", "contexts"))
        alignment = segmentation = vectors[0].new_zeros(())
        excluded = torch.stack([equal_candidates(*side) for side in zip(strings, contexts)]).any(dim=0)
        for one, other in ((0, 1), (1, 0)):
            alignment = alignment + alignment_losses(vectors[one], vectors[other], scale, excluded).sum()
            are_phrases = torch.arange(len(outputs[one][1]), device=excluded.device) < count
            segmentation = segmentation + segmentation_losses(outputs[one][1], are_phrases).sum()
        loss = alignment + self.cfg.segmentation_weight / SPANS_A_PAIR * segmentation
        # The alignment loss covers all processes: each logs its part of it.
        logged = {
            "loss": loss.detach() - alignment.detach() * (1 - count / len(strings[0])),
            "segmentation": segmentation.detach() / SPANS_A_PAIR,
            "temperature": count / float(scale),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": count,
        }
        return loss, count, logged

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over phrase pairs."""
        count = sum(log.get("sample_size", 0) for log in logging_outputs)
        for name in ("loss", "segmentation", "temperature"):
            total = sum(float(log.get(name, 0)) for log in logging_outputs)
            metrics.log_scalar(name, total / max(count, 1), count, round=3)
        queries = sum(log.get("queries", 0) for log in logging_outputs)
        if queries:
            for name in ("accuracy", "string_accuracy"):
                metrics.log_scalar(
                    name, 100 * sum(log.get(name, 0) for log in logging_outputs) / queries, queries, round=2
                )

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True
