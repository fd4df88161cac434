"""An encoder that remembers, for tests that draw their sentences out of the same text."""

from __future__ import annotations

import numpy as np

from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder


class RememberedVectors:
    """Encodes each text once, and keeps its vector in memory as fp16.

    Args:
        encoder: of new texts.
    """

    def __init__(self, encoder: SentenceEncoder) -> None:
        self._encoder, self._known = encoder, dict[str, np.ndarray]()
        self.fingerprint, self.dimension = encoder.fingerprint, encoder.dimension

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encode n texts as vectors fp32 [n, d]."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            self._known.update(zip(new, self._encoder.encode(new).astype(np.float16)))
        rows = [self._known[text] for text in texts]
        return np.array(rows, np.float32).reshape(len(texts), self.dimension)
