"""Draws the phrase pairs of an epoch, and the sentences that they appear in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.recall import matching_neighbours
from fairseq_ccpr.storage.arrays import as_tensor
from fairseq_ccpr.storage.equal_strings import digest_number
from fairseq_ccpr.timing import progress_bar
from fairseq_ccpr.training.contrast_dataset import Origins, SentenceOrigins
from fairseq_ccpr.training.token_clusters import BLOCK_ROWS, TokenClusters


@dataclass(frozen=True)
class ContrastOptions:
    """How phrases are drawn."""

    phrases_per_sentence: int
    different_context_fraction: float  # 0: CCPR, 1: CPR
    max_subwords: int
    seed: int


@dataclass(frozen=True)
class DrawnPhrases:
    """D phrases of n sentence pairs, ordered by sentence pair, then by target sentence."""

    sources: np.ndarray  # int64 [D], the phrase pairs that supply the source side
    targets: np.ndarray  # int64 [D], those that supply the target side: the same strings, perhaps from another sentence
    starts: np.ndarray  # int64 [n + 1], the first phrase of each sentence pair; the last is D

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and targets of one sentence pair."""
        rows = slice(self.starts[number], self.starts[number + 1])
        return self.sources[rows], self.targets[rows]


class PhraseDraw:
    """Draws phrase pairs; the same seed and epoch give the same ones.

    Args:
        pairs: P phrase pairs.
        sentences: int64 [n], ascending, the sentence pairs to draw from; each has a phrase pair.
        target_lengths: int64 [sentences of `pairs`], in subwords.
        options: how.
    """

    def __init__(
        self, pairs: PhrasePairs, sentences: np.ndarray, target_lengths: np.ndarray, options: ContrastOptions
    ) -> None:
        self.options = options
        self.numbers = np.array(pairs.pairs[:, 0])  # the sentence of each phrase pair
        self.first = np.searchsorted(self.numbers, sentences)
        self.sizes = np.searchsorted(self.numbers, sentences, side="right") - self.first
        self.fits = target_lengths <= options.max_subwords
        self.elsewhere = Occurrences(pairs) if options.different_context_fraction > 0 else None

    def draw(self, epoch: int) -> DrawnPhrases:
        """Draw the phrases of an epoch.

        1. Some phrase pairs of each sentence pair.
        2. For a fraction of them, another occurrence of the target, if there is one in a sentence that is not too long.
        """
        rng = np.random.default_rng([self.options.seed, epoch])
        owners = np.repeat(np.arange(len(self.sizes)), self.sizes)  # of all candidates
        starts = self.sizes.cumsum() - self.sizes
        places = np.arange(len(owners)) - starts[owners]
        rows = self.first[owners] + places
        shuffled = rows[np.lexsort((rng.random(len(rows)), owners))]  # within each sentence pair
        kept = places < self.options.phrases_per_sentence
        sources, owners = shuffled[kept], owners[kept]
        targets = sources
        if self.elsewhere is not None:
            others = self.elsewhere.draw(sources, rng)
            moved = rng.random(len(sources)) < self.options.different_context_fraction
            targets = np.where(moved & self.fits[self.numbers[others]], others, sources)
        order = np.lexsort((self.numbers[targets], owners))
        return DrawnPhrases(sources[order], targets[order], np.searchsorted(owners, np.arange(len(self.sizes) + 1)))


