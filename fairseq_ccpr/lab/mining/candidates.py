"""Pairs of sentences that may be translations: near in either direction, with the evidence of sentences and fragments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from fairseq_ccpr.lab.mining.f1 import Answers
from fairseq_ccpr.lab.mining.neighbours import SearchableKeys, SearchableText, runs
from fairseq_ccpr.timing import VOTING, phase

BLOCK_SENTENCES = 4096  # that are searched for at a time
VOTERS = 20  # neighbours of a fragment
BETA = 100  # how much the nearest of them count
TIED = 1e-6  # cosines nearer than that are equal in fp32
BLOCK_ROWS, BLOCK_NUMBERS = 64, 1 << 20  # of sources that vote at a time, and of the matrix of their cosines
NEAREST = 4  # that a neighbourhood is made of


@dataclass
class Candidates:
    """C pairs of n rows, which are sentences, with columns, which are sentences of the other side."""

    rows: np.ndarray  # int64 [C], ascending
    columns: np.ndarray  # int64 [C], ascending in each row
    cosines: np.ndarray  # float64 [C]
    sentences: np.ndarray  # int64 [n], the sentence of each row

    @classmethod
    def find(cls, sources: SearchableText, targets: SearchableText, k: int) -> Candidates:
        """Search in both directions for the k nearest; sentences are the rows."""
        rows, columns, cosines = _nearest(sources, targets, k)
        back_columns, back_rows, back_cosines = _nearest(targets, sources, k)
        names = np.concatenate([rows, back_rows]) * targets.sentences + np.concatenate(
            [columns, back_columns]
        )
        names, first = np.unique(names, return_index=True)
        cosines = np.concatenate([cosines, back_cosines])[first]
        return cls(*np.divmod(names, max(targets.sentences, 1)), cosines, np.arange(sources.sentences))

    def by_column(self, columns: int) -> tuple[Candidates, np.ndarray]:
        """Turn rows into columns: the pairs seen from the other side, and where each of them stands here, int64 [C]."""
        order = np.lexsort((self.rows, self.columns))
        turned = Candidates(self.columns[order], self.rows[order], self.cosines[order], np.arange(columns))
        return turned, order

    def select(self, sources: np.ndarray, hidden: np.ndarray) -> tuple[Candidates, np.ndarray]:
        """Select the pairs of n sources, int64 [n], except those with the targets hidden from them, int64 [n], -1 for none.

        In the result rows are numbers of `sources`; also where each pair stands here, int64 [C'].
        """
        starts, ends = np.searchsorted(self.rows, np.stack([sources, sources + 1]))
        rows, places = np.repeat(np.arange(len(sources)), ends - starts), runs(starts, ends - starts)
        seen = self.columns[places] != hidden[rows]
        rows, places = rows[seen], places[seen]
        return Candidates(rows, self.columns[places], self.cosines[places], self.sentences[sources]), places


def _nearest(one: SearchableText, other: SearchableText, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns, cosines = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0)]
    for start in range(0, len(one.keys), BLOCK_SENTENCES):
        block = np.arange(start, min(start + BLOCK_SENTENCES, len(one.keys)))
        scores, ids = other.keys.search(one.keys.keys_of(block), k)
        found = ids >= 0
        rows.append(one.owners[np.broadcast_to(block[:, None], ids.shape)[found]])
        columns.append(other.owners[ids[found]])
        cosines.append(scores[found])
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(cosines)


def best_of_rows(pairs: Candidates, scores: np.ndarray) -> Answers:
    """Answer each row with the column of its highest score; of equal ones the lower. A score of -inf is none."""
    order = np.lexsort((pairs.columns, -scores, pairs.rows))
    order = order[np.isfinite(scores[order])]
    best = order[np.unique(pairs.rows[order], return_index=True)[1]]
    return Answers(pairs.columns[best], scores[best]).spread(pairs.rows[best], len(pairs.sentences))


def best_first(pairs: Candidates, scores: np.ndarray, columns: int) -> Answers:
    """Answer rows pair by pair, the highest score first, each row and each column once.

    Of equal scores the pair of the lower row comes first, then that of the lower column. A score of -inf is
    none.
    """
    partners = np.full(len(pairs.sentences), -1)
    found = np.zeros(len(partners))
    free = np.ones(columns, bool)
    order = np.lexsort((pairs.columns, pairs.rows, -scores))
    order = order[np.isfinite(scores[order])]
    for row, column, score in zip(
        pairs.rows[order].tolist(), pairs.columns[order].tolist(), scores[order].tolist()
    ):
        if partners[row] < 0 and free[column]:
            partners[row], found[row], free[column] = column, score, False
    return Answers(partners, found)


@phase(VOTING)
def fragment_votes(
    pairs: Candidates, text: SearchableText, other_text: SearchableText, spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """Let the fragments of each row vote for the row's columns, and see how near the nearest are.

    A fragment f of x and g of y are as near as c = (cos(f, g) + cos(x, y)) / 2. Of each f, the 20 nearest g
    of all candidates of x vote, and those equal to the last of them, by softmax of 100 * exp(-d^2 / 2) /
    sqrt(2 pi), as in RFR, where d is (1 - c) / (1.5 spread): encoders to which all texts are alike are then
    like others.

    The result is P(y | x), the mean over the fragments of x, and the mean of the highest cos(f, g) in y;
    float64 [C].
    """
    votes, nearest = np.empty(len(pairs.rows)), np.empty(len(pairs.rows))
    bounds = np.searchsorted(pairs.rows, np.arange(len(pairs.sentences) + 1))
    starts, counts = _ranges(text, pairs.sentences)
    others = _ranges(other_text, pairs.columns)
    widths = np.diff(np.concatenate([[0], np.cumsum(others[1])])[bounds])
    for rows in _blocks(np.flatnonzero(np.diff(bounds)), counts, widths):
        here = slice(bounds[rows[0]], bounds[rows[-1] + 1])
        fragments = _vectors(text.fragments, starts[rows], counts[rows])
        other = _vectors(other_text.fragments, others[0][here], others[1][here])
        cosines = _cosines(fragments, other, counts[rows], widths[rows])
        per_row = np.diff(bounds)[rows]
        votes[here], nearest[here] = _vote(
            cosines, pairs.cosines[here], others[1][here], per_row, counts[rows], spread
        )
    return votes, nearest


def _blocks(rows: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> Iterator[np.ndarray]:
    first, lines, width = 0, 0, 0
    for place, row in enumerate(rows.tolist()):
        lines, width = lines + int(counts[row]), max(width, int(widths[row]))
        if place > first and (lines * width > BLOCK_NUMBERS or place - first == BLOCK_ROWS):
            yield rows[first:place]
            first, lines, width = place, int(counts[row]), int(widths[row])
    if len(rows):
        yield rows[first:]


def _cosines(fragments: np.ndarray, other: np.ndarray, counts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Multiply the fragments of each of r rows with those of its columns.

    Args:
        fragments: fp32 [l, d], `counts` int64 [r] of each row, one row after the other.
        other: fp32 [sum of widths, d], `widths` int64 [r] of the columns of each row.

    Returns:
        float64 [l, the largest width], -inf beyond the width of a row.
    """
    cosines = np.full((len(fragments), int(widths.max())), -np.inf)
    line = column = 0
    for count, width in zip(counts.tolist(), widths.tolist()):
        cosines[line : line + count, :width] = (
            fragments[line : line + count] @ other[column : column + width].T
        )
        line, column = line + count, column + width
    return cosines


def _vote(
    cosines: np.ndarray,
    whole: np.ndarray,
    sizes: np.ndarray,
    per_row: np.ndarray,
    counts: np.ndarray,
    spread: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Sum the votes of l fragments of r rows for c pairs: votes and nearest as of `fragment_votes`, float64 [c].

    Args:
        whole: [c], cos(x, y) of each pair.
        sizes: int64 [c], how many fragments its column has.
        per_row: int64 [r], how many pairs each row has; `counts`, how many fragments.
    """
    present = np.isfinite(cosines)
    flat = cosines[present]  # line by line, in each pair by pair
    first_pairs = np.repeat(np.cumsum(per_row) - per_row, counts)
    judged = runs(first_pairs, np.repeat(per_row, counts))  # the pair of each run of `flat`
    starts = np.cumsum(sizes[judged]) - sizes[judged]
    lines = np.repeat(counts, per_row)  # of each pair
    nearest = np.bincount(judged, np.maximum.reduceat(flat, starts)) / lines
    cosines[present] = (flat + np.repeat(whole[judged], sizes[judged])) / 2
    weights = _weights(cosines, spread)[present]
    return np.bincount(judged, np.add.reduceat(weights, starts)) / lines, nearest


def _weights(cosines: np.ndarray, spread: float) -> np.ndarray:
    if cosines.shape[1] > VOTERS:
        last = np.partition(cosines, -VOTERS, axis=1)[:, [-VOTERS]]
        cosines = np.where(cosines >= last - TIED, cosines, -np.inf)
    logits = BETA / math.sqrt(2 * math.pi) * np.exp(-(((1 - cosines) / (1.5 * spread)) ** 2) / 2)
    weights = np.where(np.isfinite(cosines), np.exp(logits - logits.max(axis=1, keepdims=True)), 0)
    return weights / weights.sum(axis=1, keepdims=True)


def _ranges(text: SearchableText, sentences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bounds = text.fragment_bounds
    return bounds[sentences], bounds[sentences + 1] - bounds[sentences]


def _vectors(fragments: SearchableKeys, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Read the fragments of some sentences, fp32 [g, d]."""
    return fragments.keys_of(runs(starts, counts)).astype(np.float32)


@dataclass
class Evidence:
    """Evidence on C candidate pairs (x, y); arrays are float64 [C]."""

    # mean of 1 - cos(x, y) over all candidates, at least 1e-3; None where fragments do not vote
    spread: float | None
    cosines: np.ndarray  # cos(x, y)
    around: np.ndarray  # m_x, the mean cosine of x and its nearest
    back_around: np.ndarray  # m_y, likewise
    votes: np.ndarray  # P(y | x), see `fragment_votes`; 0 where fragments do not vote
    back_votes: np.ndarray  # P(x | y)
    # mean of cos(x, y) and of MaxSim, a fragment's nearest cosine, over those of x and of y
    alike: np.ndarray
    alike_around: np.ndarray  # its mean over x and the most alike
    back_alike_around: np.ndarray  # likewise for y
    lengths: np.ndarray  # log of the ratio of lengths, less what it is for all sentences

    @classmethod
    def gather(
        cls, pairs: Candidates, sources: SearchableText, targets: SearchableText, voting: bool
    ) -> Evidence:
        """Look at all pairs, from both sides."""
        turned, order = pairs.by_column(targets.sentences)
        back = order.argsort()
        nothing = np.zeros(len(pairs.rows))
        log_lengths = [np.log(np.maximum(side.lengths, 1)) for side in (sources, targets)]
        usual = log_lengths[0].mean() - log_lengths[1].mean()
        votes = back_votes = alike = nothing
        spread = None
        if voting:
            spread = max(1e-3, 1 - float(pairs.cosines.mean())) if len(pairs.cosines) else 1.0
            votes, nearest = fragment_votes(pairs, sources, targets, spread)
            back_votes, back_nearest = (
                seen[back] for seen in fragment_votes(turned, targets, sources, spread)
            )
            alike = (pairs.cosines + (nearest + back_nearest) / 2) / 2
        return cls(
            spread,
            pairs.cosines,
            _around(pairs, pairs.cosines),
            _around(turned, turned.cosines)[back],
            votes,
            back_votes,
            alike,
            _around(pairs, alike),
            _around(turned, alike[order])[back],
            log_lengths[0][pairs.sentences[pairs.rows]] - log_lengths[1][pairs.columns] - usual,
        )

    def hiding(
        self, pairs: Candidates, places: np.ndarray, sources: SearchableText, targets: SearchableText
    ) -> Evidence:
        """Recompute the source's side after pairs were removed; `places`, int64 [C'], tells where those left stand here."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spread"}
        left = Evidence(self.spread, **{name: value[places] for name, value in values.items()})
        votes = left.votes if self.spread is None else fragment_votes(pairs, sources, targets, self.spread)[0]
        around, alike_around = _around(pairs, left.cosines), _around(pairs, left.alike)
        return replace(left, around=around, votes=votes, alike_around=alike_around)

    def margins(self) -> np.ndarray:
        """Compute how much nearer a pair is than its neighbourhood, cos(x, y) / ((m_x + m_y) / 2)."""
        return _ratios(self.cosines, self.around, self.back_around)

    def alike_margins(self) -> np.ndarray:
        """Compute how much more alike a pair is than its neighbourhood."""
        return _ratios(self.alike, self.alike_around, self.back_alike_around)

    def mutual_votes(self) -> np.ndarray:
        """Compute the geometric mean of P(y | x) and P(x | y)."""
        return np.sqrt(self.votes * self.back_votes)


def _around(pairs: Candidates, values: np.ndarray) -> np.ndarray:
    """Average the highest values of each row, as many as a neighbourhood has or there are: float64 [C]."""
    order = np.lexsort((-values, pairs.rows))
    high = order[np.arange(len(order)) - np.searchsorted(pairs.rows, pairs.rows) < NEAREST]
    sums, counts = np.bincount(pairs.rows[high], values[high]), np.bincount(pairs.rows[high])
    return (sums / np.maximum(counts, 1))[pairs.rows]


def _ratios(values: np.ndarray, around: np.ndarray, back_around: np.ndarray) -> np.ndarray:
    both = (around + back_around) / 2
    return np.where(both > 0, values / np.where(both > 0, both, 1), -np.inf)
