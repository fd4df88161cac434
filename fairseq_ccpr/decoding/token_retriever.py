"""Search in a token datastore with the decoder's states: the interface of a retriever, and that of CLKNN and kNN-MT.

Letters: N queries, d decoder width, k neighbours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.learned_memory import LearnedEntries
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import EXACT, ExactIndex, Index
from fairseq_ccpr.search.candidates import Candidates
from fairseq_ccpr.search.exact import largest
from fairseq_ccpr.search.live import search_without
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.fingerprint import short

MOST_BYTES = 4 << 30  # that keys gathered for a batch may take


class Neighbours(NamedTuple):
    """The nearest entries of N queries, best first; missing ones may stand between them.

    Args:
        ids: int64 [N, k], entries; -1 where one is missing.
        scores: fp32 [N, k], inner products or minus squared distances; -inf where one is missing.
        values: int64 [N, k], their tokens; any token where one is missing.
        likeness: fp32 [N, k], how much their source sentences are like the one that is translated, 0 to 1;
            None: not known.
    """

    ids: Tensor
    scores: Tensor
    values: Tensor
    likeness: Tensor | None = None

    @classmethod
    def missing(cls, queries: Tensor, k: int) -> Neighbours:
        """Return no neighbours of queries, [N, d]."""
        ids = queries.new_full((len(queries), k), -1, dtype=torch.int64)
        return cls(ids, torch.full_like(ids, float("-inf"), dtype=torch.float32), torch.zeros_like(ids))

    def put(self, rows: Tensor, found: Neighbours) -> None:
        """Put neighbours in the places of those of some queries, int64 [n]."""
        for part, other in zip(self[:3], found[:3]):
            part[rows] = other

    @classmethod
    def joined(cls, several: Sequence[Neighbours], join: Callable[[list[Tensor]], Tensor]) -> Neighbours:
        """Join each part of several, all of which know the likeness, or none."""
        ids, scores, values, likeness = zip(*several)
        together = join(list(likeness)) if likeness[0] is not None else None
        return cls(join(list(ids)), join(list(scores)), join(list(values)), together)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Neighbours:
        """Change all parts alike."""
        return self.joined([self], lambda parts: change(parts[0]))

    def nearest(self, k: int) -> Neighbours:
        """Return the first k of each query."""
        return self if k >= self.ids.size(1) else self.changed(lambda part: part[:, :k])

    def without(self, missing: Tensor) -> Neighbours:
        """Return the same neighbours, some of which are missing: bool [N, k], or [N, 1] for all of a query."""
        ids, scores = self.ids.masked_fill(missing, -1), self.scores.masked_fill(missing, float("-inf"))
        return self._replace(ids=ids, scores=scores)


class Retriever(Protocol):
    """Searches a token datastore. `TranslationRetrievalTask.retriever_class` names the class.

    It is called with an opened datastore and the model's device, and must keep no state from one search to
    the next: several generators, or threads, may share it.
    """

    datastore: TokenDatastore

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest entries of the decoder's states, [N, d] in any float dtype, on its device."""
        ...

    def describe(self) -> dict[str, object]:
        """Name all that decides what is retrieved, by name: the retrieval signature prints it."""
        ...


@runtime_checkable
class LearningRetriever(Retriever, Protocol):
    """A retriever that also searches what was learned alongside its datastore."""

    def project(self, states: Tensor) -> Tensor:
        """Make keys of the decoder's states, [N, d] in any float dtype."""
        ...

    def with_learned(self, entries: LearnedEntries) -> LearningRetriever:
        """Return the same retriever with what was learned up to a moment, whose entries are numbered after its own."""
        ...


