"""The margin ratio (Artetxe and Schwenk, 2019): how much nearer a pair is than its neighbourhood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fairseq_ccpr.lab.mining.evidence import NEAREST, Evidence
from fairseq_ccpr.lab.mining.pair_method import PairMethod
from fairseq_ccpr.settings import option


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
