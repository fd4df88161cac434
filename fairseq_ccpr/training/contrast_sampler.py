"""Draws the training data of an adapter from a token datastore: anchors, positives and negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.precision import matching_neighbours
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.training.token_clusters import BLOCK_ROWS, TokenClusters

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

    The queries of validation are tokens of other text, or, without that, of sentences that are held out from training.

    Args:
        keys: fp16 [N, d], may be memory-mapped. They move to a GPU when they take no more than half of what is free
            there; else the rows drawn do.
        values: int32 [N].
        sentences: int [N], the sentence each entry came from.
        other_text: keys and values of text that is not among these, of which the queries are a sample.

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
        other_text: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.settings, self.device = settings, device
        held_out = _hold_out(sentences, settings) if other_text is None else np.zeros(len(values), dtype=bool)
        queries = (keys[held_out], values[held_out]) if other_text is None else _sample(*other_text, settings)
        self.query_keys, self.query_values = (torch.from_numpy(array).to(device) for array in queries)
        pool = torch.from_numpy(np.flatnonzero(~held_out))
        self.values = as_tensor(values)
        clusters = TokenClusters(self.values[pool], pool)
        if (few := int((clusters.counts > 1).sum())) < 2:
            raise DatastoreError(
                f"the datastore is too small to train an adapter on: of the {len(pool):,} entries that are not held out, "
                f"{few} tokens occur twice, and 2 are needed; use a larger one, or --adapter none"
            )
        rng = np.random.default_rng(settings.seed)
        chosen = rng.choice(len(pool), min(settings.valid_keys, len(pool)), replace=False)
        self.valid_pool = pool[torch.from_numpy(np.sort(chosen))]
        self.clusters = clusters.to(device)
        most = max(int(self.values.max()), int(self.query_values.max()))
        self.cluster_of_token = torch.full((most + 1,), -1, device=device)
        repeated = (clusters.counts > 1).nonzero().squeeze(1)
        self.cluster_of_token[clusters.tokens[repeated].long()] = repeated
        self.keys = as_tensor(keys)
        if device.type == "cuda" and keys.nbytes < torch.cuda.mem_get_info(device)[0] / 2:
            self.keys = self.keys.to(device)
        self._centres: Tensor | None = None
        self._refreshed = -1
        self._index: ExactIndex | None = None

    def rows(self, entries: Tensor) -> Tensor:
        """Return the keys of entries, fp32 [..., d] on the training device."""
        return self.keys[entries.to(self.keys.device)].to(self.device).float()

    def draw(self, adapter: Any, count: int, update: int, part: int) -> Tensor:
        """Draw random anchors with their positives and negatives.

        What is drawn depends on nothing but the arguments and, for hard negatives, on the adapter as it was when the
        centres were last computed: in the first draw of each R updates, or after a resume.

        Args:
            adapter: from h to z, as it is now.
            count: B.
            update: number of the update.
            part: tells apart what is drawn for one update by several processes, or one after the other.

        Returns:
            Keys [B, 1 + M + N, d]: each anchor, its positives, its negatives.
        """
        generator = self._generator(update, part)
        slots = torch.randint(self.clusters.anchors, (count,), generator=generator, device=self.device)
        return self._contrast(adapter, self.rows(self.clusters.members[slots]), slots, update, generator)

    def draw_held_out(self, adapter: Any, queries: Tensor) -> Tensor:
        """Draw the same for queries of validation as anchors, those of tokens that training has twice or more."""
        queries = queries.to(self.device)
        cluster = self.cluster_of_token[self.query_values[queries].long()]
        known = cluster >= 0
        anchors = self.query_keys[queries[known]].float()
        return self._contrast(adapter, anchors, self.clusters.starts[cluster[known]], 0, self._generator(0, 0))

    def _contrast(
        self, adapter: Any, anchors: Tensor, slots: Tensor, update: int, generator: torch.Generator
    ) -> Tensor:
        """Anchors [B, d] of the clusters of `slots`, with positives, which are never those slots, and negatives."""
        settings, clusters = self.settings, self.clusters
        positives = clusters.draw_positives(slots, settings.positives, generator)
        if settings.hard:
            similarities = self._similarities(adapter, anchors, update)
            negatives = clusters.draw_hard_negatives(
                slots, similarities, settings.negatives, settings.nearest_clusters, generator
            )
        else:
            negatives = clusters.draw_random_negatives(slots, settings.negatives, generator)
        others = self.rows(clusters.members[torch.cat([positives, negatives], dim=1)])
        return torch.cat([anchors.unsqueeze(1), others], dim=1)

    @torch.no_grad()
    def _similarities(self, adapter: Any, anchors: Tensor, update: int) -> Tensor:
        """Compute similarities of anchors to the centres of clusters, [B, C]."""
        interval = update // self.settings.refresh_interval
        if self._centres is None or interval != self._refreshed:
            generator = self._generator(interval, -1)
            self._centres = self.clusters.centres(lambda entries: adapter(self.rows(entries)), generator)
            self._refreshed = interval
        return adapter(anchors).float() @ self._centres.T

    def _generator(self, *numbers: int) -> torch.Generator:
        """Seed a generator for a sequence of numbers."""
        seed = self.settings.seed
        for number in numbers:
            seed = (seed * 1_000_003 + number) % (1 << 63)
        return torch.Generator(self.device).manual_seed(seed)

    @torch.no_grad()
    def prepare_validation(self, adapter: Any) -> None:
        """Index the keys that validation searches, as the adapter sees them now."""
        blocks = [adapter(self.rows(entries)).float() for entries in self.valid_pool.split(BLOCK_ROWS)]
        self._index = ExactIndex(torch.nn.functional.normalize(torch.cat(blocks), dim=1), "ip")

    @torch.no_grad()
    def precision(self, adapter: Any, queries: Tensor, k: int) -> Tensor:
        """Compute the fraction of the k nearest neighbours that have the query's token, fp32 [Q].

        Args:
            queries: which of those of validation.
        """
        assert self._index is not None, "prepare_validation comes first"
        queries = queries.to(self.device)
        z = torch.nn.functional.normalize(adapter(self.query_keys[queries].float()).float(), dim=1)
        values = self.values[self.valid_pool].to(self.device)
        matches = matching_neighbours(self._index, values, z, self.query_values[queries], k)
        return matches.float().mean(dim=1)


def _hold_out(sentences: np.ndarray, settings: ContrastSettings) -> np.ndarray:
    """Mark the entries of the sentences held out, bool [N]: about `valid_queries` of them."""
    first = np.diff(sentences, prepend=sentences[0] - 1) != 0  # entries stand sentence by sentence
    lengths = np.diff(np.append(np.flatnonzero(first), len(sentences)))
    order = np.random.default_rng(settings.seed).permutation(len(lengths))
    enough = int(np.searchsorted(lengths[order].cumsum(), settings.valid_queries)) + 1
    chosen = np.zeros(len(lengths), dtype=bool)
    chosen[order[: max(1, min(enough, int(HELD_OUT * len(lengths))))]] = True
    return np.repeat(chosen, lengths)


def _sample(keys: np.ndarray, values: np.ndarray, settings: ContrastSettings) -> tuple[np.ndarray, np.ndarray]:
    """Sample at most `valid_queries` of some entries, in order."""
    count = min(settings.valid_queries, len(values))
    rows = np.sort(np.random.default_rng(settings.seed).choice(len(values), count, replace=False))
    return keys[rows], values[rows]
