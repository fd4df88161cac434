"""Source text for a query head: each sentence in the subwords of the phrase encoder and of the translation model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.models.phrase_finder import candidate_spans
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, collate
from fairseq_ccpr.training.sized_dataset import SizedDataset


class Sides(NamedTuple):
    """A sentence in the subwords of teacher and head."""

    teacher: Subwords
    head: Subwords


class QueryTexts(SizedDataset):
    """Sentences whose spans of words the phrase encoder judges, and the head should judge in the same way.

    Args:
        texts: the sentences; those without words or with too many subwords are left out.
        teacher, head: tokenizers.
        limits: most subwords that each takes.
        most_words: of a span.
    """

    def __init__(
        self,
        texts: list[str],
        teacher: SubwordTokenizer,
        head: SubwordTokenizer,
        limits: tuple[int, int],
        most_words: int,
    ) -> None:
        super().__init__()
        self.tokenizers, self.most_words = (teacher, head), most_words
        counts = [
            [tokenizer.encode(text).count for tokenizer in self.tokenizers]
            for text in progress_bar("subwords", "sentence", texts)
        ]
        lengths = np.array(counts, dtype=np.int64).reshape(-1, 2)
        kept = np.flatnonzero(((lengths > 0) & (lengths <= np.array(limits))).all(axis=1))
        self.texts, self._sizes = [texts[number] for number in kept.tolist()], lengths[kept].max(axis=1)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sizes(self) -> np.ndarray:
        """Subwords of each sentence on its longer side, int64 [n]."""
        return self._sizes

    def size(self, index: int) -> int:
        """Return the subwords of one sentence on its longer side."""
        return int(self._sizes[index])

    def ordered_indices(self) -> np.ndarray:
        """Order by length, which saves padding."""
        return self._sizes.argsort(kind="stable")

    def __getitem__(self, index: int) -> Sides:
        return Sides(*(tokenizer.encode(self.texts[index]) for tokenizer in self.tokenizers))

    def collater(self, samples: list[Sides]) -> dict[str, Any]:
        """Make a batch: tokens of both sides, and the C spans of words that both see whole, int64 [C, 3] each."""
        if not samples:
            return {}
        spans = [_common_spans(sides, self.most_words) for sides in samples]
        return {
            "nsentences": len(samples),
            "ntokens": sum(sides.head.count for sides in samples),
            "teacher_tokens": collate([sides.teacher for sides in samples], self.tokenizers[0].pad),
            "tokens": collate([sides.head for sides in samples], self.tokenizers[1].pad),
            "teacher_spans": _numbered([one for one, _ in spans]),
            "spans": _numbered([one for _, one in spans]),
        }


def _common_spans(sides: Sides, most_words: int) -> tuple[np.ndarray, np.ndarray]:
    """List the first and last subwords, int64 [c, 2] on each side, of spans whose borders no subword of either crosses."""
    teacher, head = (candidate_spans(side, 1, most_words) for side in sides)
    of_teacher, of_head = (spans[:, 0] * (len(sides.head.text) + 1) + spans[:, 1] for spans in (teacher, head))
    _, of_teacher, of_head = np.intersect1d(of_teacher, of_head, assume_unique=True, return_indices=True)
    return teacher[of_teacher, 2:], head[of_head, 2:]


def _numbered(each: list[np.ndarray]) -> Tensor:
    """Return the spans of each sentence with its number in the batch, int64 [C, 3]."""
    numbers = np.repeat(np.arange(len(each)), list(map(len, each)))
    return torch.from_numpy(np.column_stack([numbers, np.concatenate(each)]))
