"""A plug-in of your own on top of fairseq_ccpr: two other ways to decide how much retrieval counts.

    fairseq-generate DATA_BIN --user-dir user_dir --task translation_agreement --datastore DIR ...
    fairseq-ccpr tune DATA_BIN --user-dir user_dir --task translation_adaptive --datastore DIR ...

`translation_agreement` has another policy: the weight is lambda where all neighbours name the same token, and less the more
they disagree. `translation_adaptive` has another kind of trust, which `tune` trains. Decoder, tuner and explanation use both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.tasks import register_task
from torch import Tensor, nn

from fairseq_ccpr import (
    Decision,
    Memory,
    ModelView,
    TokenMemory,
    TokenRetrievalSettings,
    TranslationRetrievalConfig,
    TranslationRetrievalTask,
    Trust,
    TrustStep,
)
from fairseq_ccpr.errors import ConfigurationError

from . import bigrams as bigrams


def agreement_weight(
    scores: Tensor, values: Tensor, model: ModelView, settings: TokenRetrievalSettings
) -> Tensor:
    """lambda times the largest fraction of the k neighbours that name one token, fp32 [N]; a missing one agrees with none.

    Args:
        scores, values: fp32 and int64 [N, k], the neighbours' scores, -inf where one is missing, and their tokens.
        model: what the model says of those tokens; not needed here.
        settings: the `--knn-*` options.
    """
    found = scores > float("-inf")
    same = (values.unsqueeze(2) == values.unsqueeze(1)) & found.unsqueeze(1)  # [N, k, k]
    votes = same.sum(dim=2).masked_fill(~found, 0).amax(dim=1)
    return settings.lambda_ * votes / values.size(1)


@register_task("translation_agreement", dataclass=TranslationRetrievalConfig)
class TranslationAgreementTask(TranslationRetrievalTask):
    """`translation_retrieval` with that policy."""

    token_weight = staticmethod(agreement_weight)


class AdaptiveTrust(Trust):
    """Adaptive kNN-MT (Zheng et al., 2021): a distribution over how many neighbours to believe, none among the choices.

    p = pi_0 p_NMT + sum over r in {1, 2, 4, ... k} of pi_r softmax(score_1..r / T), pi = softmax(W2 tanh(W1 z + b1) + b2),
    z the scores of the k neighbours and the counts of distinct values among the first 1, 2, ... k of them, normalised.
    """

    KIND = "adaptive"
    SPREADS = True  # it decides over the distribution of the neighbours as well
    mean: Tensor
    scale: Tensor

    def __init__(
        self, memories: dict[str, list[str]], neighbours: int, temperature: float, hidden: int = 32
    ) -> None:
        super().__init__(memories)
        self.neighbours, self.temperature = neighbours, temperature
        self.ranks = [2**i for i in range(neighbours.bit_length()) if 2**i <= neighbours]
        self.register_buffer("mean", torch.zeros(2 * neighbours))
        self.register_buffer("scale", torch.ones(2 * neighbours))
        self.network = nn.Sequential(
            nn.Linear(2 * neighbours, hidden), nn.Tanh(), nn.Linear(hidden, 1 + len(self.ranks))
        )

    @classmethod
    def untrained(cls, memories: Sequence[Memory], small: bool) -> Trust:
        """Make one for the neighbours and the temperature of the settings."""
        if [memory.name for memory in memories] != [TokenMemory.name]:
            raise ConfigurationError("--task translation_adaptive is for tokens alone: leave out the phrases")
        settings: TokenRetrievalSettings = memories[0].settings
        return cls({TokenMemory.name: []}, settings.k, settings.temperature)

    def arguments(self) -> dict[str, Any]:
        """Return what makes another of the same shape."""
        return {**super().arguments(), "neighbours": self.neighbours, "temperature": self.temperature}

    def inputs(self, step: TrustStep) -> Tensor:
        """Scores, a missing neighbour having the lowest that was found, and counts, fp32 [N, 2k]; then which were found."""
        scores, values = step.votes[0].evidence.scores.float(), step.votes[0].values  # type: ignore[union-attr]
        found = scores > float("-inf")
        lowest = scores.masked_fill(~found, float("inf")).amin(dim=1, keepdim=True).nan_to_num(posinf=0.0)
        earlier = (values.unsqueeze(2) == values.unsqueeze(1)) & found.unsqueeze(1)  # [N, k, k]
        first = found & (earlier.tril(-1).sum(dim=2) == 0)
        return torch.cat(
            [torch.where(found, scores, lowest), first.cumsum(dim=1).float(), found.float()], dim=1
        )

    def prepare(self, inputs: Tensor) -> None:
        """Take mean and standard deviation of scores and counts."""
        seen = inputs[:, : 2 * self.neighbours]
        self.mean.copy_(seen.mean(dim=0))
        self.scale.copy_(seen.std(dim=0).clamp_min(1e-3))

    def decide(self, inputs: Tensor, weights: Tensor) -> Decision:
        """Mix distributions of the nearest 1, 2, 4, ... neighbours."""
        scores, counts, found = inputs.split(self.neighbours, dim=1)
        chosen = self.network((torch.cat([scores, counts], dim=1) - self.mean) / self.scale).softmax(dim=1)
        logits = (scores / self.temperature).masked_fill(found == 0, float("-inf"))
        spread = torch.zeros_like(logits)
        for number, rank in enumerate(self.ranks, start=1):
            nearest = logits[:, :rank].softmax(dim=1).nan_to_num(0.0)  # of none where none was found
            spread = spread + chosen[:, number, None] * nn.functional.pad(
                nearest, (0, self.neighbours - rank)
            )
        total = spread.sum(dim=1, keepdim=True)  # what is left goes to the model
        return Decision(total * (weights > 0), spread / total.clamp_min(1e-12))


@register_task("translation_adaptive", dataclass=TranslationRetrievalConfig)
class TranslationAdaptiveTask(TranslationRetrievalTask):
    """`translation_retrieval` with that trust."""

    trust_class = AdaptiveTrust
