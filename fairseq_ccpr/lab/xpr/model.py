"""XPR's phrase encoder as it is trained: its options, and its momentum encoder."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, cast

import torch
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import SpanEncoderConfig
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.xpr_encoder import NAME, XprEncoder, project, span_means


class MomentumEncoder(nn.Module):
    """theta_m <- mu theta_m + (1 - mu) theta, with `queue` vectors of earlier batches for each side.

    It has no gradients and no dropout, and stays in fp32 when the model trains in fp16, where steps of 1 - mu
    would be lost.
    """

    vectors: Tensor  # of the queue, [2, size, o]
    strings: Tensor  # int64 [size, 2], of both phrases of each pair
    enqueued: Tensor  # how many pairs there were so far

    def __init__(self, encoder: nn.ModuleDict, momentum: float, queue: int, dimension: int) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum = momentum
        self.register_buffer("vectors", torch.zeros(2, queue, dimension))
        self.register_buffer("strings", torch.zeros(queue, 2, dtype=torch.int64))
        self.register_buffer("enqueued", torch.zeros((), dtype=torch.int64))
        self.train()

    def train(self, mode: bool = True) -> "MomentumEncoder":
        super().train(mode)
        self.encoder.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "MomentumEncoder":
        """Move it like any module, but keep its dtypes: `half` rounds the values once, and training continues in fp32."""
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), *args, **kwargs)

    @torch.no_grad()
    def follow(self, encoder: nn.Module) -> None:
        for slow, fast in zip(self.encoder.parameters(), encoder.parameters()):
            slow.lerp_(fast.to(slow.dtype), 1 - self.momentum)

    def queued(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the vectors [F, o] of a side, and the strings of both phrases of each pair, int64 [F, 2]."""
        filled = min(int(self.enqueued), self.vectors.size(1))
        return self.vectors[side, :filled], self.strings[:filled]

    @torch.no_grad()
    def enqueue(self, vectors: tuple[Tensor, Tensor], strings: Tensor) -> None:
        """Replace the oldest pairs in the queue with new ones: vectors [K, o] of either side, strings int64 [K, 2]."""
        size = self.vectors.size(1)
        first = max(0, len(strings) - size)  # earlier pairs would be overwritten at once
        rows = (int(self.enqueued) + torch.arange(first, len(strings), device=strings.device)) % max(size, 1)
        for queue, new in zip(self.vectors, vectors):
            queue[rows] = new[first:].to(queue.dtype)
        self.strings[rows] = strings[first:]
        self.enqueued += len(strings)


@dataclass
class XprEncoderConfig(SpanEncoderConfig):
    """Options of `--arch phrase_encoder_xpr`."""

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
class TrainedXprEncoder(XprEncoder):
    """An encoder that a momentum encoder follows, unless `momentum` is 0."""

    def __init__(
        self, context: ContextEncoder, layer: int, dimension: int, momentum: float = 0.0, queue: int = 0
    ) -> None:
        super().__init__(context, layer, dimension)
        self.momentum: Optional[MomentumEncoder] = None
        if momentum:
            encoder = nn.ModuleDict({"context": context, "head": self.head})
            self.momentum = MomentumEncoder(encoder, momentum, queue, self.dimension)

    @classmethod
    def build_model(cls, cfg: XprEncoderConfig, task: Any) -> "TrainedXprEncoder":
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

    def follow(self) -> None:
        if self.momentum is not None:
            self.momentum.follow(nn.ModuleDict({"context": self.context, "head": self.head}))


def pool(tables: Sequence[dict[str, Tensor]], phrases: int, encode: Any) -> Tensor:
    """Average `span_means` over the example sentences of each phrase, fp32 [K, H]; `as_tables` makes the tables."""
    means = torch.cat([span_means(encode(table["tokens"]), table["spans"]) for table in tables])
    owners = torch.cat([table["phrases"] for table in tables])
    sums = means.new_zeros(phrases, means.size(1)).index_add(0, owners, means)
    return sums / torch.bincount(owners, minlength=phrases).unsqueeze(1)
