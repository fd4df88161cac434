"""Nearest keys in a reproducible order: it does not depend on blocks of queries or on threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from fairseq_ccpr.search import ExactIndex, Index, IndexDescription, build_index, open_index
from fairseq_ccpr.timing import INDEXING, SEARCH, phase, progress_bar

SPARE = 8  # neighbours beyond the k wanted that are searched for at first
NEAR = 1e-5  # differences of scores below which fp32 may order them wrongly
DECIMALS = 9
BLOCK_NUMBERS = 1 << 24  # numbers of the keys that are rescored at a time: 128 MB in float64


class SearchableKeys(Protocol):
    """Keys that are searched by inner product."""

    def __len__(self) -> int:
        """Count the keys: N."""

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Read some of the keys, [n, d]."""

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest keys.

        Args:
            queries: [Q, d] of length about 1.
            k: at least 1; may exceed N.

        Returns:
            Scores float64 [Q, k], highest first, and ids int64 [Q, k]; -inf and -1 where there are fewer.
        """


class IndexedKeys:
    """Keys with an index, whose results are rescored.

    1. The index finds some more neighbours than are wanted.
    2. They are rescored in float64; equal scores come in the order of the keys.
    3. Where the last found is as near as the last wanted, there may be further ties, and the search is widened.

    So neither blocks of queries nor threads change the result of an exact index.

    Args:
        keys: [N, d] of length about 1, any float dtype; may be memory-mapped.
        index: opens one over them, by inner product; exact search by default.
    """

    def __init__(self, keys: np.ndarray, index: Callable[[], Index] | None = None) -> None:
        self.keys = keys
        self._open = index or (lambda: ExactIndex(keys, "ip"))

    @cached_property
    def index(self) -> Index:
        """Open the index when it is first searched: keys that are only read need none."""
        return self._open()

    def __len__(self) -> int:
        """Count the keys."""
        return len(self.keys)

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Read some of the keys, in any order."""
        return self.keys[ids]

    @phase(SEARCH)
    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Search the index, deeper where scores are tied, and score again."""
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
        """Find the k nearest keys of each query, scored in float64, in order."""
        found = self.index.search(torch.from_numpy(np.ascontiguousarray(queries, np.float32)), k)[1]
        return _in_order(queries, self.keys, found.numpy())


def _in_order(queries: np.ndarray, keys: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rescore and sort found ids [Q, k]: scores and ids, highest first, of equal ones the lower id."""
    chosen = keys[np.maximum(ids, 0)].astype(np.float64)  # [Q, k, d]
    scores = np.einsum("qkd,qd->qk", chosen, queries.astype(np.float64)).round(DECIMALS)
    scores[ids < 0] = -np.inf
    return _sorted(scores, ids)


def _sorted(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort each row by falling score, equal ones by rising id."""
    order = np.lexsort((ids, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


class JoinedKeys:
    """Several sets of keys that are searched as one; ids of each set follow those of the set before.

    Args:
        parts: of equal width.
    """

    def __init__(self, parts: Sequence[SearchableKeys]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        """Count the keys of all parts."""
        return int(self.starts[-1])

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Read some of the keys, in any order."""
        owners = np.searchsorted(self.starts, ids, side="right") - 1
        read = [part.keys_of(ids[owners == number] - self.starts[number]) for number, part in enumerate(self.parts)]
        return np.concatenate(read)[np.argsort(owners, kind="stable").argsort()]

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Search all parts, and merge what they find."""
        scores, ids = zip(*(part.search(queries, k) for part in self.parts))
        shifted = [np.where(part < 0, -1, part + start) for part, start in zip(ids, self.starts)]
        best, best_ids = _sorted(np.concatenate(scores, axis=1), np.concatenate(shifted, axis=1))
        return best[:, :k], best_ids[:, :k]


class SentenceKeys(NamedTuple):
    """The keys that a method compares S sentences by."""

    keys: np.ndarray  # [N, d], one per fragment, or one per sentence
    owners: np.ndarray  # int64 [N], the sentence of each; ascending
    lengths: np.ndarray  # int64 [S], characters of each sentence
    fragments: np.ndarray  # [F, d], of sentences that are searched by keys of their own
    fragment_owners: np.ndarray  # int64 [F], ascending


@dataclass
class SearchableText:
    """S sentences that are searched by their keys.

    Attributes:
        keys: N of them.
        owners: int64 [N], the sentence of each; ascending.
        lengths: int64 [S], characters of each sentence.
        fragments: F, which are only read; 0 where the keys say all.
        fragment_owners: int64 [F], ascending.
    """

    keys: SearchableKeys
    owners: np.ndarray
    lengths: np.ndarray
    fragments: SearchableKeys
    fragment_owners: np.ndarray

    @classmethod
    def of(cls, keys: SentenceKeys) -> SearchableText:
        """Search exactly, in memory."""
        return cls(IndexedKeys(keys.keys), keys.owners, keys.lengths, IndexedKeys(keys.fragments), keys.fragment_owners)

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
    """Prepare to search some keys; the first search builds the index, whose file, if it needs one, goes into the folder.

    That search raises:
        ConfigurationError: there are too few keys for such an index.
        DatastoreError: its file cannot be written.
    """

    @phase(INDEXING, whole=True)
    def build() -> Index:
        if description.file:
            with progress_bar("index", "key", total=len(keys), quiet=quiet) as bar:
                build_index(keys, description, folder / description.file, bar.update)
        return open_index(description, keys, folder)

    return IndexedKeys(keys, build)
