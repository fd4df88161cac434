"""The binarised corpus of a token datastore: sentences, chunks, batches, shards, and a sample of its states.

A shard is one of N smaller datastores, built by as many commands, of neighbouring chunks of sentences each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import data_utils

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.data_bin import corpus_fingerprint, has_subset, parts_of, what_is_there
from fairseq_ccpr.text.languages import LanguageTags

SEED = 1  # of random fractions of a corpus


@dataclass(frozen=True)
class PseudoPairs:
    """Sentence pairs whose sources are back-translations."""

    data_bin: Path  # as `fairseq-ccpr prepare` makes one of pairs, with the subset train
    reverse_model: str  # fingerprint of the model that translated
    left_out: dict[str, int]  # lines of the text that gave no pair, by a few words that say why


@dataclass(frozen=True)
class Chunk:
    """Neighbouring sentences of one subset: the most that a killed build loses.

    Chunks do not depend on how many processes work or how often a build was resumed, and batches are made
    inside a chunk. So every sentence always shares its batch with the same others, and its keys are the same
    to the bit.
    """

    number: int
    subset: str
    sentences: np.ndarray  # ids within the subset, ascending
    first_row: int
    rows: int


@dataclass(frozen=True)
class Corpus:
    """The subsets a datastore is built from, cut into chunks."""

    task: Any
    subsets: dict[str, int]  # name -> sentences, those left out included
    chunks: list[Chunk]
    left_out: int  # sentences longer than the model takes
    fingerprint: str
    fraction: float  # of all sentences, drawn at random

    @property
    def size(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def shard(self, num_shards: int, shard_id: int) -> Corpus:
        """Cut out one of `num_shards` parts, whose sentences are numbered as in the whole corpus."""
        mine = [self.chunks[i] for i in chunks_of_shard(len(self.chunks), num_shards, shard_id, "tokens")]
        number, row = mine[0].number, mine[0].first_row
        moved = [replace(one, number=one.number - number, first_row=one.first_row - row) for one in mine]
        return replace(self, chunks=moved)

    def sources(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each sentence's number, counted through all subsets, and its source's subwords, int32 [L]."""
        before = dict(zip(self.subsets, np.cumsum([0, *self.subsets.values()]).tolist()))
        for chunk in self.chunks:
            dataset = self.task.dataset(chunk.subset)
            for number in chunk.sentences.tolist():
                yield before[chunk.subset] + number, self.task.source_subwords(dataset[number]["source"])

    def batches(self, chunk: Chunk, max_tokens: int) -> list[Any]:
        """Divide a chunk into fairseq's batches of at most `max_tokens` tokens per side, alike in length."""
        dataset = self.task.dataset(chunk.subset)
        order = np.lexsort((dataset.src_sizes[chunk.sentences], dataset.tgt_sizes[chunk.sentences]))
        longest = max(dataset.src_sizes[chunk.sentences].max(), dataset.tgt_sizes[chunk.sentences].max())
        return dataset.batch_by_size(chunk.sentences[order], max_tokens=max(max_tokens, int(longest)))


def draw_fraction(count: int, fraction: float) -> np.ndarray:
    """Draw a random fraction of `count` items, ascending; a larger fraction holds a smaller one.

    >>> set(draw_fraction(100, 0.1)) < set(draw_fraction(100, 0.3))
    True
    """
    return np.flatnonzero(np.random.default_rng(SEED).random(count) < fraction)


def read_corpus(
    task: Any, subsets: list[str], max_positions: tuple[int, int], chunk_tokens: int, fraction: float
) -> Corpus:
    """Load a fraction of `subsets`, and of what continues them, in chunks of about `chunk_tokens` tokens."""
    data_bin, source, target = task.cfg.data, task.cfg.source_lang, task.cfg.target_lang
    if twice := [one for one in subsets if subsets.count(one) > 1]:
        raise ConfigurationError(f"--subset names '{twice[0]}' twice")
    chunks: list[Chunk] = []
    sentence_counts: dict[str, int] = {}
    left_out = first_row = 0
    for subset in dict.fromkeys(part for one in subsets for part in parts_of(task, one)):
        if not has_subset(task, subset):
            raise ConfigurationError(
                f"{data_bin} holds no subset '{subset}' for {source}-{target}{what_is_there(task, subset)}: "
                f"{subset}.{source}-{target}.* are not all there; give the folder that fairseq-ccpr prepare "
                "or fairseq-preprocess wrote, and --subset as there"
            )
        task.load_dataset(subset, alone=False)
        dataset = task.dataset(subset)
        sentence_counts[subset] = len(dataset)
        kept, ignored = data_utils.filter_paired_dataset_indices_by_size(
            dataset.src_sizes, dataset.tgt_sizes, draw_fraction(len(dataset), fraction), max_positions
        )
        left_out += len(ignored)
        lengths = entries_of(dataset, task.tags)
        # Chunks end where the running count of tokens passes a multiple of `chunk_tokens`.
        cuts = np.flatnonzero(np.diff((np.cumsum(lengths[kept]) - 1) // chunk_tokens)) + 1
        for sentences in np.split(kept, cuts) if len(kept) else ():
            rows = int(lengths[sentences].sum())
            chunks.append(Chunk(len(chunks), subset, sentences, first_row, rows))
            first_row += rows
    if first_row == 0:
        raise ConfigurationError(
            f"{data_bin} holds no sentence to build from in {', '.join(sentence_counts)}: {left_out:,} are "
            f"longer than the model takes ({max_positions[0]} source, {max_positions[1]} target tokens), "
            "and there are no others"
        )
    return Corpus(
        task, sentence_counts, chunks, left_out, corpus_fingerprint(task, sentence_counts), fraction
    )


def entries_of(dataset: Any, tags: LanguageTags) -> np.ndarray:
    """Count the entries of each sentence, int64: all target tokens but the tags that decoding forces."""
    return np.asarray(dataset.tgt_sizes, np.int64) - tags.forced


def chunks_of_shard(total: int, num_shards: int, shard_id: int, unit: str) -> range:
    """Choose the chunks of a shard among `total`: neighbours, so that shards are joined by appending.

    >>> [list(chunks_of_shard(5, 2, shard, "sentences")) for shard in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    if total < num_shards:
        raise ConfigurationError(
            f"--num-shards is {num_shards}, but --chunk-{unit} cuts the text into {total}: give up to "
            f"{total} shards, or shorter chunks"
        )
    return range(total * shard_id // num_shards, total * (shard_id + 1) // num_shards)
