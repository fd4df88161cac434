"""Choosing how retrieval counts on a held-out subset: settings by likelihood, trust learned, the best few by BLEU."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fairseq_ccpr.decoding.combiners import KINDS
from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings, automatic_token_settings
from fairseq_ccpr.decoding.phrase_votes import PhraseVotes
from fairseq_ccpr.decoding.trust import HIDDEN, LearnedTrust, Trust
from fairseq_ccpr.decoding.trust_file import TrustDescription, needs_of
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.comparison import BASE
from fairseq_ccpr.evaluation.translation.scores import TranslationScores
from fairseq_ccpr.evaluation.translation.test_set import batches, decode
from fairseq_ccpr.evaluation.tuning.held_out import CPU, HeldOut, force_decode_text
from fairseq_ccpr.evaluation.tuning.other_text import OtherText
from fairseq_ccpr.evaluation.tuning.phrase_grid import References, phrase_candidates, score_phrase_grid
from fairseq_ccpr.evaluation.tuning.token_grid import (
    NEIGHBOURS,
    TEMPERATURES,
    UNIT_TEMPERATURES,
    Gain,
    candidates,
    gain,
    likeliest_of_each_kind,
    score_grid,
)
from fairseq_ccpr.evaluation.tuning.trust_training import Worth, learn, training_text, worth
from fairseq_ccpr.evaluation.tuning.vote_training import VotingText, learn_votes
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import as_options, automatic_values

# Fields that the grids have: written into FILE even where they are at their default.
TUNED_OF_TOKENS = ("k", "lambda_", "temperature")
TUNED_OF_PHRASES = ("lambda_",)
TRUSTED_NEIGHBOURS = (8, 32)  # k that trust is learned with: the more, the better and the slower
# The lambda that trust starts from: it multiplies odds, which can fall as far as they can rise from here. A weight near 1
# could never fall.
TRUSTED_LAMBDA = 0.5
LEAST_TOKENS = 5000  # of the held-out text, for a hidden layer
SAMPLED = 3  # one batch in so many is decoded
BATCHES = 12  # at least, so that those are of all lengths


@dataclass
class Candidate:
    """Settings, with trust or without."""

    ensemble: RetrievalEnsemble
    texts: dict[str, Worth] = field(default_factory=dict)  # of trust, by text
    learned: str = ""  # what of it was learned

    @property
    def name(self) -> str:
        """Its options, and what was learned."""
        return f"{options_of(self.ensemble)} {self.learned}".strip()


@dataclass
class Tuned:
    """What came of tuning."""

    best: Candidate
    helps: bool  # whether it is better than the model alone; if not, the interpolation weights are 0
    scores: dict[str, TranslationScores]  # by name of the system, the base among them; of a sample of the subset
    token_grid: dict[TokenRetrievalSettings, float]  # empty without a token memory
    phrase_grid: dict[PhraseSettings, float]  # beside the best of the token grid; empty without a phrase memory
    seconds: float  # of everything
    base_seconds: float  # of decoding the whole subset without retrieval
    decoded: float  # how often the subset was decoded, all systems together
    linear: bool  # whether there were too few tokens for a hidden layer
    gains: dict[
        str, dict[str, Gain]
    ]  # of the likeliest fixed lambda and lambda*, by text; empty without a token memory

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The best settings, as `datastore.tuned` keeps them."""
        ensemble = self.best.ensemble
        kept = [memory.settings for memory in (ensemble.tokens, ensemble.phrases) if memory is not None]
        return {one.PREFIX: automatic_values(one) for one in (*kept, ensemble.settings)}

    @property
    def options(self) -> str:
        """Options of fairseq-generate for them, but for trust."""
        return options_of(self.best.ensemble)

    def description(self, parts: Any) -> TrustDescription:
        """Describe the trust of the best, for the parts of the datastore."""
        trust = self.best.ensemble.trust
        assert trust is not None
        keys = {name: part.keys_fingerprint for name, part in parts.items()}
        texts = {name: one._asdict() for name, one in self.best.texts.items()}
        return TrustDescription(trust.KIND, trust.arguments(), needs_of(parts), keys, self.settings, texts)


