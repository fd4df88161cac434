"""Batches that a phrase encoder trains on: sentence pairs, phrase pairs in them, and spans that are no phrases."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fairseq_ccpr.phrases.length_batches import LengthBatches
from fairseq_ccpr.phrases.pair_store import PhrasePairs
from fairseq_ccpr.phrases.subwords import Subwords, SubwordTokenizer, collate, subword_bounds
from fairseq_ccpr.phrases.words import word_spans

Span = tuple[int, int]  # in characters
TRIES = 6  # random spans for each that is wanted, since some are phrases, and some end beyond the sentence
COLUMNS = slice(1, 3), slice(3, 5)  # of a phrase pair: its span on either side


@dataclass(frozen=True)
class ContrastOptions:
    """How phrases are drawn."""

    phrases_per_sentence: int
    different_context_fraction: float  # 0: CCPR, 1: CPR
    max_subwords: int
    seed: int


@dataclass
class Side:
    """One language's part of an example: a sentence, the phrases drawn from it, as many other spans."""

    subwords: Subwords
    spans: list[tuple[int, int]]  # first and last subword
    strings: list[str]
    others: list[tuple[int, int]]


class PhraseContrastDataset(LengthBatches):
    """Sentence pairs with phrase pairs drawn anew each epoch.

    Args:
        pairs: of one language pair.
        tokenizer: the encoder's.
        options: how phrases are drawn.
    """

    def __init__(self, pairs: PhrasePairs, tokenizer: SubwordTokenizer, options: ContrastOptions) -> None:
        super().__init__()
        self.pairs, self.tokenizer, self.options, self.seed = pairs, tokenizer, options, options.seed
        self.most_words = int(pairs.manifest.settings["max_phrase_words"])
        self.sentences = np.unique(pairs.pairs[:, 0])  # those that have a phrase pair
        bar = tqdm(self.sentences, f"subwords of {pairs.directory}", unit="sentence", unit_scale=True, disable=None)
        self.sizes = np.array([self._length(i) for i in bar], dtype=np.int64)
        fits = self.sizes <= options.max_subwords
        self.left_out = int((~fits).sum())
        self.sentences, self.sizes = self.sentences[fits], self.sizes[fits]
        self.elsewhere = Occurrences(pairs) if options.different_context_fraction > 0 else None

    def _length(self, sentence: int) -> int:
        """Of the longer side, in subwords."""
        return max(len(self.tokenizer.encode(text).ids) for text in self.pairs.sentence(sentence))

    def __len__(self) -> int:
        return len(self.sentences)

    def num_tokens(self, index: int) -> int:
        """See `FairseqDataset.num_tokens`."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """See `FairseqDataset.num_tokens_vec`."""
        return self.sizes[indices]

    def size(self, index: int) -> int:
        """See `FairseqDataset.size`."""
        return int(self.sizes[index])

    def __getitem__(self, index: int) -> list[tuple[Side, Side]]:
        """One sentence pair, and for each phrase whose translation comes from elsewhere, that sentence."""
        rng = np.random.default_rng([self.seed, self.epoch, index])
        sentence = int(self.sentences[index])
        rows = self.pairs.rows_of(sentence)
        drawn = rows.start + rng.permutation(len(rows))[: self.options.phrases_per_sentence]
        examples: dict[int, list[int]] = {}  # sentence of the target side -> phrase pairs
        rows_elsewhere: dict[int, int] = {}
        for row in drawn.tolist():
            other = row
            if self.elsewhere is not None and rng.random() < self.options.different_context_fraction:
                other = self.elsewhere.draw(row, rng)
            rows_elsewhere[row] = other
            examples.setdefault(int(self.pairs.pairs[other, 0]), []).append(row)
        made = []
        for target_sentence, of_source in examples.items():
            rows_of_sides = of_source, [rows_elsewhere[row] for row in of_source]
            sides = self._sides((sentence, target_sentence), rows_of_sides, rng)
            if sides is not None:
                made.append(sides)
        return made

    def _sides(
        self, sentences: tuple[int, int], rows: tuple[list[int], list[int]], rng: np.random.Generator
    ) -> tuple[Side, Side] | None:
        """Both sides in subwords, without the pairs that subwords cut through; None where none is left."""
        texts = [self.pairs.sentence(number)[side] for side, number in enumerate(sentences)]
        encoded = [self.tokenizer.encode(text) for text in texts]
        spans = [_spans(self.pairs.pairs[of_side], side) for side, of_side in enumerate(rows)]
        bounds = [[subword_bounds(e, *span) for span in of_side] for e, of_side in zip(encoded, spans)]
        kept = [i for i, both in enumerate(zip(*bounds)) if None not in both]
        if not kept or max(len(e.ids) for e in encoded) > self.options.max_subwords:
            return None
        sides = []
        for side, (e, of_side, found) in enumerate(zip(encoded, spans, bounds)):
            chosen = [ends for i in kept if (ends := found[i]) is not None]
            strings = [e.text[slice(*of_side[i])] for i in kept]
            phrases = _spans(self.pairs.pairs_of(sentences[side]), side)
            sides.append(Side(e, chosen, strings, self._no_phrases(e, phrases, len(kept), rng)))
        return sides[0], sides[1]

    def _no_phrases(
        self, encoded: Subwords, phrases: list[Span], count: int, rng: np.random.Generator
    ) -> list[tuple[int, int]]:
        """So many random spans of words, no longer than phrases, that are none of the sentence's phrases, drawn or not;
        fewer where it has few."""
        words = word_spans(encoded.text)
        first = rng.integers(0, len(words), TRIES * count)
        last = first + rng.integers(0, self.most_words, TRIES * count)
        spans = [(words[a][0], words[b][1]) for a, b in zip(first.tolist(), last.tolist()) if b < len(words)]
        found = dict.fromkeys(subword_bounds(encoded, *span) for span in spans)
        taken = {subword_bounds(encoded, *span) for span in phrases}
        return [bounds for bounds in found if bounds is not None and bounds not in taken][:count]

    def collater(self, samples: list[list[tuple[Side, Side]]]) -> dict[str, Any]:
        """See `FairseqDataset.collater`."""
        pairs = [pair for sample in samples for pair in sample]
        if not pairs:
            return {}
        sides = [self._collate([pair[i] for pair in pairs]) for i in range(2)]
        return {
            "nsentences": len(samples),
            "ntokens": int(sum(side["tokens"].ne(self.tokenizer.pad).sum() for side in sides)),
            "phrases": len(sides[0]["spans"]),
            "source": sides[0],
            "target": sides[1],
        }

    def _collate(self, sides: list[Side]) -> dict[str, Tensor]:
        """tokens [S, L], spans and others int64 [K, 3] (sentence, first, last subword), strings and contexts int64 [K]."""
        return {
            "tokens": collate([side.subwords for side in sides], self.tokenizer.pad),
            "spans": _numbered([side.spans for side in sides]),
            "others": _numbered([side.others for side in sides]),
            "strings": torch.tensor([_digest(string) for side in sides for string in side.strings]),
            "contexts": torch.tensor([_digest(side.subwords.text) for side in sides for _ in side.strings]),
        }


class Occurrences:
    """Where each phrase pair, as a pair of strings, occurs in other contexts.

    Args:
        pairs: P phrase pairs with their sentences.
    """

    def __init__(self, pairs: PhrasePairs) -> None:
        digests = np.empty(pairs.size, dtype=np.int64)
        self.contexts = np.empty(pairs.size, dtype=np.int64)  # of the target side
        numbers = tqdm(range(pairs.sentences), f"occurrences in {pairs.directory}", unit="sentence", disable=None)
        for number in numbers:
            source, target = pairs.sentence(number)
            rows = slice(pairs.rows_of(number).start, pairs.rows_of(number).stop)
            digests[rows] = [_digest(f"{source[a:b]}\t{target[c:d]}") for _, a, b, c, d in pairs.pairs[rows].tolist()]
            self.contexts[rows] = _digest(target)
        self.order = digests.argsort(kind="stable")
        first = np.diff(digests[self.order], prepend=digests[self.order[:1]] - 1) != 0
        self.group = np.empty(pairs.size, dtype=np.int64)
        self.group[self.order] = first.cumsum() - 1
        self.starts = np.append(np.flatnonzero(first), pairs.size)

    def draw(self, row: int, rng: np.random.Generator) -> int:
        """An occurrence of the phrase pair `row` in another target sentence, or itself where there is none."""
        start, end = self.starts[self.group[row] : self.group[row] + 2]
        others = self.order[start:end]
        others = others[self.contexts[others] != self.contexts[row]]
        return int(rng.choice(others)) if len(others) else row


def _spans(rows: np.ndarray, side: int) -> list[Span]:
    """The spans of phrase pairs [p, 5] on the source side, 0, or the target side, 1."""
    return [(start, end) for start, end in rows[:, COLUMNS[side]].tolist()]


def _numbered(spans: list[list[tuple[int, int]]]) -> Tensor:
    """Spans of each sentence with the sentence's number, int64 [K, 3]."""
    rows = [(number, *span) for number, of_sentence in enumerate(spans) for span in of_sentence]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def _digest(text: str) -> int:
    """64 bits that stand for a string, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
