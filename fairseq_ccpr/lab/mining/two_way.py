"""RFR in both directions: fragments of sources and of targets vote, among the candidates of the margin ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fairseq_ccpr.lab.mining.evidence import Evidence
from fairseq_ccpr.lab.mining.fragments import WINDOW
from fairseq_ccpr.lab.mining.pair_method import PairMethod
from fairseq_ccpr.settings import option

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
