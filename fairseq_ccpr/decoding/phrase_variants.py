"""Retrieved phrases as subword models cut them elsewhere: after a space, or after a sign such as an opening quote.

SentencePiece writes a word that follows a space with another piece than one that follows a quote or bracket. A phrase that
stands after a sign in its own sentence gets a variant for after a space; any other gets one for after a sign where its
source phrase stands after one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS
from fairseq_ccpr.text.decoder_subwords import SIGN, DecoderSubwords

PHRASES = 1 << 16  # whose variants are kept

Place = tuple[str, int, int]  # a sentence, start and end of a phrase in characters


class PhraseVariants:
    """Writes variants of phrases. Threads may share it.

    Args:
        subwords: of the translation model.
        reach: subwords that are given of what follows a phrase in its sentence.
    """

    def __init__(self, subwords: DecoderSubwords, reach: int) -> None:
        self.subwords, self.reach = subwords, reach
        self._write_once = lru_cache(PHRASES)(self._write)

    def needed(self, first: np.ndarray, after_sign: np.ndarray) -> np.ndarray:
        """Tell which of C phrases have a variant, bool [C].

        Args:
            first: int32 [C], their first token.
            after_sign: bool [C], whether their source phrase stands after a sign.
        """
        if not self.subwords.marks_beginnings:
            return np.zeros(len(first), bool)
        return self.subwords.borders.going_on[first] | after_sign

    def __call__(self, place: Place, own: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return the token ids of a phrase's variant, and of what follows it; nothing where it is no other.

        Args:
            place: where it is in its sentence.
            own: its token ids there.
        """
        ids, following = self._write_once(place, bool(self.subwords.borders.going_on[own[0]]))
        if tuple(ids) == own or len(ids) > MAX_SUBWORDS:
            return [], []
        return ids, following[: MAX_SUBWORDS - len(ids)]

    def _write(self, place: Place, after_sign: bool) -> tuple[list[int], list[int]]:
        """Write a phrase as after a space where it stands after a sign, or else the reverse."""
        text, start, end = place
        before = "" if after_sign else SIGN
        return self.subwords.written(before + text[start:], len(before), len(before) + end - start, self.reach)
