"""What an adapter trains and validates on: the keys of a token datastore, drawn as anchors, positives and negatives."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.models.token_clusters import BLOCK_ROWS, TokenClusters
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.precision import matching_neighbours

HELD_OUT = 0.1  # of the sentences, at most, are kept for validation


@dataclass(frozen=True)
class ContrastSettings:
    """How contrasts are drawn; letters as in the CLKNN paper.

    Raises:
        ConfigurationError: a number below 1.
    """

    positives: int  # M
    negatives: int  # N
    nearest_clusters: int  # K
    hard: bool
    refresh_interval: int  # R, updates
    valid_queries: int
    valid_keys: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("positives", "negatives", "nearest_clusters", "refresh_interval", "valid_queries", "valid_keys"):
            if (value := getattr(self, name)) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} is {value}: give at least 1")


class ContrastSampler:
    """Draws contrasts from a token datastore, all on the training device.

    Some sentences are held out: their tokens are the queries of validation, and nothing else.

    Args:
        keys: fp16 [N, d], may be memory-mapped. They move to a GPU when they take no more than half of what is free
            there; else the rows drawn do.
        values: int32 [N].
        sentences: int [N], the sentence each entry came from.

    Raises:
        DatastoreError: fewer than 2 tokens occur twice.
    """

    def __init__(
        self,
        keys: np.ndarray,
        values: np.ndarray,
        sentences: np.ndarray,
        settings: ContrastSettings,
        device: torch.device,
    ) -> None:
        self.settings, self.device = settings, device
        held_out = _hold_out(sentences, settings)
        self.queries = torch.from_numpy(np.flatnonzero(held_out))
        pool = torch.from_numpy(np.flatnonzero(~held_out))
        self.values = _tensor(values)
        clusters = TokenClusters(self.values[pool], pool)
        if (repeated := int((clusters.counts > 1).sum())) < 2:
            raise DatastoreError(
                f"the datastore is too small to train an adapter on: of its {len(values):,} entries, {repeated} tokens "
                "occur twice, and 2 are needed; use a larger one, or --adapter none"
            )
        chosen = np.random.default_rng(settings.seed).permutation(len(pool))[: settings.valid_keys]
        self.valid_pool = pool[torch.from_numpy(np.sort(chosen))]
        self.clusters = clusters.to(device)
        self.keys = _tensor(keys)
        if device.type == "cuda" and keys.nbytes < torch.cuda.mem_get_info(device)[0] / 2:
            self.keys = self.keys.to(device)
        self._centres: Tensor | None = None
        self._refreshed = -1
        self._index: ExactIndex | None = None

    def rows(self, entries: Tensor) -> Tensor:
        """The keys of entries, [..., d] on the training device."""
        return self.keys[entries.to(self.keys.device)].to(self.device)

    def draw(self, adapter: Any, count: int, update: int, part: int) -> Tensor:
        """Anchors with their positives and negatives. The same arguments give the same draw.

        Args:
            adapter: from h to z, as it is now; tells which negatives are hard.
            count: B.
            update: number of the update.
            part: tells apart what is drawn for one update by several processes, or one after the other.

        Returns:
            Keys [B, 1 + M + N, d]: each anchor, its positives, its negatives.
        """
        settings = self.settings
        seed = ((settings.seed * 1_000_003 + update) * 1_000_003 + part) % (1 << 63)
        generator = torch.Generator(self.device).manual_seed(seed)
        slots = torch.randint(self.clusters.anchors, (count,), generator=generator, device=self.device)
        positives = self.clusters.draw_positives(slots, settings.positives, generator)
        if settings.hard:
            similarities = self.similarities(adapter, slots, update, generator)
            negatives = self.clusters.draw_hard_negatives(
                slots, similarities, settings.negatives, settings.nearest_clusters, generator
            )
        else:
            negatives = self.clusters.draw_random_negatives(slots, settings.negatives, generator)
        return self.rows(self.clusters.members[torch.cat([slots.unsqueeze(1), positives, negatives], dim=1)])

    @torch.no_grad()
    def similarities(self, adapter: Any, slots: Tensor, update: int, generator: torch.Generator) -> Tensor:
        """Of each anchor to the centre of each cluster, which were made anew at most R updates ago: fp32 [B, C]."""
        if self._centres is None or update // self.settings.refresh_interval != self._refreshed:
            self._centres = self.clusters.centres(lambda entries: adapter(self.rows(entries)), generator)
            self._refreshed = update // self.settings.refresh_interval
        return adapter(self.rows(self.clusters.members[slots])).float() @ self._centres.T

    @torch.no_grad()
    def prepare_validation(self, adapter: Any) -> None:
        """Index the keys that validation searches, as the adapter sees them now."""
        blocks = [adapter(self.rows(entries)).float() for entries in self.valid_pool.split(BLOCK_ROWS)]
        self._index = ExactIndex(torch.nn.functional.normalize(torch.cat(blocks), dim=1), "ip")

    @torch.no_grad()
    def precision(self, adapter: Any, queries: Tensor, k: int) -> Tensor:
        """Share of the k nearest neighbours that have the query's token, fp32 [Q].

        Args:
            queries: which of the held-out entries.
        """
        assert self._index is not None, "prepare_validation comes first"
        entries = self.queries[queries.cpu()]
        z = torch.nn.functional.normalize(adapter(self.rows(entries)).float(), dim=1)
        values = self.values[self.valid_pool].to(self.device)
        matches = matching_neighbours(self._index, values, z, self.values[entries].to(self.device), k)
        return matches.float().mean(dim=1)


def _hold_out(sentences: np.ndarray, settings: ContrastSettings) -> np.ndarray:
    """Which entries belong to the sentences held out, bool [N]: about `valid_queries` of them."""
    ids, inverse, lengths = np.unique(sentences, return_inverse=True, return_counts=True)
    order = np.random.default_rng(settings.seed).permutation(len(ids))
    enough = int(np.searchsorted(lengths[order].cumsum(), settings.valid_queries)) + 1
    chosen = np.zeros(len(ids), dtype=bool)
    chosen[order[: max(1, min(enough, int(HELD_OUT * len(ids))))]] = True
    return chosen[inverse]


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)
