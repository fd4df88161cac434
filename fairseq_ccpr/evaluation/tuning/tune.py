"""Choosing the settings of retrieval on a held-out subset: large grids by likelihood, their best few by BLEU."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.memory import Neighbours
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings, automatic_token_settings
from fairseq_ccpr.decoding.token_memory import DistributionView
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.comparison import BASE
from fairseq_ccpr.evaluation.translation.scores import TranslationScores
from fairseq_ccpr.evaluation.translation.test_set import batches, decode
from fairseq_ccpr.evaluation.tuning.phrase_grid import (
    PHRASES,
    TOKENS,
    PhraseCache,
    References,
    phrase_candidates,
    score_phrase_grid,
)
from fairseq_ccpr.evaluation.tuning.token_grid import (
    NEIGHBOURS,
    TEMPERATURES,
    UNIT_TEMPERATURES,
    CachedView,
    TokenCache,
    candidates,
    score_grid,
)
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import as_options, automatic_values

# Fields that the grids have: written into FILE even where they are at their default.
TUNED_OF_TOKENS = ("k", "lambda_", "temperature")
TUNED_OF_PHRASES = ("k", "lambda_", "temperature", "min_similarity", "enter")


@dataclass
class Tuned:
    """What came of tuning."""

    best: RetrievalEnsemble  # with the best settings
    options: str  # of fairseq-generate, for these
    helps: bool  # whether they are better than the model alone; if not, the interpolation weights are 0
    scores: dict[str, TranslationScores]  # by name of the system, the base among them
    token_grid: dict[TokenRetrievalSettings, float]  # empty without a token memory
    phrase_grid: dict[PhraseSettings, float]  # beside the best of the token grid; empty without a phrase memory
    grid_seconds: float  # the teacher-forced pass included
    base_seconds: float  # of decoding the same sentences without retrieval

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The best settings, as `datastore.tuned` keeps them."""
        memories = (self.best.tokens, self.best.phrases)
        kept = [memory.settings for memory in memories if memory is not None]
        return {one.PREFIX: automatic_values(one) for one in (*kept, self.best.settings)}


def tune(system: System, count: int) -> Tuned:
    """Choose by likelihood which `count` settings to decode with, and by BLEU which of those to keep.

    1. One teacher-forced pass keeps what model, neighbours and phrases say of each reference token.
    2. The token memory's grid is scored, then the phrase memory's together with the likeliest token settings.
    3. The best settings of the one with the best of the other are decoded with. The best by BLEU is chosen; where no
       settings are better than the model alone, their interpolation weights become 0.

    Raises:
        ConfigurationError: no datastore, or a reward, which the grid does not have.
    """
    cfg, task, models, ensemble = system.cfg, system.task, system.models, system.ensemble
    if ensemble is None:
        raise ConfigurationError("there is nothing to tune without a datastore: give --datastore DIR")
    if cfg.task.phrase_reward:
        raise ConfigurationError(
            "--phrase-reward is not tuned: leave it out here, or compare some with fairseq-ccpr compare"
        )
    task.load_dataset(cfg.dataset.gen_subset)
    generators = {BASE: system.generator(retrieve=False)}
    if ensemble.phrases is not None:  # one search serves all settings
        ensemble = ensemble.with_memories(ensemble.tokens, ensemble.phrases.remembering(max(PHRASES)))
    start = time.perf_counter()
    tokens, phrases, log_probs = fill_caches(cfg, task, models, ensemble, max(NEIGHBOURS))
    token_grid = _score_tokens(cfg, ensemble, tokens)
    best_tokens: list[TokenRetrievalSettings | None] = [*candidates(token_grid, count)] or [None]
    references = _references(tokens, best_tokens[0], log_probs, ensemble.settings.lambda_max)
    phrase_grid = {}
    best_phrases: list[PhraseSettings | None] = [None]
    if ensemble.phrases is not None:
        phrase_grid = score_phrase_grid(phrases, references, ensemble.phrases.settings)
        best_phrases = [*phrase_candidates(phrase_grid, count)]
    grid_seconds = time.perf_counter() - start
    settings = _crossed(best_tokens, best_phrases, count)
    tried = {_options_of(one): one for one in (_with_settings(ensemble, *pair) for pair in settings)}
    for name, one in tried.items():
        generators[name] = system.generator(retrieve=False)
        generators[name].model = one
    decodings = decode(cfg, task, models, generators)
    scores = {name: decodings.scores(name) for name in generators}
    winner = max(tried, key=lambda name: scores[name].bleu)
    helps = scores[winner].bleu > scores[BASE].bleu
    best = tried[winner] if helps else _silenced(tried[winner])
    base_seconds = decodings.systems[BASE].seconds
    return Tuned(best, _options_of(best), helps, scores, token_grid, phrase_grid, grid_seconds, base_seconds)


