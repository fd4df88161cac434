"""The records of the journal of what was learnt, as bytes: numbers are little-endian, texts UTF-8, arrays NumPy's bytes."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any, Union

import numpy as np

from fairseq_ccpr.datastore.pair_phrases import PairPhrases

HEADER, LEARNT, AGAIN, FORGOTTEN, MOVED = range(5)
WITH_PHRASES, PHRASES, PHRASES_OF, MOVED_WITH_PHRASES = range(5, 9)  # version 2 brought them
_ID = struct.Struct("<BQ")
_PAIR = struct.Struct("<BQIIII")  # kind, id, count, bytes of source and target, tokens
_PLACE = struct.Struct("<q")  # the first entry, or the sentence, of a pair that has moved into the datastore
OWN_SENTENCE = -1  # in place of the number of a sentence that the datastore was built with
_VALUE, _KEY = np.dtype("<i4"), np.dtype("<f2")


@dataclass(frozen=True)
class LearntPair:
    """A sentence pair that was learnt.

    Attributes:
        id: by which it can be forgotten; never reused.
        source, target: as they were given.
        count: how often it was learnt.
        tokens: of the target, the end of the sentence included.
        first_entry: of its tokens in the datastore itself, where it has moved there; None: they are in the journal.
        sentence: of its target in the datastore's phrase part, where its phrases have moved there; `OWN_SENTENCE` where that
            sentence is there without it, too; None: its phrases are in the journal, or it has none.
    """

    id: int
    source: str
    target: str
    count: int
    tokens: int
    first_entry: int | None = None
    sentence: int | None = None


@dataclass(frozen=True)
class NewPair:
    """A sentence pair that is to be learnt."""

    source: str
    target: str
    values: np.ndarray  # int32 [n]
    keys: np.ndarray  # fp16 [n, d]
    phrases: PairPhrases | None = None  # None: no phrase memory is there


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
    phrases: PairPhrases | None = None


@dataclass(frozen=True)
class Phrases:
    """A pair was learnt once more, and has phrases from now on."""

    id: int
    phrases: PairPhrases


@dataclass(frozen=True)
class PhrasesOf:
    """Says what all phrases belong to, and comes before them."""

    identity: dict[str, Any]  # by name


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
    """Make the record of a pair with its values and keys, and with its phrases, where it has some."""
    arrays = pair.values.astype(_VALUE).tobytes() + pair.keys.astype(_KEY).tobytes()
    kind, more = (LEARNT, b"") if pair.phrases is None else (WITH_PHRASES, pair.phrases.to_bytes())
    return _texts(kind, LearntPair(number, pair.source, pair.target, count, len(pair.values))) + arrays + more


def phrases(number: int, found: PairPhrases) -> bytes:
    """Make the record of a pair that was learnt again, and has phrases from then on."""
    return _ID.pack(PHRASES, number) + found.to_bytes()


def phrases_of(identity: dict[str, Any]) -> bytes:
    """Make the record that says what phrases belong to."""
    return bytes([PHRASES_OF]) + json.dumps(identity).encode()


def moved(pair: LearntPair) -> bytes:
    """Make the record of a pair whose entries are the datastore's own."""
    assert pair.first_entry is not None
    if pair.sentence is None:
        return _texts(MOVED, pair) + _PLACE.pack(pair.first_entry)
    return _texts(MOVED_WITH_PHRASES, pair) + _PLACE.pack(pair.first_entry) + _PLACE.pack(pair.sentence)


def again(number: int) -> bytes:
    """Make the record of a pair that was learnt again."""
    return _ID.pack(AGAIN, number)


def forgotten(number: int) -> bytes:
    """Make the record of a pair that is forgotten."""
    return _ID.pack(FORGOTTEN, number)


Record = Union[Header, Learnt, Again, Forgotten, Phrases, PhrasesOf]


def read(record: bytes, dimension: int) -> Record:
    """Read a record.

    Args:
        dimension: d, of tokens' keys; arrays share the record's memory.

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
        if kind == PHRASES_OF:
            return PhrasesOf(json.loads(record[1:]))
        if kind == PHRASES:
            _, number = _ID.unpack_from(record)
            return Phrases(number, PairPhrases.from_bytes(record, _ID.size))
        if kind in (LEARNT, MOVED, WITH_PHRASES, MOVED_WITH_PHRASES):
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
    if kind in (MOVED, MOVED_WITH_PHRASES):
        places = struct.unpack(f"<{1 if kind == MOVED else 2}q", record[end:])
        return Learnt(LearntPair(number, *texts, count, tokens, *places))
    after = end + tokens * (_VALUE.itemsize + dimension * _KEY.itemsize)
    if len(record) < after or (kind == LEARNT and len(record) > after):
        raise ValueError("its length is not that of its parts")
    values = np.frombuffer(record, _VALUE, tokens, end)
    keys = np.frombuffer(record, _KEY, tokens * dimension, end + values.nbytes).reshape(tokens, dimension)
    found = PairPhrases.from_bytes(record, after) if kind == WITH_PHRASES else None
    return Learnt(LearntPair(number, *texts, count, tokens), values, keys, found)
