"""`--task phrase_distillation`: a phrase encoder of fewer layers, trained to the vectors of another."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.criterions import register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II
from torch import Tensor
from torch.nn import functional

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.student.model import span_ends
from fairseq_ccpr.models.phrase_encoder import COSINE, PhraseEncoder
from fairseq_ccpr.paths import split_paths
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, collate
from fairseq_ccpr.timing import progress_bar
from fairseq_ccpr.training.length_batches import SizedDataset, by_length
from fairseq_ccpr.training.tasks import EncoderTask, SummedCriterion, refuse_below_1

logger = logging.getLogger(__name__)
SEGMENTATION_WEIGHT = 0.125  # two values in 258 would hardly count, and are learned before the vectors are
LEAST_VARIANCE = 1e-6  # of a value that is always the same
TEACHER_BATCH = 50  # sentences at a time whose values are measured


class Sentences(SizedDataset):
    """Sentences of `sizes` subwords."""

    def __init__(self, texts: list[str], sizes: np.ndarray, tokenizer: SubwordTokenizer, seed: int) -> None:
        super().__init__()
        self.texts, self.sizes, self.tokenizer, self.seed = texts, sizes, tokenizer, seed

    def ordered_indices(self) -> np.ndarray:
        return by_length(self.sizes, self.seed)

    def __getitem__(self, index: int) -> Subwords:
        return self.tokenizer.encode(self.texts[index])

    def collater(self, samples: list[Subwords]) -> dict[str, Any]:
        """Make a batch: tokens int64 [S, L]."""
        if not samples:
            return {}
        tokens = collate(samples, self.tokenizer.pad)
        return {"nsentences": len(samples), "ntokens": sum(one.count for one in samples), "tokens": tokens}


@dataclass
class PhraseDistillationConfig(FairseqDataclass):
    """Options of the task."""

    text: str = field(
        default="",
        metadata={
            "help": "text of both languages, of any domains: files of a sentence per line, or of pairs, separated by ':'"
        },
    )
    phrase_encoder: str = field(
        default="", metadata={"help": "checkpoint of the phrase encoder that teaches"}
    )
    valid_sentences: int = field(default=500, metadata={"help": "sentences held out, the first of --text"})
    seed: int = II("common.seed")
    save_dir: str = II("checkpoint.save_dir")


@register_task("phrase_distillation", dataclass=PhraseDistillationConfig)
class PhraseDistillationTask(EncoderTask):
    """Distillation of a phrase encoder, the frozen `teacher`, into a `phrase_student`."""

    cfg: PhraseDistillationConfig

    def __init__(self, cfg: PhraseDistillationConfig) -> None:
        super().__init__(cfg)
        for name in ("text", "phrase_encoder"):
            if not getattr(cfg, name):
                raise ConfigurationError(f"--{name.replace('_', '-')} is missing")
        refuse_below_1(cfg, "valid_sentences")
        if Path(cfg.save_dir).resolve() == Path(cfg.phrase_encoder).resolve().parent:
            raise ConfigurationError(
                f"--save-dir {cfg.save_dir} is the folder of --phrase-encoder: give another"
            )
        self.teacher = PhraseEncoder.load(Path(cfg.phrase_encoder)).requires_grad_(False)
        if self.teacher.similarity != COSINE:
            raise ConfigurationError(
                f"--phrase-encoder {cfg.phrase_encoder} compares phrases by {self.teacher.similarity}: give "
                "one that compares them by cosine"
            )
        self._taught_by = self.teacher.fingerprint()

    @cached_property
    def _sentences(self) -> Sentences:
        """All sentences that have subwords, and no more than the encoder reads."""
        files = [Path(path) for path in split_paths(self.cfg.text)]
        for path in files:
            if not path.is_file():
                raise ConfigurationError(f"--text: there is no file {path}")
        cells = (cell.strip() for path in files for line in read_lines(path) for cell in line.split("\t"))
        texts = list(dict.fromkeys(cells))
        tokenizer, most = self.teacher.context.tokenizer, self.teacher.context.max_positions
        encoded = (tokenizer.encode(text).count for text in progress_bar("subwords", "sentence", texts))
        counts = np.fromiter(encoded, np.int64, len(texts))
        kept = np.flatnonzero((counts > 0) & (counts <= most))
        if too_long := int((counts > most).sum()):
            logger.info("--text: %d sentences of more than %d subwords left out", too_long, most)
        if len(kept) <= self.cfg.valid_sentences:
            raise ConfigurationError(
                f"--text has {len(kept):,} sentences, of which --valid-sentences holds out "
                f"{self.cfg.valid_sentences:,}: give more text"
            )
        return Sentences([texts[row] for row in kept.tolist()], counts[kept], tokenizer, self.cfg.seed)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        last = Path(self.cfg.save_dir) / "checkpoint_last.pt"
        if last.is_file():
            state = checkpoint_utils.load_checkpoint_to_cpu(str(last))
            taught_by, settings = state.get("task_state", {}).get("teacher"), state["cfg"]["model"]
            if (taught_by, settings.get("layers")) != (self._taught_by, cfg.layers):
                raise ConfigurationError(
                    f"--save-dir {self.cfg.save_dir} does not hold a student of {self.cfg.phrase_encoder} "
                    f"with --layers {cfg.layers}: give those that it was trained with, or another --save-dir"
                )
        return self.keep(super().build_model(cfg, from_checkpoint), self.cfg.phrase_encoder)

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split: `valid` is the first sentences, `train` all others."""
        every, held_out = self._sentences, self.cfg.valid_sentences
        rows = slice(held_out, None) if split == "train" else slice(held_out)
        self.datasets[split] = Sentences(every.texts[rows], every.sizes[rows], every.tokenizer, every.seed)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"edges": self.teacher.edges, "teacher": self._taught_by}

    @torch.no_grad()
    def teach(self, tokens: Tensor) -> Tensor:
        return span_ends(self.teacher.to(tokens.device), tokens).float()

    @cached_property
    def variances(self) -> Tensor:
        """The variances of the teacher's values over the subwords that are held out, fp32 [2 (o + 1)].

        They are measured once, so that the loss does not depend on how sentences are batched.
        """
        device = next(self.teacher.parameters()).device
        rows = self._sentences.ordered_indices()
        rows = rows[rows < self.cfg.valid_sentences]
        values = []
        for batch in np.array_split(rows, range(TEACHER_BATCH, len(rows), TEACHER_BATCH)):
            tokens = self._sentences.collater([self._sentences[row] for row in batch])["tokens"].to(device)
            values.append(self.teach(tokens)[inside(tokens, self._sentences.tokenizer.pad)])
        return torch.cat(values).var(dim=0).clamp_min(LEAST_VARIANCE)


