"""Entries of a phrase datastore as the decoder writes them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN
from fairseq_ccpr.text.decoder_subwords import DecoderSubwords


class Written(NamedTuple):
    """R phrases in the decoder's subwords."""

    tokens: np.ndarray  # int32 [R, L], NO_TOKEN after a phrase's end
    lengths: np.ndarray  # int64 [R]
    hashes: np.ndarray  # int64 [R], of the tokens; 0 where there are none, since the decoder cannot write the phrase


class WrittenPhrases:
    """Cuts entries out of their own sentences' subwords, each when it is first asked for, and remembers them.

    A phrase cannot be written where its border falls inside a subword, or where it is longer than MAX_SUBWORDS. Memory grows
    with the entries that were asked for, some 50 bytes each.

    Args:
        datastore: whose entries they are.
        subwords: of the translation model.
    """

    def __init__(self, datastore: PhraseDatastore, subwords: DecoderSubwords) -> None:
        self.datastore, self.subwords = datastore, subwords
        self._entries = np.empty(0, np.int64)  # those known, in order
        self._rows = np.empty(0, np.int64)  # of each, in what follows
        self._hashes = array("q")
        self._tokens = array("i", [NO_TOKEN])  # of all rows, one after another
        self._bounds = array("q", [1])  # where the tokens of each row begin, and at last where those of the last end

    def __call__(self, entries: np.ndarray) -> Written:
        """The phrases of entries, int64 [R].

        Raises:
            ConfigurationError: see `DecoderSubwords.split`.
        """
        wanted, which = np.unique(entries, return_inverse=True)
        places = np.searchsorted(self._entries, wanted)
        known = np.append(self._entries, -1)[places] == wanted
        if not known.all():
            self._add(wanted[~known])
        rows = self._rows[np.searchsorted(self._entries, wanted)[which]]
        bounds = np.frombuffer(self._bounds, np.int64)
        lengths = bounds[rows + 1] - bounds[rows]
        places = np.arange(int(lengths.max(initial=1)))
        at = (bounds[rows][:, None] + places) * (places < lengths[:, None])  # 0 after the end
        hashes = np.frombuffer(self._hashes, np.int64)[rows] if len(rows) else np.empty(0, np.int64)
        return Written(np.frombuffer(self._tokens, np.int32)[at], lengths, hashes)

    def _add(self, entries: np.ndarray) -> None:
        """Write entries that are not known, int64 [n] in order."""
        first = len(self._hashes)
        for number, start, end in self.datastore.spans[entries].tolist():
            ids = self.subwords.slice(self.subwords.split(self.datastore.sentence(number)), start, end) or []
            tokens = tuple(ids) if len(ids) <= MAX_SUBWORDS else ()
            self._hashes.append(hash(tokens) if tokens else 0)
            self._tokens.extend(tokens)
            self._bounds.append(len(self._tokens))
        known, rows = np.concatenate([self._entries, entries]), np.arange(first, len(self._hashes))
        order = known.argsort(kind="stable")
        self._entries, self._rows = known[order], np.concatenate([self._rows, rows])[order]
