"""Choosing k, lambda and T on a held-out subset: a large grid by likelihood, its best few by BLEU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.interpolation import retrieval_confidence, target_log_probabilities
from fairseq_ccpr.decoding.token_retriever import ALMOST_ALL, TokenRetrievalSettings
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.decoding import batches, decode
from fairseq_ccpr.evaluation.scores import Scores

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
    scores: Tensor  # fp32 [N, K]
    ids: Tensor  # int64 [N, K]
    matches: Tensor  # bool [N, K], whether the neighbour's value is the reference token

    def log_likelihood(
        self, k: int, temperature: float, lambdas: Tensor, confidence: bool, min_similarity: float = 0.0
    ) -> Tensor:
        """Mean log p of the reference tokens (equations 2, 4 and 8 of the CLKNN paper) for each lambda, fp32 [lambdas]."""
        scores, ids = self.scores[:, :k], self.ids[:, :k]
        retrieved = target_log_probabilities(scores, ids, self.matches[:, :k], temperature)
        factor = retrieval_confidence(scores, ids, min_similarity) if confidence else (ids >= 0).any(dim=1)
        share = (lambdas.unsqueeze(1) * factor).clamp_max(ALMOST_ALL)  # [lambdas, N]
        mixed = torch.logaddexp(torch.log1p(-share) + self.log_probs, share.log() + retrieved)
        return mixed.mean(dim=1)


@torch.inference_mode()
def fill_cache(cfg: Any, task: Any, models: list[Any], ensemble: RetrievalEnsemble, k: int) -> TokenCache:
    """Force-decode the subset once, keeping the reference's probabilities and the k nearest neighbours."""
    rows: list[tuple[Tensor, ...]] = []
    for sample in batches(cfg, task, models):
        real = sample["target"].ne(task.target_dictionary.pad())
        targets = sample["target"][real]
        log_probs, queries, _ = ensemble.force_decode_models(sample)
        scores, ids = ensemble.retriever.search(queries[real], k)
        matches = (ensemble.retriever.values[ids.clamp_min(0)] == targets.unsqueeze(1)) & (ids >= 0)
        of_targets = log_probs.gather(2, sample["target"].unsqueeze(2)).squeeze(2)[real]
        rows.append((of_targets, scores, ids, matches))
    return TokenCache(*(torch.cat(column).cpu() for column in zip(*rows)))


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


@dataclass
class Tuned:
    """What came of tuning."""

    options: str  # of fairseq-generate, for the best settings
    signature: str  # of that
    scores: dict[str, Scores]  # by name of the system, the base among them
    grid: dict[TokenRetrievalSettings, float]
    grid_seconds: float  # the teacher-forced pass included
    base_seconds: float  # of decoding the same sentences without retrieval


def tune(cfg: Any, task: Any, models: list[Any], count: int) -> Tuned:
    """Choose by likelihood which `count` settings to decode with, and by BLEU which of those to keep.

    Raises:
        ConfigurationError: a limit of lambda*, which the grid does not have.
    """
    if cfg.task.knn_lambda_max != 1:
        raise ConfigurationError(
            "--knn-lambda-max is not tuned: leave it out here, and add it to what comes out if need be"
        )
    generators = {"base": task.build_base_generator(models, cfg.generation)}
    ensemble = task.build_ensemble(models, generators["base"].beam_size)
    start = time.perf_counter()
    cache = fill_cache(cfg, task, models, ensemble, max(NEIGHBOURS))
    unit = ensemble.retriever.projection is not None
    kinds = (True, False) if unit and not cfg.task.knn_confidence else (ensemble.retriever.settings.confidence,)
    if cfg.task.no_knn_confidence:
        kinds = (False,)
    grid = score_grid(cache, UNIT_TEMPERATURES if unit else TEMPERATURES, kinds, cfg.task.knn_min_similarity)
    grid_seconds = time.perf_counter() - start
    chosen = {as_options(settings, unit): settings for settings in candidates(grid, count)}
    for name, settings in chosen.items():
        generators[name] = task.build_base_generator(models, cfg.generation)
        retriever = ensemble.retriever.with_settings(settings)
        generators[name].model = RetrievalEnsemble(
            models, ensemble.capture, retriever, ensemble.pad, ensemble.beam_size
        )
    decodings = decode(cfg, task, models, generators)
    scores = {name: decodings.scores(name) for name in generators}
    best = max(chosen, key=lambda name: scores[name].bleu)
    base_seconds = decodings.systems["base"].seconds
    return Tuned(best, generators[best].model.signature(), scores, grid, grid_seconds, base_seconds)


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