@register_criterion("phrase_distillation")
class PhraseDistillation(SummedCriterion):
    """L = u_align + u_segment / 8, means over subwords.

    u is the fraction of the teacher's variance that the student leaves unexplained, a mean over the values
    that vectors, or log-odds, of all spans are sums of (`span_ends`). `cosine` is of the vectors of subwords
    as phrases of their own.
    """

    means: ClassVar = dict.fromkeys(("loss", "align", "segmentation", "cosine"), 4)

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        tokens = sample["tokens"]
        real = inside(tokens, self.task.teacher.context.tokenizer.pad)
        # [n, 2 (o + 1)]
        found, wanted = (ends[real].float() for ends in (model(tokens), self.task.teach(tokens)))
        with torch.autocast(found.device.type, enabled=False):
            unexplained = (found - wanted).square() / self.task.variances.to(found.device)
            align, segment = (
                part.mean(dim=1).sum() for part in _parts(unexplained, self.task.teacher.dimension)
            )
            loss = align + SEGMENTATION_WEIGHT * segment
            with torch.no_grad():
                cosines = functional.cosine_similarity(self._alone(found), self._alone(wanted))
        logged = {
            "loss": loss.detach(), "align": align.detach(), "segmentation": segment.detach(), "cosine": cosines.sum(),
            "ntokens": len(found), "nsentences": sample["nsentences"], "sample_size": len(found),
        }  # fmt: skip
        return loss, len(found), logged

    def _alone(self, ends: Tensor) -> Tensor:
        """Compute the vectors of subwords as phrases of their own, [n, o], of any length."""
        starts, lasts = _parts(ends, self.task.teacher.dimension)[0].chunk(2, dim=-1)
        return starts + lasts + self.task.teacher.align.bias


def inside(tokens: Tensor, pad: int) -> Tensor:
    """Mark the subwords of sentences, without the markers, bool [S, L]."""
    real = tokens.ne(pad)
    real[:, 0] = False
    return real & functional.pad(real[:, 1:], (0, 1))


def _parts(ends: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """Divide the columns of `span_ends`: those of vectors [..., 2 o] and of segmentation [..., 2]."""
    start, start_segment, last, last_segment = ends.split([dimension, 1, dimension, 1], dim=-1)
    return torch.cat([start, last], dim=-1), torch.cat([start_segment, last_segment], dim=-1)
