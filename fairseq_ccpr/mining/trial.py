"""Labelled sentences with vectors: methods are tuned and tested on them."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.mining.fragments import fragment_text
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.labelled import LabelledText
from fairseq_ccpr.mining.method import MiningMethod
from fairseq_ccpr.mining.neighbours import SearchableText
from fairseq_ccpr.mining.pknn import Answers
from fairseq_ccpr.models.pretrained.sentence_encoders import SentenceEncoder


@dataclass
class Unlabelled:
    """The text to be mined, indexed by the keys of one method.

    Labelled sentences are tried among it, since the more text there is, the less a score says.

    Attributes:
        targets: all of them.
        sources: indexes all of them.
        known: sources that are labelled as well.
    """

    targets: SearchableText
    sources: Callable[[], SearchableText]
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

    @classmethod
    def encode(cls, labelled: LabelledText, encoder: SentenceEncoder, label: str, quiet: bool) -> Trial:
        """Encode labelled sentences."""
        sides = (fragment_text(side) for side in (labelled.sources, labelled.targets))
        sources, targets = (encode(side, encoder, label, quiet) for side in sides)
        return cls(sources, targets, labelled.gold)

    def answers(self, method: MiningMethod) -> Answers:
        """Match each source."""
        text = self.unlabelled(method)
        return method.matcher(text.targets, text.sources)(method.keys(self.sources))

    def tune(self, method: MiningMethod, grid: Grid, among: Unlabelled | None = None) -> tuple[MiningMethod, float]:
        """Choose the settings that do best here; the method with these, and its F1.

        Args:
            method: with the settings that are not tuned.
            grid: what to try.
            among: further text to search.
        """
        text = self.unlabelled(method)
        if among is None:
            return method.tune(method.keys(self.sources), self.gold, text.targets, text.sources, grid)

        def sources() -> SearchableText:
            texts = self.sources.text.sentences
            new = np.array([row for row, text in enumerate(texts) if text not in among.known], np.int64)
            return SearchableText.of(method.keys(self.sources.select(new))).join(among.sources())

        targets = text.targets.join(among.targets)
        return method.tune(method.keys(self.sources), self.gold, targets, sources, grid)

    def unlabelled(self, method: MiningMethod) -> Unlabelled:
        """Index these sentences as text to be mined."""
        targets = SearchableText.of(method.keys(self.targets))
        return Unlabelled(targets, lambda: SearchableText.of(method.keys(self.sources)))
