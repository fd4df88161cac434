"""Robust fragment-level retrieval (RFR): sentences are paired by the combined votes of their surest fragments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from fairseq_ccpr.lab.mining.encoded_text import WINDOW, EncodedText
from fairseq_ccpr.lab.mining.f1 import f1_by_threshold
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.method import Grid, Matcher, steadiest
from fairseq_ccpr.lab.mining.neighbours import SearchableText, SentenceKeys
from fairseq_ccpr.lab.mining.pknn import ENTROPIES, OVER_SENTENCES, Answers, answer, distributions, entropy_ranks
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder
from fairseq_ccpr.settings import option


@dataclass(frozen=True)
class RfrMethod:
    """Matches the fragments of a sentence with those of others, and sums their votes; see `MiningMethod`."""

    name: ClassVar[str] = "rfr"
    centred: ClassVar[bool] = False  # as published
    stride: ClassVar[int] = 1

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
        """Take a key per fragment."""
        return text.fragment_keys(self.sentence_half)

    def matcher(self, sources: SearchableText, targets: SearchableText) -> Matcher:
        """Prepare to match by the neighbours of each fragment among those of the targets."""

        def match(rows: np.ndarray, hidden: np.ndarray) -> Answers:
            near = _neighbours(sources, targets, rows, hidden, self.k)
            found = distributions(near.cosines, near.classes, self.beta, self.entropy_over)
            return answer(found, entropy_ranks(found.entropies, near.owners), near.owners, len(rows), self.keep)

        return match

    def tune(
        self, sources: SearchableText, targets: SearchableText, labels: Labels, grid: Grid
    ) -> tuple[RfrMethod, float]:
        """Choose k, beta, the fraction that is kept and the threshold out of a grid, all from one search."""
        near, thresholds = (
            _neighbours(sources, targets, labels.rows, labels.hidden, max(grid.k)),
            np.array(grid.threshold),
        )
        f1 = np.empty((len(grid.k), len(grid.beta), len(grid.keep), len(thresholds)))
        for i, k in enumerate(grid.k):
            for j, beta in enumerate(grid.beta):
                found = distributions(near.cosines[:, :k], near.classes[:, :k], beta, self.entropy_over)
                ranks = entropy_ranks(found.entropies, near.owners)
                for m, keep in enumerate(grid.keep):
                    answers = answer(found, ranks, near.owners, len(labels.rows), keep)
                    f1[i, j, m] = f1_by_threshold(answers, labels.gold, thresholds)
        best = steadiest(f1)
        i, j, m, n = best
        tuned = replace(self, k=grid.k[i], beta=grid.beta[j], keep=grid.keep[m], threshold=grid.threshold[n])
        return tuned, float(f1[best])


class _Neighbours(NamedTuple):
    """The k nearest of F fragments of some sources."""

    cosines: np.ndarray  # [F, k]
    classes: np.ndarray  # int64 [F, k], sentences
    owners: np.ndarray  # int64 [F], which of the sources


def _neighbours(
    sources: SearchableText, targets: SearchableText, rows: np.ndarray, hidden: np.ndarray, k: int
) -> _Neighbours:
    """Search for the k nearest fragments that are not of what is hidden from a source."""
    bounds = np.searchsorted(sources.owners, np.stack([rows, rows + 1]))
    counts = bounds[1] - bounds[0]
    owners = np.repeat(np.arange(len(rows)), counts)
    ids, places = np.unique(
        np.arange(len(owners)) + np.repeat(bounds[0] - (np.cumsum(counts) - counts), counts), return_inverse=True
    )
    of_hidden = np.bincount(targets.owners, minlength=targets.sentences)[hidden[hidden >= 0]]
    cosines, near = targets.keys.search(sources.keys.keys_of(ids), k + int(of_hidden.max(initial=0)))
    cosines, classes = cosines[places], targets.owners_of(near)[places]
    seen = np.argsort((classes == hidden[owners][:, None]) & (classes >= 0), axis=1, kind="stable")[:, :k]
    # Fewer than k may be left where there are few at all.
    cosines, classes = (np.take_along_axis(values, seen, 1) for values in (cosines, classes))
    gone = (classes == hidden[owners][:, None]) & (classes >= 0)
    return _Neighbours(np.where(gone, -np.inf, cosines), np.where(gone, -1, classes), owners)


class RememberedVectors:
    """Encodes each text once, and keeps its vector in memory as fp16.

    Args:
        encoder: of new texts.
    """

    def __init__(self, encoder: SentenceEncoder) -> None:
        self._encoder, self._known = encoder, dict[str, np.ndarray]()
        self.fingerprint, self.dimension = encoder.fingerprint, encoder.dimension

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encode n texts as vectors fp32 [n, d]."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            self._known.update(zip(new, self._encoder.encode(new).astype(np.float16)))
        rows = [self._known[text] for text in texts]
        return np.array(rows, np.float32).reshape(len(texts), self.dimension)
