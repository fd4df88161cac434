"""Training data of CLKNN's contrast: keys by token, and which sentences repeat others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.storage.equal_strings import digest_number
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, collate, subword_bounds
from fairseq_ccpr.text.words import word_spans
from fairseq_ccpr.timing import progress_bar
from fairseq_ccpr.training.contrast_sampler import ContrastOptions, PhraseDraw
from fairseq_ccpr.training.length_batches import LengthBatches

SOURCE_NUMBERS = 8  # r, that stand for a source
# Differences of these numbers, in standard deviations, up to which sources count as the same. Batching and the keys' fp16
# cause a fiftieth of it if the model computes in fp32, a third if it computes in fp16. Sources that differ in one short word
# are farther apart; if they are not, it is just as well that neither gives the other negatives.
SAME_SOURCE = 0.03
BLOCK_ROWS = 1 << 20
BLOCK_SENTENCES = 1 << 14


@dataclass(frozen=True)
class Origins:
    """Marks that show whether sentences repeat each other, in any shape.

    Attributes:
        groups: int64 [...], the same number where all target tokens are the same; -1: no group of the datastore.
        sources: fp32 [..., r], equal up to `SAME_SOURCE` where the source is the same.
    """

    groups: Tensor
    sources: Tensor

    def __getitem__(self, index: Tensor) -> Origins:
        return Origins(self.groups[index], self.sources[index])

    def to(self, device: torch.device) -> Origins:
        """Copy to another device."""
        return Origins(self.groups.to(device), self.sources.to(device))

    def repeated_by(self, others: Origins) -> Tensor:
        """Compare [B] sentences with [B, C] others: bool [B, C], where translation or source is the same."""
        same_target = others.groups == self.groups.unsqueeze(1)
        apart = (others.sources - self.sources.unsqueeze(1)).abs().amax(dim=2)
        return same_target | (apart <= SAME_SOURCE)


class SentenceOrigins:
    """The origins of a datastore's sentences.

    A datastore does not hold the source. But the decoder's state at the first position depends only on the source, so equal
    sources give equal states; a few random projections of that state represent the source.

    Args:
        keys: fp16 [N, d], the decoder's own states, whole sentences one after the other; may be memory-mapped.
        values: int [N].
        sentences: int [N], the sentence of each.
    """

    def __init__(self, keys: np.ndarray, values: np.ndarray, sentences: np.ndarray) -> None:
        starts = _starts(sentences)
        self.lengths = np.diff(np.append(starts, len(sentences)))  # int64 [S]
        self.sentence_of = torch.from_numpy(np.repeat(np.arange(len(starts), dtype=np.int32), self.lengths))  # [N]
        self._hashes, groups = np.unique(hash_sentences(values, sentences), return_inverse=True)
        self._random = np.random.default_rng(1).normal(size=(keys.shape[1], SOURCE_NUMBERS)).astype(np.float32)
        sources = self._project(keys, starts)
        self._mean, self._deviation = sources.mean(axis=0), np.maximum(sources.std(axis=0), 1e-6)
        self.origins = Origins(torch.from_numpy(groups), self._scale(sources))

    def of_rows(self, keys: np.ndarray, values: np.ndarray, sentences: np.ndarray, rows: np.ndarray) -> Origins:
        """Determine the origins of some rows of another datastore, by the same marks.

        Args:
            keys, values, sentences: of the other datastore.
            rows: int64 [Q].
        """
        starts = _starts(sentences)
        chosen, sentence_of = np.unique(np.searchsorted(starts, rows, side="right") - 1, return_inverse=True)
        hashes = hash_sentences(values, sentences)[chosen]
        place = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        groups = np.where(self._hashes[place] == hashes, place, -1)
        sources = self._scale(self._project(keys, starts[chosen]))
        return Origins(torch.from_numpy(groups), sources)[torch.from_numpy(sentence_of)]

    def _project(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Project some states, fp32 [n, r]; memory holds a block of them."""
        blocks = [rows[start : start + BLOCK_SENTENCES] for start in range(0, len(rows), BLOCK_SENTENCES)]
        return np.concatenate([keys[block].astype(np.float32) @ self._random for block in blocks])

    def _scale(self, projected: np.ndarray) -> Tensor:
        return torch.from_numpy((projected - self._mean) / self._deviation)


