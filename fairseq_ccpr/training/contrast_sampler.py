"""Contrasts of CLKNN's training: keys by token, and which sentences repeat others."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_ccpr.datastore.token import TokenDatastore, hash_targets
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.recall import matching_neighbours
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.training.tasks import ContrastTaskConfig
from fairseq_ccpr.training.token_clusters import PROJECTED_ROWS, TokenClusters

HELD_OUT = 0.1  # the largest fraction of the groups of sentences held out for validation
VALID_KEYS = 200_000  # that validation searches in, at most
QUERIES_AT_ONCE = 1 << 10  # searched for at a time


class Text(NamedTuple):
    """The N entries of a token datastore, of sentences with numbers below S."""

    keys: np.ndarray  # fp16 [N, d]
    values: np.ndarray  # int32 [N]
    provenance: np.ndarray  # int32 [N, 2]
    source_hashes: np.ndarray  # uint64 [S], see `source_index.hash_source`

    @classmethod
    def of(cls, datastore: TokenDatastore) -> "Text":
        hashes = datastore.source_index.hashes
        return cls(datastore.keys, datastore.values, datastore.provenance, hashes)

    @property
    def sentences(self) -> np.ndarray:
        """The sentence of each entry, int32 [N]."""
        return self.provenance[:, 0]

    def target_hashes(self) -> np.ndarray:
        return hash_targets(self.values, self.provenance)


class SentenceOrigins:
    """Which sentences of a datastore repeat one another.

    An origin is two numbers: of a group, in which all have the same target, and of the source.
    """

    def __init__(self, text: Text) -> None:
        self._hashes, groups = np.unique(text.target_hashes(), return_inverse=True)
        self.origins = _origins(groups, text.source_hashes)  # int64 [S, 2]

    def of_rows(self, text: Text, rows: np.ndarray) -> Tensor:
        """Determine the origins of rows, int64 [Q], of another datastore, int64 [Q, 2].

        -1 is in place of a group where none here has the same target.
        """
        sentences = text.sentences[rows]
        hashes = text.target_hashes()[sentences]
        place = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        return _origins(np.where(self._hashes[place] == hashes, place, -1), text.source_hashes[sentences])


def _origins(groups: np.ndarray, source_hashes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack([groups, source_hashes.view(np.int64)], axis=1))


def repeated(origins: Tensor, others: Tensor) -> Tensor:
    """Compare origins [B, 2] with others [B, C, 2]: bool [B, C], where target or source is the same."""
    return (others == origins.unsqueeze(1)).any(dim=2)


@dataclass
class TokenContrastConfig(ContrastTaskConfig):
    """Options of `--task token_contrast`: how contrasts are drawn, with letters as in the CLKNN paper."""

    data: str = field(
        default=MISSING, metadata={"help": "a token datastore with the decoder's own states as keys"}
    )
    positives: int = field(default=2, metadata={"help": "M, positives of an anchor"})
    negatives: int = field(default=32, metadata={"help": "N, negatives of an anchor"})
    nearest_clusters: int = field(
        default=128, metadata={"help": "K, clusters nearest to an anchor that its negatives come from"}
    )
    refresh_interval: int = field(
        default=200, metadata={"help": "R, updates until the clusters' centres are recomputed"}
    )
    anchors_per_epoch: int = field(
        default=32000, metadata={"help": "anchors drawn in an epoch, after which fairseq validates and saves"}
    )
    valid_datastore: Optional[str] = field(
        default=None,
        metadata={
            "help": "a datastore of the same states of held-out text, for validation; without it some sentences of the "
            "one that is trained on are held out, with all that have the same translation"
        },
    )
    valid_queries: int = field(
        default=2000, metadata={"help": "held-out tokens, about, that validation searches for"}
    )
    no_save: bool = II("checkpoint.no_save")


class ContrastSampler:
    """Draws contrasts from a token datastore, all on the training device.

    Validation queries are tokens of other text or, without it, of sentences held out from training. Equal
    translations form a group: an anchor's positives are from other groups. Its negatives are neither from its
    own group nor from a sentence with the same source, since a source may have two right translations.

    Args:
        text: of the datastore. Its keys move to a GPU if they take at most half of its free memory; otherwise
            only the rows drawn do.
        other_text: text that is not in the datastore, from which the queries are sampled.
    """

    def __init__(
        self, text: Text, settings: TokenContrastConfig, device: torch.device, other_text: Text | None = None
    ) -> None:
        self.settings, self.device = settings, device
        known = SentenceOrigins(text)
        self.values, sentences = as_tensor(text.values), torch.from_numpy(text.sentences.astype(np.int64))
        self.sentence_of = sentences.int().to(device)
        groups = known.origins[sentences, 0]
        if other_text is None:
            held_out = _hold_out(groups.numpy(), settings)
            rows, source = np.flatnonzero(held_out), text
            origins = known.origins[sentences[rows]]
            pool = torch.from_numpy(np.flatnonzero(~held_out))
        else:
            rows, source = _sample(len(other_text.values), settings.valid_queries, settings.seed), other_text
            origins = known.of_rows(other_text, rows)
            pool = torch.arange(len(text.values))
        asked = source.keys[rows], source.values[rows]
        self.query_keys, self.query_values = (torch.from_numpy(array).to(device) for array in asked)
        self.query_origins, self.origins = origins.to(device), known.origins.to(device)
        clusters = TokenClusters(self.values[pool], pool, groups[pool])
        if (few := int((clusters.runs > 1).sum())) < 2:
            raise DatastoreError(
                f"the datastore is too small to train an adapter on: of the {len(pool):,} entries that are "
                f"not held out, {few} tokens occur in two different sentences, and 2 are needed; use a "
                "larger one, or --adapter none"
            )
        self.valid_pool = pool[_sample(len(pool), VALID_KEYS, settings.seed)]
        self.clusters = clusters.to(device)
        most = max(int(self.values.max()), int(self.query_values.max()))
        self.cluster_of_token = torch.full((most + 1,), -1, device=device)
        self.cluster_of_token[self.clusters.tokens] = torch.arange(len(self.clusters.tokens), device=device)
        self.keys = as_tensor(text.keys)
        if device.type == "cuda" and text.keys.nbytes < torch.cuda.mem_get_info(device)[0] / 2:
            self.keys = self.keys.to(device)
        self._refreshed = -1  # the interval that `_centres` are of
        self._index: ExactIndex | None = None

    def rows(self, entries: Tensor) -> Tensor:
        """Return the keys of entries, fp32 [..., d] on the training device."""
        return self.keys[entries.to(self.keys.device)].to(self.device).float()

    def draw(self, adapter: Any, count: int, update: int, part: int) -> Tensor:
        """Draw random anchors with their positives and negatives: keys [count, 1 + M + N, d].

        The result depends only on the arguments and, for negatives, on the adapter at the time the
        centres were last computed: in the first draw of each R updates, or after resuming. `part`
        distinguishes the draws for one update.
        """
        generator = self._generator(update, part)
        slots = torch.randint(self.clusters.anchors, (count,), generator=generator, device=self.device)
        entries, clusters = self.clusters.members[slots], self.clusters.cluster_of(slots)
        origins = self.origins[self.sentence_of[entries]]
        own = self.clusters.own_run(clusters, origins[:, 0])
        return self._contrast(adapter, self.rows(entries), clusters, own, origins, update, generator)

    def draw_held_out(self, adapter: Any, queries: Tensor) -> Tensor:
        """Do the same with validation queries as anchors, those whose token training has in another group."""
        queries = queries.to(self.device)
        cluster = self.cluster_of_token[self.query_values[queries].long()]
        queries, cluster = queries[cluster >= 0], cluster[cluster >= 0]
        own = self.clusters.own_run(cluster, self.query_origins[queries, 0])
        others = self.clusters.runs[cluster] > (own >= 0).long()
        queries = queries[others]
        keys, origins = self.query_keys[queries].float(), self.query_origins[queries]
        generator = self._generator(0, 0)
        return self._contrast(adapter, keys, cluster[others], own[others], origins, 0, generator)

    def _contrast(
        self,
        adapter: Any,
        keys: Tensor,
        clusters: Tensor,
        own: Tensor,
        origins: Tensor,
        update: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw for B anchors: keys fp32 [B, d]; int64 [B], clusters and the runs of their groups in them (or -1)."""
        drawn_from, settings = self.clusters, self.settings
        positives = drawn_from.draw_positives(clusters, own, settings.positives, generator)

        def barred(slots: Tensor) -> Tensor:
            return repeated(origins, self.origins[self.sentence_of[drawn_from.members[slots]]])

        n, nearest = settings.negatives, settings.nearest_clusters
        alike = self._similarities(adapter, keys, update)
        negatives = drawn_from.draw_negatives(clusters, alike, n, nearest, barred, generator)
        others = self.rows(drawn_from.members[torch.cat([positives, negatives], dim=1)])
        return torch.cat([keys.unsqueeze(1), others], dim=1)

    @torch.no_grad()
    def _similarities(self, adapter: Any, anchors: Tensor, update: int) -> Tensor:
        interval = update // self.settings.refresh_interval
        if interval != self._refreshed:
            generator = self._generator(interval, -1)
            self._centres = self.clusters.centres(lambda entries: adapter(self.rows(entries)), generator)
            self._refreshed = interval
        return adapter(anchors).float() @ self._centres.T

    def _generator(self, *numbers: int) -> torch.Generator:
        seed = self.settings.seed
        for number in numbers:
            seed = (seed * 1_000_003 + number) % (1 << 63)
        return torch.Generator(self.device).manual_seed(seed)

    @torch.no_grad()
    def prepare_validation(self, adapter: Any) -> None:
        """Index the keys that validation searches, projected by the adapter in its current state."""
        blocks = [adapter(self.rows(entries)).float() for entries in self.valid_pool.split(PROJECTED_ROWS)]
        self._index = ExactIndex(torch.nn.functional.normalize(torch.cat(blocks), dim=1), "ip")

    @torch.no_grad()
    def precision(self, adapter: Any, queries: Tensor, k: int) -> Tensor:
        """Compute the fraction of the k nearest neighbours with the token of each of Q queries, fp32 [Q]."""
        assert self._index is not None, "prepare_validation comes first"
        queries = queries.to(self.device)
        z = torch.nn.functional.normalize(adapter(self.query_keys[queries].float()).float(), dim=1)
        values = self.values[self.valid_pool].to(self.device)
        matches = matching_neighbours(self._index, values, z, self.query_values[queries], k)
        return matches.float().mean(dim=1)

    def measure(self, adapter: Any, k: int) -> float:
        """Compute the mean precision of all queries with an adapter in its current state."""
        self.prepare_validation(adapter)
        numbers = torch.arange(len(self.query_values)).split(QUERIES_AT_ONCE)
        return float(torch.cat([self.precision(adapter, block, k) for block in numbers]).mean())


def _sample(count: int, most: int, seed: int) -> np.ndarray:
    """Draw `most` of the numbers below `count`, or all where they are fewer, in ascending order."""
    return np.sort(np.random.default_rng(seed).choice(count, min(most, count), replace=False))


def _hold_out(groups: np.ndarray, settings: TokenContrastConfig) -> np.ndarray:
    """Mark the entries that are held out, bool [N]: about `valid_queries`, in whole groups, int64 [N]."""
    lengths = np.bincount(groups)
    there = np.flatnonzero(lengths)  # sentences without entries are a group, too
    order = np.random.default_rng(settings.seed).permutation(there)
    enough = int(np.searchsorted(lengths[order].cumsum(), settings.valid_queries)) + 1
    chosen = np.zeros(len(lengths), dtype=bool)
    least = min(1, len(there) - 1)  # a single group is needed for training
    chosen[order[: max(least, min(enough, int(HELD_OUT * len(there))))]] = True
    return chosen[groups]
