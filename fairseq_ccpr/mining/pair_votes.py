"""What the fragments of a sentence say on its candidates."""

from __future__ import annotations

import math

import numpy as np

from fairseq_ccpr.mining.candidates import Candidates
from fairseq_ccpr.mining.neighbours import SearchableKeys, SearchableText
from fairseq_ccpr.timing import VOTING, phase

VOTERS = 20  # neighbours of a fragment
BETA = 100  # how much the nearest of them count
TIED = 1e-6  # cosines nearer than that are equal in fp32


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
    for row, sentence in enumerate(pairs.sentences.tolist()):
        here = slice(bounds[row], bounds[row + 1])
        if here.start == here.stop:
            continue
        own = _vectors(of.fragments, *_ranges(of, np.array([sentence])))  # [f, d]
        starts, counts = _ranges(among, pairs.columns[here])
        cosines = (own @ _vectors(among.fragments, starts, counts).T).astype(np.float64)  # [f, g]
        first = np.cumsum(counts) - counts
        nearest[here] = np.maximum.reduceat(cosines, first, axis=1).mean(axis=0)
        weights = _weights((cosines + np.repeat(pairs.cosines[here], counts)) / 2, spread)
        votes[here] = np.add.reduceat(weights, first, axis=1).mean(axis=0)
    return votes, nearest


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
    ids = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return fragments.keys_of(ids).astype(np.float32)
