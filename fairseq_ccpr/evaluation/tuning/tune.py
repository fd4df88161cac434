"""Choosing the settings of retrieval on a held-out subset: large grids by likelihood, their best few by BLEU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble, TokenMemory
from fairseq_ccpr.decoding.interpolation import ALMOST_ALL
from fairseq_ccpr.decoding.options import TranslationRetrievalConfig
from fairseq_ccpr.decoding.phrase_candidates import PhraseCandidates, SentencePhrases
from fairseq_ccpr.decoding.phrase_memory import PhraseSettings
from fairseq_ccpr.decoding.token_retriever import TokenRetrievalSettings
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.scores import Scores
from fairseq_ccpr.evaluation.translation.test_set import batches, decode
from fairseq_ccpr.evaluation.tuning.phrase_grid import (
    PHRASES,
    TOKENS,
    PhraseCache,
    References,
    as_phrase_options,
    phrase_candidates,
    score_phrase_grid,
)
from fairseq_ccpr.evaluation.tuning.token_grid import (
    NEIGHBOURS,
    TEMPERATURES,
    UNIT_TEMPERATURES,
    TokenCache,
    as_options,
    candidates,
    score_grid,
)


@dataclass
class Tuned:
    """What came of tuning."""

    options: str  # of fairseq-generate, for the best settings
    signature: str  # of that
    scores: dict[str, Scores]  # by name of the system, the base among them
    token_grid: dict[TokenRetrievalSettings, float]  # empty without a token memory
    phrase_grid: dict[PhraseSettings, float]  # beside the best of the token grid; empty without a phrase memory
    grid_seconds: float  # the teacher-forced pass included
    base_seconds: float  # of decoding the same sentences without retrieval


def tune(cfg: Any, task: Any, models: list[Any], count: int) -> Tuned:
    """Choose by likelihood which `count` settings to decode with, and by BLEU which of those to keep.

    1. One teacher-forced pass keeps what model, neighbours and phrases say of each reference token.
    2. The token memory's grid is scored, then the phrase memory's beside the likeliest token settings.
    3. The best settings of the one with the best of the other are decoded with.

    Raises:
        ConfigurationError: a limit of lambda*, or a reward, which the grid does not have.
    """
    if cfg.task.phrase_reward:
        raise ConfigurationError(
            "--phrase-reward is not tuned: leave it out here, or compare some with compare_decoding.py"
        )
    if cfg.task.knn_lambda_max != 1:
        raise ConfigurationError(
            "--knn-lambda-max is not tuned: leave it out here, and add it to what comes out if need be"
        )
    generators = {"base": task.build_base_generator(models, cfg.generation)}
    ensemble = with_all_phrases(task.build_ensemble(models, generators["base"].beam_size))
    start = time.perf_counter()
    tokens, phrases, log_probs = fill_caches(cfg, task, models, ensemble, max(NEIGHBOURS))
    token_grid = _score_tokens(cfg, ensemble, tokens)
    best_tokens: list[TokenRetrievalSettings | None] = [*candidates(token_grid, count)] or [None]
    references = _references(tokens, best_tokens[0], log_probs, ensemble.share_max)
    phrase_grid = {}
    best_phrases: list[PhraseSettings | None] = [None]
    if ensemble.phrases is not None:
        phrase_grid = score_phrase_grid(phrases, references, ensemble.phrases.settings)
        best_phrases = [*phrase_candidates(phrase_grid, count)]
    grid_seconds = time.perf_counter() - start
    chosen = dict(_system(ensemble, *pair) for pair in _crossed(best_tokens, best_phrases, count))
    for name, system in chosen.items():
        generators[name] = task.build_base_generator(models, cfg.generation)
        generators[name].model = system
    decodings = decode(cfg, task, models, generators)
    scores = {name: decodings.scores(name) for name in generators}
    best = max(chosen, key=lambda name: scores[name].bleu)
    base_seconds = decodings.systems["base"].seconds
    options = " ".join([best, *_untuned_options(cfg.task)])
    return Tuned(options, chosen[best].signature(), scores, token_grid, phrase_grid, grid_seconds, base_seconds)


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
    of_model = []
    every = max(1, int(task.dataset(cfg.dataset.gen_subset).tgt_sizes.sum()) // TOKENS)
    for number, sample in enumerate(batches(cfg, task, models)):
        real = sample["target"].ne(task.target_dictionary.pad())
        targets = sample["target"][real]
        log_probs, queries, attention = ensemble.force_decode_models(sample)
        of_model.append(log_probs.gather(2, sample["target"].unsqueeze(2)).squeeze(2)[real].cpu())
        if ensemble.tokens is not None:
            retriever = ensemble.tokens.retriever
            scores, ids = retriever.search(queries[real], k)
            matches = (retriever.values[ids] == targets.unsqueeze(1)) & (ids >= 0)
            rows.append((scores.cpu(), matches.cpu()))
        if ensemble.phrases is not None and number % every == 0:
            memory = ensemble.phrases
            memory.start(sample["net_input"]["src_tokens"])
            previous = sample["net_input"]["prev_output_tokens"]
            first = sum(map(len, of_model)) - len(targets)
            phrases.add(memory.table, *memory.force_outlook(previous, log_probs, attention, real), targets, first)
    tokens = TokenCache(torch.cat(of_model), *(torch.cat(column) for column in zip(*rows))) if rows else None
    return tokens, phrases, torch.cat(of_model)


def with_all_phrases(ensemble: RetrievalEnsemble) -> RetrievalEnsemble:
    """The ensemble with the most phrases that the grid has, retrieved once for all settings."""
    memory = ensemble.phrases
    if memory is None:
        return ensemble
    memory.candidates.retriever.k = max(PHRASES)
    return ensemble.with_memories(ensemble.tokens, memory.with_settings(memory.settings, remember(memory.candidates)))


def remember(candidates: PhraseCandidates) -> Callable[[Tensor], list[SentencePhrases]]:
    """The same candidates, but those of a batch that was asked for before are not retrieved again."""
    known: dict[bytes, list[SentencePhrases]] = {}

    def find(src_tokens: Tensor) -> list[SentencePhrases]:
        key = src_tokens.cpu().numpy().tobytes()
        if key not in known:
            known[key] = candidates(src_tokens)
        return known[key]

    return find


def _untuned_options(given: TranslationRetrievalConfig) -> list[str]:
    """Of the options that are not tuned, those that differ from their defaults and shaped what was."""
    defaults, shaping = (
        TranslationRetrievalConfig(),
        ("phrase_threshold", "phrase_segmentation", "retrieval_lambda_max"),
    )
    values = {name: getattr(given, name) for name in shaping if getattr(given, name) != getattr(defaults, name)}
    return [f"--{name.replace('_', '-')} {value}" for name, value in values.items()]


def _score_tokens(
    cfg: Any, ensemble: RetrievalEnsemble, cache: TokenCache | None
) -> dict[TokenRetrievalSettings, float]:
    if ensemble.tokens is None or cache is None:
        return {}
    retriever = ensemble.tokens.retriever
    unit = retriever.projection is not None
    kinds = (True, False) if unit and not cfg.task.knn_confidence else (retriever.settings.confidence,)
    if cfg.task.no_knn_confidence:
        kinds = (False,)
    return score_grid(cache, UNIT_TEMPERATURES if unit else TEMPERATURES, kinds, cfg.task.knn_min_similarity)


def _references(
    cache: TokenCache | None, settings: TokenRetrievalSettings | None, log_probs: Tensor, share_max: float
) -> References:
    """The reference tokens with the token memory at these settings."""
    if cache is None or settings is None:
        return References(log_probs, torch.full_like(log_probs, float("-inf")), torch.zeros_like(log_probs), share_max)
    retrieved, factor = cache.opinion(settings.k, settings.temperature, settings.confidence, settings.min_similarity)
    return References(log_probs, retrieved, (settings.lambda_ * factor).clamp_max(ALMOST_ALL), share_max)


def _crossed(tokens: list[Any], phrases: list[Any], count: int) -> list[tuple[Any, Any]]:
    """`count` pairs, those first whose places in their lists are the best together."""
    pairs = [(i + j, i, j) for i in range(len(tokens)) for j in range(len(phrases))]
    return [(tokens[i], phrases[j]) for _, i, j in sorted(pairs)[:count]]


def _system(
    ensemble: RetrievalEnsemble, token_settings: TokenRetrievalSettings | None, phrase_settings: PhraseSettings | None
) -> tuple[str, RetrievalEnsemble]:
    """The options of these settings, and the ensemble with them."""
    tokens, phrases, options = ensemble.tokens, ensemble.phrases, []
    if tokens is not None and token_settings is not None:
        options.append(as_options(token_settings, tokens.retriever.projection is not None))
        tokens = TokenMemory(tokens.capture, tokens.retriever.with_settings(token_settings))
    if phrases is not None and phrase_settings is not None:
        options.append(as_phrase_options(phrase_settings))
        phrases = phrases.with_settings(phrase_settings)
    return " ".join(options), ensemble.with_memories(tokens, phrases)
