"""Robust fragment-level retrieval (RFR): sentences are paired by what their surest fragments say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fairseq_ccpr.mining.encoded_text import EncodedText
from fairseq_ccpr.mining.f1 import f1_by_threshold
from fairseq_ccpr.mining.fragments import WINDOW
from fairseq_ccpr.mining.grid import Grid, steadiest
from fairseq_ccpr.mining.method import Matcher
from fairseq_ccpr.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.mining.pknn import ENTROPIES, OVER_SENTENCES, Answers, answer, distributions, entropy_ranks
from fairseq_ccpr.settings import option


@dataclass(frozen=True)
class RfrMethod:
    """Matches the fragments of a sentence with those of others, and sums what they say; see `MiningMethod`."""

    name: ClassVar[str] = "rfr"

    k: int = option(10, "neighbours of a fragment", within="[1, inf)", needs="at least 1")
    beta: float = option(75.0, "how much the nearest of them count")
    keep: float = option(
        0.5, "p, the fraction of a sentence's fragments that count, those of the lowest entropies",
        within="(0, 1]", needs="above 0 and at most 1",
    )  # fmt: skip
    threshold: float = option(0.5, "P, the probability below which there is no pair")
    window: int = option(WINDOW, "n, words of a fragment", within="[1, inf)", needs="at least 1")
    sentence_half: bool = option(True, "whether a fragment's vector holds its sentence's")
    entropy_over: str = option(OVER_SENTENCES, "what the entropy is over", choices=ENTROPIES)

    def keys(self, text: EncodedText) -> SentenceKeys:
        """Take a key a fragment."""
        return SentenceKeys(text.keys(self.sentence_half), text.text.owners, len(text.text.sentences))

    def matcher(self, targets: SearchableText, sources: Callable[[], SearchableText]) -> Matcher:
        """Prepare to match by the neighbours of each fragment among those of the targets."""

        def match(queries: SentenceKeys) -> Answers:
            cosines, ids = targets.keys.search(queries.keys, self.k)
            found = distributions(cosines, targets.owners_of(ids), self.beta, self.entropy_over)
            ranks = entropy_ranks(found.entropies, queries.owners)
            return answer(found, ranks, queries.owners, queries.sentences, self.keep)

        return match

    def tune(
        self, queries: SentenceKeys, gold: np.ndarray, targets: SearchableText, sources: Callable[[], SearchableText],
        grid: Grid,
    ) -> tuple[RfrMethod, float]:  # fmt: skip
        """Choose k, beta, the fraction that is kept and the threshold out of a grid, all from one search."""
        cosines, ids = targets.keys.search(queries.keys, max(grid.k))
        classes, thresholds = targets.owners_of(ids), np.array(grid.threshold)
        f1 = np.empty((len(grid.k), len(grid.beta), len(grid.keep), len(thresholds)))
        for i, k in enumerate(grid.k):
            for j, beta in enumerate(grid.beta):
                found = distributions(cosines[:, :k], classes[:, :k], beta, self.entropy_over)
                ranks = entropy_ranks(found.entropies, queries.owners)
                for m, keep in enumerate(grid.keep):
                    answers = answer(found, ranks, queries.owners, queries.sentences, keep)
                    f1[i, j, m] = f1_by_threshold(answers, gold, thresholds)
        best = steadiest(f1)
        i, j, m, n = best
        tuned = replace(self, k=grid.k[i], beta=grid.beta[j], keep=grid.keep[m], threshold=grid.threshold[n])
        return tuned, float(f1[best])
