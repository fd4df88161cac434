"""How likely a token datastore makes the references, at every point of a grid of settings, from one pass over them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from fairseq_ccpr.decoding.interpolation import ALMOST_ALL, retrieval_confidence, target_log_probabilities
from fairseq_ccpr.decoding.token_retriever import TokenRetrievalSettings

NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64)
FEW = 16
LAMBDAS = tuple(round(0.1 * i, 1) for i in range(1, 11))
# In squared distances, of which the decoder's states lie some tens to hundreds apart.
TEMPERATURES = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
# In inner products of unit vectors.
UNIT_TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)


@dataclass
class TokenCache:
    """What a teacher-forced pass leaves behind, enough to score any setting: a row for each of N reference tokens."""

    log_probs: Tensor  # fp32 [N], log p_NMT of the reference token
    scores: Tensor  # fp32 [N, K], nearest first; -inf where a neighbour is missing
    matches: Tensor  # bool [N, K], whether there is a neighbour and its value is the reference token

    def log_likelihood(
        self, k: int, temperature: float, lambdas: Tensor, confidence: bool, min_similarity: float = 0.0
    ) -> Tensor:
        """Mean log p of the reference tokens (equations 2, 4 and 8 of the CLKNN paper) for each lambda, fp32 [lambdas]."""
        retrieved, factor = self.opinion(k, temperature, confidence, min_similarity)
        share = (lambdas.unsqueeze(1) * factor).clamp_max(ALMOST_ALL)  # [lambdas, N]
        mixed = torch.logaddexp(torch.log1p(-share) + self.log_probs, share.log() + retrieved)
        return mixed.mean(dim=1)

    def opinion(self, k: int, temperature: float, confidence: bool, min_similarity: float) -> tuple[Tensor, Tensor]:
        """log p_tok of the reference tokens, and what lambda is multiplied by, fp32 [N] each."""
        scores = self.scores[:, :k]
        retrieved = target_log_probabilities(scores, self.matches[:, :k], temperature)
        factor = retrieval_confidence(scores, min_similarity) if confidence else (scores[:, 0] > float("-inf")).float()
        return retrieved, factor


def score_grid(
    cache: TokenCache, temperatures: tuple[float, ...], confidences: tuple[bool, ...], min_similarity: float = 0.0
) -> dict[TokenRetrievalSettings, float]:
    """Mean log-likelihood of the references at every point of the grid, with lambda fixed and, or, scaled to lambda*."""
    grid = {}
    for k, temperature, confidence in product(NEIGHBOURS, temperatures, confidences):
        least = min_similarity if confidence else 0.0
        values = cache.log_likelihood(k, temperature, torch.tensor(LAMBDAS), confidence, least)
        for lambda_, value in zip(LAMBDAS, values.tolist()):
            grid[TokenRetrievalSettings(k, lambda_, temperature, confidence, min_similarity=least)] = value
    return grid


def candidates(grid: dict[TokenRetrievalSettings, float], count: int) -> list[TokenRetrievalSettings]:
    """The best points of the grid that differ in lambda, its kind, or in whether they take few neighbours or many.

    On lambda, likelihood and BLEU disagree the most; and few neighbours are faster, if they do as well.
    """
    best: dict[tuple[float, bool, bool], TokenRetrievalSettings] = {}
    for settings in sorted(grid, key=lambda s: -grid[s]):
        best.setdefault((settings.lambda_, settings.confidence, settings.k <= FEW), settings)
    return list(best.values())[:count]


def as_options(settings: TokenRetrievalSettings, unit: bool = False) -> str:
    """Settings in the form of fairseq-generate's options.

    Args:
        unit: whether they are for an adapter's keys, for which lambda* is on unless one says otherwise.

    >>> as_options(TokenRetrievalSettings(8, 0.6, 10.0))
    '--knn-k 8 --knn-lambda 0.6 --knn-temperature 10'
    """
    options = f"--knn-k {settings.k} --knn-lambda {settings.lambda_:g} --knn-temperature {settings.temperature:g}"
    kind = "--knn-confidence" if settings.confidence else "--no-knn-confidence"
    least = f" --knn-min-similarity {settings.min_similarity:g}" if settings.min_similarity else ""
    return f"{options} {kind}{least}" if unit else options
