"""Labelled sentences with vectors: what settings are tuned on, and methods tested on. Searched once for all settings."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from fairseq_ccpr.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.mining.fragments import fragment_text
from fairseq_ccpr.mining.grid import Grid, tune_margin, tune_rfr
from fairseq_ccpr.mining.labelled import LabelledText
from fairseq_ccpr.mining.margin import margin_answers, mean_of_found
from fairseq_ccpr.mining.neighbours import Neighbours, Searched, Side
from fairseq_ccpr.mining.pknn import Answers, classes_of, rfr_answers
from fairseq_ccpr.mining.settings import MarginSettings, Settings
from fairseq_ccpr.models.pretrained.sentence_encoders import SentenceEncoder

DEEPEST = max(Grid().k)  # neighbours that are searched for, so that one search does for most settings


@dataclass
class Unlabelled:
    """The text that is to be mined, as a method searches it.

    Labelled sentences are tried among it, since the more there is, the less a score says.

    Attributes:
        targets: all of them.
        sources: all of them, for a margin, which looks both ways.
        known: sources that are labelled and part of it as well.
    """

    targets: Side
    sources: Side | None = None
    known: Set[str] = frozenset()


@dataclass
class Trial:
    """Sources to be paired with targets, and the truth.

    Attributes:
        gold: int64 [S], the target of each source, or -1; those of unlabelled text come after T.
    """

    sources: EncodedText
    targets: EncodedText
    gold: np.ndarray
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
            return self._margins(settings, None)
        cosines, ids = self._neighbours(settings.sentence_half, settings.k)
        owners = self.sources.text.owners
        return rfr_answers(cosines, ids, self.targets.text.owners, owners, len(self.gold), settings)

    def tune(self, base: Settings, grid: Grid, among: Unlabelled | None = None) -> tuple[Settings, float]:
        """The settings that do best here, and their F1.

        Args:
            base: the method, and the settings that the grid does not have.
            grid: what RFR tries; a margin's threshold is chosen from all that differ.
            among: further text, if it is to be searched as well.
        """
        if isinstance(base, MarginSettings):
            return tune_margin(self._margins(base, among), self.gold, base)
        targets = searched(self.targets, base)
        targets = targets.join(among.targets) if among else targets
        cosines, ids = targets.keys.search(self.sources.keys(base.sentence_half), max(grid.k))
        classes = classes_of(ids, targets.owners)
        return tune_rfr(cosines, classes, self.sources.text.owners, self.gold, grid, base)

    def searched(self, settings: Settings) -> Unlabelled:
        """This text, as if nothing were known of it."""
        sources = searched(self.sources, settings) if isinstance(settings, MarginSettings) else None
        return Unlabelled(searched(self.targets, settings), sources)

    def _neighbours(self, sentence_half: bool, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines float64 and ids int64 [F, k] of each source fragment's neighbours."""
        if sentence_half not in self._found or self._found[sentence_half][0].shape[1] < k:
            index = Neighbours(self.targets.keys(sentence_half))
            self._found[sentence_half] = index.search(self.sources.keys(sentence_half), max(k, DEEPEST))
        cosines, ids = self._found[sentence_half]
        return cosines[:, :k], ids[:, :k]

    def _margins(self, settings: MarginSettings, among: Unlabelled | None) -> Answers:
        sources, targets = searched(self.sources, settings), searched(self.targets, settings)
        around: Searched = sources.keys
        if among:
            assert among.sources is not None, "for a margin"
            texts = self.sources.text.sentences
            fresh = np.array([row for row, text in enumerate(texts) if text not in among.known], np.int64)
            around = searched(self.sources.select(fresh), settings).join(among.sources).keys
            targets = targets.join(among.targets)
        cosines, ids = targets.keys.search(sources.keys.keys_of(np.arange(len(sources.keys))), settings.k)
        found = np.unique(ids[ids >= 0])
        back_means = np.zeros(len(targets.keys))
        back_means[found] = mean_of_found(around.search(targets.keys.keys_of(found), settings.k)[0])
        return margin_answers(cosines, ids, back_means, targets.owners).spread(sources.owners, len(self.gold))


def searched(text: EncodedText, settings: Settings) -> Side:
    """A text as a method searches it: by its fragments, or for a margin by its sentences that have words."""
    if isinstance(settings, MarginSettings):
        owners = np.unique(text.text.owners)
        return Side(Neighbours(text.sentences[owners]), owners, len(text.sentences))
    return Side(Neighbours(text.keys(settings.sentence_half)), text.text.owners, len(text.sentences))
