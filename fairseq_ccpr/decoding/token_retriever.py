"""Search in a token datastore with the decoder's states."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.memory import Neighbours
from fairseq_ccpr.search import Index
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.fingerprint import short


class TokenRetriever:
    """The retriever of CLKNN and kNN-MT: projects queries as the keys were, searches the index, looks up values.

    Args:
        datastore: an opened token datastore.
        device: the model's device; keys and values live there where the index can.
    """

    def __init__(self, datastore: TokenDatastore, device: torch.device) -> None:
        self.datastore = datastore
        self.index = datastore.open_index().to(device)
        projection = datastore.open_projection()
        self.projection = projection.to(device) if projection is not None else None
        self.values = as_tensor(datastore.values).to(device)

    def search(self, queries: Tensor, k: int) -> Neighbours:
        """Find the k nearest entries of the decoder's states, [N, d] in any float dtype."""
        scores, ids = self.index.search(self.projection(queries) if self.projection is not None else queries, k)
        return Neighbours(ids, scores, self.values[ids].long())

    def with_entries(self, index: Index, values: Tensor) -> TokenRetriever:
        """Return the same retriever over other entries: an index of keys, and their tokens [N] on its device."""
        other = copy.copy(self)
        other.index, other.values = index, values
        return other

    def describe(self) -> dict[str, object]:
        """Name all that decides what is retrieved, by name."""
        section = self.datastore.section
        return {
            "retriever": type(self).__name__,
            "store": short(self.datastore.keys_fingerprint),
            "entries": section.size,
            "keys": section.key_layer + (f"+{section.projection}" if section.projection is not None else ""),
            "index": section.index,
            "metric": section.index.metric,
        }
