"""Labelled sentences with vectors: what settings are tuned on, and methods tested on. Searched once for all settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fairseq_ccpr.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.mining.fragments import fragment_text
from fairseq_ccpr.mining.labelled import LabelledText
from fairseq_ccpr.mining.margin import margin_answers, mean_of_found
from fairseq_ccpr.mining.neighbours import Neighbours
from fairseq_ccpr.mining.pknn import Answers, classes_of, rfr_answers
from fairseq_ccpr.mining.sentence_encoders import SentenceEncoder
from fairseq_ccpr.mining.settings import MarginSettings, Settings
from fairseq_ccpr.mining.tuning import Grid, tune_margin, tune_rfr

DEEPEST = max(Grid().k)  # neighbours that are searched for, so that one search does for most settings


@dataclass
class Trial:
    """Sources to be paired with targets, and the truth."""

    sources: EncodedText
    targets: EncodedText
    gold: np.ndarray  # int64 [S], the target of each source, or -1
    _found: dict[bool, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def encode(cls, labelled: LabelledText, encoder: SentenceEncoder, label: str, quiet: bool) -> Trial:
        """Give labelled sentences their vectors."""
        sides = (fragment_text(side) for side in (labelled.sources, labelled.targets))
        sources, targets = (encode(side, encoder, label, quiet) for side in sides)
        return cls(sources, targets, labelled.gold)

    def answers(self, settings: Settings) -> Answers:
        """What a method answers for each source."""
        if isinstance(settings, MarginSettings):
            return self._margins(settings.k)
        cosines, ids = self._neighbours(settings.sentence_half, settings.k)
        owners = self.sources.text.owners
        return rfr_answers(cosines, ids, self.targets.text.owners, owners, len(self.gold), settings)

    def tune(self, base: Settings, grid: Grid) -> tuple[Settings, float]:
        """The settings that do best here, and their F1.

        Args:
            base: the method, and the settings that the grid does not have.
            grid: what RFR tries; a margin's threshold is chosen from all that differ.
        """
        if isinstance(base, MarginSettings):
            return tune_margin(self._margins(base.k), self.gold, base)
        cosines, ids = self._neighbours(base.sentence_half, max(grid.k))
        classes = classes_of(ids, self.targets.text.owners)
        return tune_rfr(cosines, classes, self.sources.text.owners, self.gold, grid, base)

    def _neighbours(self, sentence_half: bool, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines float64 and ids int64 [F, k] of each source fragment's neighbours."""
        if sentence_half not in self._found or self._found[sentence_half][0].shape[1] < k:
            index = Neighbours(self.targets.keys(sentence_half))
            self._found[sentence_half] = index.search(self.sources.keys(sentence_half), max(k, DEEPEST))
        cosines, ids = self._found[sentence_half]
        return cosines[:, :k], ids[:, :k]

    def _margins(self, k: int) -> Answers:
        with_words = [np.unique(side.text.owners) for side in (self.sources, self.targets)]
        sources, targets = (side.sentences[rows] for side, rows in zip((self.sources, self.targets), with_words))
        cosines, ids = Neighbours(targets).search(sources, k)
        back_means = mean_of_found(Neighbours(sources).search(targets, k)[0])
        found = margin_answers(cosines, ids, back_means, with_words[1])
        return found.spread(with_words[0], len(self.gold))
