"""Reads and makes SentencePiece models with the message classes that come with sentencepiece."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentencepiece import SentencePieceProcessor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extras import installing

SPECIALS = ["<unk>", "<s>", "</s>"]  # the first pieces of a model


def read_pieces(model: bytes) -> list[str]:
    """Return the pieces of a model, by id.

    Raises:
        RuntimeError: these bytes are no model.
    """
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
    made = [kinds(piece=text, score=0, type=kinds.CONTROL if at else kinds.UNKNOWN) for at, text in enumerate(SPECIALS)]
    made += [kinds(piece=text, score=score) for text, score in pieces]
    return replace_pieces(
        messages.ModelProto(normalizer_spec=messages.NormalizerSpec.FromString(normalizer_spec)), made
    )


def replace_pieces(message: Any, pieces: Iterable[Any]) -> bytes:
    """Return a model of other pieces with the settings of `message`; its test of itself goes, since it names pieces."""
    changed = type(message)()
    for field, value in message.ListFields():
        if field.name.endswith("_spec"):
            getattr(changed, field.name).CopyFrom(value)
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
