"""SentencePiece models read and rewritten, and what their pieces stand for in a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sentencepiece import SentencePieceProcessor

from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.text.words import SPACE, kinds_of

SPECIAL_PIECES = ["<unk>", "<s>", "</s>"]  # the first pieces of a model
BLANK = "▁"  # how a piece writes the space before it


def read_pieces(model: bytes) -> list[str]:
    """Return the pieces of a model, by id; RuntimeError where these bytes are none."""
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor.id_to_piece(list(range(len(processor))))


def parse_model(model: bytes) -> Any:
    """Return a model as a message, of `pieces`, `trainer_spec` and `normalizer_spec`."""
    return _messages().ModelProto.FromString(model)


def make_model(pieces: Iterable[tuple[str, float]], normalizer_spec: bytes) -> bytes:
    """Make a unigram model of `SPECIAL_PIECES` and pieces with log probabilities; settings are defaults."""
    messages = _messages()
    kinds = messages.ModelProto.SentencePiece
    made = [
        kinds(piece=text, score=0, type=kinds.CONTROL if at else kinds.UNKNOWN)
        for at, text in enumerate(SPECIAL_PIECES)
    ]
    made += [kinds(piece=text, score=score) for text, score in pieces]
    spec = messages.NormalizerSpec.FromString(normalizer_spec)
    return replace_pieces(messages.ModelProto(normalizer_spec=spec), made)


def replace_pieces(message: Any, pieces: Iterable[Any]) -> bytes:
    """Return a model of other pieces with the settings of `message`, without its test, which names pieces."""
    changed = type(message)()
    for descriptor, value in message.ListFields():
        if descriptor.name.endswith("_spec"):
            getattr(changed, descriptor.name).CopyFrom(value)
    for piece in pieces:
        changed.pieces.add(piece=piece.piece, score=piece.score, type=piece.type)
    return changed.SerializeToString(deterministic=True)


def _messages() -> Any:
    """Import the message classes, which need protobuf; sentencepiece does not bring it."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except Exception as error:  # protobuf is missing, or older than the classes: a VersionError of its own
        raise ConfigurationError(
            f"making a SentencePiece model needs protobuf ({str(error).splitlines()[0]}): "
            f"{installing('encoder')}"
        ) from None
    return sentencepiece_model_pb2


def piece_spans(processor: SentencePieceProcessor, text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the pieces of a text with the characters each stands for, spaces around it left out.

    The pieces laid end to end are the normalised text, and SentencePiece says of each of its characters where
    in the text it comes from. Where one character becomes several pieces (½, or the bytes of one that has no
    piece), each of them stands for it.
    """
    _, origins = processor.normalize(text, with_offsets=True)  # one more than characters
    kinds = kinds_of(text)
    at = 0
    for piece in processor.encode(text, out_type=str):
        byte = _byte(processor, piece) if piece.startswith("<0x") else None
        if byte is None:
            begin, after = at + len(piece) - len(piece.lstrip(BLANK)), at + len(piece)
        else:
            begin = at - 1 if 0x80 <= byte < 0xC0 else at  # such a byte continues a character of UTF-8
            after = begin + 1
        start, end = origins[begin], origins[after]
        if begin < after:
            # the blank of a last word comes from no character
            end = max(end, min(origins[after - 1] + 1, len(text)))
            while end > start + 1 and kinds[end - 1] == SPACE:  # at the end of the text
                end -= 1
        yield piece, start, end
        at = after


def _byte(processor: SentencePieceProcessor, piece: str) -> int | None:
    """Return the byte that a piece such as <0xE2> stands for, if the model falls back on bytes."""
    return int(piece[1:-1], 16) if processor.is_byte(processor.piece_to_id(piece)) else None
