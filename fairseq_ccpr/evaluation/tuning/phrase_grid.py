"""How likely a phrase datastore makes the references, at every point of a grid of settings, from one pass over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from fairseq_ccpr.decoding.interpolation import interpolate_references, limit_weights
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_memory import phrase_weight
from fairseq_ccpr.evaluation.tuning.held_out import PhraseCache

PHRASES = (4, 8, 16)
TEMPERATURES = (0.02, 0.05, 0.1)
ENTERING = (0.2, 0.5, 1.0)
LAMBDAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class References:
    """N reference tokens as the model, and a token memory or none, see them."""

    log_probs: Tensor  # fp32 [N], log p_NMT
    retrieved: Tensor  # fp32 [N], log p_tok
    weight: Tensor  # fp32 [N], lambda_tok*
    weight_max: float  # Lambda_max

    def at(self, rows: Tensor) -> References:
        """Select some of the tokens."""
        return References(self.log_probs[rows], self.retrieved[rows], self.weight[rows], self.weight_max)

    def log_likelihood(self, retrieved: Tensor, weight: Tensor) -> float:
        """Mean log p with a phrase memory that says log p_phr and weighs lambda_phr*, fp32 [N] each."""
        tokens, phrases = limit_weights(self.weight, weight, self.weight_max)
        return float(interpolate_references(self.log_probs, (self.retrieved, tokens), (retrieved, phrases)).mean())


def grid_of(settings: PhraseSettings) -> Iterator[PhraseSettings]:
    """Yield the points of the grid but for lambda; whatever has no grid is as in `settings`."""
    for k, temperature, enter in product(PHRASES, TEMPERATURES, ENTERING):
        yield replace(settings, k=k, temperature=temperature, enter=enter)


def score_phrase_grid(
    cache: PhraseCache, references: References, settings: PhraseSettings
) -> dict[PhraseSettings, float]:
    """Mean log-likelihood of the references at every point of the grid."""
    grid = {}
    references = references.at(cache.rows)
    for point in grid_of(settings):
        retrieved, mass = cache.continuation(point)
        for lambda_ in LAMBDAS:
            settings = replace(point, lambda_=lambda_)
            grid[settings] = references.log_likelihood(retrieved, phrase_weight(mass, settings))
    return grid


def phrase_candidates(grid: dict[PhraseSettings, float], count: int) -> list[PhraseSettings]:
    """Pick the best points of the grid that differ in lambda or in how readily a phrase begins.

    On these, likelihood and BLEU disagree the most.
    """
    best: dict[tuple[float, float], PhraseSettings] = {}
    for settings in sorted(grid, key=lambda s: -grid[s]):
        best.setdefault((settings.lambda_, settings.enter), settings)
    return list(best.values())[:count]
