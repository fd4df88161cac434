"""Draw the sentences by which a token datastore knows its own text, from its keys on disk."""

from __future__ import annotations

import numpy as np
import torch

from fairseq_ccpr.datastore.domain import STATES, Domain

BLOCK_ROWS = 1 << 20


def sample_domain(keys: np.ndarray, provenance: np.ndarray) -> Domain:
    """Describe the text of a datastore by whole sentences that are spread evenly over it.

    Args:
        keys: fp16 [N, d], the decoder's own states.
        provenance: int32 [N, 2], sentence and position of each; the tokens of a sentence stand together, in order.
    """
    starts = sentence_starts(provenance)
    ends = np.append(starts[1:], len(provenance))
    count = max(1, min(len(starts), STATES * len(starts) // len(provenance)))
    chosen = np.unique(np.linspace(0, len(starts) - 1, count).round().astype(np.int64))
    states = np.concatenate([keys[starts[i] : ends[i]] for i in chosen])
    lengths, numbers = (ends - starts)[chosen], provenance[starts[chosen], 0].astype(np.int64)
    return Domain.of(torch.from_numpy(states), torch.from_numpy(lengths), torch.from_numpy(numbers))


def sentence_starts(provenance: np.ndarray) -> np.ndarray:
    """Return the rows where a sentence begins, int64, read block by block."""
    blocks = []
    for start in range(0, len(provenance), BLOCK_ROWS):
        before = provenance[max(0, start - 1) : start + BLOCK_ROWS, 0]
        changes = np.flatnonzero(before[1:] != before[:-1]) + 1
        blocks.append(changes + max(0, start - 1))
    return np.concatenate([[0], *blocks]).astype(np.int64)


def join_domains(domains: list[Domain], weights: list[int]) -> Domain:
    """Describe the text of several datastores by some of the sentences of each, in proportion to its entries.

    Args:
        domains: of each; the numbers of their sentences are kept.
        weights: entries of each.
    """
    states, lengths, numbers = [], [], []
    for domain, weight in zip(domains, weights):
        share = STATES * weight / sum(weights) / max(1, len(domain.states))
        chosen = (
            torch.linspace(0, len(domain.lengths) - 1, max(1, int(len(domain.lengths) * min(1.0, share))))
            .round()
            .long()
        )
        rows = torch.isin(torch.arange(len(domain.lengths)).repeat_interleave(domain.lengths), chosen)
        states.append(domain.states[rows])
        lengths.append(domain.lengths[chosen])
        numbers.append(domain.numbers[chosen])
    return Domain.of(torch.cat(states), torch.cat(lengths), torch.cat(numbers))
