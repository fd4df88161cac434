"""The binarised corpus a datastore is built from: which sentences, in which shards, in which batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import data_utils

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.data_bin import corpus_fingerprint, has_subset

SEED = 1  # of which sentences are in a share


@dataclass(frozen=True)
class Shard:
    """A run of neighbouring sentences of one subset: what a killed build loses at most.

    Shards do not depend on how many processes work or how often a build was resumed, and batches are made inside
    a shard. So every sentence always shares its batch with the same others, and its keys are the same to the bit.
    """

    number: int
    subset: str
    sentences: np.ndarray  # ids within the subset, ascending
    first_row: int
    rows: int


@dataclass(frozen=True)
class Corpus:
    """The subsets a datastore is built from, cut into shards."""

    task: Any
    subsets: dict[str, int]  # name -> sentences, those left out included
    shards: list[Shard]
    left_out: int  # sentences longer than the model takes
    fingerprint: str
    share: float  # of all sentences, drawn at random

    @property
    def size(self) -> int:
        """Target tokens, the end of each sentence included: the number of entries."""
        return sum(shard.rows for shard in self.shards)

    def shard(self, num_shards: int, shard_id: int) -> Corpus:
        """One of several parts of it, whose sentences count as in the whole."""
        mine = [self.shards[i] for i in shard_of(len(self.shards), num_shards, shard_id, "tokens")]
        first = mine[0]
        moved = [replace(s, number=s.number - first.number, first_row=s.first_row - first.first_row) for s in mine]
        return replace(self, shards=moved)

    def sentence_offset(self, subset: str) -> int:
        """What to add to a sentence's id within `subset` to count through all subsets."""
        names = list(self.subsets)
        return sum(self.subsets[name] for name in names[: names.index(subset)])

    def batches(self, shard: Shard, max_tokens: int) -> list[Any]:
        """The shard's sentences in fairseq's batches of at most `max_tokens` tokens a side, alike in length."""
        dataset = self.task.dataset(shard.subset)
        order = np.lexsort((dataset.src_sizes[shard.sentences], dataset.tgt_sizes[shard.sentences]))
        longest = max(dataset.src_sizes[shard.sentences].max(), dataset.tgt_sizes[shard.sentences].max())
        return dataset.batch_by_size(shard.sentences[order], max_tokens=max(max_tokens, int(longest)))


def check_shard(num_shards: int, shard_id: int, index: str) -> None:
    """Raise a ConfigurationError where a shard is none, or is to have an index of its own."""
    if num_shards < 1:
        raise ConfigurationError(f"--num-shards is {num_shards}: give at least 1")
    if not 0 <= shard_id < num_shards:
        raise ConfigurationError(
            f"--shard-id is {shard_id}, and --num-shards {num_shards}: give a number from 0 to {num_shards - 1}"
        )
    if num_shards > 1 and index not in ("auto", "exact"):
        raise ConfigurationError(
            f"--index {index}: a shard has no index; leave it out, and give it to merge_datastores.py"
        )


def place_of_shard(num_shards: int, shard_id: int, length: int) -> list[int] | None:
    """What a manifest says of a shard: its number, of how many, and of how long runs, which all must have in common."""
    return [shard_id, num_shards, length] if num_shards > 1 else None


def shard_of(total: int, num_shards: int, shard_id: int, unit: str) -> range:
    """Which of `total` runs of sentences a shard has: neighbours, so that shards are joined by appending.

    Raises:
        ConfigurationError: there are fewer than shards.

    >>> [list(shard_of(5, 2, shard, "sentences")) for shard in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    if total < num_shards:
        raise ConfigurationError(
            f"--num-shards is {num_shards}, but there are {total} runs of --shard-{unit}: give up to {total}, or shorter runs"
        )
    return range(total * shard_id // num_shards, total * (shard_id + 1) // num_shards)


def check_share(share: float) -> None:
    """Raise a ConfigurationError where a share is none."""
    if not 0 < share <= 1:
        raise ConfigurationError(f"--share is {share:g}: give more than 0, and at most 1")


def drawn(count: int, share: float) -> np.ndarray:
    """The items of `count` that are in a random share of them, ascending; a larger share holds a smaller one.

    >>> set(drawn(100, 0.1)) < set(drawn(100, 0.3))
    True
    """
    return np.flatnonzero(np.random.default_rng(SEED).random(count) < share)


def read_corpus(
    task: Any, subsets: list[str], max_positions: tuple[int, int], shard_tokens: int, share: float
) -> Corpus:
    """Load a share of `subsets` through fairseq's translation task, in shards of about `shard_tokens` target tokens.

    Raises:
        ConfigurationError: a subset is missing or holds no sentence the model can take.
    """
    data_bin, source, target = Path(task.cfg.data), task.cfg.source_lang, task.cfg.target_lang
    shards: list[Shard] = []
    sentence_counts: dict[str, int] = {}
    left_out = first_row = 0
    for subset in subsets:
        if subset in sentence_counts:
            raise ConfigurationError(f"--subset names '{subset}' twice")
        if not has_subset(task, subset):
            raise ConfigurationError(
                f"{data_bin} holds no subset '{subset}' for {source}-{target}: {subset}.{source}-{target}.* are "
                "not all there; give the folder that fairseq-preprocess wrote, and --subset as it is named there"
            )
        task.load_dataset(subset)
        dataset = task.dataset(subset)
        sentence_counts[subset] = len(dataset)
        kept, ignored = data_utils.filter_paired_dataset_indices_by_size(
            dataset.src_sizes, dataset.tgt_sizes, drawn(len(dataset), share), max_positions
        )
        left_out += len(ignored)
        for sentences in _cut(kept, dataset.tgt_sizes, shard_tokens):
            rows = int(dataset.tgt_sizes[sentences].sum())
            shards.append(Shard(len(shards), subset, sentences, first_row, rows))
            first_row += rows
    if first_row == 0:
        raise ConfigurationError(
            f"{data_bin} holds no sentence to build from in {', '.join(subsets)}: {left_out:,} are longer than the model "
            f"takes ({max_positions[0]} source, {max_positions[1]} target tokens), and there are no others"
        )
    return Corpus(task, sentence_counts, shards, left_out, corpus_fingerprint(task, subsets), share)


def _cut(sentences: np.ndarray, lengths: np.ndarray, shard_tokens: int) -> list[np.ndarray]:
    """Cut ascending sentence ids where the running count of tokens passes a multiple of `shard_tokens`.

    >>> [part.tolist() for part in _cut(np.arange(4), np.array([3, 3, 3, 3]), 6)]
    [[0, 1], [2, 3]]
    """
    if not len(sentences):
        return []
    shard_of = (np.cumsum(lengths[sentences]) - 1) // shard_tokens
    return np.split(sentences, np.flatnonzero(np.diff(shard_of)) + 1)
