"""The supervised contrastive loss of CLKNN, and the criterion that trains with it."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError

ACCURACY_DIGITS = 3  # of `accuracy`, in percent


def supervised_contrastive_loss(anchors: Tensor, positives: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Compute equation 6 of the CLKNN paper for each anchor.

    -log [ sum_M exp s(z, z+) / (sum_M exp s(z, z+) + sum_N exp s(z, z-)) ], s = cosine / T'.

    Args:
        anchors: z, [B, d].
        positives: [B, M, d], of the anchor's token.
        negatives: [B, N, d], of other tokens.
        temperature: T'. At the paper's 0.01 the logits reach 100, so all is computed in fp32 or better.

    Returns:
        [B], in fp32, or fp64 where that was given.

    >>> z = torch.eye(2)
    >>> supervised_contrastive_loss(z[:1], z[:1].unsqueeze(0), z[1:].unsqueeze(0), 1.0)
    tensor([0.3133])
    """
    dtype = torch.promote_types(anchors.dtype, torch.float32)
    others = torch.cat([positives, negatives], dim=1)
    anchors, others = (torch.nn.functional.normalize(z.to(dtype), dim=-1) for z in (anchors, others))
    with torch.autocast(anchors.device.type, enabled=False):
        logits = (others @ anchors.unsqueeze(2)).squeeze(2) / temperature  # [B, M + N]
    return logits.logsumexp(dim=1) - logits[:, : positives.size(1)].logsumexp(dim=1)


@dataclass
class SupervisedContrastiveConfig(FairseqDataclass):
    """Options of `--criterion supervised_contrastive`."""

    # The paper has 0.01, which makes retrieval less precise here.
    contrast_temperature: float = field(default=0.03, metadata={"help": "T' of the loss, by which cosines are divided"})


@register_criterion("supervised_contrastive", dataclass=SupervisedContrastiveConfig)
class SupervisedContrastiveCriterion(FairseqCriterion):
    """That loss in training. In validation the task measures the precision of retrieval, logged as `accuracy`."""

    def __init__(self, task: Any, contrast_temperature: float) -> None:
        super().__init__(task)
        if not 0 < contrast_temperature < float("inf"):
            raise ConfigurationError(f"--contrast-temperature is {contrast_temperature}: a number above 0 is needed")
        self.temperature = contrast_temperature

    def forward(self, model: Any, sample: dict[str, Any]) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss summed over the anchors, their number, and the values to log.

        Args:
            sample: `keys` [B, 1 + M + N, d]: each anchor, its M positives, its N negatives; `positives`: M.
        """
        z = model(sample["keys"])
        m = sample["positives"]
        loss = supervised_contrastive_loss(z[:, 0], z[:, 1 : 1 + m], z[:, 1 + m :], self.temperature).sum()
        count = len(z)
        logged = {"loss": loss.data, "nsentences": count, "ntokens": count, "sample_size": count}
        return loss, count, logged

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over anchors, and over the validation queries."""
        count = sum(log.get("sample_size", 0) for log in logging_outputs)
        metrics.log_scalar("loss", sum(log.get("loss", 0) for log in logging_outputs) / max(count, 1), count, round=3)
        if any("precision" in log for log in logging_outputs):
            queries = sum(log.get("queries", 0) for log in logging_outputs)
            precision = sum(log.get("precision", 0) for log in logging_outputs)
            metrics.log_scalar("accuracy", 100 * precision / queries, queries, round=ACCURACY_DIGITS)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True
