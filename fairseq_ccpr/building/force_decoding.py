"""Force-decoding a corpus with a translation model, to read a key for every target token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from fairseq.data.iterators import EpochBatchIterator

from fairseq_ccpr.building.corpus import Chunk, Corpus, entries_of
from fairseq_ccpr.datastore.token import KEYS, PROVENANCE, VALUES
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.models.key_layer import KeyCapture


def force_decode(
    capture: KeyCapture, corpus: Corpus, chunks: list[Chunk], max_tokens: int, done: Callable[[int], object]
) -> Iterator[tuple[Chunk, dict[str, np.ndarray]]]:
    """Keys, values and provenance of each chunk, rows in the order of the corpus.

    Equation 3 of the CLKNN paper: for each sentence pair (x, y) and position t the key h_t = f(x, y_<t) and the value
    y_t. The end of the sentence is a value like any other; padding never is.

    Args:
        capture: of a fairseq model in evaluation mode.
        done: called after each batch with the number of new rows.

    Yields:
        The chunk, and its arrays: keys fp16 [n, d], values int32 [n], provenance int32 [n, 2] (sentence, position).

    Raises:
        DatastoreError: the model computes NaN, or a number that fp16 cannot hold.
    """
    for subset in corpus.subsets:
        work = [(chunk, corpus.batches(chunk, max_tokens)) for chunk in chunks if chunk.subset == subset]
        stream = _load(corpus.task.dataset(subset), [batch for _, batches in work for batch in batches])
        for chunk, batches in work:
            yield chunk, _decode_chunk(capture, corpus, chunk, itertools.islice(stream, len(batches)), done)


def _load(dataset: Any, batches: list[Any]) -> Iterator[dict[str, Any]]:
    """fairseq's own loader over ready batches, one worker thread ahead."""
    return iter(EpochBatchIterator(dataset, dataset.collater, batches, buffer_size=8).next_epoch_itr(shuffle=False))


@torch.inference_mode()
def _decode_chunk(
    capture: KeyCapture, corpus: Corpus, chunk: Chunk, samples: Iterable[dict[str, Any]], done: Callable[[int], object]
) -> dict[str, np.ndarray]:
    dataset = corpus.task.dataset(chunk.subset)
    pad = corpus.task.target_dictionary.pad()
    offset = corpus.sentence_offset(chunk.subset)
    forced = corpus.task.tags.forced
    lengths = entries_of(dataset, corpus.task.tags)[chunk.sentences]
    first_row = dict(zip(chunk.sentences.tolist(), (np.cumsum(lengths) - lengths).tolist()))
    keys = np.empty((chunk.rows, capture.dimension), dtype=np.float16)
    values = np.empty(chunk.rows, dtype=np.int32)
    provenance = np.empty((chunk.rows, 2), dtype=np.int32)
    filled = 0
    for sample in samples:
        target = sample["target"]
        real = target.ne(pad)  # [B, T]; all that follows is [B, T] -> [tokens]
        real[:, :forced] = False
        position = (real.cumsum(1) - 1)[real].numpy()
        length = real.sum(1).numpy()
        sentence = np.repeat(sample["id"].numpy(), length)
        rows = np.repeat([first_row[i] for i in sample["id"].tolist()], length) + position
        keys[rows] = capture.force_decode(sample["net_input"])[real].half().cpu().numpy()
        values[rows] = target[real].numpy()
        provenance[rows] = np.stack([sentence + offset, position], axis=1)
        filled += len(rows)
        done(len(rows))
    if filled != chunk.rows:
        raise RuntimeError(f"fairseq's batches hold {filled} of the {chunk.rows} tokens of chunk {chunk.number}")
    if not np.isfinite(keys).all():
        row = int(np.flatnonzero(~np.isfinite(keys).all(axis=1))[0])
        raise DatastoreError(
            f"the model computes numbers that a key cannot hold (NaN, or beyond fp16's range), first in sentence "
            f"{provenance[row, 0]} of the corpus: check the model; without --fp16 it may do better"
        )
    return {KEYS: keys, VALUES: values, PROVENANCE: provenance}
