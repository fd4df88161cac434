"""Training data of CCPR: the phrase pairs of an epoch, and the sentences that they appear in."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

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
Bounds = tuple[int, int]  # first and last subword
TRIES = 6  # random spans drawn for each one needed, since some are phrases, and some end beyond the sentence


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
        """Find where in `order` the pairs with all digests [., P] of each begin and end, int64 [2, P]."""
        ordered = digests[:, self.order]
        changes = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
        borders = np.concatenate([[0], changes, [len(self.order)]])
        runs = np.empty((2, len(self.order)), dtype=np.int64)
        runs[:, self.order] = np.repeat([borders[:-1], borders[1:]], np.diff(borders), axis=1)
        return runs

    def draw(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw for each phrase pair, int64 [D], one of its strings in another target sentence, or itself."""
        (start, end), (own_start, own_end) = self.same_strings[:, rows], self.same_context[:, rows]
        own = own_end - own_start
        others = end - start - own
        places = start + rng.integers(0, others.clip(1))
        places += np.where(places >= own_start, own, 0)  # skip its own sentence
        return np.where(others > 0, self.order[places.clip(max=len(self.order) - 1)], rows)


class SentenceWithSpans(NamedTuple):
    """A sentence, the phrases drawn from it, and as many other spans."""

    subwords: Subwords
    spans: list[Bounds]
    strings: list[str]
    others: list[Bounds]


# A source sentence with the phrases of all targets, in their order, and the target sentences with the
# translations of its phrases: its own, and others.
ContrastExample = list[SentenceWithSpans]


class PhraseContrastDataset(LengthBatches):
    """Sentence pairs of one language pair, with phrase pairs drawn again each epoch; `left_out` are too long.

    The same seed and epoch give the same phrases: `sources`, int64 [D], those that supply the source side,
    and `targets`, those that supply the target side, the same strings, perhaps from another sentence. They
    are ordered by sentence pair, then by target sentence; those of sentence pair i are from `starts[i]` to
    `starts[i + 1]`.

    Args:
        phrases_per_sentence: at most.
        different_context_fraction: of the targets, those from other sentences; 0 is CCPR, 1 is CPR.
    """

    def __init__(
        self,
        pairs: PhrasePairs,
        tokenizer: SubwordTokenizer,
        phrases_per_sentence: int,
        different_context_fraction: float,
        max_subwords: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.pairs, self.tokenizer, self.seed = pairs, tokenizer, seed
        self.phrases_per_sentence, self.max_subwords = phrases_per_sentence, max_subwords
        self.different_context_fraction = different_context_fraction
        self.most_words = int(pairs.manifest.settings["max_phrase_words"])
        self.numbers = np.array(pairs.pairs[:, 0])  # the sentence of each phrase pair
        with_phrases = np.unique(self.numbers)
        # in subwords, of those with a phrase pair
        self.lengths_of = np.zeros((pairs.sentences, 2), dtype=np.int64)
        for i in progress_bar(f"subwords of {pairs.directory}", "sentence", with_phrases):
            self.lengths_of[i] = [len(tokenizer.encode(text).ids) for text in pairs.sentence(i)]
        fits = self.lengths_of[with_phrases].max(axis=1) <= max_subwords
        self.left_out = int((~fits).sum())
        self.sentences = with_phrases[fits]  # int64 [n]
        self.elsewhere = Occurrences(pairs) if different_context_fraction > 0 else None
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the phrases of an epoch, which determine how many sentences are needed."""
        super().set_epoch(epoch)
        owners = self._draw(np.random.default_rng([self.seed, epoch]))
        targets = self.numbers[self.targets]
        is_first = np.diff(owners, prepend=-1).astype(bool) | np.diff(targets, prepend=-1).astype(bool)
        self.counts = np.ones((len(self), 2), dtype=np.int64)
        self.counts[:, 1] = np.bincount(owners[is_first], minlength=len(self))
        self.lengths = self.lengths_of[self.sentences]
        self.lengths[:, 1] = np.maximum.reduceat(self.lengths_of[targets, 1], self.starts[:-1])

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw `sources` and, for a fraction of them, another occurrence as target.

        Return their sentence pairs, [D].
        """
        first, end = (np.searchsorted(self.numbers, self.sentences, side=side) for side in ("left", "right"))
        sizes = end - first
        owners = np.repeat(np.arange(len(sizes)), sizes)  # of all candidates
        places = np.arange(len(owners)) - (sizes.cumsum() - sizes)[owners]
        rows = first[owners] + places
        shuffled = rows[np.lexsort((rng.random(len(rows)), owners))]  # within each sentence pair
        kept = places < self.phrases_per_sentence
        sources, owners = shuffled[kept], owners[kept]
        targets = sources
        if self.elsewhere is not None:
            others = self.elsewhere.draw(sources, rng)
            moved = rng.random(len(sources)) < self.different_context_fraction
            fits = self.lengths_of[self.numbers[others], 1] <= self.max_subwords
            targets = np.where(moved & fits, others, sources)
        order = np.lexsort((self.numbers[targets], owners))  # owners ascend already
        self.sources, self.targets = sources[order], targets[order]
        self.starts = np.searchsorted(owners, np.arange(len(sizes) + 1))
        return owners

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> ContrastExample | None:
        rng = np.random.default_rng([self.seed, self.epoch, index])
        number = int(self.sentences[index])
        source = self.tokenizer.encode(self.pairs.sentence(number)[0])
        own = slice(*self.starts[index : index + 2])
        sources, targets = (self.pairs.pairs[rows[own]].tolist() for rows in (self.sources, self.targets))
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
                sides.append(self._side(target, [two for _, two in whole], other, 1, rng))
        return [self._side(source, source_spans, number, 0, rng), *sides] if sides else None

    def _side(
        self, subwords: Subwords, spans: list[Span], number: int, side: int, rng: np.random.Generator
    ) -> SentenceWithSpans:
        """Find the subwords of phrases, and draw as many other spans of words, unless the sentence has fewer.

        Those are no phrases of it, drawn or not.
        """
        strings = [subwords.text[start:end] for start, end in spans]
        words, tries = word_spans(subwords.text), TRIES * len(spans)
        first = rng.integers(0, len(words), tries)
        last = first + rng.integers(0, self.most_words, tries)
        drawn = [(words[a][0], words[b][1]) for a, b in zip(first.tolist(), last.tolist()) if b < len(words)]
        phrases = self.pairs.pairs_of(number)[:, 1 + 2 * side : 3 + 2 * side].tolist()
        bounds, others, taken = (
            [found for span in of_spans if (found := subword_bounds(subwords, *span)) is not None]
            for of_spans in (spans, drawn, phrases)
        )
        barred = set(taken)
        others = [found for found in dict.fromkeys(others) if found not in barred]
        return SentenceWithSpans(subwords, bounds, strings, others[: len(spans)])

    def collater(self, samples: list[ContrastExample | None]) -> dict[str, Any]:
        """Make a batch. Phrases of the source and of the target side are in the same order."""
        examples = [sample for sample in samples if sample is not None]
        if not examples:
            return {}
        source = self._collate([example[0] for example in examples])
        target = self._collate([side for example in examples for side in example[1:]])
        return {
            "nsentences": len(samples),
            "ntokens": int(sum(side["tokens"].ne(self.tokenizer.pad).sum() for side in (source, target))),
            "phrases": len(source["spans"]),
            "source": source,
            "target": target,
        }

    def _collate(self, sides: list[SentenceWithSpans]) -> dict[str, Tensor]:
        """Number spans and others, int64 [K, 3] (sentence, first, last subword), strings and contexts."""
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
