"""A query head: phrases of a source sentence from the states of the translation model's own encoder."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_ccpr.errors import CheckpointError, ConfigurationError, describe
from fairseq_ccpr.models.checkpoint import FAULTS
from fairseq_ccpr.models.key_layer import TranslationStates
from fairseq_ccpr.models.phrase_encoder import SpanEncoder, project_ends
from fairseq_ccpr.storage.fingerprint import of_parameters, of_strings, short
from fairseq_ccpr.text.tokenizers import load_tokenizer

ARCHITECTURE = "phrase_query_head"


@dataclass
class QueryHeadConfig(FairseqDataclass):
    """Options of `--arch phrase_query_head`."""

    head_dim: int = field(default=256, metadata={"help": "H, width of the head's own layer"})
    head_attention_heads: int = field(default=4, metadata={"help": "attention heads of that layer"})
    dropout: float = field(default=0.1, metadata={"help": "dropout in that layer"})


@register_model(ARCHITECTURE, dataclass=QueryHeadConfig)
class QueryHead(SpanEncoder):
    """Vectors and segmentation of a phrase encoder, predicted from the translation model's states.

    One Transformer layer over three layers of the model's encoder; then, as in equations 1 and 5 of the CCPR paper,
    h = MLP([H_s ; H_e]) and P(phrase) = sigmoid(MLP([H_i ; H_j])), here with a hidden layer. `teacher` is the fingerprint of
    the phrase encoder whose keys are queried.
    """

    context: TranslationStates
    segments = True

    def __init__(
        self, context: TranslationStates, width: int, heads: int, dropout: float, dimension: int, teacher: str
    ) -> None:
        super().__init__()
        self.context, self.dimension, self.teacher = context, dimension, teacher
        self.mix = nn.Linear(context.hidden, width)
        self.layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.align, self.align_out = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, dimension)
        self.segment, self.segment_out = nn.Linear(2 * width, width), nn.Linear(width, 1)

    @classmethod
    def build_model(cls, cfg: QueryHeadConfig, task: Any) -> "QueryHead":
        """Build an untrained head for the translation model and the phrase encoder of the task."""
        teacher = task.teacher
        if cfg.head_dim < 1 or cfg.head_attention_heads < 1 or cfg.head_dim % cfg.head_attention_heads:
            raise ConfigurationError(
                f"--head-dim is {cfg.head_dim}, and --head-attention-heads {cfg.head_attention_heads}: give a width that is "
                "a multiple of the heads"
            )
        sizes = cfg.head_dim, cfg.head_attention_heads, cfg.dropout, teacher.dimension
        head = cls(task.context, *sizes, teacher.fingerprint())
        head.edges = teacher.edges
        return head

    def forward(self, tokens: Tensor, phrases: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
        """Compute everything that training needs: vectors of phrases [K, o], and log-odds of spans [C]."""
        states = self.states(tokens)
        return self.vectors(states, phrases), self.phrase_logits(states, spans)

    def states(self, tokens: Tensor, known: Tensor | None = None) -> Tensor:
        """Compute the states of the head's own layer, int64 [S, L] -> [S, L, H].

        `known` are the translation model's states, where it has already encoded the sentences, fp32 [S, L, hidden].
        """
        bf16 = self.context.bf16
        with torch.autocast(tokens.device.type, torch.bfloat16) if bf16 else nullcontext():
            known = self.context(tokens) if known is None else known
            mixed = self.mix(known.to(self.mix.weight.dtype))
            states = self.norm(self.layer(mixed, src_key_padding_mask=tokens.eq(self.context.tokenizer.pad)))
        return states.float() if bf16 else states

    def vectors(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute vectors of phrases, of length 1."""
        return nn.functional.normalize(_two_layers(self.align, self.align_out, states, spans), dim=1)

    def phrase_logits(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute the log-odds that spans are phrases, fp32 [K]."""
        return _two_layers(self.segment, self.segment_out, states, spans).squeeze(1)

    @property
    def name(self) -> str:
        """Its name in the description of the phrases that it finds."""
        return f"head:{short(self.fingerprint())}"

    def fingerprint(self) -> str:
        """Digest the head and the models it was trained for."""
        return of_strings([of_parameters(self.named_parameters()), self.teacher])


def _two_layers(first: nn.Linear, second: nn.Linear, states: Tensor, spans: Tensor) -> Tensor:
    hidden = nn.functional.gelu(project_ends(first, states, spans))
    return second(hidden.to(second.weight.dtype)).float()


def load_query_head(path: Path, encoders: Sequence[Any], bf16: bool = False) -> QueryHead:
    """Load a head that fairseq-train wrote, on the CPU in fp32, in evaluation mode.

    `encoders` are those of an ensemble's translation models, for one of which it was trained.

    Raises:
        CheckpointError: a missing file, another kind of checkpoint, or a head for another translation model.
    """
    if not path.is_file():
        raise CheckpointError(
            f"there is no query head {path}: train one with fairseq-train --task phrase_queries, or give --phrase-queries "
            "none to find phrases with the phrase encoder"
        )
    state = _read(path)
    trained, tokenizer = state["task_state"], load_tokenizer(path.parent)
    contexts = (TranslationStates(encoder, tokenizer, bf16) for encoder in encoders)
    context = next((one for one in contexts if one.fingerprint() == trained["translation"]), None)
    if context is None:
        raise CheckpointError(
            f"the query head {path} was trained for another translation model, or other subwords: train one for this model, "
            "or give --phrase-queries none to find phrases with the phrase encoder"
        )
    settings = state["cfg"]["model"]
    sizes = settings["head_dim"], settings["head_attention_heads"], settings["dropout"]
    head = QueryHead(context, *sizes, trained["dimension"], trained["teacher"])
    try:
        head.load_state_dict(state["model"])
    except RuntimeError as error:
        raise _no_head(path, error) from None
    head.edges = trained["edges"]
    return head.eval()


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        kind = state["cfg"]["model"]["_name"]
        complete = {"translation", "teacher", "dimension", "edges"} <= state["task_state"].keys()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {describe(error)}") from None
    except FAULTS as error:
        raise _no_head(path, error) from None
    if kind != ARCHITECTURE or not complete:
        raise _no_head(path, kind)
    return state


def _no_head(path: Path, found: object) -> CheckpointError:
    message = " ".join(str(found).split())[:200] or type(found).__name__
    return CheckpointError(
        f"{path} is no query head ({message}): give a checkpoint of fairseq-train --task phrase_queries"
    )
