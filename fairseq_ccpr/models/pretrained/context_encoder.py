"""The pretrained multilingual encoder: a state for each subword in its context; its pieces may be pruned."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.models.roberta import RobertaModel
from torch import Tensor, nn

from fairseq_ccpr.device import has_bf16
from fairseq_ccpr.errors import CheckpointError, ConfigurationError
from fairseq_ccpr.models.checkpoint import as_checkpoint, reading
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import scratch_directory
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.sentencepiece import BLANK
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.tokenizers import CONTINUED, load_tokenizer
from fairseq_ccpr.timing import progress_bar

WEIGHTS = "model.pt"
TRANSFORMER = "encoder.sentence_encoder."  # where a RoBERTa of fairseq has its Transformer
EMBEDDINGS = f"{TRANSFORMER}embed_tokens.weight"
HEAD = "encoder.lm_head."  # and its head for masked subwords, which is not used here
LAYER = re.compile(r"layers\.\d+\.")  # where a weight of the Transformer is one of a layer
MARKERS = 2  # <s> and </s>
# Settings that a checkpoint records of its model, besides `layer_norm_eps`, which fairseq's own loaders
# ignore.
SETTINGS = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
    "max_positions",
    "activation_fn",
    "encoder_normalize_before",
    "layernorm_embedding",
    "no_scale_embedding",
    "encoder_learned_pos",
    "dropout",
    "attention_dropout",
    "activation_dropout",
)
FAIRSEQ_EPS = 1e-5


class ContextEncoder(nn.Module):
    """A Transformer of fairseq's RoBERTa family with its tokenizer.

    Its directory is one of fairseq's `xlmr.*`: model.pt, dict.txt, and the tokenizer's file.

    Args:
        arguments: its settings, by fairseq's names (`SETTINGS`); missing ones default to RoBERTa's.
        tokenizer: its dictionary is that of the embeddings.
        weights: by fairseq's names, those of old checkpoints included, with or without the head.
        bf16: whether to compute the states in bfloat16, whatever the dtype of the weights, unless the device
            is slower so.
    """

    def __init__(
        self, arguments: Any, tokenizer: SubwordTokenizer, weights: dict[str, Tensor], bf16: bool = False
    ) -> None:
        super().__init__()
        roberta = RobertaModel.build_model(arguments, SimpleNamespace(source_dictionary=tokenizer.dictionary))
        roberta.load_state_dict(_with_head(weights), strict=True, model_cfg=arguments)
        self.tokenizer, self.bf16 = tokenizer, bf16
        self.arguments = Namespace(**{name: getattr(arguments, name) for name in SETTINGS})
        self.arguments.layer_norm_eps = getattr(arguments, "layer_norm_eps", FAIRSEQ_EPS)
        self.transformer = roberta.encoder.sentence_encoder
        self.hidden: int = arguments.encoder_embed_dim  # H, width of the states
        self.layers = len(self.transformer.layers)  # number of the last; 0 is the embeddings
        # subwords that a sentence may have, the two markers not counted
        self.max_positions: int = arguments.max_positions - MARKERS
        for module in self.transformer.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = self.arguments.layer_norm_eps

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the states of the last layer, int64 [B, L] -> [B, L, H].

        Those of padding have no meaning.
        """
        return self.states(tokens, self.layers)

    def states(self, tokens: Tensor, layer: int) -> Tensor:
        """Compute the states of any layer from 0, the embeddings, to `layers`; those above it cost nothing.

        `tokens`, int64 [B, L], have both markers. The states [B, L, H] have the weights' dtype, or the one
        that autocast chooses; fp32 with `bf16`.
        """
        return self.states_of_layers(tokens, [layer])[0]

    def states_of_layers(self, tokens: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """Compute `states` of several layers at the cost of the highest."""
        for layer in layers:
            if not 0 <= layer <= self.layers:
                raise ConfigurationError(
                    f"layer {layer} of an encoder of {self.layers} layers: give 0 to {self.layers}"
                )
        if tokens.size(1) > self.max_positions + MARKERS:
            raise ConfigurationError(
                f"a text has {tokens.size(1) - MARKERS} subwords, and the encoder takes "
                f"{self.max_positions}: leave it out, or cut it"
            )
        padding = tokens.eq(self.tokenizer.pad)
        half = self.bf16 and has_bf16(tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16) if half else nullcontext():
            states, _ = self.transformer.forward_embedding(tokens)
            states = states.masked_fill(padding[:, :, None], 0).transpose(0, 1)  # [B, L, H] -> [L, B, H]
            found = {0: states}
            for number, block in enumerate(self.transformer.layers[: max(layers)], 1):
                states = block(states, encoder_padding_mask=padding)
                if number in layers:
                    found[number] = states
            if self.transformer.layer_norm is not None and self.layers in layers:
                found[self.layers] = self.transformer.layer_norm(states)
        return [(found[layer].float() if self.bf16 else found[layer]).transpose(0, 1) for layer in layers]

    def fingerprint(self) -> str:
        """Digest what decides states: weights rounded to fp16, settings, dictionary, tokenizer."""
        settings = [
            f"{name}={value}" for name, value in sorted(vars(self.arguments).items()) if "dropout" not in name
        ]
        parts = [fingerprint.of_parameters(self.transformer.named_parameters()), self.tokenizer.content.hex()]
        return fingerprint.of_strings([*parts, *settings, *self.tokenizer.symbols])

    @classmethod
    def load(cls, directory: Path, dropout: float | None = None, bf16: bool = False) -> ContextEncoder:
        """Read an encoder directory, ours or fairseq's own `xlmr.*`, on the CPU in fp32, in evaluation mode.

        Raises:
            CheckpointError: no such directory, a missing file, or weights of another kind of model.
        """
        tokenizer = load_tokenizer(directory)
        path = directory / WEIGHTS
        if not path.is_file():
            raise CheckpointError(
                f"the encoder {directory} has no {WEIGHTS}: make one with fairseq-ccpr convert"
            )
        what = f"no XLM-R-style encoder with the {len(tokenizer.dictionary):,} entries of its dictionary"
        with reading(path, what, "copy the encoder's folder again"):
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
            arguments, weights = state["cfg"]["model"], state["model"]
            if dropout is not None:
                arguments.dropout = arguments.attention_dropout = dropout
            return cls(arguments, tokenizer, weights, bf16).eval()

    def save(self, directory: Path, half: bool = True) -> None:
        """Write an encoder directory, in fp16 or fp32, for `load` and fairseq's `XLMRModel.from_pretrained`.

        Raises:
            CheckpointError: `directory` exists and is not empty, or a weight is beyond fp16.
        """
        check_empty(directory)
        weights = _weights(self)
        if half:
            weights = {name: tensor.half() for name, tensor in weights.items()}
            if not all(tensor.isfinite().all() for tensor in weights.values()):
                raise CheckpointError(
                    "a weight of the encoder is beyond fp16's range, or no number: save it with half=False"
                )
        directory = directory.resolve()
        with scratch_directory(directory) as partial:
            self.tokenizer.save(partial)
            most = self.arguments.max_positions
            task = {"task": "masked_lm", "data": ".", "tokens_per_sample": most, "criterion": "masked_lm"}
            arguments = Namespace(arch="roberta", **task, **vars(self.arguments))
            torch.save(as_checkpoint(arguments, _with_head(weights), "MaskedLmLoss"), partial / WEIGHTS)
            partial.replace(directory)


def _with_head(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the weights of a head, which fairseq's loaders need, unless they have one; it changes nothing."""
    if any(".lm_head." in name for name in weights):
        return weights
    embeddings = weights[EMBEDDINGS]
    entries, width = embeddings.shape
    head = {
        "dense.weight": torch.eye(width), "dense.bias": torch.zeros(width), "layer_norm.weight": torch.ones(width),
        "layer_norm.bias": torch.zeros(width), "bias": torch.zeros(entries),
    }  # fmt: skip
    small = {HEAD + name: tensor.to(embeddings.dtype) for name, tensor in head.items()}
    return {**weights, **small, HEAD + "weight": embeddings}


def check_empty(directory: Path) -> None:
    """Refuse to write an encoder to a directory that has something in it."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not empty: give a new directory for the encoder")


def lines_of(paths: Iterable[Path], quiet: bool = False) -> Iterator[str]:
    """Read the lines of text files, plain, `.gz` or `.xz`."""
    for path in paths:
        yield from progress_bar(path.name, "line", read_lines(path), quiet=quiet)


def needed_pieces(tokenizer: SubwordTokenizer, texts: Iterable[str]) -> set[str]:
    """Collect the pieces that texts split into, and each of their characters (and of ASCII) as a piece.

    Thanks to the characters, a word that is not in the texts still splits into known pieces, though not the
    best ones.
    """
    needed = {piece for text in texts for piece, _, _ in tokenizer.split(text)}
    if not needed:
        raise ConfigurationError("--keep-pieces-of: the files hold no text")
    characters = {c for piece in needed for c in piece} | {chr(code) for code in range(33, 127)} | {BLANK}
    return needed | {prefix + c for c in characters for prefix in ("", BLANK, CONTINUED)}


def prune(encoder: ContextEncoder, texts: Iterable[str]) -> ContextEncoder:
    """Prune an encoder to the pieces of these texts.

    The states of text that splits into these pieces stay the same.
    """
    old = encoder.tokenizer
    new = old.restrict(needed_pieces(old, texts))
    rows = [old.dictionary.index(symbol) for symbol in new.dictionary.symbols]
    weights = _weights(encoder)
    weights[EMBEDDINGS] = weights[EMBEDDINGS][torch.tensor(rows)]
    return ContextEncoder(encoder.arguments, new, weights).eval()


def keep_layers(encoder: ContextEncoder, kept: Sequence[int]) -> ContextEncoder:
    """Keep some layers, by their numbers from 0; the others go."""
    if not 1 <= len(kept) <= encoder.layers:
        raise ConfigurationError(
            f"--layers {len(kept)}: the encoder has {encoder.layers}, give 1 to {encoder.layers}"
        )
    if encoder.transformer.layer_norm is not None and kept[-1] != encoder.layers - 1:
        raise ConfigurationError(
            "--layers: this encoder normalises the states of its last layer: keep all layers"
        )
    place = {f"layers.{number}.": f"layers.{place}." for place, number in enumerate(kept)}
    weights = {}
    for name, tensor in _weights(encoder).items():
        layer = LAYER.search(name)
        if layer is None or layer[0] in place:
            weights[name if layer is None else name.replace(layer[0], place[layer[0]])] = tensor
    arguments = Namespace(**{**vars(encoder.arguments), "encoder_layers": len(kept)})
    return ContextEncoder(arguments, encoder.tokenizer, weights).eval()


def _weights(encoder: ContextEncoder) -> dict[str, Tensor]:
    return {TRANSFORMER + name: tensor.cpu() for name, tensor in encoder.transformer.state_dict().items()}
