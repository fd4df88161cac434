"""Centred keys, and the nearest of them in a reproducible order, whatever the blocks of queries and threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Union

import numpy as np
import torch

from fairseq_ccpr.search import ExactIndex, Index, IndexDescription, build_index, open_index
from fairseq_ccpr.timing import INDEXING, SEARCH, phase, progress_bar

SPARE = 8  # neighbours beyond the k wanted that are searched for at first
NEAR = 1e-5  # differences of scores below which fp32 may order them wrongly
DECIMALS = 9
BLOCK_NUMBERS = 1 << 24  # numbers of the keys that are rescored at a time: 128 MB in float64
FEWEST = 300  # vectors that a mean is made of: of fewer it would be that of the subject, or of one sentence
BLOCK = 4096  # vectors at a time


class IndexedKeys:
    """Keys [N, d] of length about 1, which may be memory-mapped, with an index, whose results are rescored.

    More neighbours than needed are found, and rescored in float64; equal scores come in the order of the
    keys. Where the last found is as near as the last needed, there may be further ties, and the search is
    widened. So neither blocks of queries nor threads change the result of an exact index.
    """

    def __init__(self, keys: np.ndarray, index: Callable[[], Index] | None = None) -> None:
        self.keys, self._open = keys, index

    @cached_property
    def index(self) -> Index:
        """Open the index when it is first searched: keys that are only read need none."""
        return self._open() if self._open else ExactIndex(self.keys, "ip")

    def __len__(self) -> int:
        return len(self.keys)

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Read some of the keys, in any order."""
        return self.keys[ids]

    @phase(SEARCH)
    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest keys of queries [Q, d] of length about 1; k may exceed N.

        Scores are float64 [Q, k], highest first, and ids int64 [Q, k]; -inf and -1 where there are fewer.
        """
        scores, ids = np.full((len(queries), k), -np.inf), np.full((len(queries), k), -1)
        pending, wide = np.arange(len(queries)), k + SPARE
        # Where very many are tied, their order is not worth the memory.
        deepest = min(self.index.deepest, max(wide, BLOCK_NUMBERS // self.keys.shape[1]))
        while len(pending) and len(self.keys):
            wide = min(wide, deepest)
            rows = max(1, BLOCK_NUMBERS // (wide * self.keys.shape[1]))
            tied = []
            for block in (pending[start : start + rows] for start in range(0, len(pending), rows)):
                found, names = self._find(queries[block], wide)
                scores[block, :wide], ids[block, :wide] = found[:, :k], names[:, :k]
                if wide < deepest:
                    tied.append(block[found[:, k - 1] - found[:, -1] < NEAR])
            pending, wide = np.concatenate(tied) if tied else pending[:0], 4 * wide
        return scores, ids

    def _find(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.index.search(torch.from_numpy(np.ascontiguousarray(queries, np.float32)), k)[1].numpy()
        chosen = self.keys[np.maximum(ids, 0)].astype(np.float64)  # [Q, k, d]
        scores = np.einsum("qkd,qd->qk", chosen, queries.astype(np.float64)).round(DECIMALS)
        scores[ids < 0] = -np.inf
        return _sorted(scores, ids)


def _sorted(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((ids, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


class JoinedKeys:
    """Several sets of keys that are searched as one; ids of each set follow those of the set before."""

    def __init__(self, parts: Sequence[SearchableKeys]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Read some of the keys, in any order."""
        owners = np.searchsorted(self.starts, ids, side="right") - 1
        read = [
            part.keys_of(ids[owners == number] - self.starts[number])
            for number, part in enumerate(self.parts)
        ]
        return np.concatenate(read)[np.argsort(owners, kind="stable").argsort()]

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Search all parts, and merge what they find."""
        scores, ids = zip(*(part.search(queries, k) for part in self.parts))
        shifted = [np.where(part < 0, -1, part + start) for part, start in zip(ids, self.starts)]
        best, best_ids = _sorted(np.concatenate(scores, axis=1), np.concatenate(shifted, axis=1))
        return best[:, :k], best_ids[:, :k]


SearchableKeys = Union[IndexedKeys, JoinedKeys]


class SentenceKeys(NamedTuple):
    """The keys that a method compares S sentences by."""

    keys: np.ndarray  # [N, d], one per fragment, or one per sentence
    owners: np.ndarray  # int64 [N], the sentence of each; ascending
    lengths: np.ndarray  # int64 [S], characters of each sentence
    fragments: np.ndarray  # [F, d], of sentences that are searched by keys of their own
    fragment_owners: np.ndarray  # int64 [F], ascending


@dataclass
class SearchableText:
    """S sentences that are searched by their N keys."""

    keys: SearchableKeys
    owners: np.ndarray  # int64 [N], the sentence of each; ascending
    lengths: np.ndarray  # int64 [S], characters of each sentence
    fragments: SearchableKeys  # F, which are only read; 0 where the keys say all
    fragment_owners: np.ndarray  # int64 [F], ascending

    @classmethod
    def in_memory(cls, keys: SentenceKeys) -> SearchableText:
        """Search exactly."""
        return cls(
            IndexedKeys(keys.keys),
            keys.owners,
            keys.lengths,
            IndexedKeys(keys.fragments),
            keys.fragment_owners,
        )

    @property
    def sentences(self) -> int:
        """Count the sentences: S."""
        return len(self.lengths)

    @cached_property
    def fragment_bounds(self) -> np.ndarray:
        """Locate where the fragments of each sentence begin, and end: int64 [S + 1]."""
        return np.searchsorted(self.fragment_owners, np.arange(self.sentences + 1))

    def owners_of(self, ids: np.ndarray) -> np.ndarray:
        """Look up the sentence of each neighbour, int64 like `ids`, -1 where there is none."""
        return np.append(self.owners, -1)[ids]

    def join(self, other: SearchableText) -> SearchableText:
        """Append the sentences of another text to these."""
        return SearchableText(
            JoinedKeys([self.keys, other.keys]),
            np.concatenate([self.owners, other.owners + self.sentences]),
            np.concatenate([self.lengths, other.lengths]),
            JoinedKeys([self.fragments, other.fragments]),
            np.concatenate([self.fragment_owners, other.fragment_owners + self.sentences]),
        )


def index_keys(keys: np.ndarray, description: IndexDescription, folder: Path, quiet: bool) -> IndexedKeys:
    """Prepare to search some keys; the first search builds the index, whose file, if it needs one, goes into the folder."""

    @phase(INDEXING, whole=True)
    def build() -> Index:
        if description.file:
            with progress_bar("index", "key", total=len(keys), quiet=quiet) as bar:
                build_index(keys, description, folder / description.file, bar.update)
        return open_index(description, keys, folder)

    return IndexedKeys(keys, build)


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Count on from each start: int64 [sum of counts].

    >>> runs(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    return np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


class Centre:
    """The mean of vectors that come in blocks: what all texts of a language have in common says nothing about a pair."""

    def __init__(self) -> None:
        self._sum, self._count = np.zeros(1), 0

    def add(self, vectors: np.ndarray) -> Centre:
        """Add up some vectors, [n, d]."""
        self._sum = self._sum + vectors.sum(axis=0, dtype=np.float64)
        self._count += len(vectors)
        return self

    def subtract_(self, vectors: np.ndarray) -> np.ndarray:
        """Take the mean away from vectors [n, d], in place, and bring them to length 1; leave them if there were few."""
        if self._count >= FEWEST:
            mean = (self._sum / self._count).round(DECIMALS).astype(np.float32)
            for start in range(0, len(vectors), BLOCK):
                block = vectors[start : start + BLOCK].astype(np.float32) - mean
                lengths = np.linalg.norm(block, axis=1, keepdims=True)
                vectors[start : start + BLOCK] = block / np.maximum(lengths, np.finfo(np.float32).tiny)
        return vectors


def centred(keys: SentenceKeys) -> SentenceKeys:
    """Centre the keys of a text, and its fragments, each by a mean of their own."""
    values, fragments = (Centre().add(rows).subtract_(rows.copy()) for rows in (keys.keys, keys.fragments))
    return keys._replace(keys=values, fragments=fragments)
