"""Pairs of sentences that may be translations of each other: at least one is among the nearest of the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.lab.mining.neighbours import SearchableText
from fairseq_ccpr.lab.mining.pknn import Answers

BLOCK_SENTENCES = 4096  # that are searched for at a time


@dataclass
class Candidates:
    """C pairs of n rows, which are sentences, with columns, which are sentences of the other side.

    Attributes:
        rows: int64 [C], ascending.
        columns: int64 [C], ascending in each row.
        cosines: float64 [C].
        sentences: int64 [n], the sentence of each row.
    """

    rows: np.ndarray
    columns: np.ndarray
    cosines: np.ndarray
    sentences: np.ndarray

    @classmethod
    def find(cls, sources: SearchableText, targets: SearchableText, k: int) -> Candidates:
        """Search in both directions for the k nearest; sentences are the rows."""
        rows, columns, cosines = _nearest(sources, targets, k)
        back_columns, back_rows, back_cosines = _nearest(targets, sources, k)
        names = np.concatenate([rows, back_rows]) * targets.sentences + np.concatenate([columns, back_columns])
        names, first = np.unique(names, return_index=True)
        cosines = np.concatenate([cosines, back_cosines])[first]
        return cls(*np.divmod(names, max(targets.sentences, 1)), cosines, np.arange(sources.sentences))

    def by_column(self, columns: int) -> tuple[Candidates, np.ndarray]:
        """Turn rows into columns: the pairs seen from the other side, and where each of them stands here, int64 [C]."""
        order = np.lexsort((self.rows, self.columns))
        turned = Candidates(self.columns[order], self.rows[order], self.cosines[order], np.arange(columns))
        return turned, order

    def of(self, sources: np.ndarray, hidden: np.ndarray) -> tuple[Candidates, np.ndarray]:
        """Select the pairs of n sources, except those with the targets hidden from them.

        Args:
            sources: int64 [n], rows of these.
            hidden: int64 [n], a column or -1.

        Returns:
            Pairs whose rows are numbers of `sources`, and where each stands here, int64 [C'].
        """
        bounds = np.searchsorted(self.rows, np.stack([sources, sources + 1]))
        counts = bounds[1] - bounds[0]
        rows = np.repeat(np.arange(len(sources)), counts)
        places = np.arange(len(rows)) + np.repeat(bounds[0] - (np.cumsum(counts) - counts), counts)
        seen = self.columns[places] != hidden[rows]
        rows, places = rows[seen], places[seen]
        return Candidates(rows, self.columns[places], self.cosines[places], self.sentences[sources]), places


def _nearest(one: SearchableText, other: SearchableText, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the k nearest of each sentence: its number, theirs, and cosines."""
    rows, columns, cosines = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0)]
    for start in range(0, len(one.keys), BLOCK_SENTENCES):
        block = np.arange(start, min(start + BLOCK_SENTENCES, len(one.keys)))
        scores, ids = other.keys.search(one.keys.keys_of(block), k)
        found = ids >= 0
        rows.append(one.owners[np.broadcast_to(block[:, None], ids.shape)[found]])
        columns.append(other.owners[ids[found]])
        cosines.append(scores[found])
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(cosines)


def mean_of_highest(values: np.ndarray, owners: np.ndarray, k: int, count: int) -> np.ndarray:
    """Average the k highest values of each owner, or all where it has fewer; 0 where it has none.

    Args:
        values: [C].
        owners: int64 [C], ascending.
        k: at least 1.
        count: of owners.

    Returns:
        float64 [count].

    >>> mean_of_highest(np.array([0.5, 0.25, 0.75, 1.0]), np.array([0, 0, 0, 2]), 2, 3)
    array([0.625, 0.   , 1.   ])
    """
    order = np.lexsort((-values, owners))
    high = order[np.arange(len(owners)) - np.searchsorted(owners, owners) < k]
    kept = np.bincount(owners[high], minlength=count)
    return np.bincount(owners[high], values[high], minlength=count) / np.maximum(kept, 1)


def best_of_rows(pairs: Candidates, scores: np.ndarray) -> Answers:
    """Answer each row with the column of its highest score; of equal ones the lower. A score of -inf is none."""
    order = np.lexsort((pairs.columns, -scores, pairs.rows))
    order = order[np.isfinite(scores[order])]
    best = order[np.unique(pairs.rows[order], return_index=True)[1]]
    return Answers(pairs.columns[best], scores[best]).spread(pairs.rows[best], len(pairs.sentences))


def best_first(pairs: Candidates, scores: np.ndarray, columns: int) -> Answers:
    """Answer rows pair by pair, the highest score first, each row and each column once.

    Of equal scores the pair of the lower row comes first, then that of the lower column. A score of -inf is none.

    Args:
        pairs: C of them.
        scores: [C].
        columns: how many there are.
    """
    partners = np.full(len(pairs.sentences), -1)
    found = np.zeros(len(partners))
    free = np.ones(columns, bool)
    order = np.lexsort((pairs.columns, pairs.rows, -scores))
    order = order[np.isfinite(scores[order])]
    for row, column, score in zip(pairs.rows[order].tolist(), pairs.columns[order].tolist(), scores[order].tolist()):
        if partners[row] < 0 and free[column]:
            partners[row], found[row], free[column] = column, score, False
    return Answers(partners, found)
