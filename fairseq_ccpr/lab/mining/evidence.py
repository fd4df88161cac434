"""Evidence on candidate pairs, from the source's side and from the target's."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from fairseq_ccpr.lab.mining.candidates import Candidates, mean_of_highest
from fairseq_ccpr.lab.mining.neighbours import SearchableText
from fairseq_ccpr.lab.mining.pair_votes import fragment_votes

NEAREST = 4  # that a neighbourhood is made of


@dataclass
class Evidence:
    """Evidence on C candidate pairs (x, y); arrays are float64 [C].

    Attributes:
        spread: the mean of 1 - cos(x, y) over all candidates, at least 1e-3; None where fragments do not vote.
        cosines: cos(x, y).
        around: m_x, the mean cosine of x and its nearest.
        back_around: m_y, likewise.
        votes: P(y | x), see `fragment_votes`; 0 where fragments do not vote.
        back_votes: P(x | y).
        alike: the mean of cos(x, y) and of MaxSim, the cosine of a fragment's nearest, over those of x and over those of y.
        alike_around: its mean over x and the most alike.
        back_alike_around: likewise for y.
        lengths: log of the ratio of lengths, less what it is for all sentences.
    """

    spread: float | None
    cosines: np.ndarray
    around: np.ndarray
    back_around: np.ndarray
    votes: np.ndarray
    back_votes: np.ndarray
    alike: np.ndarray
    alike_around: np.ndarray
    back_alike_around: np.ndarray
    lengths: np.ndarray

    @classmethod
    def gather(cls, pairs: Candidates, sources: SearchableText, targets: SearchableText, voting: bool) -> Evidence:
        """Look at all pairs, from both sides.

        Args:
            pairs: the candidates.
            sources: their rows.
            targets: their columns.
            voting: whether their fragments vote.
        """
        turned, order = pairs.by_column(targets.sentences)
        back = order.argsort()
        nothing = np.zeros(len(pairs.rows))
        votes = back_votes = alike = nothing
        spread = None
        if voting:
            spread = max(1e-3, 1 - float(pairs.cosines.mean())) if len(pairs.cosines) else 1.0
            votes, nearest = fragment_votes(pairs, sources, targets, spread)
            back_votes, back_nearest = (seen[back] for seen in fragment_votes(turned, targets, sources, spread))
            alike = (pairs.cosines + (nearest + back_nearest) / 2) / 2
        return cls(
            spread, pairs.cosines,
            _around(pairs, pairs.cosines), _around(turned, turned.cosines)[back],
            votes, back_votes,
            alike, _around(pairs, alike), _around(turned, alike[order])[back],
            _log_ratios(pairs, sources.lengths, targets.lengths),
        )  # fmt: skip

    def hiding(
        self, pairs: Candidates, places: np.ndarray, sources: SearchableText, targets: SearchableText
    ) -> Evidence:
        """Recompute the source's side after some pairs were removed; the target's side is unchanged.

        Args:
            pairs: what is left, C'.
            places: int64 [C'], where each stands here.
            sources: as for `gather`.
            targets: as for `gather`.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spread"}
        left = Evidence(self.spread, **{name: value[places] for name, value in values.items()})
        votes = left.votes if self.spread is None else fragment_votes(pairs, sources, targets, self.spread)[0]
        around, alike_around = _around(pairs, left.cosines), _around(pairs, left.alike)
        return replace(left, around=around, votes=votes, alike_around=alike_around)

    def margins(self) -> np.ndarray:
        """Compute how much nearer a pair is than its neighbourhood, cos(x, y) / ((m_x + m_y) / 2)."""
        return _ratios(self.cosines, self.around, self.back_around)

    def alike_margins(self) -> np.ndarray:
        """Compute how much more alike a pair is than its neighbourhood."""
        return _ratios(self.alike, self.alike_around, self.back_alike_around)

    def mutual_votes(self) -> np.ndarray:
        """Compute the geometric mean of P(y | x) and P(x | y)."""
        return np.sqrt(self.votes * self.back_votes)


def _around(pairs: Candidates, values: np.ndarray) -> np.ndarray:
    return mean_of_highest(values, pairs.rows, NEAREST, len(pairs.sentences))[pairs.rows]


def _ratios(values: np.ndarray, around: np.ndarray, back_around: np.ndarray) -> np.ndarray:
    """Divide by the mean of both; -inf where a neighbourhood is as near as its opposite, and there is no ratio."""
    both = (around + back_around) / 2
    return np.where(both > 0, values / np.where(both > 0, both, 1), -np.inf)


def _log_ratios(pairs: Candidates, source_lengths: np.ndarray, target_lengths: np.ndarray) -> np.ndarray:
    """Compute log(length of x / length of y), less the ratio of the mean lengths."""
    sources, targets = (np.log(np.maximum(lengths, 1)) for lengths in (source_lengths, target_lengths))
    return sources[pairs.sentences[pairs.rows]] - targets[pairs.columns] - (sources.mean() - targets.mean())
