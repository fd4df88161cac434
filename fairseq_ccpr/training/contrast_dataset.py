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
from fairseq_ccpr.training.length_batches import LengthBatches

Span = tuple[int, int]  # in characters
TRIES = 6  # random spans drawn for each one needed, since some are phrases, and some end beyond the sentence


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
    # int64 [D], those that supply the target side: the same strings, perhaps from another sentence
    targets: np.ndarray
    starts: np.ndarray  # int64 [n + 1], the first phrase of each sentence pair; the last is D

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sources and targets of one sentence pair."""
        rows = slice(self.starts[number], self.starts[number + 1])
        return self.sources[rows], self.targets[rows]


class PhraseDraw:
    """Draws phrase pairs of `sentences`, int64 [n], ascending, each of which has one; `target_lengths` is in subwords.

    The same seed and epoch give the same phrases.
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
        """Draw some phrases of each sentence pair, and for a fraction of them another occurrence of the target."""
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
        return DrawnPhrases(
            sources[order], targets[order], np.searchsorted(owners, np.arange(len(self.sizes) + 1))
        )


class Occurrences:
    """Where each phrase pair, as a pair of strings, occurs in other contexts."""

    def __init__(self, pairs: PhrasePairs) -> None:
        digests = np.empty((2, pairs.size), dtype=np.int64)  # of the pair of strings, of the target sentence
        for number in progress_bar(f"occurrences in {pairs.directory}", "sentence", range(pairs.sentences)):
            source, target = pairs.sentence(number)
            rows = pairs.rows_of(number)
            spans = pairs.pairs[rows, 1:].tolist()
            digests[0, rows] = [digest_number(f"{source[a:b]}\t{target[c:d]}") for a, b, c, d in spans]
            digests[1, rows] = digest_number(target)
        # [P], those of the same strings together, and of them those of a sentence
        self.order = np.lexsort(digests[::-1])
        self.same_strings = self._runs(digests[:1])
        self.same_context = self._runs(digests)

    def _runs(self, digests: np.ndarray) -> np.ndarray:
        """Find where in `order` the phrase pairs that share all digests [., P] with each begin and end, int64 [2, P]."""
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
    """Sentence pairs of one language pair, with phrase pairs drawn again each epoch; `left_out` are too long."""

    def __init__(self, pairs: PhrasePairs, tokenizer: SubwordTokenizer, options: ContrastOptions) -> None:
        super().__init__()
        self.pairs, self.tokenizer, self.seed = pairs, tokenizer, options.seed
        self.most_words = int(pairs.manifest.settings["max_phrase_words"])
        with_phrases = np.unique(pairs.pairs[:, 0])
        # in subwords, of those with a phrase pair
        self.lengths_of = np.zeros((pairs.sentences, 2), dtype=np.int64)
        for i in progress_bar(f"subwords of {pairs.directory}", "sentence", with_phrases):
            self.lengths_of[i] = [len(tokenizer.encode(text).ids) for text in pairs.sentence(i)]
        fits = self.lengths_of[with_phrases].max(axis=1) <= options.max_subwords
        self.left_out = int((~fits).sum())
        self.sentences = with_phrases[fits]  # int64 [n]
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
        rng = np.random.default_rng([self.seed, self.epoch, index])
        number = int(self.sentences[index])
        source = self.tokenizer.encode(self.pairs.sentence(number)[0])
        sources, targets = (self.pairs.pairs[rows].tolist() for rows in self.drawn.of(index))
        source_spans: list[Span] = []
        sides = []
        for other, rows in groupby(zip(sources, targets), key=lambda row: row[1][0]):
            target = self.tokenizer.encode(self.pairs.sentence(other)[1])
            spans = [((a, b), (c, d)) for (_, a, b, _, _), (_, _, _, c, d) in rows]
            whole = [
                (one, two)
                for one, two in spans
                if subword_bounds(source, *one) and subword_bounds(target, *two)
            ]
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
        bounds = [found for span in spans if (found := subword_bounds(subwords, *span)) is not None]
        strings = [subwords.text[start:end] for start, end in spans]
        return SentenceWithSpans(
            subwords, bounds, strings, self._no_phrases(subwords, phrases, len(spans), rng)
        )

    def _no_phrases(
        self, encoded: Subwords, phrases: list[Span], count: int, rng: np.random.Generator
    ) -> list[tuple[int, int]]:
        """Draw `count` random spans of words that are not phrases of the sentence, drawn or not; fewer if it has few."""
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
        """Spans and others are int64 [K, 3] (sentence, first, last subword), strings and contexts int64 [K]."""
        return {
            "tokens": collate([side.subwords for side in sides], self.tokenizer.pad),
            "spans": _numbered([side.spans for side in sides]),
            "others": _numbered([side.others for side in sides]),
            "strings": torch.tensor([digest_number(string) for side in sides for string in side.strings]),
            "contexts": torch.tensor(
                [digest_number(side.subwords.text) for side in sides for _ in side.strings]
            ),
        }


def _numbered(spans: list[list[tuple[int, int]]]) -> Tensor:
    rows = [(number, *span) for number, sentence_spans in enumerate(spans) for span in sentence_spans]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
