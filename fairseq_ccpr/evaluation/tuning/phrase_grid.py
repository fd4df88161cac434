"""How likely a phrase datastore makes the references, at every point of a grid of settings, from one pass over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from fairseq_ccpr.decoding.interpolation import limit_shares
from fairseq_ccpr.decoding.phrase_continuation import Outlook, PhraseTable
from fairseq_ccpr.decoding.phrase_memory import PhraseSettings

PHRASES = (4, 8, 16)
TEMPERATURES = (0.02, 0.05, 0.1)
ENTERING = (0.2, 0.5, 1.0)
LAMBDAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
TOKENS = 8000  # of the references, about: there are hundreds of phrases to weigh at each, for every point of the grid


@dataclass
class PhraseCache:
    """What a teacher-forced pass leaves behind: of some batches their phrases, and what each would write at every token."""

    batches: list[tuple[PhraseTable, Outlook, Tensor, Tensor]] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def add(self, table: PhraseTable, outlook: Outlook, sentences: Tensor, targets: Tensor, first: int) -> None:
        """A batch of n tokens: their sentences in the table, the reference tokens, int64 [n] each; how many came before."""
        self.batches.append((table, outlook, sentences, targets))
        self.rows.append(torch.arange(first, first + len(targets)))

    def opinion(self, settings: PhraseSettings) -> tuple[Tensor, Tensor]:
        """log p_phr of the n reference tokens kept, and min(1, Z), fp32 [n] each; of lambda nothing is asked."""
        opinions = []
        for table, outlook, sentences, targets in self.batches:
            weights = table.weights(settings.k, settings.temperature, settings.min_similarity)
            found = outlook.continuation(table, sentences, weights, settings.enter, settings.k)
            others = found.values != targets.unsqueeze(1)
            opinions.append((found.log_probs.masked_fill(others, float("-inf")).amax(dim=1), found.mass.clamp_max(1.0)))
        retrieved, mass = (torch.cat(column) for column in zip(*opinions))
        return retrieved, mass


@dataclass(frozen=True)
class References:
    """N reference tokens as the model, and a token memory or none, see them."""

    log_probs: Tensor  # fp32 [N], log p_NMT
    retrieved: Tensor  # fp32 [N], log p_tok
    share: Tensor  # fp32 [N], lambda_tok*
    share_max: float  # Lambda_max

    def at(self, rows: Tensor) -> References:
        """Some of the tokens."""
        return References(self.log_probs[rows], self.retrieved[rows], self.share[rows], self.share_max)

    def log_likelihood(self, retrieved: Tensor, phrase_share: Tensor) -> float:
        """Mean log p with a phrase memory that says log p_phr and has the share lambda_phr*, fp32 [N] each."""
        token_share, phrase_share = limit_shares(self.share, phrase_share, self.share_max)
        terms = [torch.log1p(-token_share - phrase_share) + self.log_probs, token_share.log() + self.retrieved]
        return float(torch.stack([*terms, phrase_share.log() + retrieved]).logsumexp(dim=0).mean())


def grid_of(settings: PhraseSettings) -> Iterator[PhraseSettings]:
    """The points of the grid but for lambda; whatever has no grid is as in `settings`."""
    for k, temperature, enter in product(PHRASES, TEMPERATURES, ENTERING):
        yield replace(settings, k=k, temperature=temperature, enter=enter)


def score_phrase_grid(
    cache: PhraseCache, references: References, settings: PhraseSettings
) -> dict[PhraseSettings, float]:
    """Mean log-likelihood of the references at every point of the grid."""
    grid = {}
    references = references.at(torch.cat(cache.rows))
    for point in grid_of(settings):
        retrieved, mass = cache.opinion(point)
        for lambda_ in LAMBDAS:
            grid[replace(point, lambda_=lambda_)] = references.log_likelihood(retrieved, lambda_ * mass)
    return grid


def phrase_candidates(grid: dict[PhraseSettings, float], count: int) -> list[PhraseSettings]:
    """The best points of the grid that differ in lambda or in how readily a phrase begins.

    On these, likelihood and BLEU disagree the most.
    """
    best: dict[tuple[float, float], PhraseSettings] = {}
    for settings in sorted(grid, key=lambda s: -grid[s]):
        best.setdefault((settings.lambda_, settings.enter), settings)
    return list(best.values())[:count]


def as_phrase_options(settings: PhraseSettings) -> str:
    """Settings in the form of fairseq-generate's options.

    >>> as_phrase_options(PhraseSettings(4, 0.5, 0.05, 0.3, 0.2))
    '--phrase-k 4 --phrase-lambda 0.5 --phrase-temperature 0.05 --phrase-min-similarity 0.3 --phrase-enter 0.2'
    """
    options = (
        f"--phrase-k {settings.k} --phrase-lambda {settings.lambda_:g} --phrase-temperature {settings.temperature:g} "
        f"--phrase-min-similarity {settings.min_similarity:g} --phrase-enter {settings.enter:g}"
    )
    gate = f" --phrase-gate {settings.gate}" if settings.gate != PhraseSettings.gate else ""
    return options + gate + ("" if settings.coverage else " --no-phrase-coverage")
