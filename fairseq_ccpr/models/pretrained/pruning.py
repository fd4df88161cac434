"""Prunes an encoder to the pieces of given texts and to its lowest layers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.pretrained.context_encoder import TRANSFORMER, ContextEncoder
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.sentencepiece_tokenizer import BLANK
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.wordpiece_tokenizer import CONTINUED


def lines_of(paths: Iterable[Path], quiet: bool = False) -> Iterator[str]:
    """Read the lines of text files, plain, `.gz` or `.xz`.

    Raises:
        ConfigurationError: bytes that are not UTF-8, by file and line, or a damaged file.
    """
    for path in paths:
        yield from progress_bar(path.name, "line", read_lines(path), quiet=quiet)


def needed_pieces(tokenizer: SubwordTokenizer, texts: Iterable[str]) -> set[str]:
    """Collect the pieces that texts split into, and each of their characters (and of ASCII) as a piece of its own.

    Thanks to the characters, a word that is not in the texts still splits into known pieces, though not the best ones.

    Raises:
        ConfigurationError: there is no text.
    """
    needed = {piece for text in texts for piece, _, _ in tokenizer.split(text)}
    if not needed:
        raise ConfigurationError("--keep-pieces-of: the files hold no text")
    characters = {c for piece in needed for c in piece} | {chr(code) for code in range(33, 127)} | {BLANK}
    return needed | {prefix + c for c in characters for prefix in ("", BLANK, CONTINUED)}


def prune(encoder: ContextEncoder, texts: Iterable[str]) -> ContextEncoder:
    """Prune an encoder to the pieces of these texts; the states of text that splits into these pieces stay the same.

    Raises:
        ConfigurationError: the texts are empty.
    """
    old = encoder.tokenizer
    needed = needed_pieces(old, texts)
    new = old.restrict(needed)
    rows = [old.dictionary.index(symbol) for symbol in new.dictionary.symbols]
    weights = _weights(encoder)
    weights[TRANSFORMER + "embed_tokens.weight"] = encoder.transformer.embed_tokens.weight.detach()[torch.tensor(rows)]
    return ContextEncoder(encoder.arguments, new, weights).eval()


def keep_layers(encoder: ContextEncoder, layers: int) -> ContextEncoder:
    """Remove all layers above the first `layers`, so that the states of that layer become the last.

    Raises:
        ConfigurationError: it has fewer layers, or none would remain; or it normalises its last states once more.
    """
    if not 1 <= layers <= encoder.layers:
        raise ConfigurationError(f"--layers {layers}: the encoder has {encoder.layers}, give 1 to {encoder.layers}")
    if encoder.transformer.layer_norm is not None and layers < encoder.layers:
        raise ConfigurationError("--layers: this encoder normalises the states of its last layer: keep all layers")
    above = tuple(f"{TRANSFORMER}layers.{number}." for number in range(layers, encoder.layers))
    weights = {name: tensor for name, tensor in _weights(encoder).items() if not name.startswith(above)}
    arguments = Namespace(**{**vars(encoder.arguments), "encoder_layers": layers})
    return ContextEncoder(arguments, encoder.tokenizer, weights).eval()


def _weights(encoder: ContextEncoder) -> dict[str, Tensor]:
    return {TRANSFORMER + name: tensor for name, tensor in encoder.transformer.state_dict().items()}
