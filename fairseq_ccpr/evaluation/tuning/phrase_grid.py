"""How likely a phrase datastore makes the references, by its interpolation weight, from one pass over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_ccpr.decoding.interpolation import interpolate_references, limit_weights
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.evaluation.tuning.held_out import HeldOut, PhraseCache

LAMBDAS = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class References:
    """N reference tokens as the model, and a token memory or none, see them."""

    log_probs: Tensor  # fp32 [N], log p_NMT
    retrieved: Tensor  # fp32 [N], log p_tok
    weight: Tensor  # fp32 [N], lambda_tok*
    weight_max: float  # Lambda_max

    @classmethod
    def of(cls, text: HeldOut, settings: TokenRetrievalSettings | None, weight_max: float) -> References:
        """Describe a text with the token memory at these settings; None: without."""
        if text.tokens is None or settings is None:
            nothing = torch.full_like(text.log_probs, float("-inf"))
            return cls(text.log_probs, nothing, torch.zeros_like(text.log_probs), weight_max)
        vote = text.tokens.first(settings.k).vote(settings)
        return cls(text.log_probs, vote.of_token(text.targets), vote.weight, weight_max)

    def at(self, rows: Tensor) -> References:
        """Select some of the tokens."""
        return References(self.log_probs[rows], self.retrieved[rows], self.weight[rows], self.weight_max)

    def log_likelihood(self, retrieved: Tensor, weight: Tensor) -> Tensor:
        """Compute log p with a phrase memory that says log p_phr and weighs lambda_phr*, fp32 [N] each."""
        votes = zip((self.retrieved, retrieved), self.weights(weight))
        return interpolate_references(self.log_probs, *((said.clamp_min(-80), w.clamp_min(1e-12)) for said, w in votes))

    def weights(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Limit the weights of both memories, fp32 [N] each, by that of a phrase memory."""
        # Votes are learned through this: 0 / 0 and log 0 would make gradients NaN.
        return limit_weights(self.weight, weight.clamp_min(1e-12), self.weight_max)


def score_phrase_grid(cache: PhraseCache, references: References, memory: PhraseMemory) -> dict[PhraseSettings, float]:
    """Mean log-likelihood of the references for every weight."""
    said, weight = cache.vote(replace(memory, settings=replace(memory.settings, lambda_=1.0)))
    references = references.at(cache.rows)
    return {
        replace(memory.settings, lambda_=lambda_): float(references.log_likelihood(said, lambda_ * weight).mean())
        for lambda_ in LAMBDAS
    }


def phrase_candidates(grid: dict[PhraseSettings, float], count: int) -> list[PhraseSettings]:
    """Pick the likeliest settings."""
    return sorted(grid, key=lambda settings: -grid[settings])[:count]
