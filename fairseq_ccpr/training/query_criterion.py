"""`--criterion query_distillation`: the loss of a query head."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor
from torch.nn import functional

LEAST_PROBABILITY = 0.3  # of spans whose vectors are learned: others are hardly ever queried
MOST_COMPARED = 512  # phrases of a batch whose similarities to one another are learned


@dataclass
class QueryDistillationConfig(FairseqDataclass):
    """Options of `--criterion query_distillation`."""

    cosine_weight: float = field(default=4.0, metadata={"help": "weight of 1 - cosine to the phrase encoder's vector"})
    query_temperature: float = field(
        default=0.05,
        metadata={
            "help": "temperature of the softmax over the vectors of other phrases, which the head imitates as well"
        },
    )


@register_criterion("query_distillation", dataclass=QueryDistillationConfig)
class QueryDistillation(FairseqCriterion):
    """L = w (1 - cos(q, h)) + KL(p_h || p_q) + BCE(P(phrase)), means over phrases and spans.

    q is the head's vector of a phrase and h the phrase encoder's; p_h and p_q are softmaxes of h and q against the vectors h
    of the batch's phrases: the results of a query depend on the differences, not on the cosine alone.
    """

    def __init__(self, cfg: QueryDistillationConfig, task: Any) -> None:
        super().__init__(task)
        self.cfg, self.task = cfg, task

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss summed over sentences, their number, and the values to log."""
        probabilities, taught = self.task.teach(sample, LEAST_PROBABILITY)
        are_phrases = probabilities > LEAST_PROBABILITY
        vectors, logits = model(sample["tokens"], sample["spans"][are_phrases], sample["spans"])
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = vectors.float()
            cosines = (vectors * taught).sum(dim=1)
            order = torch.randperm if model.training else torch.arange  # validation compares the same phrases each time
            some = order(len(taught), device=taught.device)[:MOST_COMPARED]
            wanted, found = (one[some] @ taught[some].T / self.cfg.query_temperature for one in (taught, vectors))
            apart = functional.kl_div(
                found.log_softmax(dim=1), wanted.log_softmax(dim=1), log_target=True, reduction="sum"
            ) / max(len(some), 1)
            segmentation = functional.binary_cross_entropy_with_logits(logits.float(), probabilities)
            cosine = cosines.sum() / max(len(cosines), 1)
            loss = self.cfg.cosine_weight * (1 - cosine) + apart + segmentation
        right = found.argmax(dim=1).eq(torch.arange(len(some), device=some.device)).sum() if len(some) else 0
        count = sample["nsentences"]
        logged = {
            "loss": loss.detach() * count, "cosine": cosines.detach().sum(), "phrases": len(cosines),
            "segmentation": segmentation.detach() * count, "right": right, "compared": len(some),
            "ntokens": sample["ntokens"], "nsentences": count, "sample_size": count,
        }  # fmt: skip
        return loss * count, count, logged

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log means; `accuracy` is in per cent."""
        total = {name: sum(float(log.get(name, 0)) for log in logging_outputs) for name in logging_outputs[0]}
        metrics.log_scalar("loss", total["loss"] / total["sample_size"], total["sample_size"], round=3)
        metrics.log_scalar("segmentation", total["segmentation"] / total["sample_size"], total["sample_size"], round=3)
        metrics.log_scalar("cosine", total["cosine"] / max(total["phrases"], 1), total["phrases"], round=3)
        accuracy = 100 * total["right"] / max(total["compared"], 1)
        metrics.log_scalar("accuracy", accuracy, total["compared"], round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True