def hash_sentences(values: np.ndarray, sentences: np.ndarray) -> np.ndarray:
    """Hash the tokens of each sentence in their order, uint64 [S]; memory holds a block of rows.

    >>> hashes = hash_sentences(np.array([5, 6, 2, 6, 5, 2, 5, 6, 2]), np.array([0, 0, 0, 1, 1, 1, 4, 4, 4]))
    >>> (hashes == hashes[0]).tolist()
    [True, False, True]
    """
    starts = _starts(sentences)
    hashes = np.zeros(len(starts), np.uint64)
    for first in range(0, len(values), BLOCK_ROWS):
        tokens = values[first : first + BLOCK_ROWS].astype(np.uint64)
        rows = np.arange(first, first + len(tokens))
        sentence_of = np.searchsorted(starts, rows, side="right") - 1
        mixed = _mix(_mix((rows - starts[sentence_of]).astype(np.uint64)) + tokens)
        begins = np.flatnonzero(np.diff(sentence_of, prepend=-1))
        hashes[sentence_of[begins]] += np.add.reduceat(mixed, begins)
    return hashes


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Scatter uint64 numbers over all of uint64, one to one: the finaliser of SplitMix64."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _starts(sentences: np.ndarray) -> np.ndarray:
    """Find the first row of each sentence, int64 [S]."""
    return np.flatnonzero(np.diff(sentences, prepend=sentences[0] - 1))


Span = tuple[int, int]  # in characters
TRIES = 6  # random spans drawn for each one needed, since some are phrases, and some end beyond the sentence


@dataclass
class SentenceWithSpans:
    """A sentence, the phrases drawn from it, and as many other spans."""

    subwords: Subwords
    spans: list[tuple[int, int]]  # first and last subword
    strings: list[str]
    others: list[tuple[int, int]]


@dataclass
class ContrastExample:
    """A source sentence, and the target sentences with the translations of its phrases: its own, and others."""

    source: SentenceWithSpans  # with the phrases of all targets, in their order
    targets: list[SentenceWithSpans]


