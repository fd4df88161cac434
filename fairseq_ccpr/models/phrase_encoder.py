"""CCPR's phrase encoder: spans of a pretrained encoder's states, loading by architecture."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import logging
import math
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor, nn

from fairseq_ccpr.device import choose_device, has_bf16
from fairseq_ccpr.errors import CheckpointError, ConfigurationError
from fairseq_ccpr.models.checkpoint import reading
from fairseq_ccpr.models.pretrained.context_encoder import TRANSFORMER, ContextEncoder
from fairseq_ccpr.storage.fingerprint import of_parameters, of_strings
from fairseq_ccpr.text.tokenizers import ENCODER_TOKENIZERS, load_tokenizer

logger = logging.getLogger(__name__)

E = TypeVar("E", bound="SpanEncoder")
CONTEXT = "context.transformer."  # prefix of a phrase encoder's Transformer
MOMENTUM = "momentum."  # and of the weights that only its training needs
UNRECORDED_EDGES = "own"  # the edge rule of checkpoints that do not record one; see `pair_build.edge_rule`
DEFAULT_ARCHITECTURE, STUDENT = "phrase_encoder", "phrase_student"
COSINE, DOT = SIMILARITIES = "cosine", "dot"
MOST_SCALE = 100.0  # maximum of the learned 1 / temperature: beyond it only the nearest candidate counts
# learning rates for a pretrained Transformer would hardly move the logarithm of the temperature
SCALE_SPEED = 20.0
# by the name of their architecture, filled by their modules
ENCODER_CLASSES: dict[str, "type[SpanEncoder]"] = {}
OTHER_ENCODER = "give a checkpoint of fairseq-train --task phrase_contrast or phrase_lexicon"


class SpanEncoder(BaseFairseqModel):
    """A context encoder, and the layers that compute vectors of spans in its sentences."""

    context: ContextEncoder
    segments: bool  # whether it can tell which spans are phrases
    dimension: int  # o, width of a phrase vector
    trained_on: list[str]  # language pairs of the lexicons; of a loaded XPR encoder
    # the rule that barred words from the edges of phrases; of a loaded CCPR encoder
    edges: str = UNRECORDED_EDGES

    heads: tuple[str, ...]  # prefixes of the weights besides those of `context`
    kind: str  # what else decides vectors

    def states(self, tokens: Tensor) -> Tensor:
        """Compute the states that `vectors` takes, int64 [S, L] -> [S, L, H]."""
        raise NotImplementedError

    def vectors(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute vectors of spans, fp32 [K, o].

        Args:
            states: [S, L, H].
            spans: int64 [K, 3], sentence, first and last subword.
        """
        raise NotImplementedError

    def phrase_logits(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute the log-odds that spans are phrases, fp32 [K], where `segments`.

        Arguments as in `vectors`.
        """
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Digest everything that determines the phrases and vectors of a text."""
        heads = [(name, tensor) for name, tensor in self.named_parameters() if name.startswith(self.heads)]
        return of_strings([self.context.fingerprint(), of_parameters(heads), self.kind])

    @classmethod
    def restore(
        cls: type[E], context: ContextEncoder, weights: dict[str, Tensor], settings: dict[str, Any]
    ) -> E:
        """Rebuild the encoder from a checkpoint's weights and options.

        KeyError or RuntimeError where they do not match.
        """
        raise NotImplementedError

    @classmethod
    def load(cls: type[E], path: Path) -> E:
        """Load the encoder of a checkpoint of fairseq-train, on the CPU in fp32, in evaluation mode."""
        encoder = load_phrase_encoder(path, cls)
        assert isinstance(encoder, cls)
        return encoder


def load_phrase_encoder(
    path: Path, wanted: type[SpanEncoder] = SpanEncoder, bf16: bool = False
) -> SpanEncoder:
    """Load the phrase encoder of a checkpoint, without the weights that only training needs.

    Raises:
        CheckpointError: a missing file, another kind of checkpoint, or no tokenizer next to it.
    """
    if not path.is_file():
        found = f"{path} is a folder" if path.is_dir() else f"there is no phrase encoder {path}"
        raise CheckpointError(
            f"{found}: {OTHER_ENCODER}; the repository has one for German and English, "
            "datastores/demo/ccpr/ccpr.pt"
        )
    if not any((path.parent / name).is_file() for name in ENCODER_TOKENIZERS):
        raise CheckpointError(
            f"{path} is not a phrase encoder with its tokenizer ({' or '.join(ENCODER_TOKENIZERS)}) next to it: "
            f"{OTHER_ENCODER}, in its folder"
        )
    if bf16 and not has_bf16(choose_device(cpu=False)):
        logger.warning(
            "bfloat16 is many times slower on a processor with AVX2 alone: "
            "the phrase encoder computes in fp32"
        )
    tokenizer = load_tokenizer(path.parent)
    what = "no phrase encoder for the tokenizer next to it"
    with reading(path, what, f"{OTHER_ENCODER}, in its folder"):
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        settings, task = state["cfg"]["model"], state["task_state"]
        weights = {name: weight for name, weight in state["model"].items() if not name.startswith(MOMENTUM)}
        kind = ENCODER_CLASSES[settings.get("_name") or DEFAULT_ARCHITECTURE]
        if not issubclass(kind, wanted):
            raise KeyError(f"a {kind.__name__} rather than a {wanted.__name__}")
        inner = {
            TRANSFORMER + n.removeprefix(CONTEXT): w for n, w in weights.items() if n.startswith(CONTEXT)
        }
        context = ContextEncoder(Namespace(**task["context"]), tokenizer, inner, bf16)
        model = kind.restore(context, weights, settings)
        model.trained_on = list(task.get("trained_on", []))
        model.edges = str(task.get("edges", UNRECORDED_EDGES))
        return model.float().eval()


@dataclass
class SpanEncoderConfig(FairseqDataclass):
    """Options of all encoders that begin from a pretrained one."""

    encoder: str = field(
        default="",
        metadata={"help": "the pretrained context encoder, made by fairseq-ccpr convert; must be given"},
    )


@dataclass
class PhraseEncoderConfig(SpanEncoderConfig):
    """Options of `--arch phrase_encoder`."""

    phrase_dim: int = field(default=128, metadata={"help": "o, width of a phrase vector"})
    similarity: ChoiceEnum(SIMILARITIES) = field(  # type: ignore[valid-type]
        default="cosine",
        metadata={"help": "cosine: vectors of length 1 and a learned temperature; dot: plain inner products"},
    )
    phrase_temperature: float = field(default=0.05, metadata={"help": "where the learned temperature starts"})
    dropout: float = field(default=0.2, metadata={"help": "dropout inside the context encoder"})


@register_model(DEFAULT_ARCHITECTURE, dataclass=PhraseEncoderConfig)
class PhraseEncoder(SpanEncoder):
    """h = MLP_align([H_s ; H_e]), P(phrase) = sigmoid(MLP_seg([H_i ; H_j])): equations 1 and 5 of CCPR."""

    segments = True
    heads = "align.", "segment."

    def __init__(self, context: ContextEncoder, dimension: int, similarity: str, temperature: float) -> None:
        super().__init__()
        self.context, self.similarity, self.kind = context, similarity, similarity
        self.align, self.dimension = nn.Linear(2 * context.hidden, dimension), dimension
        self.segment = nn.Linear(2 * context.hidden, 1)
        self.log_scale = -math.log(temperature)  # at the start, where weight decay draws it back to
        self.scale_offset = nn.Parameter(torch.zeros(()), requires_grad=similarity == "cosine")

    @classmethod
    def build_model(cls, cfg: PhraseEncoderConfig, task: Any) -> "PhraseEncoder":
        if cfg.phrase_dim < 1:
            raise ConfigurationError(f"--phrase-dim is {cfg.phrase_dim}: give at least 1")
        if not cfg.phrase_temperature > 0:
            raise ConfigurationError(
                f"--phrase-temperature is {cfg.phrase_temperature}: give a number above 0"
            )
        context = ContextEncoder.load(Path(cfg.encoder), dropout=cfg.dropout)
        return cls(context, cfg.phrase_dim, str(cfg.similarity), cfg.phrase_temperature)

    @property
    def scale(self) -> Tensor | float:
        """The factor for inner products of phrase vectors in training: 1 / temperature."""
        if self.similarity == "dot":
            return 1.0
        return (self.log_scale + SCALE_SPEED * self.scale_offset).exp().clamp_max(MOST_SCALE)

    def forward(self, *sides: dict[str, Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor | float]:
        """Compute everything that training needs in one call, as torch's distributed wrappers require.

        Args:
            sides: batches of sentences: tokens int64 [S, L], spans of phrases and of others int64 [., 3].

        Returns:
            For each side the vectors of the phrases [K, o] and the log-odds of the phrases, then of the
            others; the scale.
        """
        outputs = []
        for side in sides:
            states = self.context(side["tokens"])
            logits = self.phrase_logits(states, torch.cat([side["spans"], side["others"]]))
            outputs.append((self.vectors(states, side["spans"]), logits))
        return outputs, self.scale

    def states(self, tokens: Tensor) -> Tensor:
        return self.context(tokens)

    def vectors(self, states: Tensor, spans: Tensor) -> Tensor:
        vectors = project_ends(self.align, states, spans)
        return nn.functional.normalize(vectors, dim=1) if self.similarity == "cosine" else vectors

    def phrase_logits(self, states: Tensor, spans: Tensor) -> Tensor:
        return project_ends(self.segment, states, spans).squeeze(1)

    @classmethod
    def restore(
        cls, context: ContextEncoder, weights: dict[str, Tensor], settings: dict[str, Any]
    ) -> "PhraseEncoder":
        similarity = str(settings.get("similarity", COSINE))  # a student's is its teacher's
        model = cls(context, len(weights["align.weight"]), similarity, 1.0)
        model.load_state_dict(weights)
        return model


ENCODER_CLASSES |= {DEFAULT_ARCHITECTURE: PhraseEncoder, STUDENT: PhraseEncoder}


def project_ends(linear: nn.Linear, states: Tensor, spans: Tensor) -> Tensor:
    """Compute linear([H_s ; H_e]), fp32 [K, m].

    There is one product per subword: there are many more spans than subwords.
    """
    sentence, first, last = spans.unbind(dim=1)
    starts, lasts = (states @ half.T for half in linear.weight.chunk(2, dim=1))  # [S, L, m] each
    return starts[sentence, first].float() + lasts[sentence, last].float() + linear.bias
