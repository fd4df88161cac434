"""Draws the phrase pairs of an epoch, and the sentences that they appear in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.storage.equal_strings import digest_number


@dataclass(frozen=True)
class ContrastOptions:
    """How phrases are drawn."""

    phrases_per_sentence: int
    different_context_fraction: float  # 0: CCPR, 1: CPR
    max_subwords: int
    seed: int


@dataclass(frozen=True)
class DrawnPhrases:
    """D phrases of n sentence pairs, ordered by sentence pair, then by target sentence."""

    sources: np.ndarray  # int64 [D], the phrase pairs that supply the source side
    targets: np.ndarray  # int64 [D], those that supply the target side: the same strings, perhaps from another sentence
    starts: np.ndarray  # int64 [n + 1], the first phrase of each sentence pair; the last is D

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and targets of one sentence pair."""
        rows = slice(self.starts[number], self.starts[number + 1])
        return self.sources[rows], self.targets[rows]


class PhraseDraw:
    """Draws phrase pairs; the same seed and epoch give the same ones.

    Args:
        pairs: P phrase pairs.
        sentences: int64 [n], ascending, the sentence pairs to draw from; each has a phrase pair.
        target_lengths: int64 [sentences of `pairs`], in subwords.
        options: how.
    """

    def __init__(
        self, pairs: PhrasePairs, sentences: np.ndarray, target_lengths: np.ndarray, options: ContrastOptions
    ) -> None:
        self.options = options
        self.numbers = np.array(pairs.pairs[:, 0])  # the sentence of each phrase pair
        self.first = np.searchsorted(self.numbers, sentences)
        self.sizes = np.searchsorted(self.numbers, sentences, side="right") - self.first
        self.fits = target_lengths <= options.max_subwords
        self.elsewhere = Occurrences(pairs) if options.different_context_fraction > 0 else None

    def draw(self, epoch: int) -> DrawnPhrases:
        """Draw the phrases of an epoch.

        1. Some phrase pairs of each sentence pair.
        2. For a fraction of them, another occurrence of the target, if there is one in a sentence that is not too long.
        """
        rng = np.random.default_rng([self.options.seed, epoch])
        owners = np.repeat(np.arange(len(self.sizes)), self.sizes)  # of all candidates
        starts = self.sizes.cumsum() - self.sizes
        places = np.arange(len(owners)) - starts[owners]
        rows = self.first[owners] + places
        shuffled = rows[np.lexsort((rng.random(len(rows)), owners))]  # within each sentence pair
        kept = places < self.options.phrases_per_sentence
        sources, owners = shuffled[kept], owners[kept]
        targets = sources
        if self.elsewhere is not None:
            others = self.elsewhere.draw(sources, rng)
            moved = rng.random(len(sources)) < self.options.different_context_fraction
            targets = np.where(moved & self.fits[self.numbers[others]], others, sources)
        order = np.lexsort((self.numbers[targets], owners))
        return DrawnPhrases(sources[order], targets[order], np.searchsorted(owners, np.arange(len(self.sizes) + 1)))


class Occurrences:
    """Where each phrase pair, as a pair of strings, occurs in other contexts.

    Args:
        pairs: P phrase pairs with their sentences.
    """

    def __init__(self, pairs: PhrasePairs) -> None:
        digests = np.empty((2, pairs.size), dtype=np.int64)  # of the pair of strings, of the target sentence
        numbers = progress_bar(f"occurrences in {pairs.directory}", "sentence", range(pairs.sentences))
        for number in numbers:
            source, target = pairs.sentence(number)
            rows = slice(pairs.rows_of(number).start, pairs.rows_of(number).stop)
            digests[0, rows] = [
                digest_number(f"{source[a:b]}\t{target[c:d]}") for _, a, b, c, d in pairs.pairs[rows].tolist()
            ]
            digests[1, rows] = digest_number(target)
        # [P], those of the same strings together, and of them those of a sentence
        self.order = np.lexsort(digests[::-1])
        self.same_strings = self._runs(digests[:1])
        self.same_context = self._runs(digests)

    def _runs(self, digests: np.ndarray) -> np.ndarray:
        """Find where in `order` the phrase pairs that share all digests with each begin and end, int64 [2, P].

        Args:
            digests: int64 [., P].
        """
        ordered = digests[:, self.order]
        changes = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
        borders = np.concatenate([[0], changes, [len(self.order)]])
        runs = np.empty((2, len(self.order)), dtype=np.int64)
        runs[:, self.order] = np.repeat([borders[:-1], borders[1:]], np.diff(borders), axis=1)
        return runs

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw for each phrase pair of int64 [D] one of the same strings in another target sentence, or itself."""
        (start, end), (own_start, own_end) = self.same_strings[:, rows], self.same_context[:, rows]
        own = own_end - own_start
        others = end - start - own
        places = start + rng.integers(0, others.clip(1))
        places += np.where(places >= own_start, own, 0)  # skip its own sentence
        return np.where(others > 0, self.order[places.clip(max=len(self.order) - 1)], rows)
