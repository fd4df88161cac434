"""Text with the vectors of its sentences and fragments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.lab.mining.fragments import FragmentedText
from fairseq_ccpr.lab.mining.neighbours import SentenceKeys
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder
from fairseq_ccpr.timing import ENCODING, phase, progress_bar

DTYPE = np.float16
BLOCK_TEXTS = 2048  # texts encoded at a time
HALF = np.float32(0.5**0.5)  # of a vector of length 1 that is one of two halves


@dataclass
class EncodedText:
    """S sentences and F fragments with vectors fp16 of length 1."""

    text: FragmentedText
    sentences: np.ndarray  # [S, d]
    fragments: np.ndarray  # [F, d]

    def keys(self, sentence_half: bool = True) -> np.ndarray:
        """Make the keys of fragments: [fragment ; sentence] of length 1, fp16 [F, 2d]; or the fragment alone, [F, d].

        Inner products of the former are the mean of two cosines.
        """
        if not sentence_half:
            return self.fragments
        return np.concatenate([self.fragments * HALF, self.sentences[self.text.owners] * HALF], axis=1).astype(DTYPE)

    def every(self, stride: int) -> EncodedText:
        """Take of each sentence the fragments that begin `stride` words apart, and the last."""
        owners = self.text.owners
        places = np.arange(len(owners)) - np.searchsorted(owners, owners)
        last = np.append(owners[1:] != owners[:-1], True)[: len(owners)]
        rows = np.flatnonzero((places % (stride // self.text.stride) == 0) | last)
        chosen = FragmentedText(self.text.sentences, [self.text.fragments[row] for row in rows], owners[rows], stride)
        return EncodedText(chosen, self.sentences, self.fragments[rows])

    def lengths(self) -> np.ndarray:
        """Count the characters of each sentence, int64 [S]."""
        return np.array([len(sentence) for sentence in self.text.sentences], np.int64)

    def fragment_keys(self, sentence_half: bool = True) -> SentenceKeys:
        """Compare sentences by their fragments, see `keys`."""
        nothing = np.empty((0, self.fragments.shape[1]), DTYPE), np.empty(0, np.int64)
        return SentenceKeys(self.keys(sentence_half), self.text.owners, self.lengths(), *nothing)

    def sentence_keys(self) -> SentenceKeys:
        """Compare sentences as wholes, those that have words; their fragments are at hand."""
        owners = np.unique(self.text.owners)
        return SentenceKeys(self.sentences[owners], owners, self.lengths(), self.fragments, self.text.owners)

    def select(self, rows: np.ndarray) -> EncodedText:
        """Take the sentences of some rows, int64 [n], in that order."""
        bounds = np.searchsorted(self.text.owners, np.stack([rows, rows + 1]))
        fragment_rows = np.concatenate([np.arange(first, end) for first, end in bounds.T] or [np.empty(0, np.int64)])
        owners = np.repeat(np.arange(len(rows)), bounds[1] - bounds[0])
        chosen = FragmentedText(
            [self.text.sentences[row] for row in rows],
            [self.text.fragments[row] for row in fragment_rows],
            owners,
            self.text.stride,
        )
        return EncodedText(chosen, self.sentences[rows], self.fragments[fragment_rows])

    def join(self, other: EncodedText) -> EncodedText:
        """Append the sentences of another text to these; fragments of both are as far apart."""
        one, two = self.text, other.text
        owners = np.concatenate([one.owners, two.owners + len(one.sentences)])
        joined = FragmentedText([*one.sentences, *two.sentences], [*one.fragments, *two.fragments], owners, one.stride)
        vectors = zip((self.sentences, self.fragments), (other.sentences, other.fragments))
        return EncodedText(joined, *map(np.concatenate, vectors))


def encode(text: FragmentedText, encoder: SentenceEncoder, label: str, quiet: bool) -> EncodedText:
    """Encode all sentences and fragments; equal texts are encoded once."""
    with progress_bar(label, "text", total=len(text.sentences) + len(text.fragments), quiet=quiet) as bar:
        sentences, fragments = (
            encode_distinct(texts, encoder, bar.update) for texts in (text.sentences, text.fragments)
        )
    return EncodedText(text, sentences, fragments)


@phase(ENCODING)
def encode_distinct(
    texts: Sequence[str], encoder: SentenceEncoder, done: Callable[[int], object] = lambda count: None
) -> np.ndarray:
    """Encode texts, each distinct one once: fp16 [n, d], zeros for an empty one.

    Args:
        done: called with the number of newly encoded texts.
    """
    numbers: dict[str, int] = {}
    rows = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)
    # By length, since some encoders pad a block to its longest text.
    distinct = sorted(filter(None, numbers), key=len)
    vectors = np.zeros((len(numbers), encoder.dimension), DTYPE)
    for start in range(0, len(distinct), BLOCK_TEXTS):
        block = distinct[start : start + BLOCK_TEXTS]
        vectors[[numbers[text] for text in block]] = encoder.encode(block)
        done(len(block))
    done(len(texts) - len(distinct))
    return vectors[rows]
