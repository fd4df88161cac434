"""Sentences and their fragments, sliding windows of words, with their vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fairseq_ccpr.lab.mining.neighbours import SentenceKeys, runs
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder
from fairseq_ccpr.text.words import CHARACTER, has_letters, kinds_of, word_spans
from fairseq_ccpr.timing import ENCODING, phase, progress_bar

WINDOW = 6  # words in a fragment
LETTERS, SIGNS = 4, 2  # characters of a word, in Thai, Lao, Burmese and Khmer, and in Chinese and Japanese
IDEOGRAPHS = 0x2E80  # where the latter begin
DTYPE = np.float16
BLOCK_TEXTS = 2048  # texts encoded at a time
HALF = np.float32(0.5**0.5)  # of a vector of length 1 that is one of two halves


def fragments(text: str, window: int = WINDOW, stride: int = 1) -> list[str]:
    """Cut a sentence into fragments: runs of `window` words, in lower case and without punctuation.

    Every `stride` words one begins, and the last is that of the last words. Words are those of `word_spans`;
    in scripts without spaces so many characters count as one as words have there, on average. A shorter
    sentence is one fragment; one without any word has none.

    >>> fragments("Press Ctrl+C, then wait.", 3)
    ['press ctrl+c then', 'ctrl+c then wait']
    >>> fragments("東京、タワー", 6), fragments("Wait!"), fragments("... !")
    (['東京 タワー'], ['wait'], [])
    >>> fragments("a b c d e", 2, 2)
    ['a b', 'c d', 'd e']
    """
    spans = _join_characters(
        text, [(start, end) for start, end in word_spans(text) if has_letters(text[start:end])]
    )
    if not spans:
        return []
    lowered = [text[start:end].lower() for start, end in spans]
    # Neighbouring characters of a script without spaces stay together.
    gaps = ["" if before[1] == after[0] else " " for before, after in itertools.pairwise(spans)]
    words = [*map("".join, zip(lowered, gaps)), lowered[-1]]
    last = max(0, len(words) - window)
    return ["".join(words[first : first + window]).rstrip() for first in (*range(0, last, stride), last)]


def _join_characters(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    room = 0  # characters that the last span may still take in
    for start, end in spans:
        unspaced = kinds_of(text[start]) == CHARACTER
        if unspaced and room and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
            room -= 1
        else:
            joined.append((start, end))
            room = (LETTERS if ord(text[start]) < IDEOGRAPHS else SIGNS) - 1 if unspaced else 0
    return joined


@dataclass
class FragmentedText:
    """S sentences and their F fragments."""

    sentences: list[str]
    fragments: list[str]
    owners: np.ndarray  # int64 [F], the sentence of each fragment; ascending
    stride: int = 1  # words from one fragment to the next


def fragment_text(sentences: Iterable[str], window: int = WINDOW, stride: int = 1) -> FragmentedText:
    """Cut sentences into fragments; those without any word remain as sentences."""
    texts = list(sentences)
    parts = [fragments(text, window, stride) for text in texts]
    owners = np.repeat(np.arange(len(texts)), np.array([len(part) for part in parts], np.int64))
    return FragmentedText(texts, [fragment for part in parts for fragment in part], owners, stride)


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
        return np.concatenate(
            [self.fragments * HALF, self.sentences[self.text.owners] * HALF], axis=1
        ).astype(DTYPE)

    def every(self, stride: int) -> EncodedText:
        """Take of each sentence the fragments that begin `stride` words apart, and the last."""
        owners = self.text.owners
        places = np.arange(len(owners)) - np.searchsorted(owners, owners)
        last = np.append(owners[1:] != owners[:-1], True)[: len(owners)]
        rows = np.flatnonzero((places % (stride // self.text.stride) == 0) | last)
        chosen = FragmentedText(
            self.text.sentences, [self.text.fragments[row] for row in rows], owners[rows], stride
        )
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
        starts, ends = np.searchsorted(self.text.owners, np.stack([rows, rows + 1]))
        fragment_rows, owners = runs(starts, ends - starts), np.repeat(np.arange(len(rows)), ends - starts)
        sentences, parts = (
            [self.text.sentences[row] for row in rows],
            [self.text.fragments[row] for row in fragment_rows],
        )
        chosen = FragmentedText(sentences, parts, owners, self.text.stride)
        return EncodedText(chosen, self.sentences[rows], self.fragments[fragment_rows])

    def join(self, other: EncodedText) -> EncodedText:
        """Append the sentences of another text to these; fragments of both are as far apart."""
        one, two = self.text, other.text
        owners = np.concatenate([one.owners, two.owners + len(one.sentences)])
        joined = FragmentedText(
            [*one.sentences, *two.sentences], [*one.fragments, *two.fragments], owners, one.stride
        )
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
    """Encode texts, each distinct one once: fp16 [n, d], zeros for an empty one."""
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


class RememberedVectors:
    """Encodes each text once, and keeps its vector in memory as fp16."""

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