class PhraseContrastDataset(LengthBatches):
    """Sentence pairs with phrase pairs drawn again each epoch.

    Args:
        pairs: of one language pair.
        tokenizer: the encoder's.
        options: how phrases are drawn.

    Attributes:
        sentences: int64 [n], the sentence pairs that have a phrase pair and are not too long.
        left_out: those that are.
    """

    def __init__(self, pairs: PhrasePairs, tokenizer: SubwordTokenizer, options: ContrastOptions) -> None:
        super().__init__()
        self.pairs, self.tokenizer, self.seed = pairs, tokenizer, options.seed
        self.most_words = int(pairs.manifest.settings["max_phrase_words"])
        with_phrases = np.unique(pairs.pairs[:, 0])
        self.lengths_of = np.zeros((pairs.sentences, 2), dtype=np.int64)  # in subwords, of those with a phrase pair
        for i in progress_bar(f"subwords of {pairs.directory}", "sentence", with_phrases):
            self.lengths_of[i] = [len(tokenizer.encode(text).ids) for text in pairs.sentence(i)]
        fits = self.lengths_of[with_phrases].max(axis=1) <= options.max_subwords
        self.left_out = int((~fits).sum())
        self.sentences = with_phrases[fits]
        self.draw = PhraseDraw(pairs, self.sentences, self.lengths_of[:, 1], options)
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the phrases of an epoch, which determine how many sentences are needed."""
        super().set_epoch(epoch)
        self.drawn = self.draw.draw(epoch)
        owners = np.repeat(np.arange(len(self)), np.diff(self.drawn.starts))
        targets = self.draw.numbers[self.drawn.targets]
        is_first = np.diff(owners, prepend=-1).astype(bool) | np.diff(targets, prepend=-1).astype(bool)
        self.counts = np.ones((len(self), 2), dtype=np.int64)
        self.counts[:, 1] = np.bincount(owners[is_first], minlength=len(self))
        self.lengths = self.lengths_of[self.sentences]
        self.lengths[:, 1] = np.maximum.reduceat(self.lengths_of[targets, 1], self.drawn.starts[:-1])

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> ContrastExample | None:
        """Return a sentence pair with phrases of this epoch; None if no phrase consists of whole subwords."""
        rng = np.random.default_rng([self.seed, self.epoch, index])
        number = int(self.sentences[index])
        source = self.tokenizer.encode(self.pairs.sentence(number)[0])
        sources, targets = (self.pairs.pairs[rows].tolist() for rows in self.drawn.of(index))
        source_spans: list[Span] = []
        sides = []
        for other, rows in groupby(zip(sources, targets), key=lambda row: row[1][0]):
            target = self.tokenizer.encode(self.pairs.sentence(other)[1])
            spans = [((a, b), (c, d)) for (_, a, b, _, _), (_, _, _, c, d) in rows]
            whole = [(one, two) for one, two in spans if _is_whole(source, one) and _is_whole(target, two)]
            if whole:
                source_spans += [one for one, _ in whole]
                phrases = [(c, d) for _, _, _, c, d in self.pairs.pairs_of(other).tolist()]
                sides.append(self._side(target, [two for _, two in whole], phrases, rng))
        if not sides:
            return None
        phrases = [(a, b) for _, a, b, _, _ in self.pairs.pairs_of(number).tolist()]
        return ContrastExample(self._side(source, source_spans, phrases, rng), sides)

    def _side(
        self, subwords: Subwords, spans: list[Span], phrases: list[Span], rng: np.random.Generator
    ) -> SentenceWithSpans:
        """A sentence with the phrases drawn from it that are whole subwords, and as many spans that are not its phrases."""
        bounds = [found for span in spans if (found := subword_bounds(subwords, *span)) is not None]
        strings = [subwords.text[start:end] for start, end in spans]
        return SentenceWithSpans(subwords, bounds, strings, self._no_phrases(subwords, phrases, len(spans), rng))

    def _no_phrases(
        self, encoded: Subwords, phrases: list[Span], count: int, rng: np.random.Generator
    ) -> list[tuple[int, int]]:
        """Draw `count` random spans of words, no longer than phrases, that are not phrases of the sentence, drawn or not;
        fewer if it has few."""
        words = word_spans(encoded.text)
        first = rng.integers(0, len(words), TRIES * count)
        last = first + rng.integers(0, self.most_words, TRIES * count)
        spans = [(words[a][0], words[b][1]) for a, b in zip(first.tolist(), last.tolist()) if b < len(words)]
        found = dict.fromkeys(subword_bounds(encoded, *span) for span in spans)
        taken = {subword_bounds(encoded, *span) for span in phrases}
        return [bounds for bounds in found if bounds is not None and bounds not in taken][:count]

    def collater(self, samples: list[ContrastExample | None]) -> dict[str, Any]:
        """Make a batch. Phrases of the source and of the target side are in the same order."""
        examples = [sample for sample in samples if sample is not None]
        if not examples:
            return {}
        source = self._collate([example.source for example in examples])
        target = self._collate([side for example in examples for side in example.targets])
        return {
            "nsentences": len(samples),
            "ntokens": int(sum(side["tokens"].ne(self.tokenizer.pad).sum() for side in (source, target))),
            "phrases": len(source["spans"]),
            "source": source,
            "target": target,
        }

    def _collate(self, sides: list[SentenceWithSpans]) -> dict[str, Tensor]:
        """tokens [S, L], spans and others int64 [K, 3] (sentence, first, last subword), strings and contexts int64 [K]."""
        return {
            "tokens": collate([side.subwords for side in sides], self.tokenizer.pad),
            "spans": _numbered([side.spans for side in sides]),
            "others": _numbered([side.others for side in sides]),
            "strings": torch.tensor([digest_number(string) for side in sides for string in side.strings]),
            "contexts": torch.tensor([digest_number(side.subwords.text) for side in sides for _ in side.strings]),
        }


def _is_whole(subwords: Subwords, span: Span) -> bool:
    """Check that no subword crosses the borders of a span."""
    return subword_bounds(subwords, *span) is not None


def _numbered(spans: list[list[tuple[int, int]]]) -> Tensor:
    """Return the spans of each sentence with the sentence's number, int64 [K, 3]."""
    rows = [(number, *span) for number, sentence_spans in enumerate(spans) for span in sentence_spans]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
