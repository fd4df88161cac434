"""Logistic regression on all evidence for a pair: margin, votes of fragments both ways, MaxSim, lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fairseq_ccpr.lab.mining.evidence import Evidence
from fairseq_ccpr.lab.mining.f1 import decide, score
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.pair_method import PairMatcher, PairMethod
from fairseq_ccpr.lab.mining.two_way import TwoWayMethod
from fairseq_ccpr.settings import option

LEARNED_FROM = 8  # candidates of each labelled source, those of the highest margins
RIDGE = 1.0
STEPS = 30


@dataclass(frozen=True)
class LogisticMethod(PairMethod):
    """Matches by the probability that a pair is one, each sentence once; its five weights are learned from labels."""

    name: ClassVar[str] = "logistic"
    window: ClassVar[int] = TwoWayMethod.window
    stride: ClassVar[int] = TwoWayMethod.stride

    margin: float = option(1.0, "weight of the margin")
    votes: float = option(1.0, "weight of the votes of fragments, both ways")
    alike: float = option(1.0, "weight of the margin of MaxSim")
    length: float = option(-1.0, "weight of the difference in length")
    bias: float = option(-3.0, "what is added")
    # Not a half: where F1 counts, a doubtful pair is worth giving. Chosen on office and bible.
    threshold: float = option(0.3, "the probability below which there is no pair")

    def score(self, evidence: Evidence) -> np.ndarray:
        """Compute the probability, sigmoid(w f + b)."""
        known = features(evidence)
        weights = np.array([self.margin, self.votes, self.alike, self.length])
        return 1 / (1 + np.exp(-(known @ weights + self.bias)))

    def tune_by(self, matcher: PairMatcher, labels: Labels) -> tuple[LogisticMethod, float]:
        """Learn the weights; the cut stays as it is, since that takes more labels than weights do."""
        pairs, evidence = matcher.hiding(labels.rows, labels.hidden)
        margins = evidence.margins()
        order = np.lexsort((-margins, pairs.rows))
        chosen = order[np.arange(len(order)) - np.searchsorted(pairs.rows, pairs.rows) < LEARNED_FROM]
        right = (pairs.columns == labels.gold[pairs.rows])[chosen]
        margin, votes, alike, length, bias = fit(features(evidence)[chosen], right).tolist()
        learned = LogisticMethod(margin=margin, votes=votes, alike=alike, length=length, bias=bias)
        answers = matcher.scored_by(learned)(labels.rows, labels.hidden)
        return learned, score(decide(answers, learned.threshold), labels.gold).f1


def features(evidence: Evidence) -> np.ndarray:
    """Collect the features of each pair: float64 [C, 4]; 0 where there is no margin."""
    values = [evidence.margins(), evidence.mutual_votes(), evidence.alike_margins(), np.abs(evidence.lengths)]
    known = np.stack(values, axis=1)
    return np.where(np.isfinite(known), known, 0)


def fit(values: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Fit a logistic regression by Newton's method, with a ridge of 1 on the weights of standardised features.

    Args:
        values: [n, m].
        right: bool [n].

    Returns:
        The weights of the features as they are, and the bias: float64 [m + 1].
    """
    means, spreads = values.mean(axis=0), values.std(axis=0) + 1e-9
    inputs = np.column_stack([(values - means) / spreads, np.ones(len(values))])
    ridge = np.diag([*[RIDGE] * values.shape[1], 1e-3])  # a bias of its own, but a finite one
    weights = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-inputs @ weights))
        gradient = inputs.T @ (p - right) + ridge @ weights
        curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + ridge
        weights -= np.linalg.solve(curvature, gradient)
    scaled = weights[:-1] / spreads
    return np.append(scaled, weights[-1] - scaled @ means)
