"""The k nearest entries with distinct strings; widens the search until k are found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from fairseq_ccpr.device import to_host
from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.index_plan import PHRASE_DEPTH
from fairseq_ccpr.search.live import JoinedIndex

DEEPEST = 1024  # most neighbours requested for a phrase: more of them are nearly always the same few strings
NONE_GONE = np.empty(0, np.int64)


def nearest_distinct(
    index: Index | JoinedIndex,
    strings: Callable[[np.ndarray], np.ndarray],
    vectors: Tensor,
    k: int,
    min_similarity: float,
    gone: np.ndarray = NONE_GONE,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k nearest strings, each by its best entry, the first of several that score the same.

    1. Search for the `PHRASE_DEPTH` best entries of each vector, whatever k: fewer strings are then the head
       of more.
    2. Leave out those that score as the last does, of which there may be more, and deduplicate the strings of
       the rest.
    3. Search twice as deep for the vectors that have fewer than k strings, while there is more to find, down
       to `DEEPEST`.

    Entries that only a deeper search of an approximate index finds come after the earlier ones, better or
    not.

    Args:
        strings: a number for the string of each of n entries, int64 [n] -> uint64 [n].
        gone: int64 [m], entries to treat as if they did not exist.

    Returns:
        The entries of each vector, the best first, int64 [Q, k], -1 where there are fewer, and their scores,
        fp64 [Q, k].
    """
    best_entries, best_scores = np.full((len(vectors), k), -1), np.full((len(vectors), k), -np.inf)
    rows, depth, deepest = np.arange(len(vectors)), PHRASE_DEPTH, min(index.deepest, DEEPEST)
    while len(rows):
        scores, entries = _by_score(*index.search(vectors[rows], min(depth, deepest)))  # [R, depth]
        last = scores[:, -1] if depth < index.deepest else np.full(len(rows), -np.inf)
        taken = (scores > last[:, None]) & (scores >= min_similarity)
        taken &= ~np.isin(entries, gone)
        entries = np.concatenate([best_entries[rows], np.where(taken, entries, -1)], axis=1)
        scores = np.concatenate([best_scores[rows], scores], axis=1)
        numbers = np.zeros(entries.shape, np.uint64)
        numbers[entries >= 0] = strings(entries[entries >= 0])
        kept = unique_mask(numbers, entries >= 0)
        order = (~kept).argsort(axis=1, kind="stable")[:, :k]
        valid = np.take_along_axis(kept, order, 1)
        best_entries[rows] = np.where(valid, np.take_along_axis(entries, order, 1), -1)
        best_scores[rows] = np.where(valid, np.take_along_axis(scores, order, 1), -np.inf)
        rows = (
            rows[(last > -np.inf) & (last >= min_similarity) & ~valid.all(axis=1)]
            if depth < deepest
            else rows[:0]
        )
        depth *= 2
    return best_entries, best_scores


def unique_mask(numbers: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Mark the first occurrence of each number in its row, of the valid ones, [Q, n] -> bool [Q, n].

    >>> unique_mask(np.array([[7, 7, 8, 7]]), np.array([[False, True, True, True]]))
    array([[False,  True,  True, False]])
    """
    if (valid & (numbers == 0)).any():
        # stable: of equal ones the valid ones first, in their order
        order = np.lexsort((~valid, numbers), axis=1)
    else:  # 0 then stands for those that are not valid
        numbers = np.where(valid, numbers, numbers.dtype.type(0))
        order = numbers.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(numbers, order, 1)
    changes = np.ones(numbers.shape, bool)
    changes[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.empty_like(changes)
    np.put_along_axis(first, order, changes, 1)
    return first & valid


def _by_score(scores: Tensor, ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The best first, of equal scores the lowest id: [Q, k] each, on the CPU."""
    scores, ids = to_host([scores, ids])
    best, entries = scores.double().numpy(), ids.numpy()
    falling = (best[:, 1:] < best[:, :-1]) | (entries[:, 1:] < 0)
    # an index gives the best first, but equal ones in any order
    if len(rows := np.flatnonzero(~falling.all(axis=1))):
        order = np.lexsort((entries[rows], -best[rows]), axis=1)
        for part in (best, entries):
            part[rows] = np.take_along_axis(part[rows], order, 1)
    return best, entries
