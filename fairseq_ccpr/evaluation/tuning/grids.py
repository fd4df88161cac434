"""The grids of settings: how likely each makes the held-out references, and which to continue with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.interpolation import interpolate_references
from fairseq_ccpr.decoding.options import PhraseSettings, TokenRetrievalSettings
from fairseq_ccpr.evaluation.tuning.held_out import CPU, HeldOut
from fairseq_ccpr.evaluation.tuning.phrase_grid import References, phrase_candidates, score_phrase_grid
from fairseq_ccpr.evaluation.tuning.token_grid import (
    NEIGHBOURS,
    TEMPERATURES,
    UNIT_TEMPERATURES,
    candidates,
    likeliest_of_each_kind,
    score_grid,
)
from fairseq_ccpr.evaluation.tuning.worth import Worth

# The lambda that trust starts from: it multiplies odds, which can fall as far as they can rise from here. A weight near 1
# could never fall.
TRUSTED_LAMBDA = 0.5
OF_PHRASES = "lambda of phrases"

Pair = tuple["TokenRetrievalSettings | None", "PhraseSettings | None"]


@dataclass
class Grids:
    """Mean log-likelihoods of the held-out references by settings."""

    tokens: dict[TokenRetrievalSettings, float]
    phrases: dict[PhraseSettings, float]

    @classmethod
    def of(cls, cfg: Any, ensemble: RetrievalEnsemble, text: HeldOut) -> Grids:
        """Score the settings of each memory that there is, those of phrases alongside the likeliest of tokens."""
        tokens = _score_tokens(cfg, ensemble, text)
        if ensemble.phrases is None:
            return cls(tokens, {})
        references = References.of(text, cls._likeliest(tokens), ensemble.settings.lambda_max)
        return cls(tokens, score_phrase_grid(text.phrases, references, ensemble.phrases.on(CPU)))

    def best_pairs(self, count: int) -> list[Pair]:
        """Pick settings of tokens and phrases to decode with, the most promising first."""
        of_tokens: list[Any] = [*candidates(self.tokens, count)] or [None]
        of_phrases: list[Any] = [*phrase_candidates(self.phrases, count)] or [None]
        pairs = [(i + j, i, j) for i in range(len(of_tokens)) for j in range(len(of_phrases))]
        return [(of_tokens[i], of_phrases[j]) for _, i, j in sorted(pairs)[:count]]

    def pairs_for_trust(self, neighbours: Sequence[int]) -> list[Pair]:
        """Pick the likeliest settings of tokens for these k, as far as the grid has them; phrases have learned votes."""
        if not self.tokens:
            return [(None, None)]
        trusted = {one: value for one, value in self.tokens.items() if one.lambda_ == TRUSTED_LAMBDA}
        best: dict[int, TokenRetrievalSettings] = {}
        for settings in sorted(trusted, key=lambda one: -trusted[one]):
            best.setdefault(settings.k, settings)
        chosen = [best[k] for k in neighbours if k in best] or list(best.values())
        return [(settings, None) for settings in chosen]

    def worths(self, text: HeldOut, ensemble: RetrievalEnsemble) -> dict[str, Worth]:
        """Measure on a text the likeliest settings without trust: of tokens with either kind of lambda, and with phrases."""
        most, measured = ensemble.settings.lambda_max, {}
        for name, settings in likeliest_of_each_kind(self.tokens).items():
            alone = References.of(text, settings, most).at(text.rows)
            mixed = interpolate_references(alone.log_probs, (alone.retrieved, alone.weight))
            measured[name] = Worth.of(alone.log_probs, mixed, alone.weight, None)
        if ensemble.phrases is not None:
            references = References.of(text, self._likeliest(self.tokens), most)
            memory = replace(ensemble.phrases.on(CPU), settings=self._likeliest(self.phrases))
            said, weight = text.phrases.vote(memory)
            references = references.at(text.rows)
            of_tokens, of_phrases = references.weights(weight)
            mixed = references.log_likelihood(said, weight)
            tokens = of_tokens if ensemble.tokens is not None else None
            measured[OF_PHRASES] = Worth.of(references.log_probs, mixed, tokens, of_phrases)
        return measured

    @staticmethod
    def _likeliest(grid: dict[Any, float]) -> Any:
        return max(grid, key=lambda one: grid[one], default=None)


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
