"""Labelled sentences with vectors: methods are tuned and tested on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fairseq_ccpr.lab.mining.centring import centred
from fairseq_ccpr.lab.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.lab.mining.f1 import decide, score
from fairseq_ccpr.lab.mining.fragments import fragment_text
from fairseq_ccpr.lab.mining.grid import Grid
from fairseq_ccpr.lab.mining.labelled import LabelledText, Labels, with_negatives
from fairseq_ccpr.lab.mining.method import Matcher, MiningMethod
from fairseq_ccpr.lab.mining.neighbours import SearchableText
from fairseq_ccpr.lab.mining.pair_method import PairMatcher, PairMethod, View
from fairseq_ccpr.lab.mining.pknn import Answers
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder


@dataclass
class Trial:
    """Sources to be paired with targets, and the truth.

    Attributes:
        gold: int64 [L], the target of each of the first L sources, or -1.
    """

    sources: EncodedText
    targets: EncodedText
    gold: np.ndarray
    _seen: dict[View, PairMatcher] = field(default_factory=dict, repr=False)

    @classmethod
    def encode(cls, labelled: LabelledText, encoder: SentenceEncoder, label: str, quiet: bool) -> Trial:
        """Encode labelled sentences."""
        sides = (fragment_text(side) for side in (labelled.sources, labelled.targets))
        sources, targets = (encode(side, encoder, label, quiet) for side in sides)
        return cls(sources, targets, labelled.gold)

    def matcher(self, method: MiningMethod) -> Matcher:
        """Prepare to match the sources with the targets; methods that look at the same pairs look at them once."""
        if isinstance(method, PairMethod):
            return self._pair_matcher(method)
        return method.matcher(*self.searchable(method))

    def answers(self, method: MiningMethod) -> Answers:
        """Match each source."""
        return self.matcher(method)(np.arange(len(self.gold)), np.full(len(self.gold), -1))

    def f1(self, method: MiningMethod) -> float:
        """Compute the F1 of a method with its settings as they are, on what `labels` has."""
        labels = self.labels()
        return score(decide(self.matcher(method)(labels.rows, labels.hidden), method.threshold), labels.gold).f1

    def tune(self, method: MiningMethod, grid: Grid) -> tuple[MiningMethod, float]:
        """Choose the settings that do best here; the method with these, and its F1.

        Args:
            method: with the settings that are not tuned.
            grid: what to try.
        """
        if isinstance(method, PairMethod):
            return method.tune_by(self._pair_matcher(method), self.labels())
        return method.tune(*self.searchable(method), self.labels(), grid)

    def among(self, other: Trial) -> Trial:
        """Put the text of another trial alongside this one's: the more there is to choose from, the less a score says."""
        return Trial(self.sources.join(other.sources), self.targets.join(other.targets), self.gold)

    def labels(self) -> Labels:
        """List what is known of the sources; each pair serves twice, see `with_negatives`."""
        return with_negatives(np.arange(len(self.gold)), self.gold)

    def searchable(self, method: MiningMethod) -> tuple[SearchableText, SearchableText]:
        """Make both sides searchable, in memory."""
        sides = (side.every(method.stride) if method.window else side for side in (self.sources, self.targets))
        keys = (method.keys(side) for side in sides)
        source, target = (SearchableText.of(centred(each) if method.centred else each) for each in keys)
        return source, target

    def _pair_matcher(self, method: PairMethod) -> PairMatcher:
        if method.view not in self._seen:
            self._seen[method.view] = method.matcher(*self.searchable(method))
        return self._seen[method.view].scored_by(method)
