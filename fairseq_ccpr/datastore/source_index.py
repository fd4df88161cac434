"""The source sentences of a token datastore, and how much they are like sentences that are translated.

Likeness is BM25 over the model's own subwords, as a share of what a sentence scores with itself:

    sim(x, s) = score(x, s) / score(x, x),  score(x, s) = sum of idf(w) tf(w, s) (K + 1) / (tf(w, s) + K (1 - B + B |s| / m))

over the distinct subwords w of x, with m the mean length of a sentence. Unknown subwords are no terms, nor
are those that stand in very many sentences. Letters: S numbers of sentences, some of which may have no
entries, V source vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairseq_ccpr.datastore.manifest import SourceIndexDescription
from fairseq_ccpr.datastore.parts import FIRSTS, PLACES, POSTINGS, SOURCE_HASHES, SUBWORDS, WORTHS
from fairseq_ccpr.storage.arrays import ArrayWriter, save_array
from fairseq_ccpr.storage.fingerprint import hash_bytes

K, B = 1.2, 0.75  # of BM25
# subwords in more than this share of the sentences, and in more than so many, are no terms
COMMON, FEW_SENTENCES = 0.1, 1000
SORTED_ROWS = 1 << 18  # subwords, or entries, that are sorted at a time

Sources = Iterable[tuple[int, np.ndarray]]  # numbers of sentences, ascending, and their subwords, int [L]


def hash_source(subwords: Iterable[int]) -> int:
    """Identify a source sentence by the ids of its subwords, without tags and end: a uint64, never 0.

    >>> hash_source([5, 9]) == hash_source([5, 9]) != hash_source([9, 5])
    True
    """
    return hash_bytes(np.fromiter(subwords, "<i4").tobytes())


def worth(counts: np.ndarray, lengths: np.ndarray, mean: float) -> np.ndarray:
    """Compute what occurrences of a subword are worth in sentences of these lengths, before idf."""
    return counts * (K + 1) / (counts + K * (1 - B + B * lengths / mean))


class Terms(NamedTuple):
    """The distinct subwords of sentences, sentence after sentence."""

    sentences: np.ndarray  # int64 [n], places of the sentences, ascending
    subwords: np.ndarray  # int64 [n]
    worth: np.ndarray  # fp16 [n]

    @classmethod
    def of(cls, subwords: np.ndarray, lengths: np.ndarray, described: SourceIndexDescription) -> Terms:
        """Count the subwords, int [T], of sentences of these lengths, int64 [n]."""
        places = np.repeat(np.arange(len(lengths)), lengths)
        terms = (subwords < described.vocabulary) & (subwords != described.unknown)
        both = places[terms] * described.vocabulary + subwords[terms]
        both, counts = np.unique(both, return_counts=True)
        places = both // described.vocabulary
        worths = worth(counts, lengths[places], described.mean_length).astype(np.float16)
        return cls(places, both % described.vocabulary, worths)

    @classmethod
    def joined(cls, sources: Sequence[np.ndarray], described: SourceIndexDescription) -> Terms:
        """Count the subwords of sources, int [L] each."""
        subwords = np.concatenate([np.empty(0, np.int64), *sources]).astype(np.int64)
        return cls.of(subwords, np.array([len(one) for one in sources], np.int64), described)


class SourceIndex:
    """The index of a token part's source sentences, opened for reading: memory-mapped, checked for size.

    Attributes:
        sentences: int64 [S + 1, 2], the first entry and the first subword of each sentence, and the ends.
        hashes: uint64 [S], see `hash_source`; 0 where a number has no entries.
    """

    def __init__(self, folder: Path, described: SourceIndexDescription) -> None:
        self.described = described
        arrays = described.open_arrays(folder)
        self.sentences, self.subwords, self.hashes = (
            arrays[name] for name in (PLACES, SUBWORDS, SOURCE_HASHES)
        )
        self.firsts, self.postings, self.worths = (arrays[name] for name in (FIRSTS, POSTINGS, WORTHS))

    @cached_property
    def document_frequencies(self) -> np.ndarray:
        """In how many sentences each subword stands, int64 [V]."""
        return np.diff(self.firsts)

    def source(self, sentence: int) -> np.ndarray:
        """Return the subwords of a sentence, int32 [L]."""
        start, end = self.sentences[sentence : sentence + 2, 1]
        return self.subwords[start:end]

    def sources(self) -> Iterator[tuple[int, np.ndarray]]:
        for number in np.flatnonzero(self.hashes).tolist():
            yield number, self.source(number)

    def entries(self, sentences: np.ndarray) -> np.ndarray:
        """List the entries of sentences, int64 [n], sentence after sentence."""
        return ranges(self.sentences[sentences, 0], self.sentences[sentences + 1, 0])

    def find(self, hashes: Iterable[int]) -> dict[int, np.ndarray]:
        """Find the sentences with these hashes: int64, ascending, by hash, as far as there are any."""
        wanted, found = np.fromiter(hashes, np.uint64), dict[int, list[int]]()
        for number in np.flatnonzero(np.isin(self.hashes, wanted)).tolist():
            found.setdefault(int(self.hashes[number]), []).append(number)
        return {one: np.array(numbers, np.int64) for one, numbers in found.items()}

    def find_damage(self, size: int) -> list[str]:
        """Check that what it names is there, `size` entries among it; returns a sentence for each fault."""
        described, faults = self.described, []
        if (
            tuple(self.sentences[-1]) != (size, described.subwords)
            or (np.diff(self.sentences, axis=0) < 0).any()
        ):
            faults.append(f"{PLACES}: entries or subwords outside the part")
        if (int(self.firsts[0]), int(self.firsts[-1])) != (0, described.postings) or (
            self.document_frequencies < 0
        ).any():
            faults.append(f"{FIRSTS}: postings that are not there")
        if not np.isfinite(self.worths).all():
            faults.append(f"{WORTHS}: NaN or infinite numbers")
        if described.postings and not 0 <= self.postings.min() <= self.postings.max() < described.sentences:
            faults.append(f"{POSTINGS}: sentences that are not there")
        return faults


class Likeness(NamedTuple):
    """How much sentences are like B sources: sim(x, s) in [0, 1]."""

    sims: np.ndarray  # fp16 [B, S'], of those of the datastore, then of those that were learned
    best: np.ndarray  # fp16 [B], the highest of each


class SentenceMemory:
    """The sentences that a source is compared with: an index, and what was learned alongside; immutable.

    Args:
        learned: subwords of sentences, which are numbered after those of the index.
        gone: int64, sentences of the index that do not count.
    """

    def __init__(self, index: SourceIndex, learned: Sequence[np.ndarray], gone: np.ndarray) -> None:
        described = index.described
        self.index, self.size, self.gone = index, described.sentences + len(learned), gone
        if not described.known and learned:  # nothing else is there to take a mean of
            described = replace(
                described, mean_length=max(1.0, float(np.mean([len(one) for one in learned])))
            )
        self.described, self._learned = described, Terms.joined(learned, described)
        lost = Terms.joined([index.source(number) for number in gone.tolist()], described)
        more, fewer = (
            np.bincount(terms.subwords, minlength=described.vocabulary) for terms in (self._learned, lost)
        )
        frequencies = index.document_frequencies + more - fewer
        total = described.known + len(learned) - len(gone)
        self.idf = np.log1p((total - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)  # [V]
        self.idf[frequencies > max(FEW_SENTENCES, COMMON * total)] = 0.0

    def likeness(self, sources: Sequence[np.ndarray]) -> Likeness:
        """Compare sources, int [L] each, with all sentences."""
        index, own = self.index, self.index.described.sentences
        sims, asked = np.zeros((len(sources), self.size), np.float16), np.zeros_like(self.idf)
        for source, found in zip(sources, sims):
            _, terms, worths = Terms.joined([source], self.described)
            perfect = float((self.idf[terms] * worths).sum())
            terms = terms[self.idf[terms] > 0]
            if not len(terms):
                continue
            starts, ends = index.firsts[terms], index.firsts[terms + 1]
            places = ranges(starts, ends)
            weights = np.repeat(self.idf[terms], ends - starts) * index.worths[places]
            row = np.empty(self.size, np.float32)
            row[:own] = np.bincount(index.postings[places], weights, minlength=own)
            row[self.gone] = 0.0
            if self.size > own:
                asked[terms] = self.idf[terms]
                weights = asked[self._learned.subwords] * self._learned.worth
                row[own:] = np.bincount(self._learned.sentences, weights, minlength=self.size - own)
                asked[terms] = 0.0
            found[:] = np.minimum(row / perfect, 1.0)
        return Likeness(sims, sims.max(axis=1, initial=0.0))


def ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """List the numbers from each start to before its end, int64, range after range.

    >>> ranges(np.array([3, 7]), np.array([5, 8])).tolist()
    [3, 4, 7]
    """
    lengths = ends - starts
    numbers: np.ndarray = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(
        int(lengths.sum())
    )
    return numbers


def write_source_index(
    folder: Path,
    sources: Sources,
    provenance: np.ndarray,
    vocabulary: int,
    unknown: int,
    progress: Callable[[int], object] = lambda count: None,
    mean_length: float | None = None,
) -> SourceIndexDescription:
    """Write the index of a token part's source sentences; memory holds a block of them at a time.

    Args:
        sources: of all sentences that have entries.
        provenance: int32 [N, 2], sentence and position of each entry; the sentences ascend.
        unknown: the unknown subword.
        mean_length: m, where it is to stay what it was; None: that of these sentences.
    """
    described, known = SourceIndexDescription(vocabulary=vocabulary, unknown=unknown), 0
    written = [described.grow(folder, name) for name in (PLACES, SUBWORDS, SOURCE_HASHES)]
    spans, subwords, hashes = written
    for (number, source), (having, entry) in zip(sources, _first_entries(provenance), strict=True):
        if having != number:
            raise RuntimeError(f"sentence {having} has entries, and the source is that of sentence {number}")
        missing = number - hashes.rows
        spans.append(np.array([[entry, subwords.rows]] * (missing + 1), np.int64))
        hashes.append(np.array([0] * missing + [hash_source(source.tolist())], np.uint64))
        subwords.append(source)
        known += 1
        progress(1)
    spans.append(np.array([[len(provenance), subwords.rows]], np.int64))
    for array in written:
        array.close()
    mean = max(1.0, subwords.rows / max(known, 1)) if mean_length is None else mean_length
    described = replace(
        described, sentences=hashes.rows, known=known, subwords=subwords.rows, mean_length=mean
    )
    return _write_postings(folder, described)


def _write_postings(folder: Path, described: SourceIndexDescription) -> SourceIndexDescription:
    """Count the sentences of each subword, then list them where they belong, block by block."""
    spans, subwords = described.open_arrays(folder, PLACES, SUBWORDS).values()

    def blocks() -> Iterator[tuple[int, Terms]]:
        begins, start = spans[:, 1], 0
        while start < described.sentences:
            end = max(start + 1, int(np.searchsorted(begins, begins[start] + SORTED_ROWS, "right")) - 1)
            yield (
                start,
                Terms.of(subwords[begins[start] : begins[end]], np.diff(begins[start : end + 1]), described),
            )
            start = end

    counts = np.zeros(described.vocabulary, np.int64)
    for _, terms in blocks():
        counts += np.bincount(terms.subwords, minlength=described.vocabulary)
    firsts = np.concatenate([[0], np.cumsum(counts)])
    save_array(folder / f"{FIRSTS}.npy", firsts)
    described = replace(described, postings=int(firsts[-1]))
    ArrayWriter(folder, described.shapes(POSTINGS, WORTHS)).create()
    mode: Any = "r+" if described.postings else None  # an empty file cannot be mapped
    postings, worths = (
        np.load(folder / f"{name}.npy", mode, allow_pickle=False) for name in (POSTINGS, WORTHS)
    )
    free = firsts[:-1].copy()
    for start, terms in blocks():
        order = np.argsort(terms.subwords, kind="stable")
        words, found = np.unique(terms.subwords, return_counts=True)
        places = ranges(free[words], free[words] + found)
        postings[places], worths[places] = start + terms.sentences[order], terms.worth[order]
        free[words] += found
    for array in (postings, worths) if described.postings else ():
        array.flush()
    return described


def _first_entries(provenance: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the number of each sentence that has entries, and the first of these."""
    for start in range(0, len(provenance), SORTED_ROWS):
        block = provenance[start : start + SORTED_ROWS]
        places = np.flatnonzero(block[:, 1] == 0)
        yield from zip(block[places, 0].tolist(), (start + places).tolist())
