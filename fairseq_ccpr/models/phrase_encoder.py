"""CCPR's phrase encoder: a context encoder shared by both languages, an alignment head and a segmentation head."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.span_encoder import DEFAULT_ARCHITECTURE, ENCODER_CLASSES, SpanEncoder
from fairseq_ccpr.storage.fingerprint import of_parameters, of_strings

SIMILARITIES = "cosine", "dot"
MOST_SCALE = 100.0  # maximum of the learned 1 / temperature: beyond it only the nearest candidate counts
SCALE_SPEED = 20.0  # learning rates for a pretrained Transformer would hardly move the logarithm of the temperature


@dataclass
class PhraseEncoderConfig(FairseqDataclass):
    """Options of `--arch phrase_encoder`."""

    encoder: str = field(
        default="", metadata={"help": "the pretrained context encoder, made by fairseq-ccpr convert; must be given"}
    )
    phrase_dim: int = field(default=128, metadata={"help": "o, width of a phrase vector"})
    similarity: ChoiceEnum(SIMILARITIES) = field(  # type: ignore[valid-type]
        default="cosine",
        metadata={"help": "cosine: vectors of length 1 and a learned temperature; dot: plain inner products"},
    )
    phrase_temperature: float = field(default=0.05, metadata={"help": "where the learned temperature starts"})
    dropout: float = field(default=0.2, metadata={"help": "dropout inside the context encoder"})


@register_model(DEFAULT_ARCHITECTURE, dataclass=PhraseEncoderConfig)
class PhraseEncoder(SpanEncoder):
    """h = MLP_align([H_s ; H_e]) and P(phrase) = sigmoid(MLP_seg([H_i ; H_j])): equations 1 and 5 of the CCPR paper.

    Args:
        context: the Transformer, of width H.
        dimension: o.
        similarity: one of SIMILARITIES.
        temperature: at the start.
    """

    context: ContextEncoder
    segments = True

    def __init__(self, context: ContextEncoder, dimension: int, similarity: str, temperature: float) -> None:
        super().__init__()
        self.context, self.similarity = context, similarity
        self.align, self.dimension = nn.Linear(2 * context.hidden, dimension), dimension
        self.segment = nn.Linear(2 * context.hidden, 1)
        self.log_scale = -math.log(temperature)  # at the start, where weight decay draws it back to
        self.scale_offset = nn.Parameter(torch.zeros(()), requires_grad=similarity == "cosine")

    @classmethod
    def build_model(cls, cfg: PhraseEncoderConfig, task: Any) -> "PhraseEncoder":
        """Build an untrained model from its options and the pretrained encoder."""
        if cfg.phrase_dim < 1:
            raise ConfigurationError(f"--phrase-dim is {cfg.phrase_dim}: give at least 1")
        if not cfg.phrase_temperature > 0:
            raise ConfigurationError(f"--phrase-temperature is {cfg.phrase_temperature}: give a number above 0")
        context = ContextEncoder.load(Path(cfg.encoder), dropout=cfg.dropout)
        return cls(context, cfg.phrase_dim, str(cfg.similarity), cfg.phrase_temperature)

    @property
    def scale(self) -> "Tensor | float":
        """The factor for inner products of phrase vectors in training: 1 / temperature."""
        if self.similarity == "dot":
            return 1.0
        return (self.log_scale + SCALE_SPEED * self.scale_offset).exp().clamp_max(MOST_SCALE)

    def forward(self, *sides: dict[str, Tensor]) -> "tuple[list[tuple[Tensor, Tensor]], Tensor | float]":
        """Compute everything that training needs in one call, as torch's distributed wrappers require.

        Args:
            sides: batches of sentences: tokens int64 [S, L], spans of phrases and of others int64 [., 3].

        Returns:
            For each side the vectors of the phrases [K, o] and the log-odds of the phrases, then of the others; the scale.
        """
        outputs = []
        for side in sides:
            states = self.context(side["tokens"])
            logits = self.phrase_logits(states, torch.cat([side["spans"], side["others"]]))
            outputs.append((self.vectors(states, side["spans"]), logits))
        return outputs, self.scale

    def states(self, tokens: Tensor) -> Tensor:
        """Compute the states of the last layer."""
        return self.context(tokens)

    def vectors(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute vectors of phrases, of length 1 where similarity is cosine."""
        vectors = project_ends(self.align, states, spans)
        return nn.functional.normalize(vectors, dim=1) if self.similarity == "cosine" else vectors

    def phrase_logits(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute the log-odds that spans are phrases, fp32 [K]; arguments as in `vectors`."""
        return project_ends(self.segment, states, spans).squeeze(1)

    @classmethod
    def restore(
        cls, context: ContextEncoder, weights: "dict[str, Tensor]", settings: "dict[str, Any]"
    ) -> "PhraseEncoder":
        """Rebuild the encoder with the heads of a checkpoint."""
        model = cls(context, len(weights["align.weight"]), str(settings["similarity"]), 1.0)
        model.load_state_dict(weights)
        return model

    def fingerprint(self) -> str:
        """Digest the context encoder, the heads and the similarity."""
        heads = [(name, tensor) for name, tensor in self.named_parameters() if name.startswith(("align.", "segment."))]
        return of_strings([self.context.fingerprint(), of_parameters(heads), self.similarity])


ENCODER_CLASSES[DEFAULT_ARCHITECTURE] = PhraseEncoder


def project_ends(linear: nn.Linear, states: Tensor, spans: Tensor) -> Tensor:
    """Compute linear([H_s ; H_e]) with one product per subword: there are many more spans than subwords.

    Args:
        linear: from 2H to m.
        states: [S, L, H].
        spans: int64 [K, 3].

    Returns:
        fp32 [K, m].
    """
    sentence, first, last = spans.unbind(dim=1)
    starts, lasts = (states @ half.T for half in linear.weight.chunk(2, dim=1))  # [S, L, m] each
    return starts[sentence, first].float() + lasts[sentence, last].float() + linear.bias