@torch.inference_mode()
def fill_caches(
    cfg: Any, task: Any, models: list[Any], ensemble: RetrievalEnsemble, k: int
) -> tuple[TokenCache | None, PhraseCache, Tensor]:
    """Force-decode the subset once, keeping the reference's probabilities, the k nearest neighbours, and the phrases.

    Returns:
        What the token memory said, None without one; what the phrases said, at some of the tokens; log p_NMT of the N
        reference tokens.
    """
    rows: list[tuple[Tensor, ...]] = []
    phrases = PhraseCache()
    of_model: list[Tensor] = []
    every = max(1, int(task.dataset(cfg.dataset.gen_subset).tgt_sizes.sum()) // TOKENS)
    for number, sample in enumerate(batches(cfg, task, models)):
        real = sample["target"].ne(task.target_dictionary.pad())
        targets = sample["target"][real]
        log_probs, queries, attention = ensemble.force_decode_models(sample)
        of_tokens = log_probs[real]  # [n, V]
        first = sum(map(len, of_model))
        of_model.append(of_tokens.gather(1, targets.unsqueeze(1)).squeeze(1).cpu())
        if ensemble.tokens is not None:
            neighbours = ensemble.tokens.search(queries[real], k)
            says = DistributionView(of_tokens, neighbours.values)
            rows.append(tuple(part.cpu() for part in (targets, *neighbours, says.neighbours, says.best)))
        if ensemble.phrases is not None and number % every == 0:
            batch = ensemble.phrases.start(sample["net_input"]["src_tokens"])()
            previous = sample["net_input"]["prev_output_tokens"]
            phrases.add(batch.table, *batch.force_proposals(previous, log_probs, attention, real), targets, first)
    tokens = None
    if ensemble.tokens is not None:
        targets, ids, scores, values, of_neighbours, best = (torch.cat(column) for column in zip(*rows))
        view = CachedView(of_neighbours, best)
        neighbours = Neighbours(ids, scores, values)
        tokens = TokenCache(ensemble.tokens.policy, targets, torch.cat(of_model), neighbours, view)
    return tokens, phrases, torch.cat(of_model)


def _score_tokens(
    cfg: Any, ensemble: RetrievalEnsemble, cache: TokenCache | None
) -> dict[TokenRetrievalSettings, float]:
    if ensemble.tokens is None or cache is None:
        return {}
    given = ensemble.tokens.settings
    unit = ensemble.tokens.retriever.datastore.section.projection is not None
    kinds = (True, False) if unit and not cfg.task.knn_confidence else (given.confidence,)
    if cfg.task.no_knn_confidence:
        kinds = (False,)
    return score_grid(cache, UNIT_TEMPERATURES if unit else TEMPERATURES, kinds, given)


def _references(
    cache: TokenCache | None, settings: TokenRetrievalSettings | None, log_probs: Tensor, weight_max: float
) -> References:
    """Describe the reference tokens with the token memory at these settings."""
    if cache is None or settings is None:
        return References(log_probs, torch.full_like(log_probs, float("-inf")), torch.zeros_like(log_probs), weight_max)
    nearest = cache.first(settings.k)
    return References(log_probs, nearest.retrieved(settings.temperature), nearest.weight(settings), weight_max)


def _crossed(tokens: list[Any], phrases: list[Any], count: int) -> list[tuple[Any, Any]]:
    """`count` pairs, those first whose places in their lists are the best together."""
    pairs = [(i + j, i, j) for i in range(len(tokens)) for j in range(len(phrases))]
    return [(tokens[i], phrases[j]) for _, i, j in sorted(pairs)[:count]]


def _with_settings(
    ensemble: RetrievalEnsemble, token_settings: TokenRetrievalSettings | None, phrase_settings: PhraseSettings | None
) -> RetrievalEnsemble:
    tokens, phrases = ensemble.tokens, ensemble.phrases
    if tokens is not None and token_settings is not None:
        tokens = replace(tokens, settings=token_settings)
    if phrases is not None and phrase_settings is not None:
        phrases = replace(phrases, settings=phrase_settings)
    return ensemble.with_memories(tokens, phrases)


def _silenced(ensemble: RetrievalEnsemble) -> RetrievalEnsemble:
    """Return the ensemble with weights of 0: it translates as the model alone, to the bit."""
    tokens = replace(ensemble.tokens.settings, lambda_=0.0) if ensemble.tokens is not None else None
    phrases = replace(ensemble.phrases.settings, lambda_=0.0) if ensemble.phrases is not None else None
    return _with_settings(ensemble, tokens, phrases)


def _options_of(ensemble: RetrievalEnsemble) -> str:
    """Write the options of fairseq-generate that give an ensemble's settings."""
    options = []
    if ensemble.tokens is not None:
        automatic = automatic_token_settings(ensemble.tokens.retriever.datastore, ensemble.tokens.settings.confidence)
        kind = ("confidence",) if automatic["confidence"] else ()  # the grid has both kinds
        options.append(as_options(ensemble.tokens.settings, (*TUNED_OF_TOKENS, *kind), automatic))
    if ensemble.phrases is not None:
        options.append(as_options(ensemble.phrases.settings, TUNED_OF_PHRASES))
    return " ".join([*options, as_options(ensemble.settings)]).strip()