class Occurrences:
    """Where each phrase pair, as a pair of strings, occurs in other contexts.

    Args:
        pairs: P phrase pairs with their sentences.
    """

    def __init__(self, pairs: PhrasePairs) -> None:
        digests = np.empty((2, pairs.size), dtype=np.int64)  # of the pair of strings, of the target sentence
        numbers = progress_bar(f"occurrences in {pairs.directory}", "sentence", range(pairs.sentences))
        for number in numbers:
            source, target = pairs.sentence(number)
            rows = slice(pairs.rows_of(number).start, pairs.rows_of(number).stop)
            digests[0, rows] = [
                digest_number(f"{source[a:b]}\t{target[c:d]}") for _, a, b, c, d in pairs.pairs[rows].tolist()
            ]
            digests[1, rows] = digest_number(target)
        # [P], those of the same strings together, and of them those of a sentence
        self.order = np.lexsort(digests[::-1])
        self.same_strings = self._runs(digests[:1])
        self.same_context = self._runs(digests)

    def _runs(self, digests: np.ndarray) -> np.ndarray:
        """Find where in `order` the phrase pairs that share all digests with each begin and end, int64 [2, P].

        Args:
            digests: int64 [., P].
        """
        ordered = digests[:, self.order]
        changes = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
        borders = np.concatenate([[0], changes, [len(self.order)]])
        runs = np.empty((2, len(self.order)), dtype=np.int64)
        runs[:, self.order] = np.repeat([borders[:-1], borders[1:]], np.diff(borders), axis=1)
        return runs

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw for each phrase pair of int64 [D] one of the same strings in another target sentence, or itself."""
        (start, end), (own_start, own_end) = self.same_strings[:, rows], self.same_context[:, rows]
        own = own_end - own_start
        others = end - start - own
        places = start + rng.integers(0, others.clip(1))
        places += np.where(places >= own_start, own, 0)  # skip its own sentence
        return np.where(others > 0, self.order[places.clip(max=len(self.order) - 1)], rows)


HELD_OUT = 0.1  # the largest fraction of the groups of sentences held out for validation
QUERIES = 1 << 10  # searched for at a time


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


@dataclass(frozen=True)
class _Anchors:
    """B anchors: entries of the store, or validation queries."""

    keys: Tensor  # fp32 [B, d]
    clusters: Tensor  # int64 [B]
    own: Tensor  # int64 [B], the run of their group in the cluster, or -1
    origins: Origins  # [B]


class ContrastSampler:
    """Draws contrasts from a token datastore, all on the training device.

    Validation queries are tokens of other text or, without it, of sentences held out from training.

    Equal translations form a group: an anchor's positives are from other groups. Its negatives are neither from its own group
    nor from a sentence with the same source, since a source may have two right translations.

    Args:
        keys: fp16 [N, d], may be memory-mapped. They move to a GPU if they take at most half of its free memory; otherwise
            only the rows drawn do.
        values: int32 [N].
        sentences: int [N], the sentence each entry came from.
        other_text: keys, values and sentences of text that is not in the datastore, from which the queries are sampled.

    Raises:
        DatastoreError: fewer than 2 tokens occur in two different sentences.
    """

    def __init__(
        self,
        keys: np.ndarray,
        values: np.ndarray,
        sentences: np.ndarray,
        settings: ContrastSettings,
        device: torch.device,
        other_text: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.settings, self.device = settings, device
        known = SentenceOrigins(keys, values, sentences)
        self.values, self.sentence_of = as_tensor(values), known.sentence_of.to(device)
        if other_text is None:
            held_out = _hold_out(known, settings)
            rows, source = torch.from_numpy(np.flatnonzero(held_out)), (keys, values)
            origins = known.origins[known.sentence_of[rows]]
            pool = torch.from_numpy(np.flatnonzero(~held_out))
        else:
            rows, source = torch.from_numpy(_sample(len(other_text[1]), settings)), other_text[:2]
            origins = known.of_rows(*other_text, rows.numpy())
            pool = torch.arange(len(values))
        self.query_keys, self.query_values = (torch.from_numpy(array[rows.numpy()]).to(device) for array in source)
        self.query_origins, self.origins = origins.to(device), known.origins.to(device)
        clusters = TokenClusters(self.values[pool], pool, known.origins.groups[known.sentence_of[pool]])
        if (few := int((clusters.runs > 1).sum())) < 2:
            raise DatastoreError(
                f"the datastore is too small to train an adapter on: of the {len(pool):,} entries that are not held out, "
                f"{few} tokens occur in two different sentences, and 2 are needed; use a larger one, or --adapter none"
            )
        rng = np.random.default_rng(settings.seed)
        chosen = rng.choice(len(pool), min(settings.valid_keys, len(pool)), replace=False)
        self.valid_pool = pool[torch.from_numpy(np.sort(chosen))]
        self.clusters = clusters.to(device)
        most = max(int(self.values.max()), int(self.query_values.max()))
        self.cluster_of_token = torch.full((most + 1,), -1, device=device)
        self.cluster_of_token[self.clusters.tokens] = torch.arange(len(self.clusters.tokens), device=device)
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

        The result depends only on the arguments and, for hard negatives, on the adapter at the time the centres were last
        computed: in the first draw of each R updates, or after resuming.

        Args:
            adapter: from h to z, as it is now.
            count: B.
            update: number of the update.
            part: distinguishes the draws for one update, by several processes or one after the other.

        Returns:
            Keys [B, 1 + M + N, d]: each anchor, its positives, its negatives.
        """
        generator = self._generator(update, part)
        slots = torch.randint(self.clusters.anchors, (count,), generator=generator, device=self.device)
        entries, clusters = self.clusters.members[slots], self.clusters.cluster_of(slots)
        origins = self.origins[self.sentence_of[entries]]
        own = self.clusters.own_run(clusters, origins.groups)
        return self._contrast(adapter, _Anchors(self.rows(entries), clusters, own, origins), update, generator)

    def draw_held_out(self, adapter: Any, queries: Tensor) -> Tensor:
        """Do the same with validation queries as anchors, those whose token training has in another group."""
        queries = queries.to(self.device)
        cluster = self.cluster_of_token[self.query_values[queries].long()]
        queries, cluster = queries[cluster >= 0], cluster[cluster >= 0]
        own = self.clusters.own_run(cluster, self.query_origins.groups[queries])
        others = self.clusters.runs[cluster] > (own >= 0).long()
        queries = queries[others]
        anchors = _Anchors(
            self.query_keys[queries].float(), cluster[others], own[others], self.query_origins[queries]
        )  # fmt: skip
        return self._contrast(adapter, anchors, 0, self._generator(0, 0))

    def _contrast(self, adapter: Any, anchors: _Anchors, update: int, generator: torch.Generator) -> Tensor:
        """Return anchors with positives and negatives, [B, 1 + M + N, d]."""
        settings, clusters = self.settings, self.clusters
        positives = clusters.draw_positives(anchors.clusters, anchors.own, settings.positives, generator)

        def barred(slots: Tensor) -> Tensor:
            return anchors.origins.repeated_by(self.origins[self.sentence_of[clusters.members[slots]]])

        if settings.hard:
            similarities = self._similarities(adapter, anchors.keys, update)
            negatives = clusters.draw_hard_negatives(
                anchors.clusters, similarities, settings.negatives, settings.nearest_clusters, barred, generator
            )
        else:
            negatives = clusters.draw_random_negatives(anchors.clusters, settings.negatives, barred, generator)
        others = self.rows(clusters.members[torch.cat([positives, negatives], dim=1)])
        return torch.cat([anchors.keys.unsqueeze(1), others], dim=1)

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
        """Index the keys that validation searches, projected by the adapter in its current state."""
        blocks = [adapter(self.rows(entries)).float() for entries in self.valid_pool.split(BLOCK_ROWS)]
        self._index = ExactIndex(torch.nn.functional.normalize(torch.cat(blocks), dim=1), "ip")

    @torch.no_grad()
    def precision(self, adapter: Any, queries: Tensor, k: int) -> Tensor:
        """Compute the fraction of the k nearest neighbours that have the query's token, fp32 [Q].

        Args:
            queries: indices into the validation queries.
        """
        assert self._index is not None, "prepare_validation comes first"
        queries = queries.to(self.device)
        z = torch.nn.functional.normalize(adapter(self.query_keys[queries].float()).float(), dim=1)
        values = self.values[self.valid_pool].to(self.device)
        matches = matching_neighbours(self._index, values, z, self.query_values[queries], k)
        return matches.float().mean(dim=1)

    def measure(self, adapter: Any, k: int) -> float:
        """Compute the mean precision of all queries with an adapter in its current state."""
        self.prepare_validation(adapter)
        numbers = torch.arange(len(self.query_values)).split(QUERIES)
        return float(torch.cat([self.precision(adapter, block, k) for block in numbers]).mean())


def _hold_out(known: SentenceOrigins, settings: ContrastSettings) -> np.ndarray:
    """Mark the entries of the sentences held out, bool [N]: about `valid_queries` of them, in whole groups."""
    groups = known.origins.groups.numpy()
    lengths = np.bincount(groups, weights=known.lengths)
    order = np.random.default_rng(settings.seed).permutation(len(lengths))
    enough = int(np.searchsorted(lengths[order].cumsum(), settings.valid_queries)) + 1
    chosen = np.zeros(len(lengths), dtype=bool)
    least = min(1, len(lengths) - 1)  # a single group is needed for training
    chosen[order[: max(least, min(enough, int(HELD_OUT * len(lengths))))]] = True
    return np.repeat(chosen[groups], known.lengths)


def _sample(count: int, settings: ContrastSettings) -> np.ndarray:
    """Sample at most `valid_queries` of `count` rows, in order."""
    return np.sort(
        np.random.default_rng(settings.seed).choice(count, min(settings.valid_queries, count), replace=False)
    )
