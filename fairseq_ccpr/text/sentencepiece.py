"""SentencePiece models read and rewritten, and pairs of them for two languages of one model."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.data.encoders import register_bpe
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from sentencepiece import SentencePieceProcessor

from fairseq_ccpr.errors import ConfigurationError, installing

SPECIALS = ["<unk>", "<s>", "</s>"]  # the first pieces of a model
PAIR = "sentencepiece_pair"
_TAG = re.compile(r"\s*(>>[\w-]+<<)\s*")  # what names the target language, in front of a source sentence


def read_pieces(model: bytes) -> list[str]:
    """Return the pieces of a model, by id; RuntimeError where these bytes are none."""
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor.id_to_piece(list(range(len(processor))))


def parse_model(model: bytes) -> Any:
    """Return a model as a message, of `pieces`, `trainer_spec` and `normalizer_spec`."""
    return _messages().ModelProto.FromString(model)


def make_model(pieces: Iterable[tuple[str, float]], normalizer_spec: bytes) -> bytes:
    """Make a unigram model of `SPECIALS` and pieces with their log probabilities; the trainer's settings are the defaults."""
    messages = _messages()
    kinds = messages.ModelProto.SentencePiece
    made = [
        kinds(piece=text, score=0, type=kinds.CONTROL if at else kinds.UNKNOWN)
        for at, text in enumerate(SPECIALS)
    ]
    made += [kinds(piece=text, score=score) for text, score in pieces]
    spec = messages.NormalizerSpec.FromString(normalizer_spec)
    return replace_pieces(messages.ModelProto(normalizer_spec=spec), made)


def replace_pieces(message: Any, pieces: Iterable[Any]) -> bytes:
    """Return a model of other pieces with the settings of `message`; its test of itself goes, since it names pieces."""
    changed = type(message)()
    for descriptor, value in message.ListFields():
        if descriptor.name.endswith("_spec"):
            getattr(changed, descriptor.name).CopyFrom(value)
    for piece in pieces:
        changed.pieces.add(piece=piece.piece, score=piece.score, type=piece.type)
    return changed.SerializeToString(deterministic=True)


def _messages() -> Any:
    """Import the message classes, which need protobuf; sentencepiece does not bring it, and splits text without it."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except Exception as error:  # protobuf is missing, or older than the classes: a VersionError of its own
        raise ConfigurationError(
            f"making a SentencePiece model needs protobuf ({str(error).splitlines()[0]}): {installing('encoder')}"
        ) from None
    return sentencepiece_model_pb2


@dataclass
class SentencepiecePairConfig(SentencepieceConfig):
    """Options of `--bpe sentencepiece_pair`."""

    sentencepiece_model: str = field(
        default="???", metadata={"help": "SentencePiece model of the source language"}
    )
    sentencepiece_target_model: str = field(
        default="???", metadata={"help": "SentencePiece model of the target language"}
    )
    source_tag: Optional[str] = field(
        default=None,
        metadata={"help": "what the model wants in front of every source sentence, such as >>deu<<"},
    )


@register_bpe(PAIR, dataclass=SentencepiecePairConfig)
class SentencepiecePair(SentencepieceBPE):
    """Split source text; `target` splits target text.

    A sentence that begins with a tag such as >>deu<< keeps it as one subword; any other gets that of
    `--source-tag`. Joining leaves tags out.
    """

    def __init__(self, cfg: SentencepiecePairConfig) -> None:
        super().__init__(cfg)
        self.tag = cfg.source_tag or ""
        self.target = SentencepieceBPE(
            SentencepieceConfig(
                sentencepiece_model=cfg.sentencepiece_target_model,
                sentencepiece_enable_sampling=cfg.sentencepiece_enable_sampling,
                sentencepiece_alpha=cfg.sentencepiece_alpha,
            )
        )

    def encode(self, x: str) -> str:
        """Split a source sentence into pieces, with its tag in front; nothing stays nothing."""
        tag, text = self._without_tag(x)
        pieces = super().encode(text)
        return " ".join(filter(None, (tag or self.tag, pieces))) if pieces else ""

    def decode(self, x: str) -> str:
        """Join the pieces of a sentence of either language."""
        return str(super().decode(self._without_tag(x)[1]))

    @staticmethod
    def _without_tag(text: str) -> tuple[str, str]:
        found = _TAG.match(text)
        return (found[1], text[found.end() :]) if found else ("", text)


def without_tag(bpe: Any, text: str) -> str:
    """Return a source text without the tag that a subword model takes in front of it."""
    return bpe._without_tag(text)[1] if isinstance(bpe, SentencepiecePair) else text


def implied_bpe(words: list[str]) -> list[str]:
    """Return words of a command line with the --bpe that its SentencePiece models mean, where it is left out.

    >>> implied_bpe(["--sentencepiece-model", "spm.model"])
    ['--bpe', 'sentencepiece', '--sentencepiece-model', 'spm.model']
    """
    names = {word.partition("=")[0] for word in words}
    if "--bpe" in names or "--sentencepiece-model" not in names:
        return words
    return ["--bpe", PAIR if "--sentencepiece-target-model" in names else "sentencepiece", *words]


def for_target(bpe: Any) -> Any:
    """Return the subword model of the target language: of a pair its second, of any other itself."""
    return bpe.target if isinstance(bpe, SentencepiecePair) else bpe
