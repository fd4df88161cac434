"""Methods that score candidate pairs of sentences, from both sides."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Optional, TypeVar

import numpy as np

from fairseq_ccpr.lab.mining.candidates import Candidates, best_first, best_of_rows
from fairseq_ccpr.lab.mining.encoded_text import EncodedText
from fairseq_ccpr.lab.mining.evidence import Evidence
from fairseq_ccpr.lab.mining.grid import Grid
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.lab.mining.pknn import DECIMALS, Answers
from fairseq_ccpr.lab.mining.threshold import tuned_threshold

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
