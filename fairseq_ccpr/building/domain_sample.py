"""Sample the sentences that describe a token datastore's own text, from its keys on disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fairseq_ccpr.datastore.domain import STATES, Domain
from fairseq_ccpr.errors import DatastoreError

BLOCK_ROWS = 1 << 20


def sample_domain(keys: np.ndarray, provenance: np.ndarray) -> Domain:
    """Describe the text of a datastore by whole sentences that are spread evenly over it.

    Memory depends on neither the number of entries nor that of sentences: provenance is read twice, block by block.

    Args:
        keys: fp16 [N, d], the decoder's own states.
        provenance: int32 [N, 2], sentence and position of each; the tokens of a sentence stand together, in order.

    Raises:
        DatastoreError: a state is NaN or infinite, which no build writes.
    """
    sentences = sum(len(starts) for starts in _sentence_starts(provenance))
    chosen = _spread(sentences, STATES * sentences // len(provenance))
    spans = _rows_of(provenance, np.stack([chosen, chosen + 1], axis=1))
    states = np.concatenate([keys[start:end] for start, end in spans])
    numbers = provenance[spans[:, 0], 0].astype(np.int64)
    if not np.isfinite(states).all():
        raise DatastoreError("the keys are damaged (NaN or infinite numbers): build the datastore again")
    return Domain.of(torch.from_numpy(states), torch.from_numpy(spans[:, 1] - spans[:, 0]), torch.from_numpy(numbers))


def join_domains(domains: list[Domain], weights: list[int]) -> Domain:
    """Describe the text of several datastores by sentences of the sample of each, in proportion to its entries.

    Args:
        domains: of each; the numbers of their sentences are kept.
        weights: entries of each.
    """
    thinned = []
    for domain, weight in zip(domains, weights):
        sentences = len(domain.lengths)
        due = STATES * weight / sum(weights)
        chosen = torch.zeros(sentences, dtype=torch.bool)
        chosen[_spread(sentences, int(sentences * due / len(domain.states)))] = True
        thinned.append(domain.select(chosen))
    joined = {name: torch.cat([getattr(one, name) for one in thinned]) for name in ("states", "lengths", "numbers")}
    return Domain.of(**joined)


def _spread(total: int, count: int) -> np.ndarray:
    """Choose about `count` of `total` items, at least one and at most all, evenly and in ascending order.

    >>> _spread(10, 4).tolist(), _spread(3, 9).tolist(), _spread(3, 0).tolist()
    ([0, 3, 6, 9], [0, 1, 2], [0])
    """
    return np.unique(np.linspace(0, total - 1, max(1, min(count, total))).round().astype(np.int64))


def _rows_of(provenance: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Find the rows where sentences begin, int64, shaped as their ranks; the one after the last begins at the end."""
    rows = np.full(ranks.shape, len(provenance), dtype=np.int64)
    before = 0
    for starts in _sentence_starts(provenance):
        here = (ranks >= before) & (ranks < before + len(starts))
        rows[here] = starts[ranks[here] - before]
        before += len(starts)
    return rows


def _sentence_starts(provenance: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows where sentences begin, int64, block by block."""
    for start in range(0, len(provenance), BLOCK_ROWS):
        yield start + np.flatnonzero(provenance[start : start + BLOCK_ROWS, 1] == 0)
