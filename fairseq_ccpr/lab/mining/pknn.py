"""Probabilistic k nearest neighbours: from the neighbours of fragments to the sentence each sentence is paired with.

Pure array maths in float64. F fragments of S sentences have k neighbours each; a neighbour's class is its sentence, and a
class or answer of -1 means none. Sums are rounded before they are compared, so that ties are ties on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

OVER_SENTENCES, OVER_NEIGHBOURS = "sentences", "neighbours"
ENTROPIES = (OVER_SENTENCES, OVER_NEIGHBOURS)
DECIMALS = 9  # of sums of probabilities


def neighbour_weights(cosines: np.ndarray, beta: float) -> np.ndarray:
    """Weigh a fragment's neighbours: softmax of beta * exp(-d^2 / 2) / sqrt(2 pi), d = 1 - cosine.

    Args:
        cosines: [F, k], -inf where there is no neighbour.
        beta: the larger, the more weight the nearest have.

    Returns:
        float64 [F, k]; rows sum to one, or to zero where there is no neighbour at all.

    >>> neighbour_weights(np.array([[1.0, 1.0, -np.inf]]), 50)
    array([[0.5, 0.5, 0. ]])
    """
    found = np.isfinite(cosines)
    distances = 1 - np.where(found, cosines, 0.0)
    kernel = np.exp(-(distances**2) / 2) / math.sqrt(2 * math.pi)
    logits = np.where(found, beta * kernel, -np.inf)
    highest = np.where(found.any(axis=1), logits.max(axis=1, initial=-np.inf), 0.0)
    weights = np.exp(logits - highest[:, None])
    return weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)


@dataclass
class Distributions:
    """The G probabilities above zero of a sentence given a fragment, by fragment, then by class."""

    fragments: np.ndarray  # int64 [G]
    classes: np.ndarray  # int64 [G]
    probabilities: np.ndarray  # float64 [G]
    entropies: np.ndarray  # float64 [F], in nats


def distributions(
    cosines: np.ndarray, classes: np.ndarray, beta: float, entropy_over: str = OVER_SENTENCES
) -> Distributions:
    """Compute P(sentence | fragment), the sum of its neighbours' weights, and its entropy.

    Args:
        cosines: [F, k], -inf where there is no neighbour.
        classes: int64 [F, k], the sentence of each neighbour.
        beta: see `neighbour_weights`.
        entropy_over: `sentences`, that of P; or `neighbours`, that of the weights.
    """
    weights = neighbour_weights(cosines, beta)
    rows, columns = np.nonzero(weights)
    fragments, summed_classes, sums = _sum_by(rows, classes[rows, columns], weights[rows, columns])
    terms = (rows, weights[rows, columns]) if entropy_over == OVER_NEIGHBOURS else (fragments, sums)
    entropies = np.bincount(terms[0], -terms[1] * np.log(terms[1]), minlength=len(cosines))
    return Distributions(fragments, summed_classes, sums, entropies.round(DECIMALS))


def entropy_ranks(entropies: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Rank each fragment among those of its sentence, lowest entropy first, of equal ones the earlier.

    Args:
        entropies: [F].
        owners: int64 [F], the sentence of each fragment; ascending.

    Returns:
        int64 [F].

    >>> entropy_ranks(np.array([0.2, 0.1, 0.2, 0.3]), np.array([0, 0, 0, 1]))
    array([1, 0, 2, 0])
    """
    order = np.lexsort((entropies, owners))
    ranks = np.empty(len(owners), np.int64)
    ranks[order] = np.arange(len(owners)) - np.searchsorted(owners, owners)
    return ranks


@dataclass
class Answers:
    """The likeliest partner of each of S sentences, whether or not it is likely enough."""

    partners: np.ndarray  # int64 [S], -1 where no fragment has a neighbour
    scores: np.ndarray  # float64 [S], the probability of the partner, or its margin; 0 where there is none

    def spread(self, rows: np.ndarray, sentences: int) -> Answers:
        """Expand to `sentences` answers, of which these belong to `rows`, int64 [S]; the others have no partner."""
        spread = Answers(np.full(sentences, -1), np.zeros(sentences))
        spread.partners[rows], spread.scores[rows] = self.partners, self.scores
        return spread


def answer(found: Distributions, ranks: np.ndarray, owners: np.ndarray, sentences: int, keep: float) -> Answers:
    """Average the distributions of the kept fragments of each sentence, and take the likeliest partner.

    Args:
        found: of F fragments.
        ranks: int64 [F], see `entropy_ranks`.
        owners: int64 [F], the sentence of each fragment; ascending.
        sentences: S.
        keep: p; of F' fragments of a sentence those of the ceil(p F') lowest entropies count.

    Returns:
        The sentence of the highest mean probability; of equal ones that with the lower number.
    """
    # 0.7 * 10 is a little more than 7
    kept_counts = np.ceil((keep * np.bincount(owners, minlength=sentences)).round(DECIMALS)).astype(np.int64)
    kept = (ranks < kept_counts[owners])[found.fragments]
    answered, classes, sums = _sum_by(owners[found.fragments[kept]], found.classes[kept], found.probabilities[kept])
    means = (sums / kept_counts[answered]).round(DECIMALS)
    order = np.lexsort((classes, -means, answered))
    first = order[np.unique(answered[order], return_index=True)[1]]
    return Answers(classes[first], means[first]).spread(answered[first], sentences)


def _sum_by(rows: np.ndarray, classes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sum the values of equal row and class: rows, classes and sums, by row, then by class."""
    count = int(classes.max(initial=0)) + 1
    keys, places = np.unique(rows * count + classes, return_inverse=True)
    return keys // count, keys % count, np.bincount(places.ravel(), values, minlength=len(keys))
