"""The training data of XPR: phrase pairs with example sentences that are drawn again each epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fairseq_ccpr.lab.xpr.lexicon_store import Lexicon
from fairseq_ccpr.lab.xpr.type_examples import TypeExample, as_tables, usable_examples
from fairseq_ccpr.storage.equal_strings import digest_number
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.training.length_batches import SizedDataset

Row = tuple[tuple[str, str], list[list[TypeExample]], int]  # both phrases, their examples, the number of the pair


class LexiconDataset(SizedDataset):
    """The phrase pairs of one or several lexicons.

    Args:
        lexicons: of any language pairs.
        tokenizer: the encoder's.
        sentences: example sentences of a phrase in a batch, at most; 0: the phrase alone.
        max_subwords: sentences are cut to this.
        seed: of order and examples.
    """

    def __init__(
        self, lexicons: list[Lexicon], tokenizer: SubwordTokenizer, sentences: int, max_subwords: int, seed: int
    ) -> None:
        super().__init__()
        self.lexicons, self.tokenizer, self.sentences = lexicons, tokenizer, sentences
        self.max_subwords, self.seed, self.epoch = max_subwords, seed, 1
        self.starts = np.cumsum([0, *(len(lexicon.pairs) for lexicon in lexicons)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Row:
        """Return a phrase pair with its examples of this epoch."""
        rng = np.random.default_rng([self.seed, self.epoch, index])
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        lexicon = self.lexicons[number]
        phrases = lexicon.pairs[index - self.starts[number]].tolist()
        strings, examples = [], []
        for types, phrase in zip(lexicon.sides, phrases):
            order = rng.permutation(types.counts[phrase]).tolist() if self.sentences else []
            places = (types.example(phrase, place) for place in order)
            strings.append(types.phrases[phrase])
            examples.append(
                usable_examples(self.tokenizer, phrase, strings[-1], places, self.sentences, self.max_subwords)
            )
        return (strings[0], strings[1]), examples, int(index)

    def collater(self, samples: list[Row]) -> dict[str, Any]:
        """Make a batch of K pairs: tables of `as_tables`, phrases numbered sources first; strings and pairs as numbers.

        Returns:
            tables; strings int64 [2, K], equal where strings are; pairs int64 [K], numbers in this dataset.
        """
        if not samples:
            return {}
        examples = [
            TypeExample(number + side * len(samples), one.place, one.subwords, one.first, one.last)
            for side in (0, 1)
            for number, (_, examples_of_sides, _) in enumerate(samples)
            for one in examples_of_sides[side]
        ]
        return {
            "nsentences": len(samples),
            "ntokens": sum(len(example.subwords.ids) for example in examples),
            "tables": as_tables(examples, self.tokenizer.pad),
            "strings": torch.tensor([[digest_number(strings[side]) for strings, _, _ in samples] for side in (0, 1)]),
            "pairs": torch.tensor([number for _, _, number in samples]),
        }

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch, which determines order and examples."""
        super().set_epoch(epoch)
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False: fairseq's workers would keep the examples of the first epoch."""
        return False

    def ordered_indices(self) -> np.ndarray:
        """Shuffle, so that each epoch batches different pairs together."""
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self))
