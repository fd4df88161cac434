"""Robust fragment-level retrieval (RFR): sentences are paired by the combined votes of their surest fragments.

Array maths in float64. F fragments of S sentences have k neighbours each; a neighbour's class is its
sentence, and a class or answer of -1 means none. Sums are rounded before they are compared, so that ties are
ties on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairseq_ccpr.lab.mining.f1 import Answers, f1_by_threshold, steadiest
from fairseq_ccpr.lab.mining.labelled import Labels
from fairseq_ccpr.lab.mining.neighbours import DECIMALS, SearchableText, runs

OVER_SENTENCES, OVER_NEIGHBOURS = "sentences", "neighbours"
ENTROPIES = (OVER_SENTENCES, OVER_NEIGHBOURS)


@dataclass(frozen=True)
class Grid:
    """Values to try: table 2 of the paper, and larger beta for encoders to which all texts are alike, such as e5."""

    k: tuple[int, ...] = tuple(range(5, 51, 5))
    beta: tuple[float, ...] = (*range(50, 101, 5), 200, 500, 1000, 2000, 5000)
    keep: tuple[float, ...] = tuple(i / 10 for i in range(1, 11))
    threshold: tuple[float, ...] = tuple(i / 10 for i in range(11))


def match_fragments(
    sources: SearchableText,
    targets: SearchableText,
    settings: Mapping[str, Any],
    rows: np.ndarray,
    hidden: np.ndarray,
) -> Answers:
    """Match sources by the neighbours of their fragments; see `Matcher` and the settings of `METHODS`."""
    cosines, classes, owners = _neighbours(sources, targets, rows, hidden, settings["k"])
    found = distributions(cosines, classes, settings["beta"], settings["entropy_over"])
    return answer(found, entropy_ranks(found.entropies, owners), owners, len(rows), settings["keep"])


def tune_fragments(
    sources: SearchableText, targets: SearchableText, settings: Mapping[str, Any], labels: Labels, grid: Grid
) -> tuple[dict[str, Any], float]:
    """Choose k, beta, the fraction that is kept and the threshold out of a grid, all from one search; their F1."""
    cosines, classes, owners = _neighbours(sources, targets, labels.rows, labels.hidden, max(grid.k))
    f1 = np.empty((len(grid.k), len(grid.beta), len(grid.keep), len(grid.threshold)))
    for i, k in enumerate(grid.k):
        for j, beta in enumerate(grid.beta):
            found = distributions(cosines[:, :k], classes[:, :k], beta, settings["entropy_over"])
            ranks = entropy_ranks(found.entropies, owners)
            for m, keep in enumerate(grid.keep):
                answers = answer(found, ranks, owners, len(labels.rows), keep)
                f1[i, j, m] = f1_by_threshold(answers, labels.gold, np.array(grid.threshold))
    best = steadiest(f1)
    i, j, m, n = best
    tuned = {"k": grid.k[i], "beta": grid.beta[j], "keep": grid.keep[m], "threshold": grid.threshold[n]}
    return tuned, float(f1[best])


def _neighbours(
    sources: SearchableText, targets: SearchableText, rows: np.ndarray, hidden: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Search without what is hidden: cosines [F, k], classes int64 [F, k], owners int64 [F], which of the rows."""
    starts, ends = np.searchsorted(sources.owners, np.stack([rows, rows + 1]))
    owners = np.repeat(np.arange(len(rows)), ends - starts)
    ids, places = np.unique(runs(starts, ends - starts), return_inverse=True)
    sizes = np.bincount(targets.owners, minlength=targets.sentences)[hidden[hidden >= 0]]
    cosines, near = targets.keys.search(sources.keys.keys_of(ids), k + int(sizes.max(initial=0)))
    cosines, classes = cosines[places], targets.owners_of(near)[places]
    seen = np.argsort((classes == hidden[owners][:, None]) & (classes >= 0), axis=1, kind="stable")[:, :k]
    # Fewer than k may be left where there are few at all.
    cosines, classes = (np.take_along_axis(values, seen, 1) for values in (cosines, classes))
    gone = (classes == hidden[owners][:, None]) & (classes >= 0)
    return np.where(gone, -np.inf, cosines), np.where(gone, -1, classes), owners


def _neighbour_weights(cosines: np.ndarray, beta: float) -> np.ndarray:
    """Weigh a fragment's neighbours: softmax of beta * exp(-d^2 / 2) / sqrt(2 pi), d = 1 - cosine, [F, k].

    A cosine is -inf where there is no neighbour; a row without any sums to zero.
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
    entropies: np.ndarray  # float64 [F], in nats; infinite without a neighbour, which is no certainty


def distributions(
    cosines: np.ndarray, classes: np.ndarray, beta: float, entropy_over: str = OVER_SENTENCES
) -> Distributions:
    """Compute P(sentence | fragment), the sum of its neighbours' weights, and the entropy of one of the two."""
    weights = _neighbour_weights(cosines, beta)
    rows, columns = np.nonzero(weights)
    fragments, summed_classes, sums = _sum_by(rows, classes[rows, columns], weights[rows, columns])
    terms = (rows, weights[rows, columns]) if entropy_over == OVER_NEIGHBOURS else (fragments, sums)
    entropies = np.bincount(terms[0], -terms[1] * np.log(terms[1]), minlength=len(cosines)).astype(float)
    entropies[~weights.any(axis=1)] = np.inf
    return Distributions(fragments, summed_classes, sums, entropies.round(DECIMALS))


def entropy_ranks(entropies: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Rank each fragment among those of its sentence, lowest entropy first, of equal ones the earlier: int64 [F]."""
    order = np.lexsort((entropies, owners))
    ranks = np.empty(len(owners), np.int64)
    ranks[order] = np.arange(len(owners)) - np.searchsorted(owners, owners)
    return ranks


def answer(
    found: Distributions, ranks: np.ndarray, owners: np.ndarray, sentences: int, keep: float
) -> Answers:
    """Average the distributions of the kept fragments of each sentence, and take the likeliest partner.

    Of F' fragments of a sentence those of the ceil(keep F') lowest entropies count; of equal partners the
    lower is taken. Ranks and owners, the sentence of each fragment, are int64 [F].
    """
    # 0.7 * 10 is a little more than 7
    kept_counts = np.ceil((keep * np.bincount(owners, minlength=sentences)).round(DECIMALS)).astype(np.int64)
    kept = (ranks < kept_counts[owners])[found.fragments]
    answered, classes, sums = _sum_by(
        owners[found.fragments[kept]], found.classes[kept], found.probabilities[kept]
    )
    means = (sums / kept_counts[answered]).round(DECIMALS)
    order = np.lexsort((classes, -means, answered))
    first = order[np.unique(answered[order], return_index=True)[1]]
    return Answers(classes[first], means[first]).spread(answered[first], sentences)


def _sum_by(
    rows: np.ndarray, classes: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sum the values of equal row and class: rows, classes and sums, by row, then by class."""
    count = int(classes.max(initial=0)) + 1
    keys, places = np.unique(rows * count + classes, return_inverse=True)
    return keys // count, keys % count, np.bincount(places.ravel(), values, minlength=len(keys))
