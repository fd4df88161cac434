"""Methods that score pairs of candidates: margin, highest similarity, two-way votes, logistic regression."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Optional, TypeVar

import numpy as np

from fairseq_ccpr.lab.mining.candidates import NEAREST, Candidates, Evidence, best_first, best_of_rows
from fairseq_ccpr.lab.mining.encoded_text import WINDOW, EncodedText
from fairseq_ccpr.lab.mining.f1 import decide, score
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.method import Grid, tuned_threshold
from fairseq_ccpr.lab.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.lab.mining.pknn import DECIMALS, Answers
from fairseq_ccpr.settings import option

Method = TypeVar("Method", bound="PairMethod")
View = tuple[int, Optional[int], int]  # candidates, window, stride: methods of the same see the same of a pair


@dataclass(frozen=True)
class PairMethod:
    """Scores the pairs of which either is among the nearest of the other; see `MiningMethod`. A subclass has the score.

    Attributes:
        candidates: nearest sentences in either direction that are scored.
        one_to_one: whether a sentence may be in one pair only; otherwise each source takes the best target.
    """

    name: ClassVar[str]
    centred: ClassVar[bool] = True
    candidates: ClassVar[int] = 16
    one_to_one: ClassVar[bool] = True
    window: ClassVar[int | None] = None
    stride: ClassVar[int] = 1

    threshold: float

    @property
    def view(self) -> View:
        """Return the settings that decide which pairs are scored, and on which evidence."""
        return self.candidates, self.window, self.stride

    def keys(self, text: EncodedText) -> SentenceKeys:
        """Take a key per sentence, for those that have words."""
        return text.sentence_keys()

    def matcher(self, sources: SearchableText, targets: SearchableText) -> PairMatcher:
        """Find the candidates, gather what is known of each, and match."""
        return PairMatcher(self, sources, targets)

    def score(self, evidence: Evidence) -> np.ndarray:
        """Score C pairs, float64 [C]; -inf for what cannot be one."""
        raise NotImplementedError

    def tune(
        self: Method, sources: SearchableText, targets: SearchableText, labels: Labels, grid: Grid
    ) -> tuple[Method, float]:
        """Choose settings, whatever the grid has; see `tune_by`."""
        return self.tune_by(self.matcher(sources, targets), labels)

    def tune_by(self: Method, matcher: PairMatcher, labels: Labels) -> tuple[Method, float]:
        """Choose the threshold by labelled sources among all that a matcher of this method has seen."""
        answers = matcher(labels.rows, labels.hidden)
        threshold, f1 = tuned_threshold(answers, labels.gold)
        return replace(self, threshold=threshold), f1


class PairMatcher:
    """Matches by the scores of candidate pairs; see `Matcher`.

    Args:
        method: that scores them.
        sources: the rows of pairs.
        targets: their columns.

    Attributes:
        pairs: all candidates.
        evidence: on them.
        answers: of all sources.
    """

    def __init__(self, method: PairMethod, sources: SearchableText, targets: SearchableText) -> None:
        self.method, self.sources, self.targets = method, sources, targets
        self.pairs = Candidates.find(sources, targets, method.candidates)
        self.evidence = Evidence.gather(self.pairs, sources, targets, method.window is not None)
        self.answers = self._match()

    def scored_by(self, method: PairMethod) -> PairMatcher:
        """Score the same pairs by another method, or other settings; its view must be the same."""
        other = copy(self)
        other.method = method
        other.answers = other._match()
        return other

    def _match(self) -> Answers:
        scores = self.method.score(self.evidence).round(DECIMALS)
        if self.method.one_to_one:
            return best_first(self.pairs, scores, self.targets.sentences)
        return best_of_rows(self.pairs, scores)

    def __call__(self, rows: np.ndarray, hidden: np.ndarray) -> Answers:
        """Look the answers up; where a target is hidden, score the others again, as the source then sees them.

        If one to one, the source takes the best target that no other source has a better claim to.
        """
        answers = Answers(self.answers.partners[rows], self.answers.scores[rows])
        asked = np.flatnonzero(hidden >= 0)
        if len(asked):
            pairs, evidence = self.hiding(rows[asked], hidden[asked])
            scores = self.method.score(evidence).round(DECIMALS)
            if self.method.one_to_one:
                scores[self._taken(pairs, scores)] = -np.inf
            other = best_of_rows(pairs, scores)
            answers.partners[asked], answers.scores[asked] = other.partners, other.scores
        return answers

    def hiding(self, rows: np.ndarray, hidden: np.ndarray) -> tuple[Candidates, Evidence]:
        """Gather the candidates of some sources, int64 [n], without what is hidden from each (-1: nothing), int64 [n]."""
        pairs, places = self.pairs.of(rows, hidden)
        return pairs, self.evidence.hiding(pairs, places, self.sources, self.targets)

    def _taken(self, pairs: Candidates, scores: np.ndarray) -> np.ndarray:
        """Tell of which pairs the target is the answer of another source, with at least that score: bool [C]."""
        holders = np.full(self.targets.sentences, -1)
        answered = np.flatnonzero(self.answers.partners >= 0)
        holders[self.answers.partners[answered]] = answered
        holder = holders[pairs.columns]
        other = (holder >= 0) & (holder != pairs.sentences[pairs.rows])
        return other & (self.answers.scores[holder] >= scores)


@dataclass(frozen=True)
class MarginMethod(PairMethod):
    """Matches each source with the target of the highest margin, whatever other sources do: "forward"."""

    name: ClassVar[str] = "margin"
    candidates: ClassVar[int] = NEAREST + 1  # so that a neighbourhood is whole where a partner is taken out
    one_to_one: ClassVar[bool] = False

    threshold: float = option(1.0, "the margin below which there is no pair")

    def score(self, evidence: Evidence) -> np.ndarray:
        """Take the margin."""
        return evidence.margins()


@dataclass(frozen=True)
class MaxMethod(MarginMethod):
    """Matches the pairs of the highest margins first, each sentence once: "max"."""

    name: ClassVar[str] = "max"
    one_to_one: ClassVar[bool] = True


STRIDE = WINDOW  # words: fragments that overlap by half do no better


@dataclass(frozen=True)
class TwoWayMethod(PairMethod):
    """Matches by sqrt(P(y | x) P(x | y)), each sentence once."""

    name: ClassVar[str] = "two-way"
    window: ClassVar[int] = WINDOW
    stride: ClassVar[int] = STRIDE

    threshold: float = option(0.5, "the score below which there is no pair")

    def score(self, evidence: Evidence) -> np.ndarray:
        """Take the geometric mean of both probabilities."""
        return evidence.mutual_votes()


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
