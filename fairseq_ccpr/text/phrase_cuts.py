"""Cuts of a sentence into phrases, at words and at the decoder's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fairseq_ccpr.text.decoder_subwords import Pieces


class SplitSentences(NamedTuple):
    """The subwords of n sentences, T together, sentence after sentence; see `Pieces`."""

    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int32 [T], characters of the sentence
    ends: np.ndarray  # int32 [T]
    bounds: np.ndarray  # int64 [n + 1], the first subword of each sentence, and at last T

    @classmethod
    def of(cls, pieces: Sequence[np.ndarray]) -> SplitSentences:
        """Join sentences, each as `as_rows` gives it."""
        joined = np.concatenate([np.empty((3, 0), np.int32), *pieces], axis=1)
        ids, starts, ends = joined
        return cls(ids, starts, ends, np.cumsum([0, *[one.shape[1] for one in pieces]]))


class Cuts(NamedTuple):
    """Where R phrases are among subwords, and how many of them follow."""

    first: np.ndarray  # int64 [R], the first subword
    lengths: np.ndarray  # int64 [R], in subwords; 0 where the decoder cannot write the phrase
    following: np.ndarray  # int64 [R], subwords after it, to the end of its sentence or the first unknown one


def as_rows(pieces: Pieces) -> np.ndarray:
    """Return the subwords of a sentence as ids, starts and ends, int32 [3, n]."""
    return np.array([pieces.ids, pieces.starts, pieces.ends], np.int32).reshape(3, -1)


def cut_phrases(spans: np.ndarray, split: SplitSentences, unknown: int) -> Cuts:
    """Find the subwords of phrases, as `DecoderSubwords.slice`, and what follows before an unknown piece.

    Spans are int64 [R, 3]: which of the n sentences, start and end in characters.
    """
    sentences, start, end = spans.T.astype(np.int64)
    ids, starts, ends, bounds = split
    # Characters counted through all sentences: starts never fall within one.
    beyond = 1 + max(int(starts.max(initial=0)), int(end.max(initial=0)))
    counted = np.repeat(np.arange(len(bounds) - 1) * beyond, np.diff(bounds)) + starts
    first, stop = (np.searchsorted(counted, sentences * beyond + at) for at in (start, end))
    ends = np.append(ends, 0)  # so that [first - 1] is something where first is 0
    last, before = ends[stop - 1], ends[first - 1]
    unknowns = np.append((ids == unknown).nonzero()[0], len(ids))
    next_unknown, after_last = (unknowns[np.searchsorted(unknowns, at)] for at in (first, stop))
    whole = (first < stop) & (start < last) & (last <= end) & (next_unknown >= stop)
    whole &= (first == bounds[sentences]) | (before <= start)
    following = np.minimum(after_last, bounds[sentences + 1]) - stop
    return Cuts(first, np.where(whole, stop - first, 0), np.where(whole, following, 0))
