"""A student as it is trained: its option, and how it begins from its teacher."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from fairseq.modules import FairseqDropout
from torch import Tensor

from fairseq_ccpr.models.phrase_encoder import STUDENT, PhraseEncoder
from fairseq_ccpr.models.pretrained.context_encoder import keep_layers


@dataclass
class PhraseStudentConfig(FairseqDataclass):
    """Options of `--arch phrase_student`."""

    layers: int = field(
        default=3, metadata={"help": "layers that the student keeps of the phrase encoder's, evenly spaced"}
    )


@register_model(STUDENT, dataclass=PhraseStudentConfig)
class PhraseStudent(PhraseEncoder):
    """A phrase encoder of fewer layers, trained to the vectors of another, its task's `teacher`.

    Embeddings and biases stay the teacher's, and there is no dropout: what is learned is a function.
    """

    @classmethod
    def build_model(cls, cfg: PhraseStudentConfig, task: Any) -> "PhraseStudent":
        teacher = task.teacher
        last, gaps = teacher.context.layers - 1, max(cfg.layers - 1, 1)
        kept = [round(number * last / gaps) for number in range(cfg.layers)]
        student = cls(keep_layers(teacher.context, kept), teacher.dimension, teacher.similarity, 1.0)
        student.align.load_state_dict(teacher.align.state_dict())
        student.segment.load_state_dict(teacher.segment.state_dict())
        transformer = student.context.transformer
        for module in transformer.modules():
            if isinstance(module, FairseqDropout):
                module.p = 0.0
        biases = student.align.bias, student.segment.bias, student.scale_offset
        for frozen in (transformer.embed_tokens, transformer.embed_positions, *biases):
            frozen.requires_grad_(False)
        return student

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return span_ends(self, tokens)


def span_ends(encoder: PhraseEncoder, tokens: Tensor) -> Tensor:
    """Compute what vectors and log-odds of spans sum over first and last subwords, [S, L, 2 (o + 1)]."""
    weights = torch.cat([encoder.align.weight, encoder.segment.weight])
    return encoder.states(tokens) @ torch.cat(weights.chunk(2, dim=1)).T
