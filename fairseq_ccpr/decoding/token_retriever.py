"""The search of the token memory: entries near the decoder's states, learned ones among them.

Letters: N queries, k neighbours, d decoder width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.forced import joined
from fairseq_ccpr.decoding.learned_memory import LearnedEntries
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.remote_answers import RemoteAnswers
from fairseq_ccpr.search import EXACT, ExactIndex
from fairseq_ccpr.search.exact import largest
from fairseq_ccpr.search.live import search_without
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.fingerprint import short


class Neighbours(NamedTuple):
    """The nearest entries of N queries, best first; missing ones may stand between them.

    Args:
        ids: int64 [N, k], entries; -1 where one is missing.
        scores: fp32 [N, k], inner products or minus squared distances; -inf where one is missing.
        values: int64 [N, k], their tokens; any token where one is missing.
        likeness: fp16 or fp32 [N, k], how much their source sentences are like the one that is translated, 0
            to 1; None: not known.
    """

    ids: Tensor
    scores: Tensor
    values: Tensor
    likeness: Tensor | None = None

    @classmethod
    def missing(cls, queries: Tensor, k: int) -> Neighbours:
        ids = queries.new_full((len(queries), k), -1, dtype=torch.int64)
        return cls(ids, torch.full_like(ids, float("-inf"), dtype=torch.float32), torch.zeros_like(ids))

    def put(self, rows: Tensor, found: Neighbours) -> None:
        """Put neighbours in the places of those of some queries, int64 [n]."""
        for part, other in zip(self[:3], found[:3]):
            part[rows] = other

    def changed(self, change: Callable[[Tensor], Tensor]) -> Neighbours:
        return joined([self], lambda parts: change(parts[0]))

    def without(self, missing: Tensor) -> Neighbours:
        """Return the same, of which some are missing: bool [N, k], or [N, 1] for all of a query."""
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

    def describe(self) -> dict[str, object]:
        """Name all that decides what is retrieved, by name: the retrieval signature prints it."""


@runtime_checkable
class LearningRetriever(Retriever, Protocol):
    """A retriever that also searches what was learned alongside its datastore."""

    def project(self, states: Tensor) -> Tensor:
        """Make keys of the decoder's states, [N, d] in any float dtype."""

    def with_learned(self, entries: LearnedEntries) -> LearningRetriever:
        """Return the same with what was learned up to a moment, numbered after its own entries."""


class TokenRetriever:
    """The retriever of CLKNN and kNN-MT: projects queries, searches the index, looks up values.

    What was learned alongside the datastore is searched together with it: its entries are numbered after the
    datastore's own.

    Args:
        datastore: an opened token datastore.
        device: the model's device; keys and values live there where the index can.
    """

    def __init__(self, datastore: TokenDatastore, device: torch.device) -> None:
        self.datastore = datastore
        self.index = datastore.open_index(device)
        self.projection: nn.Module = (datastore.open_projection() or nn.Identity()).to(device)
        values = as_tensor(datastore.values)
        # missing neighbours have some value
        self.values = (values if len(values) else values.new_zeros(1)).to(device)
        self.learned: LearnedEntries | None = None
        self._named: dict[int, bool] = {}  # whether an entry names a token, of those that were asked for

    def project(self, states: Tensor) -> Tensor:
        keys: Tensor = self.projection(states)
        return keys

    def search(self, queries: Tensor, k: int) -> Neighbours:
        keys = self.project(queries)
        if self.learned is not None:
            return self._search_both(keys, k, self.learned)
        scores, ids = self.index.search(keys, k)
        return Neighbours(ids, scores, self.values[ids].long())

    def always_finds(self, k: int, unknown: int) -> bool:
        """Tell whether no search for k neighbours leaves one out, nor names a token.

        A GPU is waited for once. A query that is no number finds nothing all the same: its scores are -inf.
        """
        own = type(self).search is TokenRetriever.search and isinstance(self.index, ExactIndex)
        if not own or self.learned is not None or k > self.index.size:
            return False
        if unknown not in self._named:
            self._named[unknown] = bool((self.values == unknown).any())
        return not self._named[unknown]

    def _search_both(self, keys: Tensor, k: int, learned: LearnedEntries) -> Neighbours:
        """Find the k nearest of the datastore's entries that count, and of those that were learned."""
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

    def with_learned(self, entries: LearnedEntries) -> TokenRetriever:
        other = copy.copy(self)
        other.learned = None if entries.empty else entries
        return other

    def describe(self) -> dict[str, object]:
        section = self.datastore.section
        learned = {} if self.learned is None else {"learned": self.learned}
        return {
            "retriever": type(self).__name__,
            "store": short(self.datastore.keys_fingerprint),
            "entries": self.index.size,
            "keys": section.key_layer + (f"+{section.projection}" if section.projection is not None else ""),
            "index": EXACT if self.index.stands_in else section.index,
            "metric": section.index.metric,
            **learned,
        }


def best_neighbours(found: Neighbours, settings: TokenRetrievalSettings) -> tuple[Neighbours, Tensor | None]:
    """Choose the k best of the neighbours found by their scores and their sentences' likeness to the source.

    A neighbour of sentence s scores gamma T (1 - sim(x, s)) less, so that its share of p_r is that of
    exp(score / T + gamma (sim(x, s) - 1)).

    Returns:
        The neighbours, best first, and their places among those found, int64 [N, k]; None: they are the first
        k.
    """
    k = settings.k
    if not settings.likeness or found.likeness is None:
        return found if k >= found.ids.size(1) else found.changed(lambda part: part[:, :k]), None
    most = settings.temperature * settings.likeness
    scores = found.scores.add(found.likeness, alpha=most) - most
    best, places = scores.sort(dim=1, descending=True, stable=True)
    best, places = best[:, :k], places[:, :k]
    ids, values, likeness = (part.gather(1, places) for part in (found.ids, found.values, found.likeness))
    return Neighbours(ids, best, values, likeness), places


@dataclass
class AnsweredSearch:
    """The search of a batch in a database; where it does not answer, the sentences go without."""

    search: Callable[[Tensor, int], Neighbours]
    remote: RemoteAnswers
    sentences: int  # of the batch; 0 once they were counted

    def __call__(self, queries: Tensor, k: int) -> Neighbours:
        found = self.remote.ask(partial(self.search, queries, k), self.sentences)
        if found is None:
            self.sentences = 0
            return Neighbours.missing(queries, k)
        return found
