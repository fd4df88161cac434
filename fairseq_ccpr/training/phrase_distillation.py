"""`--task phrase_distillation`: training a phrase encoder of fewer layers on text alone, to the vectors of another."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor
from torch.nn import functional

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder, span_ends
from fairseq_ccpr.paths import split_paths
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, collate
from fairseq_ccpr.timing import progress_bar
from fairseq_ccpr.training.cpu_autocast import CpuAutocast
from fairseq_ccpr.training.length_batches import SizedDataset
from fairseq_ccpr.training.phrase_task import save_tokenizer

SEGMENTATION_WEIGHT = 0.125


class Sentences(SizedDataset):
    """Sentences in subwords; those without any or with more than `most` are left out."""

    def __init__(self, texts: list[str], tokenizer: SubwordTokenizer, most: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        encoded = progress_bar("subwords", "sentence", texts)
        counts = np.fromiter((tokenizer.encode(text).count for text in encoded), np.int64, len(texts))
        kept = np.flatnonzero((counts > 0) & (counts <= most))
        self.texts, self.sizes = [texts[number] for number in kept.tolist()], counts[kept]

    def __len__(self) -> int:
        return len(self.texts)

    def ordered_indices(self) -> np.ndarray:
        """Order by length, which saves padding."""
        return self.sizes.argsort(kind="stable")

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
    phrase_encoder: str = field(default="", metadata={"help": "checkpoint of the phrase encoder that is imitated"})
    valid_sentences: int = field(default=500, metadata={"help": "the first sentences, which are held out"})
    save_dir: str = II("checkpoint.save_dir")


@register_task("phrase_distillation", dataclass=PhraseDistillationConfig)
class PhraseDistillationTask(CpuAutocast, FairseqTask):
    """Distillation of a phrase encoder, the frozen `teacher`, into a `phrase_student`."""

    cfg: PhraseDistillationConfig
    source_dictionary = target_dictionary = None

    def __init__(self, cfg: PhraseDistillationConfig) -> None:
        super().__init__(cfg)
        for name in ("text", "phrase_encoder"):
            if not getattr(cfg, name):
                raise ConfigurationError(f"--{name.replace('_', '-')} is missing")
        if cfg.valid_sentences < 1:
            raise ConfigurationError(f"--valid-sentences is {cfg.valid_sentences}: give at least 1")
        self.teacher = PhraseEncoder.load(Path(cfg.phrase_encoder)).requires_grad_(False)
        if self.teacher.similarity != "cosine":
            raise ConfigurationError(
                f"--phrase-encoder {cfg.phrase_encoder} compares phrases by {self.teacher.similarity}: give one that "
                "compares them by cosine"
            )

    @cached_property
    def _texts(self) -> list[str]:
        files = [Path(path) for path in split_paths(self.cfg.text)]
        for path in files:
            if not path.is_file():
                raise ConfigurationError(f"--text: there is no file {path}")
        texts = [
            text for path in files for line in read_lines(path) for cell in line.split("\t") if (text := cell.strip())
        ]
        texts = list(dict.fromkeys(texts))
        if len(texts) <= self.cfg.valid_sentences:
            raise ConfigurationError(
                f"--text has {len(texts):,} sentences, of which --valid-sentences holds out "
                f"{self.cfg.valid_sentences:,}: give more text"
            )
        return texts

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build the student, and save to `--save-dir` the tokenizer that its checkpoints need next to them."""
        last = Path(self.cfg.save_dir) / "checkpoint_last.pt"
        state = checkpoint_utils.load_checkpoint_to_cpu(str(last)) if last.is_file() else None
        if state is not None and state.get("task_state", {}).get("teacher") != self.teacher.fingerprint():
            raise ConfigurationError(
                f"--save-dir {self.cfg.save_dir} does not hold a student of {self.cfg.phrase_encoder}: give its own phrase "
                "encoder, or another --save-dir"
            )
        model = super().build_model(cfg, from_checkpoint)
        self._context = vars(model.context.arguments)
        save_tokenizer(self.teacher.context.tokenizer, Path(self.cfg.save_dir), self.cfg.phrase_encoder)
        return model

    def load_dataset(self, split: str, **kwargs: Any) -> None:
        """Load a split: `valid` is the first sentences, `train` all others."""
        held_out = self.cfg.valid_sentences
        texts = self._texts[held_out:] if split == "train" else self._texts[:held_out]
        context = self.teacher.context
        self.datasets[split] = Sentences(texts, context.tokenizer, context.max_positions)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: what loading a phrase encoder needs, and the teacher."""
        return {"context": self._context, "edges": self.teacher.edges, "teacher": self.teacher.fingerprint()}

    @torch.no_grad()
    def teach(self, tokens: Tensor) -> Tensor:
        """Compute the teacher's `span_ends`."""
        return span_ends(self.teacher.to(tokens.device), tokens).float()


@register_criterion("phrase_distillation")
class PhraseDistillation(FairseqCriterion):
    """L = u_align + u_segment / 8: mean squared errors over variances of the teacher's values.

    The values are those whose sums are the vectors and log-odds of all spans, `span_ends`, of the subwords of a batch; each
    variance is that of one value over these subwords.
    """

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.task = task

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss times the number of sentences, that number, and the values to log."""
        teacher, tokens = self.task.teacher, sample["tokens"]
        real = tokens.ne(teacher.context.tokenizer.pad)
        inside = real[:, 1:-1] & real[:, 2:]  # without the markers
        found, wanted = (
            ends[:, 1:-1][inside].float() for ends in (model(tokens), self.task.teach(tokens))
        )  # [n, 2 (o + 1)]
        with torch.autocast(found.device.type, enabled=False):
            errors = (found - wanted).square().mean(dim=0) / wanted.var(dim=0, correction=0).clamp_min(1e-6)
            align, segment = (part.mean() for part in _parts(errors, teacher.dimension))
            loss = align + SEGMENTATION_WEIGHT * segment
            with torch.no_grad():
                cosines = functional.cosine_similarity(self._alone(found), self._alone(wanted))
        count = sample["nsentences"]
        logged = {
            "loss": loss.detach() * count, "align": align.detach() * count, "segmentation": segment.detach() * count,
            "cosine": cosines.mean() * count, "ntokens": sample["ntokens"], "nsentences": count, "sample_size": count,
        }  # fmt: skip
        return loss * count, count, logged

    def _alone(self, ends: Tensor) -> Tensor:
        """Compute the vectors of subwords as phrases of their own, [n, o], of any length."""
        starts, lasts = _parts(ends, self.task.teacher.dimension)[0].chunk(2, dim=-1)
        return starts + lasts + self.task.teacher.align.bias

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log means over sentences; `cosine` is of the vectors of single subwords."""
        count = sum(log["sample_size"] for log in logging_outputs)
        for name in ("loss", "align", "segmentation", "cosine"):
            metrics.log_scalar(name, sum(float(log[name]) for log in logging_outputs) / count, count, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: all logged values are sums."""
        return True


def _parts(ends: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """Divide the columns of `span_ends`: those of vectors [..., 2 o] and of segmentation [..., 2]."""
    start, start_segment, last, last_segment = ends.split([dimension, 1, dimension, 1], dim=-1)
    return torch.cat([start, last], dim=-1), torch.cat([start_segment, last_segment], dim=-1)