class TokenRetriever:
    """The retriever of CLKNN and kNN-MT: projects queries as the keys were, searches the index, looks up values.

    What was learned alongside the datastore is searched together with it: its entries are numbered after the
    datastore's own.

    Args:
        datastore: an opened token datastore.
        device: the model's device; keys and values live there where the index can.
    """

    def __init__(self, datastore: TokenDatastore, device: torch.device) -> None:
        self.datastore = datastore
        self.index = datastore.open_index(device)
        projection = datastore.open_projection()
        self.projection = projection.to(device) if projection is not None else None
        values = as_tensor(datastore.values)
        # missing neighbours have some value
        self.values = (values if len(values) else values.new_zeros(1)).to(device)
        self.learned: LearnedEntries | None = None
        self._instead: str | None = None  # names the index of other entries

    def project(self, states: Tensor) -> Tensor:
        """Make keys of the decoder's states, [N, d] in any float dtype."""
        return self.projection(states) if self.projection is not None else states

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest entries of the decoder's states, [N, d] in any float dtype."""
        keys = self.project(queries)
        if self.learned is not None:
            return self._search_both(keys, k, self.learned)
        scores, ids = self.index.search(keys, k)
        return Neighbours(ids, scores, self.values[ids].long())

    def _search_both(self, keys: Tensor, k: int, learned: LearnedEntries) -> Neighbours:
        """Find the k nearest of the datastore's entries, less those that were forgotten, and of those that were learned."""
        scores, ids = search_without(self.index, learned.gone, keys, k)
        values = self.values[ids]
        if learned.index.size:
            more, rows = learned.index.candidates(keys, k)
            values = torch.cat([values, learned.values[rows]], dim=1)
            scores = torch.cat([scores, more], dim=1)
            ids = torch.cat([ids, torch.where(rows >= 0, rows + self.index.size, rows)], dim=1)
        # Places stand for ids, which may be missing: of equal scores the datastore's own come first.
        best, places = largest(scores, k)
        return Neighbours(ids.gather(1, places), best, values.gather(1, places).long())

    def candidates(self, entries: list[np.ndarray]) -> Candidates:
        """Gather the keys of entries, int64 [n] for each sentence of a batch, to be searched with `search_among`.

        Raises:
            ConfigurationError: they take more memory than `MOST_BYTES`.
        """
        own, device = self.index.size, self.values.device
        keys = self.index.keys if isinstance(self.index, ExactIndex) else as_tensor(self.datastore.keys)
        most = max(1, *(len(one) for one in entries))
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        if (needed := len(entries) * most * keys.size(1) * dtype.itemsize) > MOST_BYTES:
            smaller = len(entries) * MOST_BYTES // needed
            raise ConfigurationError(
                f"--knn-sentences gathers {most:,} keys for each of {len(entries):,} sentences, {needed / 1e9:.0f} GB: give "
                f"fewer{f', or a --batch-size of up to {smaller:,}' if smaller else ''}"
            )
        gathered = torch.zeros(len(entries), most, keys.size(1), dtype=dtype, device=device)
        numbers = torch.full((len(entries), most), -1)
        for row, some in enumerate(map(torch.from_numpy, entries)):
            stored = some < own
            gathered[row, : int(stored.sum())] = keys[some[stored].to(keys.device)].to(device, dtype)
            numbers[row, : len(some)] = torch.cat([some[stored], some[~stored]])
            if self.learned is not None and not stored.all():
                learned = self.learned.index.keys[(some[~stored] - own).to(device)]
                gathered[row, int(stored.sum()) : len(some)] = learned.to(dtype)
        return Candidates(gathered, numbers.to(device), self.datastore.section.index.metric)

    def search_among(
        self, candidates: Candidates, queries: Tensor, rows: Tensor, k: int, each: int | None
    ) -> Neighbours:
        """Find the k nearest candidates of the decoder's states; see `Candidates.search`."""
        scores, ids = candidates.search(self.project(queries).float(), rows, k, each)
        values = self.values[ids.clamp(0, len(self.values) - 1)]
        if self.learned is not None and self.learned.index.size:
            learned = self.learned.values[(ids - self.index.size).clamp_min(0)]
            values = torch.where(ids >= self.index.size, learned, values)
        return Neighbours(ids, scores, values.long())

    def with_learned(self, entries: LearnedEntries) -> TokenRetriever:
        """Return the same retriever with what was learned up to a moment."""
        other = copy.copy(self)
        other.learned = None if entries.empty else entries
        return other

    def with_entries(self, index: Index, values: Tensor, described: str) -> TokenRetriever:
        """Return the same retriever over other entries.

        Args:
            index: of their keys.
            values: int [N], their tokens, on the device of the index.
            described: names the index in the signature.
        """
        other = copy.copy(self)
        other.index, other.values, other.learned, other._instead = index, values, None, described
        return other

    def describe(self) -> dict[str, object]:
        """Name all that decides what is retrieved, by name."""
        section = self.datastore.section
        learned = {} if self.learned is None else {"learned": self.learned}
        return {
            "retriever": type(self).__name__,
            "store": short(self.datastore.keys_fingerprint),
            "entries": self.index.size,
            "keys": section.key_layer + (f"+{section.projection}" if section.projection is not None else ""),
            "index": self._instead or (EXACT if self.index.stands_in else section.index),
            "metric": section.index.metric,
            **learned,
        }
