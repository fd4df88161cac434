"""A query head's criterion, and its data: sentences in the subwords of encoder and translation model."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor
from torch.nn import functional

from fairseq_ccpr.models.phrase_finder import candidate_spans
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, collate
from fairseq_ccpr.timing import progress_bar
from fairseq_ccpr.training.length_batches import SizedDataset

LEAST_PROBABILITY = 0.3  # of spans whose vectors are learned: others are hardly ever queried
MOST_COMPARED = 512  # phrases of a batch whose similarities to one another are learned


class Sides(NamedTuple):
    """A sentence in the subwords of teacher and head."""

    teacher: Subwords
    head: Subwords


class QueryTexts(SizedDataset):
    """Sentences whose spans of words the phrase encoder judges, and the head should judge in the same way.

    Args:
        texts: the sentences; those without words or with too many subwords are left out.
        limits: most subwords that teacher and head take.
        most_words: of a span.
    """

    def __init__(
        self, texts: list[str], teacher: SubwordTokenizer, head: SubwordTokenizer, limits: tuple[int, int],
        most_words: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokenizers, self.most_words = (teacher, head), most_words
        counts = [
            [tokenizer.encode(text).count for tokenizer in self.tokenizers]
            for text in progress_bar("subwords", "sentence", texts)
        ]
        lengths = np.array(counts, dtype=np.int64).reshape(-1, 2)
        kept = np.flatnonzero(((lengths > 0) & (lengths <= np.array(limits))).all(axis=1))
        self.texts, self.sizes = [texts[number] for number in kept.tolist()], lengths[kept].max(axis=1)

    def __len__(self) -> int:
        return len(self.texts)

    def ordered_indices(self) -> np.ndarray:
        """Order by length, which saves padding."""
        return self.sizes.argsort(kind="stable")

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
    numbers = np.repeat(np.arange(len(each)), list(map(len, each)))
    return torch.from_numpy(np.column_stack([numbers, np.concatenate(each)]))


@dataclass
class QueryDistillationConfig(FairseqDataclass):
    """Options of `--criterion query_distillation`."""

    cosine_weight: float = field(default=4.0, metadata={"help": "weight of 1 - cosine to the phrase encoder's vector"})
    query_temperature: float = field(
        default=0.05,
        metadata={
            "help": "temperature of the softmax over the vectors of other phrases, which the head imitates as well"
        },
    )


@register_criterion("query_distillation", dataclass=QueryDistillationConfig)
class QueryDistillation(FairseqCriterion):
    """L = w (1 - cos(q, h)) + KL(p_h || p_q) + BCE(P(phrase)), means over phrases and spans.

    q is the head's vector of a phrase and h the phrase encoder's; p_h and p_q are softmaxes of h and q against the vectors h
    of the batch's phrases: the results of a query depend on the differences, not on the cosine alone.
    """

    def __init__(self, cfg: QueryDistillationConfig, task: Any) -> None:
        super().__init__(task)
        self.cfg, self.task = cfg, task

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss summed over sentences, their number, and the values to log."""
        probabilities, taught = self.task.teach(sample, LEAST_PROBABILITY)
        are_phrases = probabilities > LEAST_PROBABILITY
        vectors, logits = model(sample["tokens"], sample["spans"][are_phrases], sample["spans"])
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = vectors.float()
            cosines = (vectors * taught).sum(dim=1)
            order = torch.randperm if model.training else torch.arange  # validation compares the same phrases each time
            some = order(len(taught), device=taught.device)[:MOST_COMPARED]
            right, found = (one[some] @ taught[some].T / self.cfg.query_temperature for one in (taught, vectors))
            divergence = functional.kl_div(found.log_softmax(1), right.log_softmax(1), log_target=True, reduction="sum")
            apart = divergence / max(len(some), 1)
            segmentation = functional.binary_cross_entropy_with_logits(logits.float(), probabilities)
            cosine = cosines.sum() / max(len(cosines), 1)
            loss = self.cfg.cosine_weight * (1 - cosine) + apart + segmentation
        hits = found.argmax(dim=1).eq(torch.arange(len(some), device=some.device)).sum() if len(some) else 0
        count = sample["nsentences"]
        logged = {
            "loss": loss.detach() * count, "cosine": cosines.detach().sum(), "phrases": len(cosines),
            "segmentation": segmentation.detach() * count, "right": hits, "compared": len(some),
            "ntokens": sample["ntokens"], "nsentences": count, "sample_size": count,
        }  # fmt: skip
        return loss * count, count, logged

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log means; `accuracy` is in per cent."""
        total = {name: sum(float(log.get(name, 0)) for log in logging_outputs) for name in logging_outputs[0]}
        for name in ("loss", "segmentation"):
            metrics.log_scalar(name, total[name] / total["sample_size"], total["sample_size"], round=3)
        metrics.log_scalar("cosine", total["cosine"] / max(total["phrases"], 1), total["phrases"], round=3)
        accuracy = 100 * total["right"] / max(total["compared"], 1)
        metrics.log_scalar("accuracy", accuracy, total["compared"], round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True
