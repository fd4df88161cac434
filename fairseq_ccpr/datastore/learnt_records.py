"""The records of the journal of what was learnt, as bytes: numbers are little-endian, texts UTF-8, arrays NumPy's bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

HEADER, LEARNT, AGAIN, FORGOTTEN, MOVED = range(5)
_ID = struct.Struct("<BQ")
_PAIR = struct.Struct("<BQIIII")  # kind, id, count, bytes of source and target, tokens
_PLACE = struct.Struct("<q")  # the first entry, of a pair that has moved into the datastore
_VALUE, _KEY = np.dtype("<i4"), np.dtype("<f2")


@dataclass(frozen=True)
class LearntPair:
    """A sentence pair that was learnt.

    Attributes:
        id: by which it can be forgotten; never given again.
        source, target: as they were given.
        count: how often it was learnt.
        tokens: of the target, the end of the sentence included.
        first_entry: of its tokens in the datastore itself, where it has moved there; None: they are in the journal.
    """

    id: int
    source: str
    target: str
    count: int
    tokens: int
    first_entry: int | None = None


@dataclass(frozen=True)
class NewPair:
    """A sentence pair that is to be learnt."""

    source: str
    target: str
    values: np.ndarray  # int32 [n]
    keys: np.ndarray  # fp16 [n, d]


@dataclass(frozen=True)
class Header:
    """The first record of a journal."""

    version: int
    identity: dict[str, Any]  # what it belongs to, by name
    first_id: int  # ids below were given before


@dataclass(frozen=True)
class Learnt:
    """A pair is there from now on."""

    pair: LearntPair
    values: np.ndarray | None = None  # int32 [n]
    keys: np.ndarray | None = None  # fp16 [n, d]


@dataclass(frozen=True)
class Again:
    """A pair was learnt once more."""

    id: int


@dataclass(frozen=True)
class Forgotten:
    """A pair is not there any more."""

    id: int


def header(first: Header) -> bytes:
    """Make the first record."""
    return bytes([HEADER]) + json.dumps(asdict(first)).encode()


def learnt(number: int, pair: NewPair, count: int = 1) -> bytes:
    """Make the record of a pair with its values and keys."""
    arrays = pair.values.astype(_VALUE).tobytes() + pair.keys.astype(_KEY).tobytes()
    return _texts(LEARNT, LearntPair(number, pair.source, pair.target, count, len(pair.values))) + arrays


def moved(pair: LearntPair) -> bytes:
    """Make the record of a pair whose entries are the datastore's own."""
    assert pair.first_entry is not None
    return _texts(MOVED, pair) + _PLACE.pack(pair.first_entry)


def again(number: int) -> bytes:
    """Make the record of a pair that was learnt again."""
    return _ID.pack(AGAIN, number)


def forgotten(number: int) -> bytes:
    """Make the record of a pair that is forgotten."""
    return _ID.pack(FORGOTTEN, number)


def read(record: bytes, dimension: int) -> Header | Learnt | Again | Forgotten:
    """Read a record.

    Args:
        dimension: d; arrays share the record's memory.

    Raises:
        ValueError: it is of no kind that is known, or its parts do not go together.
    """
    kind = record[0] if record else None
    try:
        if kind == HEADER:
            return Header(**json.loads(record[1:]))
        if kind in (AGAIN, FORGOTTEN):
            _, number = _ID.unpack(record)
            return Again(number) if kind == AGAIN else Forgotten(number)
        if kind in (LEARNT, MOVED):
            return _read_pair(record, dimension)
    except (struct.error, TypeError) as error:
        raise ValueError(str(error)) from None
    raise ValueError(f"kind {kind}")


def _texts(kind: int, pair: LearntPair) -> bytes:
    source, target = pair.source.encode(), pair.target.encode()
    return _PAIR.pack(kind, pair.id, pair.count, len(source), len(target), pair.tokens) + source + target


def _read_pair(record: bytes, dimension: int) -> Learnt:
    kind, number, count, of_source, of_target, tokens = _PAIR.unpack_from(record)
    middle = _PAIR.size + of_source
    end = middle + of_target
    texts = record[_PAIR.size : middle].decode(), record[middle:end].decode()
    if kind == MOVED:
        return Learnt(LearntPair(number, *texts, count, tokens, _PLACE.unpack(record[end:])[0]))
    if len(record) != end + tokens * (_VALUE.itemsize + dimension * _KEY.itemsize):
        raise ValueError("its length is not that of its parts")
    values = np.frombuffer(record, _VALUE, tokens, end)
    keys = np.frombuffer(record, _KEY, tokens * dimension, end + values.nbytes).reshape(tokens, dimension)
    return Learnt(LearntPair(number, *texts, count, tokens), values, keys)
