"""Which sentences of a datastore repeat others: by their translation, the target tokens, or by their source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SOURCE_NUMBERS = 8  # r, that stand for a source
# Differences of these numbers, in standard deviations, up to which sources count as the same. Batching and the keys' fp16
# cause a fiftieth of it if the model computes in fp32, a third if it computes in fp16. Sources that differ in one short word
# are farther apart; if they are not, it is just as well that neither gives the other negatives.
SAME_SOURCE = 0.03
BLOCK_ROWS = 1 << 20
BLOCK_SENTENCES = 1 << 14


@dataclass(frozen=True)
class Origins:
    """Marks that show whether sentences repeat each other, in any shape.

    Attributes:
        groups: int64 [...], the same number where all target tokens are the same; -1: no group of the datastore.
        sources: fp32 [..., r], equal up to `SAME_SOURCE` where the source is the same.
    """

    groups: Tensor
    sources: Tensor

    def __getitem__(self, index: Tensor) -> Origins:
        return Origins(self.groups[index], self.sources[index])

    def to(self, device: torch.device) -> Origins:
        """Copy to another device."""
        return Origins(self.groups.to(device), self.sources.to(device))

    def repeated_by(self, others: Origins) -> Tensor:
        """Compare [B] sentences with [B, C] others: bool [B, C], where translation or source is the same."""
        same_target = others.groups == self.groups.unsqueeze(1)
        apart = (others.sources - self.sources.unsqueeze(1)).abs().amax(dim=2)
        return same_target | (apart <= SAME_SOURCE)


class SentenceOrigins:
    """The origins of a datastore's sentences.

    A datastore does not hold the source. But the decoder's state at the first position depends only on the source, so equal
    sources give equal states; a few random projections of that state represent the source.

    Args:
        keys: fp16 [N, d], the decoder's own states, whole sentences one after the other; may be memory-mapped.
        values: int [N].
        sentences: int [N], the sentence of each.
    """

    def __init__(self, keys: np.ndarray, values: np.ndarray, sentences: np.ndarray) -> None:
        starts = _starts(sentences)
        self.lengths = np.diff(np.append(starts, len(sentences)))  # int64 [S]
        self.sentence_of = torch.from_numpy(np.repeat(np.arange(len(starts), dtype=np.int32), self.lengths))  # [N]
        self._hashes, groups = np.unique(hash_sentences(values, sentences), return_inverse=True)
        self._random = np.random.default_rng(1).normal(size=(keys.shape[1], SOURCE_NUMBERS)).astype(np.float32)
        sources = self._project(keys, starts)
        self._mean, self._deviation = sources.mean(axis=0), np.maximum(sources.std(axis=0), 1e-6)
        self.origins = Origins(torch.from_numpy(groups), self._scale(sources))

    def of_rows(self, keys: np.ndarray, values: np.ndarray, sentences: np.ndarray, rows: np.ndarray) -> Origins:
        """Determine the origins of some rows of another datastore, by the same marks.

        Args:
            keys, values, sentences: of the other datastore.
            rows: int64 [Q].
        """
        starts = _starts(sentences)
        chosen, sentence_of = np.unique(np.searchsorted(starts, rows, side="right") - 1, return_inverse=True)
        hashes = hash_sentences(values, sentences)[chosen]
        place = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        groups = np.where(self._hashes[place] == hashes, place, -1)
        sources = self._scale(self._project(keys, starts[chosen]))
        return Origins(torch.from_numpy(groups), sources)[torch.from_numpy(sentence_of)]

    def _project(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Project some states, fp32 [n, r]; memory holds a block of them."""
        blocks = [rows[start : start + BLOCK_SENTENCES] for start in range(0, len(rows), BLOCK_SENTENCES)]
        return np.concatenate([keys[block].astype(np.float32) @ self._random for block in blocks])

    def _scale(self, projected: np.ndarray) -> Tensor:
        return torch.from_numpy((projected - self._mean) / self._deviation)


def hash_sentences(values: np.ndarray, sentences: np.ndarray) -> np.ndarray:
    """Hash the tokens of each sentence in their order, uint64 [S]; memory holds a block of rows.

    >>> hashes = hash_sentences(np.array([5, 6, 2, 6, 5, 2, 5, 6, 2]), np.array([0, 0, 0, 1, 1, 1, 4, 4, 4]))
    >>> (hashes == hashes[0]).tolist()
    [True, False, True]
    """
    starts = _starts(sentences)
    hashes = np.zeros(len(starts), np.uint64)
    for first in range(0, len(values), BLOCK_ROWS):
        tokens = values[first : first + BLOCK_ROWS].astype(np.uint64)
        rows = np.arange(first, first + len(tokens))
        sentence_of = np.searchsorted(starts, rows, side="right") - 1
        mixed = _mix(_mix((rows - starts[sentence_of]).astype(np.uint64)) + tokens)
        begins = np.flatnonzero(np.diff(sentence_of, prepend=-1))
        hashes[sentence_of[begins]] += np.add.reduceat(mixed, begins)
    return hashes


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Scatter uint64 numbers over all of uint64, one to one: the finaliser of SplitMix64."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _starts(sentences: np.ndarray) -> np.ndarray:
    """Find the first row of each sentence, int64 [S]."""
    return np.flatnonzero(np.diff(sentences, prepend=sentences[0] - 1))
