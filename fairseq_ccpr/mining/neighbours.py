"""The nearest fragments of a fragment, in an order that depends on nothing but their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from tqdm import tqdm

from fairseq_ccpr.search import ExactIndex, Index, IndexDescription, build_index, open_index

SPARE = 8  # neighbours more than asked for, at first
NEAR = 1e-5  # scores that fp32 may have in the wrong order
DECIMALS = 9
BLOCK_NUMBERS = 1 << 24  # numbers of keys that are scored again at a time: 128 MB in float64


class SearchableKeys(Protocol):
    """Keys that are searched by inner product."""

    def __len__(self) -> int:
        """N."""

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """Some of the keys, [n, d]."""

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest keys.

        Args:
            queries: [Q, d] of length about 1.
            k: at least 1; may exceed N.

        Returns:
            Scores float64 [Q, k], highest first, and ids int64 [Q, k]; -inf and -1 where there are fewer.
        """


class IndexedKeys:
    """Keys with an index.

    1. An index finds some more neighbours than are wanted;
    2. they are scored again in float64, and equal scores come in the order of the keys;
    3. where the last found is as near as the last wanted, there may be more like them, and more are asked for.

    So neither blocks of queries nor threads change the result of an exact index.

    Args:
        keys: [N, d] of length about 1, any float dtype; may be memory-mapped.
        index: over them, by inner product; exact search if not given.
    """

    def __init__(self, keys: np.ndarray, index: Index | None = None) -> None:
        self.keys = keys
        self.index = index or ExactIndex(keys, "ip")

    def __len__(self) -> int:
        """See `SearchableKeys`."""
        return len(self.keys)

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """See `SearchableKeys`."""
        return self.keys[ids]

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `SearchableKeys`."""
        scores, ids = np.full((len(queries), k), -np.inf), np.full((len(queries), k), -1)
        pending, wide = np.arange(len(queries)), k + SPARE
        # Where very many are equally near, memory is worth more than their order.
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
        """The k nearest keys of each query, scored in float64, in order."""
        found = self.index.search(torch.from_numpy(np.ascontiguousarray(queries, np.float32)), k)[1]
        return _in_order(queries, self.keys, found.numpy())


def _in_order(queries: np.ndarray, keys: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores [Q, k] and ids of given keys, highest first, of equal ones the lower id."""
    chosen = keys[np.maximum(ids, 0)].astype(np.float64)  # [Q, k, d]
    scores = np.einsum("qkd,qd->qk", chosen, queries.astype(np.float64)).round(DECIMALS)
    scores[ids < 0] = -np.inf
    return _sorted(scores, ids)


def _sorted(scores: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row by falling score, of equal ones by rising id."""
    order = np.lexsort((ids, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


class JoinedKeys:
    """Several sets of keys that are searched as one, those of the second numbered after those of the first, and so on.

    Args:
        parts: of equal width.
    """

    def __init__(self, parts: Sequence[SearchableKeys]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        """See `SearchableKeys`."""
        return int(self.starts[-1])

    def keys_of(self, ids: np.ndarray) -> np.ndarray:
        """See `SearchableKeys`; the ids ascend."""
        bounds = np.searchsorted(ids, self.starts)
        rows = [ids[first:end] - start for first, end, start in zip(bounds, bounds[1:], self.starts)]
        return np.concatenate([part.keys_of(of_part) for part, of_part in zip(self.parts, rows)])

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """See `SearchableKeys`."""
        found = [part.search(queries, k) for part in self.parts]
        ids = [np.where(names < 0, -1, names + start) for (_, names), start in zip(found, self.starts)]
        scores, names = _sorted(np.concatenate([of_part for of_part, _ in found], axis=1), np.concatenate(ids, axis=1))
        return scores[:, :k], names[:, :k]


class SentenceKeys(NamedTuple):
    """The keys that a method compares S sentences by."""

    keys: np.ndarray  # [N, d], one a fragment, or one a sentence
    owners: np.ndarray  # int64 [N], the sentence of each; ascending
    sentences: int  # S


@dataclass
class SearchableText:
    """S sentences that are searched by their keys.

    Attributes:
        keys: N of them.
        owners: int64 [N], the sentence of each; ascending.
        sentences: S.
    """

    keys: SearchableKeys
    owners: np.ndarray
    sentences: int

    @classmethod
    def of(cls, keys: SentenceKeys) -> SearchableText:
        """Search exactly, in memory."""
        return cls(IndexedKeys(keys.keys), keys.owners, keys.sentences)

    def owners_of(self, ids: np.ndarray) -> np.ndarray:
        """Look up the sentence of each neighbour, int64 like `ids`, -1 where there is none."""
        return np.append(self.owners, -1)[ids]

    def join(self, other: SearchableText) -> SearchableText:
        """Append the sentences of another text to these."""
        owners = np.concatenate([self.owners, other.owners + self.sentences])
        return SearchableText(JoinedKeys([self.keys, other.keys]), owners, self.sentences + other.sentences)


def index_keys(keys: np.ndarray, description: IndexDescription, folder: Path, quiet: bool) -> IndexedKeys:
    """Make the index of some keys, in a folder where it needs a file, and open it.

    Raises:
        ConfigurationError: there are too few keys for such an index.
        DatastoreError: its file cannot be written.
    """
    if description.file:
        with tqdm(desc="index", total=len(keys), unit="key", unit_scale=True, disable=quiet) as bar:
            build_index(keys, description, folder / description.file, bar.update)
    return IndexedKeys(keys, open_index(description, keys, folder))
