"""Labelled sentences with vectors: methods are tuned and tested on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.mining.fragments import fragment_text
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.labelled import LabelledText, Labels, with_negatives
from fairseq_ccpr.mining.method import Matcher, MiningMethod
from fairseq_ccpr.mining.neighbours import SearchableText
from fairseq_ccpr.mining.pknn import Answers
from fairseq_ccpr.mining.threshold import Estimate, estimate
from fairseq_ccpr.models.pretrained.sentence_encoders import SentenceEncoder


@dataclass
class Trial:
    """Sources to be paired with targets, and the truth.

    Attributes:
        gold: int64 [S], the target of each source, or -1.
    """

    sources: EncodedText
    targets: EncodedText
    gold: np.ndarray

    @classmethod
    def encode(cls, labelled: LabelledText, encoder: SentenceEncoder, label: str, quiet: bool) -> Trial:
        """Encode labelled sentences."""
        sides = (fragment_text(side) for side in (labelled.sources, labelled.targets))
        sources, targets = (encode(side, encoder, label, quiet) for side in sides)
        return cls(sources, targets, labelled.gold)

    def matcher(self, method: MiningMethod) -> Matcher:
        """Prepare to match the sources with the targets."""
        return method.matcher(*self.searchable(method))

    def answers(self, method: MiningMethod) -> Answers:
        """Match each source."""
        return self.matcher(method)(np.arange(len(self.gold)), np.full(len(self.gold), -1))

    def estimate(self, method: MiningMethod) -> Estimate:
        """Estimate the threshold, without a look at the truth."""
        return estimate(self.matcher(method), len(self.gold))

    def tune(self, method: MiningMethod, grid: Grid, among: Trial | None = None) -> tuple[MiningMethod, float]:
        """Choose the settings that do best here; the method with these, and its F1.

        Args:
            method: with the settings that are not tuned.
            grid: what to try.
            among: further text, since the more there is to choose from, the less a score says.
        """
        sources, targets = self.searchable(method)
        if among is not None:
            sources, targets = (own.join(other) for own, other in zip((sources, targets), among.searchable(method)))
        return method.tune(sources, targets, self.labels(), grid)

    def labels(self) -> Labels:
        """List what is known of the sources; each pair serves twice, see `with_negatives`."""
        return with_negatives(np.arange(len(self.gold)), self.gold)

    def searchable(self, method: MiningMethod) -> tuple[SearchableText, SearchableText]:
        """Make both sides searchable, in memory."""
        sides = (side.every(method.stride) if method.window else side for side in (self.sources, self.targets))
        source, target = (SearchableText.of(method.keys(side)) for side in sides)
        return source, target
