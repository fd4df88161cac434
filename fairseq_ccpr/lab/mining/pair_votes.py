"""The votes of a sentence's fragments for its candidates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fairseq_ccpr.lab.mining.candidates import Candidates
from fairseq_ccpr.lab.mining.neighbours import SearchableKeys, SearchableText
from fairseq_ccpr.timing import VOTING, phase

VOTERS = 20  # neighbours of a fragment
BETA = 100  # how much the nearest of them count
TIED = 1e-6  # cosines nearer than that are equal in fp32
BLOCK_ROWS, BLOCK_NUMBERS = 64, 1 << 20  # of sources that vote at a time, and of the matrix of their cosines


@phase(VOTING)
def fragment_votes(
    pairs: Candidates, of: SearchableText, among: SearchableText, spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """Let the fragments of each row vote for the row's columns, and see how near the nearest are.

    A fragment f of x and g of y are as near as c = (cos(f, g) + cos(x, y)) / 2. Of each f, the 20 nearest g of all candidates
    of x vote, and those equal to the last of them, by softmax of 100 * exp(-d^2 / 2) / sqrt(2 pi), as in RFR, where d is
    (1 - c) / (1.5 spread): encoders to which all texts are alike are then like others.

    Args:
        pairs: C of them.
        of: the sentences of the rows.
        among: those of the columns.
        spread: the mean of 1 - cos(x, y) over all candidates.

    Returns:
        P(y | x), the mean over the fragments of x, and the mean over these of the highest cos(f, g) in y; float64 [C].
    """
    votes, nearest = np.empty(len(pairs.rows)), np.empty(len(pairs.rows))
    bounds = np.searchsorted(pairs.rows, np.arange(len(pairs.sentences) + 1))
    starts, counts = _ranges(of, pairs.sentences)
    others = _ranges(among, pairs.columns)
    widths = np.diff(np.concatenate([[0], np.cumsum(others[1])])[bounds])
    for rows in _blocks(np.flatnonzero(np.diff(bounds)), counts, widths):
        here = slice(bounds[rows[0]], bounds[rows[-1] + 1])
        own = _vectors(of.fragments, starts[rows], counts[rows])
        other = _vectors(among.fragments, others[0][here], others[1][here])
        cosines = _cosines(own, other, counts[rows], widths[rows])
        per_row = np.diff(bounds)[rows]
        votes[here], nearest[here] = _vote(cosines, pairs.cosines[here], others[1][here], per_row, counts[rows], spread)
    return votes, nearest


def _blocks(rows: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> Iterator[np.ndarray]:
    """Split rows so that each block is a matrix of at most BLOCK_NUMBERS, or one row.

    Args:
        rows: int64, those that have pairs.
        counts: of all rows, how many lines each has.
        widths: and how many columns it needs.
    """
    first, lines, width = 0, 0, 0
    for place, row in enumerate(rows.tolist()):
        lines, width = lines + int(counts[row]), max(width, int(widths[row]))
        if place > first and (lines * width > BLOCK_NUMBERS or place - first == BLOCK_ROWS):
            yield rows[first:place]
            first, lines, width = place, int(counts[row]), int(widths[row])
    if len(rows):
        yield rows[first:]


def _cosines(own: np.ndarray, other: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Multiply the fragments of each row with those of its columns.

    Args:
        own: fp32 [l, d], those of the rows, one row after the other.
        other: fp32 [sum of widths, d], those of their columns.
        counts: int64 [r], how many of `own` each row has.
        widths: int64 [r], how many of `other`.

    Returns:
        float64 [l, the largest width], -inf beyond the width of a row.
    """
    cosines = np.full((len(own), int(widths.max())), -np.inf)
    line = column = 0
    for count, width in zip(counts.tolist(), widths.tolist()):
        cosines[line : line + count, :width] = own[line : line + count] @ other[column : column + width].T
        line, column = line + count, column + width
    return cosines


def _vote(
    cosines: np.ndarray, whole: np.ndarray, sizes: np.ndarray, per_row: np.ndarray, counts: np.ndarray, spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """Sum the votes of l fragments of r rows for c pairs.

    Args:
        cosines: see `_cosines`.
        whole: [c], cos(x, y) of each pair.
        sizes: int64 [c], how many fragments its column has.
        per_row: int64 [r], how many pairs each row has.
        counts: int64 [r], how many fragments.
        spread: see `fragment_votes`.

    Returns:
        Votes and nearest as of `fragment_votes`, float64 [c].
    """
    present = np.isfinite(cosines)
    flat = cosines[present]  # line by line, in each pair by pair
    first_pairs = np.repeat(np.cumsum(per_row) - per_row, counts)
    judged = _runs(first_pairs, np.repeat(per_row, counts))  # the pair of each run of `flat`
    runs = np.cumsum(sizes[judged]) - sizes[judged]
    lines = np.repeat(counts, per_row)  # of each pair
    nearest = np.bincount(judged, np.maximum.reduceat(flat, runs)) / lines
    cosines[present] = (flat + np.repeat(whole[judged], sizes[judged])) / 2
    weights = _weights(cosines, spread)[present]
    return np.bincount(judged, np.add.reduceat(weights, runs)) / lines, nearest


def _weights(cosines: np.ndarray, spread: float) -> np.ndarray:
    """Weigh the nearest of each row, [f, g] -> [f, g]; the others weigh nothing."""
    if cosines.shape[1] > VOTERS:
        last = np.partition(cosines, -VOTERS, axis=1)[:, [-VOTERS]]
        cosines = np.where(cosines >= last - TIED, cosines, -np.inf)
    logits = BETA / math.sqrt(2 * math.pi) * np.exp(-(((1 - cosines) / (1.5 * spread)) ** 2) / 2)
    weights = np.where(np.isfinite(cosines), np.exp(logits - logits.max(axis=1, keepdims=True)), 0)
    return weights / weights.sum(axis=1, keepdims=True)


def _ranges(text: SearchableText, sentences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Look up where the fragments of each sentence begin, and how many there are."""
    bounds = text.fragment_bounds
    return bounds[sentences], bounds[sentences + 1] - bounds[sentences]


def _vectors(fragments: SearchableKeys, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Read the fragments of some sentences, fp32 [g, d]."""
    return fragments.keys_of(_runs(starts, counts)).astype(np.float32)


def _runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Count on from each start: int64 [sum of counts].

    >>> _runs(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    return np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