def tune(system: System, also: list[OtherText], kind: str | None, count: int) -> Tuned:
    """Choose by likelihood what to decode with, and by BLEU what of that to keep.

    1. A teacher-forced pass over each text keeps what model, neighbours and phrases say of each reference token.
    2. The token memory's grid is scored, then the phrase memory's together with the likeliest token settings.
    3. The phrases' votes are learned, and trust, on top of the likeliest settings for few neighbours, and for many.
    4. A sample of the subset is decoded with each candidate, and with the model alone. The best by BLEU is chosen; where
       none is better than the model alone, the interpolation weights become 0.

    Args:
        system: with the subset that is held out as `--gen-subset`.
        also: text of other domains, which is to suffer no harm.
        kind: of trust, see `KINDS`; None: settings alone.
        count: of candidates, without trust.

    Raises:
        ConfigurationError: no datastore.
    """
    cfg, task, ensemble = system.cfg, system.task, system.ensemble
    if ensemble is None:
        raise ConfigurationError("there is nothing to tune without a datastore: give --datastore DIR")
    task.load_dataset(cfg.dataset.gen_subset)
    samples = list(batches(cfg, task, system.models, at_least=BATCHES))
    start = time.perf_counter()
    if ensemble.phrases is not None:  # one search serves all settings
        ensemble = ensemble.with_memories(ensemble.tokens, ensemble.phrases.remembering())
    home = force_decode_text(cfg.dataset.gen_subset, samples, ensemble, max(NEIGHBOURS))
    grids = _Grids.of(cfg, ensemble, home)
    texts = [home, *(force_decode_text(one.name, one.samples(system), ensemble, max(NEIGHBOURS)) for one in also)]
    if kind is None:
        tried = [Candidate(_with_settings(ensemble, *pair)) for pair in grids.best_pairs(count)]
    else:
        tried = [_with_trust(kind, _with_settings(ensemble, *pair), texts) for pair in grids.pairs_for_trust()]
        if ensemble.tokens is None:  # phrases alone are often best as their votes have them
            tried.append(_with_votes(tried[0].ensemble, texts))
    sample = samples[::SAMPLED]
    scores, base_seconds = _decode(system, tried, sample)
    winner = max(tried, key=lambda one: scores[one.name].bleu)
    helps = scores[winner.name].bleu > scores[BASE].bleu
    tokens, of_sample = (sum(int(one["ntokens"]) for one in some) for some in (samples, sample))
    return Tuned(
        winner if helps else Candidate(_silenced(winner.ensemble)), helps, scores, grids.tokens, grids.phrases,
        time.perf_counter() - start, base_seconds * tokens / of_sample, len(scores) * of_sample / tokens,
        linear=kind == LearnedTrust.KIND and _is_small(home), gains=_gains(grids.tokens, texts),
    )  # fmt: skip


def _gains(grid: dict[TokenRetrievalSettings, float], texts: list[HeldOut]) -> dict[str, dict[str, Gain]]:
    """Measure what a fixed lambda and lambda* bring each text, to compare with trust."""
    chosen = likeliest_of_each_kind(grid).items()
    of_tokens = [(text.name, text.tokens, text.log_probs) for text in texts if text.tokens is not None]
    return {name: {kind: gain(cache, model, one) for kind, one in chosen} for name, cache, model in of_tokens}


def _decode(system: System, tried: list[Candidate], samples: list[Any]) -> tuple[dict[str, TranslationScores], float]:
    """Decode batches with candidates and the model alone: scores by name, and the seconds of the latter."""
    generators = {BASE: system.generator(retrieve=False)}
    for candidate in tried:
        generators[candidate.name] = system.generator(retrieve=False)
        generators[candidate.name].model = candidate.ensemble
    decodings = decode(system.cfg, system.task, system.models, generators, samples)
    return {name: decodings.scores(name) for name in generators}, decodings.systems[BASE].seconds


