"""SentencePiece's model file: reading and changing its pieces without protobuf, which nothing else here needs.

A model is a protobuf message: a row of fields, each a key (number and wire type) and a value. Field 1, repeated, is a
piece (1: text, 2: score, 3: type); 2 and 3 are the specs of trainer and normalizer, 4 is a test of itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # types of pieces
PIECE, TRAINER, NORMALIZER, SELF_TEST = 1, 2, 3, 4  # fields of a model
MODEL_TYPE, UNIGRAM = 3, 1  # field of the trainer's spec, and its default
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True)
class Piece:
    """A piece and its log probability."""

    text: str
    score: float
    type: int = NORMAL


SPECIALS = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]


def read_pieces(model: bytes) -> list[Piece]:
    """The pieces of a model, by id; ValueError or KeyError where it is none."""
    return [_read_piece(value) for number, value in _fields(model) if number == PIECE and isinstance(value, bytes)]


def is_unigram(model: bytes) -> bool:
    """Whether a model takes the most probable pieces, as XLM-R's does; BPE puts them together of smaller ones."""
    specs = [value for number, value in _fields(model) if number == TRAINER and isinstance(value, bytes)]
    return all(dict(_fields(spec)).get(MODEL_TYPE, UNIGRAM) == UNIGRAM for spec in specs)


def replace_pieces(model: bytes, pieces: Iterable[Piece]) -> bytes:
    """The model with other pieces; its test of itself goes, since it names pieces."""
    kept = b"".join(_field(number, value) for number, value in _fields(model) if number not in (PIECE, SELF_TEST))
    return b"".join(_field(PIECE, _write_piece(piece)) for piece in pieces) + kept


def make_model(pieces: Iterable[Piece], normalizer_spec: bytes) -> bytes:
    """A unigram model of these pieces, whose first three are `SPECIALS`; the trainer's settings are the defaults."""
    return replace_pieces(_field(NORMALIZER, normalizer_spec), pieces)


def _read_piece(message: bytes) -> Piece:
    values = dict(_fields(message))
    text, score, kind = values[1], values[2], values.get(3, NORMAL)
    if not (isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)) or len(score) != 4:
        raise ValueError("a piece without text, score or type")
    return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], kind)


def _write_piece(piece: Piece) -> bytes:
    score = _varint(2 << 3 | _FIXED32) + struct.pack("<f", piece.score)
    return _field(1, piece.text.encode("utf-8")) + score + _varint(3 << 3 | _VARINT) + _varint(piece.type)


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of each field; a varint's value is a number."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _read_varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"a field of wire type {wire}")
        if at + length > len(message):
            raise ValueError("it ends in the middle of a field")
        yield number, message[at : at + length]
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and the place after it."""
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("it ends in the middle of a number")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
