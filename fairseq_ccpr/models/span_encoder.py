"""The interface of phrase encoders, and loading one from a checkpoint of either kind."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any, TypeVar

from fairseq import checkpoint_utils
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.pretrained.context_encoder import TRANSFORMER, ContextEncoder
from fairseq_ccpr.models.translation_states import TranslationStates
from fairseq_ccpr.text.tokenizers import TOKENIZERS, load_tokenizer

E = TypeVar("E", bound="SpanEncoder")
CONTEXT = "context.transformer."  # prefix of a phrase encoder's Transformer
MOMENTUM = "momentum."  # and of the weights that only its training needs
UNTOLD_EDGES = "own"  # the edge rule of checkpoints that do not record one; see `pair_filters.edge_rule`


class SpanEncoder(BaseFairseqModel):
    """A context encoder, and the layers that compute vectors of spans in its sentences.

    Attributes:
        context: the Transformer; of a query head, that of the translation model.
        segments: whether it can tell which spans are phrases.
        dimension: o, width of a phrase vector.
        trained_on: language pairs whose lexicons it was trained on; of a loaded XPR encoder.
        edges: the rule that barred words from the edges of the phrases it was trained on; of a loaded CCPR encoder.
    """

    context: ContextEncoder | TranslationStates
    segments: bool
    dimension: int
    trained_on: list[str]
    edges: str = UNTOLD_EDGES

    @property
    def name(self) -> str:
        """Its name in the description of its phrases; empty for the encoder that the datastore was built with."""
        return ""

    def states(self, tokens: Tensor) -> Tensor:
        """Compute the states that `vectors` takes, int64 [S, L] -> [S, L, H]."""
        raise NotImplementedError

    def vectors(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute vectors of phrases, each in one sentence.

        Args:
            states: [S, L, H].
            spans: int64 [K, 3], sentence, first and last subword.

        Returns:
            fp32 [K, o].
        """
        raise NotImplementedError

    def phrase_logits(self, states: Tensor, spans: Tensor) -> Tensor:
        """Compute the log-odds that spans are phrases, fp32 [K], where `segments`; arguments as in `vectors`."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Digest everything that determines the phrases and vectors of a text."""
        raise NotImplementedError

    @classmethod
    def restore(cls: type[E], context: ContextEncoder, weights: dict[str, Tensor], settings: dict[str, Any]) -> E:
        """Rebuild the encoder from a checkpoint's weights and options; KeyError or RuntimeError where they do not match."""
        raise NotImplementedError

    @classmethod
    def load(cls: type[E], path: Path) -> E:
        """Load the encoder of a checkpoint that fairseq-train wrote, on the CPU in fp32, in evaluation mode.

        Its tokenizer is the one that training left next to the checkpoint. Weights that only training needs are not loaded.

        Raises:
            CheckpointError: a missing file, another kind of checkpoint, or no tokenizer next to it.
        """
        encoder = load_phrase_encoder(path, cls)
        assert isinstance(encoder, cls)
        return encoder


ENCODER_CLASSES: dict[str, type[SpanEncoder]] = {}  # by the name of their architecture, filled by their modules
DEFAULT_ARCHITECTURE = "phrase_encoder"


def load_phrase_encoder(path: Path, wanted: type[SpanEncoder] = SpanEncoder, bf16: bool = False) -> SpanEncoder:
    """Load the phrase encoder of a checkpoint, whichever kind it is.

    Args:
        path: the checkpoint, in its folder.
        wanted: the required kind.
        bf16: whether its context encoder computes in bfloat16.

    Raises:
        CheckpointError: see `SpanEncoder.load`.
    """
    if not path.is_file():
        found = f"{path} is a folder" if path.is_dir() else f"there is no phrase encoder {path}"
        raise CheckpointError(
            f"{found}: give a checkpoint of fairseq-train --task phrase_contrast or phrase_lexicon; the repository has one "
            "for German and English, datastores/demo/ccpr/ccpr.pt"
        )
    if not any((path.parent / name).is_file() for name in TOKENIZERS):
        raise CheckpointError(
            f"{path} is not a phrase encoder with its tokenizer ({' or '.join(TOKENIZERS)}) next to it: give a checkpoint of "
            "fairseq-train --task phrase_contrast or phrase_lexicon, in its folder"
        )
    tokenizer = load_tokenizer(path.parent)
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        settings = state["cfg"]["model"]
        if state["task_state"].get("marked"):
            raise ValueError("it was trained with --mark-phrases, which is gone")
        weights = {name: weight for name, weight in state["model"].items() if not name.startswith(MOMENTUM)}
        kind = ENCODER_CLASSES[settings.get("_name") or DEFAULT_ARCHITECTURE]
        if not issubclass(kind, wanted):
            raise KeyError(f"a {kind.__name__} rather than a {wanted.__name__}")
        context_weights = {
            TRANSFORMER + n.removeprefix(CONTEXT): w for n, w in weights.items() if n.startswith(CONTEXT)
        }
        context = ContextEncoder(Namespace(**state["task_state"]["context"]), tokenizer, context_weights, bf16)
        model = kind.restore(context, weights, settings)
        model.trained_on = list(state["task_state"].get("trained_on", []))
        model.edges = str(state["task_state"].get("edges", UNTOLD_EDGES))
    except pickle.UnpicklingError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, EOFError, RuntimeError) as error:
        message = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"{path} is no phrase encoder for the tokenizer next to it ({message}): give a checkpoint of "
            "fairseq-train --task phrase_contrast or phrase_lexicon, in its folder"
        ) from None
    return model.float().eval()