def _with_trust(kind: str, ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> Candidate:
    """Learn trust on top of an ensemble's settings; the first text is the datastore's domain."""
    known: dict[str, Any] = {"tokens": ensemble.tokens is not None, "phrases": ensemble.phrases is not None}
    if kind == LearnedTrust.KIND:
        known["hidden"] = 0 if _is_small(texts[0]) else HIDDEN
    elif ensemble.tokens is not None:
        settings = ensemble.tokens.settings
        known |= {"neighbours": settings.k, "temperature": settings.temperature}
    trust: Trust = KINDS[kind](**known)
    if ensemble.phrases is not None and isinstance(trust, LearnedTrust):
        trust.votes = _learned_votes(ensemble, texts)
        ensemble = ensemble.with_memories(ensemble.tokens, replace(ensemble.phrases, votes=trust.votes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        rows = [training_text(trust, text, number > 0, ensemble) for number, text in enumerate(texts)]
        learn(trust, rows)
    worths = {text.name: worth(trust, text) for text in rows}
    device = next(ensemble.models[0].parameters()).device
    trust = trust.requires_grad_(False).to(device)
    return Candidate(ensemble.with_memories(ensemble.tokens, ensemble.phrases, trust), worths, f"trust:{kind}")


def _with_votes(ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> Candidate:
    """Leave the weights to an ensemble's learned votes: trust is a network of zeros."""
    assert ensemble.phrases is not None
    trust = LearnedTrust(tokens=False, phrases=True, hidden=0)
    trust.votes = ensemble.phrases.votes
    worths = {text.name: worth(trust, training_text(trust, text, False, ensemble)) for text in texts}
    trust = trust.requires_grad_(False).to(ensemble.phrases.device)
    return Candidate(ensemble.with_memories(None, ensemble.phrases, trust), worths, "votes")


def _learned_votes(ensemble: RetrievalEnsemble, texts: list[HeldOut]) -> PhraseVotes:
    """Learn how much each phrase counts, beside the token memory's settings."""
    assert ensemble.phrases is not None
    settings = ensemble.tokens.settings if ensemble.tokens is not None else None
    of_texts = [
        VotingText(text.phrases, text.sentences, _references(text, settings, ensemble.settings.lambda_max))
        for text in texts
    ]
    return learn_votes(ensemble.phrases.on(CPU), of_texts).to(ensemble.phrases.device)


def _is_small(text: HeldOut) -> bool:
    return len(text.targets) < LEAST_TOKENS


@dataclass
class _Grids:
    """Mean log-likelihoods of the held-out references by settings."""

    tokens: dict[TokenRetrievalSettings, float]
    phrases: dict[PhraseSettings, float]

    @classmethod
    def of(cls, cfg: Any, ensemble: RetrievalEnsemble, text: HeldOut) -> _Grids:
        tokens = _score_tokens(cfg, ensemble, text)
        if ensemble.phrases is None:
            return cls(tokens, {})
        best = max(tokens, key=lambda one: tokens[one]) if tokens else None
        references = _references(text, best, ensemble.settings.lambda_max)
        return cls(tokens, score_phrase_grid(text.phrases, references, ensemble.phrases.on(CPU)))

    def best_pairs(self, count: int) -> list[tuple[TokenRetrievalSettings | None, PhraseSettings | None]]:
        """Pick settings of tokens and phrases to decode with, the most promising first."""
        of_tokens: list[Any] = [*candidates(self.tokens, count)] or [None]
        of_phrases: list[Any] = [*phrase_candidates(self.phrases, count)] or [None]
        pairs = [(i + j, i, j) for i in range(len(of_tokens)) for j in range(len(of_phrases))]
        return [(of_tokens[i], of_phrases[j]) for _, i, j in sorted(pairs)[:count]]

    def pairs_for_trust(self) -> list[tuple[TokenRetrievalSettings | None, PhraseSettings | None]]:
        """Pick the likeliest settings of tokens for few neighbours and for many; phrases have learned votes."""
        if not self.tokens:
            return [(None, None)]
        trusted = {one: value for one, value in self.tokens.items() if one.lambda_ == TRUSTED_LAMBDA}
        best: dict[int, TokenRetrievalSettings] = {}
        for settings in sorted(trusted, key=lambda one: -trusted[one]):
            best.setdefault(settings.k, settings)
        chosen = [best[k] for k in TRUSTED_NEIGHBOURS if k in best] or list(best.values())
        return [(settings, None) for settings in chosen]


def _score_tokens(cfg: Any, ensemble: RetrievalEnsemble, text: HeldOut) -> dict[TokenRetrievalSettings, float]:
    if ensemble.tokens is None or text.tokens is None:
        return {}
    given = ensemble.tokens.settings
    unit = ensemble.tokens.retriever.datastore.section.projection is not None
    kinds = (True, False) if unit and not cfg.task.knn_confidence else (given.confidence,)
    if cfg.task.no_knn_confidence:
        kinds = (False,)
    neighbours = NEIGHBOURS if cfg.task.knn_k is None else (given.k,)
    temperatures: tuple[float, ...] = UNIT_TEMPERATURES if unit else TEMPERATURES
    if cfg.task.knn_temperature is not None:
        temperatures = (given.temperature,)
    return score_grid(text.tokens, text.log_probs, neighbours, temperatures, kinds, given)


def _references(text: HeldOut, settings: TokenRetrievalSettings | None, weight_max: float) -> References:
    """Describe the reference tokens with the token memory at these settings."""
    if text.tokens is None or settings is None:
        nothing = torch.full_like(text.log_probs, float("-inf"))
        return References(text.log_probs, nothing, torch.zeros_like(text.log_probs), weight_max)
    nearest = text.tokens.first(settings.k)
    return References(text.log_probs, nearest.retrieved(settings.temperature), nearest.weight(settings), weight_max)


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


def options_of(ensemble: RetrievalEnsemble) -> str:
    """Write the options of fairseq-generate that give an ensemble's settings."""
    options = []
    if ensemble.tokens is not None:
        automatic = automatic_token_settings(ensemble.tokens.retriever.datastore, ensemble.tokens.settings.confidence)
        kind = ("confidence",) if automatic["confidence"] else ()  # the grid has both kinds
        options.append(as_options(ensemble.tokens.settings, (*TUNED_OF_TOKENS, *kind), automatic))
    if ensemble.phrases is not None:
        options.append(as_options(ensemble.phrases.settings, TUNED_OF_PHRASES))
    return " ".join([*options, as_options(ensemble.settings)]).strip()
