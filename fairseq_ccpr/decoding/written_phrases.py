"""Entries of a phrase datastore as the decoder writes them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN
from fairseq_ccpr.phrases.decoder_subwords import DecoderSubwords


class Written(NamedTuple):
    """R phrases in the decoder's subwords."""

    tokens: np.ndarray  # int32 [R, L], NO_TOKEN after a phrase's end
    lengths: np.ndarray  # int64 [R]; 0 for what the decoder cannot write
    numbers: np.ndarray  # int32 [R], equal for equal tokens


class WrittenPhrases:
    """Cuts entries out of their own sentences' subwords, each when it is first asked for, and remembers them.

    A phrase cannot be written where its border falls inside a subword, or where it is longer than MAX_SUBWORDS.

    Args:
        datastore: whose entries they are.
        subwords: of the translation model.
    """

    def __init__(self, datastore: PhraseDatastore, subwords: DecoderSubwords) -> None:
        self.datastore, self.subwords = datastore, subwords
        self._rows = np.zeros(len(datastore.spans), np.int32)  # of each entry, in what follows; the first is nobody's
        self._numbers = array("i", [0])
        self._tokens = array("i", [NO_TOKEN])  # of all rows, one after another
        self._bounds = array("q", [1, 1])  # where the tokens of each row begin, and at last where those of the last end
        self._known: dict[tuple[int, ...], int] = {(): 0}

    def __call__(self, entries: np.ndarray) -> Written:
        """The phrases of entries, int64 [R].

        Raises:
            ConfigurationError: see `DecoderSubwords.split`.
        """
        self._add(np.unique(entries[self._rows[entries] == 0]))
        rows = self._rows[entries]
        begins = np.frombuffer(self._bounds, np.int64)
        lengths = begins[rows + 1] - begins[rows]
        places = np.arange(int(lengths.max(initial=1)))
        at = (begins[rows][:, None] + places) * (places < lengths[:, None])  # 0 after the end
        return Written(np.frombuffer(self._tokens, np.int32)[at], lengths, np.frombuffer(self._numbers, np.int32)[rows])

    def _add(self, entries: np.ndarray) -> None:
        for entry, (number, start, end) in zip(entries.tolist(), self.datastore.spans[entries].tolist()):
            ids = self.subwords.slice(self.subwords.split(self.datastore.sentence(number)), start, end) or []
            tokens = tuple(ids) if len(ids) <= MAX_SUBWORDS else ()
            self._rows[entry] = len(self._numbers)
            self._numbers.append(self._known.setdefault(tokens, len(self._known)))
            self._tokens.extend(tokens)
            self._bounds.append(len(self._tokens))
