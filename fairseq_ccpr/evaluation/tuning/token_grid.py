"""How likely a token datastore makes the references, at every point of a grid of settings, from one pass over them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from torch import Tensor

from fairseq_ccpr.decoding.interpolation import interpolate_references
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.evaluation.tuning.held_out import TokenCache

NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64)
LAMBDAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
# In squared distances, of which the decoder's states lie some tens to hundreds apart.
TEMPERATURES = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
# In inner products of unit vectors.
UNIT_TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)


def score_grid(
    cache: TokenCache,
    log_probs: Tensor,
    neighbours: tuple[int, ...],
    temperatures: tuple[float, ...],
    confidences: tuple[bool, ...],
    given: TokenRetrievalSettings,
) -> dict[TokenRetrievalSettings, float]:
    """Mean log-likelihood of the references at every point of the grid, with lambda fixed and, or, scaled to lambda*.

    Args:
        log_probs: fp32 [N], log p_NMT of the reference tokens.
        given: whatever has no grid is as in it.
    """
    grid = {}
    for k in neighbours:
        nearest = cache.first(k)
        for temperature in temperatures:
            retrieved = nearest.retrieved(temperature)
            for confidence, lambda_ in product(confidences, LAMBDAS):
                settings = _point(given, k, lambda_, temperature, confidence)
                mixed = interpolate_references(log_probs, (retrieved, nearest.weight(settings)))
                grid[settings] = float(mixed.mean())
    return grid


def _point(
    given: TokenRetrievalSettings, k: int, lambda_: float, temperature: float, confidence: bool
) -> TokenRetrievalSettings:
    """Settings of the grid; what is for lambda* alone is as given there, and off elsewhere."""
    if confidence:
        return replace(given, k=k, lambda_=lambda_, temperature=temperature, confidence=True)
    return TokenRetrievalSettings(k, lambda_, temperature, confidence=False, guard=given.guard)


def candidates(grid: dict[TokenRetrievalSettings, float], count: int) -> list[TokenRetrievalSettings]:
    """Pick the likeliest points of the grid that have a k, a T or a lambda that none before has, for each kind of lambda.

    Likelihood and BLEU disagree on all three, and likelihood wants ever more neighbours.
    """
    chosen: list[TokenRetrievalSettings] = []
    seen: set[tuple[object, ...]] = set()
    for settings in sorted(grid, key=lambda s: -grid[s]):
        values = {(settings.confidence, name, getattr(settings, name)) for name in ("k", "temperature", "lambda_")}
        if not values <= seen:
            seen |= values
            chosen.append(settings)
    return chosen[:count]


def likeliest_of_each_kind(grid: dict[TokenRetrievalSettings, float]) -> dict[str, TokenRetrievalSettings]:
    """Pick the likeliest settings with a fixed lambda, and with lambda*, as far as the grid has both."""
    chosen: dict[str, TokenRetrievalSettings] = {}
    for settings in sorted(grid, key=lambda one: -grid[one]):
        chosen.setdefault("lambda*" if settings.confidence else "lambda", settings)
    return dict(sorted(chosen.items()))
