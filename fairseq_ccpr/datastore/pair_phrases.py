"""The phrases of a target sentence that was learnt, and what they belong to.

Letters: P phrases, o width of their keys.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.phrase import KEYS, PhraseDatastore

_SIZE = struct.Struct("<II")  # P and o
_SPAN, _KEY = np.dtype("<i4"), np.dtype("<f2")


@dataclass(frozen=True)
class PairPhrases:
    """The phrases of a sentence, in its order."""

    spans: np.ndarray  # int32 [P, 2]: start and end in characters
    keys: np.ndarray  # fp16 [P, o]

    def to_bytes(self) -> bytes:
        """Make bytes of them: P, o, spans, keys."""
        return _SIZE.pack(*self.keys.shape) + self.spans.astype(_SPAN).tobytes() + self.keys.astype(_KEY).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, start: int) -> PairPhrases:
        """Read what `to_bytes` made, from `start` up to the end; the arrays share the memory.

        Raises:
            ValueError: the bytes are not as many as they should be.
        """
        if len(data) < start + _SIZE.size:
            raise ValueError("its length is not that of its parts")
        size, width = _SIZE.unpack_from(data, start)
        start += _SIZE.size
        if len(data) != start + size * (2 * _SPAN.itemsize + width * _KEY.itemsize):
            raise ValueError("its length is not that of its parts")
        spans = np.frombuffer(data, _SPAN, 2 * size, start).reshape(size, 2)
        keys = np.frombuffer(data, _KEY, size * width, start + spans.nbytes).reshape(size, width)
        return cls(spans, keys)


def why_not_learnt(directory: Path, phrases: PhraseDatastore) -> str:
    """Say why phrases are not learnt together with the tokens of a datastore; nothing where they are.

    Args:
        directory: of the token part.
        phrases: the phrase part that decoding uses.
    """
    section = phrases.section
    if directory.resolve() != phrases.directory.resolve():
        return f"they are in {phrases.directory}, and what is learnt is kept with the tokens, in {directory}"
    if section.pooled:
        return "they are one entry a string, the mean over its places in one text (XPR)"
    if section.store is not None:
        return f"their keys are in {section.store}, and only those in a folder can grow"
    return ""


def identity_of_phrases(section: PhraseSection | None) -> dict[str, Any]:
    """Describe what learnt phrases belong to, by name; empty without a phrase part."""
    if section is None:
        return {}
    return {
        "phrase encoder": section.fingerprints["encoder"],
        "segmentation of phrases": section.segmentation,
        "lexicon of phrases": section.fingerprints.get("lexicon"),
        "set of phrases": section.digest(f"{KEYS}.npy"),
    }
