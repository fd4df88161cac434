"""Training data of CCPR: the phrase pairs of an epoch, and the sentences that they appear in."""

from __future__ import annotations

from collections.abc import Sequence
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


class SentenceWithSpans(NamedTuple):
    """A sentence, the phrases drawn from it, and as many other spans."""

    subwords: Subwords
    spans: list[Bounds]
    strings: list[str]
    others: list[Bounds]


# A source sentence, and the target sentence with the translations of its phrases, in their order.
ContrastExample = tuple[SentenceWithSpans, SentenceWithSpans]


class PhraseContrastDataset(LengthBatches):
    """Sentence pairs of one language pair, with phrase pairs drawn again each epoch; `left_out` are too long.

    The same seed and epoch give the same phrases: `drawn`, int64 [D], their rows by sentence pair; those of
    sentence pair i are from `starts[i]` to `starts[i + 1]`.

    Args:
        phrases_per_sentence: at most.
    """

    def __init__(
        self,
        pairs: PhrasePairs,
        tokenizer: SubwordTokenizer,
        phrases_per_sentence: int,
        max_subwords: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.pairs, self.tokenizer, self.seed = pairs, tokenizer, seed
        self.phrases_per_sentence, self.max_subwords = phrases_per_sentence, max_subwords
        self.most_words = int(pairs.manifest.settings["max_phrase_words"])
        self.numbers = np.array(pairs.pairs[:, 0])  # the sentence of each phrase pair
        with_phrases = np.unique(self.numbers)
        shown = progress_bar(f"subwords of {pairs.directory}", "sentence", with_phrases)
        of_sides = [[len(tokenizer.encode(text).ids) for text in pairs.sentence(i)] for i in shown]
        lengths = np.array(of_sides, np.int64).reshape(-1, 2)
        fits = lengths.max(axis=1) <= max_subwords
        self.left_out = int((~fits).sum())
        self.sentences, self.lengths = with_phrases[fits], lengths[fits]  # int64 [n], [n, 2]
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the phrases of an epoch."""
        super().set_epoch(epoch)
        rng = np.random.default_rng([self.seed, epoch])
        first, end = (np.searchsorted(self.numbers, self.sentences, side=side) for side in ("left", "right"))
        sizes = end - first
        owners = np.repeat(np.arange(len(sizes)), sizes)  # of all candidates
        places = np.arange(len(owners)) - (sizes.cumsum() - sizes)[owners]
        rows = first[owners] + places
        shuffled = rows[np.lexsort((rng.random(len(rows)), owners))]  # within each sentence pair
        kept = places < self.phrases_per_sentence
        self.drawn = shuffled[kept]
        self.starts = np.searchsorted(owners[kept], np.arange(len(sizes) + 1))

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> ContrastExample | None:
        rng = np.random.default_rng([self.seed, self.epoch, index])
        number = int(self.sentences[index])
        source, target = map(self.tokenizer.encode, self.pairs.sentence(number))
        rows = self.pairs.pairs[self.drawn[slice(*self.starts[index : index + 2])], 1:].tolist()
        spans = [((a, b), (c, d)) for a, b, c, d in rows]
        whole = [
            (one, two) for one, two in spans if subword_bounds(source, *one) and subword_bounds(target, *two)
        ]
        if not whole:
            return None
        ones, twos = zip(*whole)
        on_target = self._side(target, twos, number, 1, rng)
        return self._side(source, ones, number, 0, rng), on_target

    def _side(
        self, subwords: Subwords, spans: Sequence[Span], number: int, side: int, rng: np.random.Generator
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
        source, target = (self._collate(list(side)) for side in zip(*examples))
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
