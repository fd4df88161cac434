"""XPR's phrase encoder: one vector per phrase, pooled from its subwords in its example sentences."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, cast

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import ENCODER_CLASSES, MomentumEncoder, SpanEncoder
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.token_adapter import init_as_identity
from fairseq_ccpr.storage.fingerprint import of_parameters, of_strings

NAME = "phrase_encoder_xpr"


@dataclass
class XprEncoderConfig(FairseqDataclass):
    """Options of `--arch phrase_encoder_xpr`."""

    encoder: str = field(
        default="",
        metadata={"help": "the pretrained context encoder, made by fairseq-ccpr convert; must be given"},
    )
    layer: Optional[int] = field(
        default=None, metadata={"help": "the layer whose states are pooled (the last)"}
    )
    phrase_dim: Optional[int] = field(
        default=None,
        metadata={
            "help": "o, width of a phrase vector (that of the states); 0: no projection head (an ablation)"
        },
    )
    encoder_momentum: float = field(
        default=0.999,
        metadata={
            "help": "mu of the momentum encoder; 0: no momentum encoder, gradients on both sides (an ablation)"
        },
    )
    queue: int = field(
        default=0,
        metadata={
            "help": "pairs of earlier batches that are candidates too, such as 1024 (MoCo, an ablation)"
        },
    )
    dropout: float = field(default=0.1, metadata={"help": "dropout inside the context encoder"})


@register_model(NAME, dataclass=XprEncoderConfig)
class XprEncoder(SpanEncoder):
    """f(p, X) = Norm(W2 ReLU(W1 x + b1) + b2), x the mean over sentences of the mean over the phrase's subwords.

    Equations 1 and 2 of the XPR paper, pooled before the head. Without a `dimension` there is no head,
    without a `momentum` no momentum encoder.
    """

    context: ContextEncoder
    segments = False

    def __init__(
        self, context: ContextEncoder, layer: int, dimension: int, momentum: float = 0.0, queue: int = 0
    ) -> None:
        super().__init__()
        self.context, self.layer = context, layer
        self.dimension = dimension or context.hidden
        hidden = context.hidden
        self.head: nn.Module = nn.Identity()
        if dimension:
            first, last = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, dimension)
            init_as_identity(first, last)
            self.head = nn.Sequential(first, nn.ReLU(), last)
        self.momentum: Optional[MomentumEncoder] = None
        if momentum:
            encoder = nn.ModuleDict({"context": context, "head": self.head})
            self.momentum = MomentumEncoder(encoder, momentum, queue, self.dimension)

    @classmethod
    def build_model(cls, cfg: XprEncoderConfig, task: Any) -> "XprEncoder":
        """Build an untrained model from its options and the pretrained encoder."""
        if cfg.phrase_dim is not None and cfg.phrase_dim < 0:
            raise ConfigurationError(
                f"--phrase-dim is {cfg.phrase_dim}: give at least 1, or 0 for no projection head"
            )
        if not 0 <= cfg.encoder_momentum < 1:
            raise ConfigurationError(f"--encoder-momentum is {cfg.encoder_momentum}: give a number in [0, 1)")
        if cfg.queue < 0 or (cfg.queue and not cfg.encoder_momentum):
            raise ConfigurationError(
                f"--queue is {cfg.queue}: give at least 0, and more only with a momentum encoder"
            )
        context = ContextEncoder.load(Path(cfg.encoder), dropout=cfg.dropout)
        layer = context.layers if cfg.layer is None else cfg.layer
        if not 0 <= layer <= context.layers:
            raise ConfigurationError(
                f"--layer is {layer}, but the encoder {cfg.encoder} has {context.layers} layers: give 0 to that"
            )
        dimension = context.hidden if cfg.phrase_dim is None else cfg.phrase_dim
        return cls(context, layer, dimension, cfg.encoder_momentum, cfg.queue)

    @classmethod
    def restore(
        cls, context: ContextEncoder, weights: dict[str, Tensor], settings: dict[str, Any]
    ) -> "XprEncoder":
        """Rebuild the encoder with the head of a checkpoint, without its momentum encoder."""
        head = weights.get("head.2.weight")
        layer = context.layers if settings["layer"] is None else int(settings["layer"])
        model = cls(context, layer, 0 if head is None else len(head))
        model.load_state_dict(weights)
        return model

    def forward(self, tables: Sequence[dict[str, Tensor]], phrases: int) -> tuple[Tensor, Tensor]:
        """Compute vectors of phrases, fp32 [K, o], by the encoder and, without gradients, by the momentum encoder."""
        vectors = self.project(pool(tables, phrases, self.states))
        if self.momentum is None:
            return vectors, vectors
        slow: Any = self.momentum.encoder
        dtype = next(self.parameters()).dtype
        device = tables[0]["tokens"].device.type
        half = dtype if dtype != torch.float32 else torch.get_autocast_dtype(device)
        mixed = dtype != torch.float32 or torch.is_autocast_enabled(device)
        with torch.no_grad(), torch.autocast(device, half, enabled=mixed):
            context = cast(ContextEncoder, slow["context"])
            pooled = pool(tables, phrases, lambda tokens: context.states(tokens, self.layer))
            return vectors, project(slow["head"], pooled)

    def states(self, tokens: Tensor) -> Tensor:
        """Compute the states of the layer that is pooled."""
        return self.context.states(tokens, self.layer)

    def vectors(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute vectors of phrases, of length 1."""
        return self.project(span_means(states, spans))

    def project(self, pooled: Tensor) -> Tensor:
        """Compute vectors of length 1 from means [K, H], fp32 [K, o]."""
        return project(self.head, pooled)

    def follow(self) -> None:
        """Update the momentum encoder, if there is one."""
        if self.momentum is not None:
            self.momentum.follow(nn.ModuleDict({"context": self.context, "head": self.head}))

    def fingerprint(self) -> str:
        """Digest the context encoder, the head and the layer."""
        heads = [(name, tensor) for name, tensor in self.named_parameters() if name.startswith("head.")]
        return of_strings([self.context.fingerprint(), of_parameters(heads), f"{NAME} layer={self.layer}"])


ENCODER_CLASSES[NAME] = XprEncoder


def project(head: nn.Module, pooled: Tensor) -> Tensor:
    """Compute Norm(head(x)), [K, H] -> fp32 [K, o]."""
    weights = next(head.parameters(), pooled)
    return nn.functional.normalize(head(pooled.to(weights.dtype)).float(), dim=1)


def span_means(states: Tensor, spans: Tensor) -> Tensor:
    """Average the states [S, L, H] of the subwords of each span, fp32 (or fp64) [K, H]: equation 2 of the XPR paper."""
    sentence, first, last = spans.unbind(dim=1)
    dtype = torch.promote_types(states.dtype, torch.float32)
    sums = nn.functional.pad(states.to(dtype).cumsum(dim=1), (0, 0, 1, 0))  # [S, L + 1, H], of all before
    return (sums[sentence, last + 1] - sums[sentence, first]) / (last + 1 - first).unsqueeze(1)


def pool(tables: Sequence[dict[str, Tensor]], phrases: int, encode: Any) -> Tensor:
    """Average `span_means` over the example sentences of each phrase, fp32 [K, H]; `as_tables` makes the tables."""
    means = torch.cat([span_means(encode(table["tokens"]), table["spans"]) for table in tables])
    owners = torch.cat([table["phrases"] for table in tables])
    sums = means.new_zeros(phrases, means.size(1)).index_add(0, owners, means)
    return sums / torch.bincount(owners, minlength=phrases).unsqueeze(1)
