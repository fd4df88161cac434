"""Tokenises target text as the decoder would emit it, cuts phrases out of it, and recovers source text."""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.pairs import one_line
from fairseq_ccpr.text.schemes import MOSES_UNIT, CharacterOrigins, Placed, Scheme, examples_of, scheme_of
from fairseq_ccpr.text.words import LETTER, MARK, SIGNS, kinds_of

MAX_UNKNOWN_PIECES = 0.1  # fraction of unknown pieces above which the subwords are not the model's
ENOUGH_PIECES = 1000  # before that fraction says anything: one line in another script may have a dozen
SIGN = '"'  # for any that words may stand after
# an unknown piece in recovered text, as SentencePiece writes it; no letter, so no word of a phrase
UNKNOWN_SIGN = "⁇"


@dataclass(frozen=True)
class Pieces:
    """The n subwords of a text, without markers: ids of the dictionary, and the characters each stands for.

    `starts` and `ends` [n] are characters of the text as it was given, end exclusive, and neither ever falls.
    A piece that stands for space alone is empty, at the start of what follows. One that was not found in the
    text, and all after it, end beyond the text, so that they are no part of a phrase.
    """

    ids: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def after_sign(text: str, start: int) -> bool:
    """Tell whether a sign stands right before text[start:], such as an opening quote or bracket."""
    return start > 0 and kinds_of(text[start - 1]) in SIGNS


class WordBorders(NamedTuple):
    """How the V symbols of a dictionary relate to the words next to them."""

    unfinished: np.ndarray  # bool [V], whether a word may continue after it
    going_on: np.ndarray  # bool [V], whether it continues an unfinished word


class DecoderSubwords:
    """The subwords of a translation model, made by fairseq's tokenizer and BPE.

    Args:
        tokenizer: of `task.build_tokenizer`, or None.
        bpe: of `task.build_bpe`: SentencePiece, subword-nmt or fastBPE; or None where the model knows words.
        dictionary: of the target language.
        tags: symbols that name a language, and are no text.
        model: digest of all that tokenizer and BPE were made from; None where it is not known.

    Attributes:
        pieces, unknown: how many pieces the sentences split so far have, and how many the dictionary does
            not.

    Raises:
        ConfigurationError: `bpe` is of another kind, or not of the kind that made the dictionary's symbols.
    """

    def __init__(
        self,
        tokenizer: Any,
        bpe: Any,
        dictionary: Dictionary,
        tags: Collection[str] = frozenset(),
        model: str | None = None,
    ) -> None:
        self.tokenizer, self.scheme = _for_target_text(tokenizer), scheme_of(bpe)
        self._source_tokenizer = tokenizer
        self.dictionary, self.tags, self.model = dictionary, frozenset(tags), model
        self.pieces = self.unknown = 0
        self._source_dictionary: Dictionary | None = None
        self.scheme.place("")  # which a kind of subwords that cannot be found in text refuses
        self.scheme.refuse_other(
            dictionary,
            f"the target text cannot be split into the model's subwords ({examples_of(dictionary)[:60]})",
        )

    @cached_property
    def borders(self) -> WordBorders:
        """Where words may begin: not between letters, unless a piece begins or ends its word there."""
        symbols, scheme = self.dictionary.symbols, self.scheme
        kinds = (
            kinds_of("".join(edge(symbol) or " " for symbol in symbols))
            for edge in (scheme.ends_with, scheme.begins_with)
        )
        found = WordBorders(*(np.array([kind in LETTER + MARK for kind in edge]) for edge in kinds))
        for markers in found:
            markers[: self.dictionary.nspecial] = False
        return found

    def split(self, text: str) -> Pieces:
        """Tokenise a sentence as fairseq does; refuse if too many of the pieces so far are unknown."""
        pieces = self.split_unchecked(text)
        self.pieces += len(pieces.ids)
        self.unknown += pieces.ids.count(self.dictionary.unk())
        self.check_known(self.pieces, self.unknown)
        return pieces

    def split_unchecked(self, text: str) -> Pieces:
        """Tokenise a sentence regardless of how many pieces are unknown, and count none."""
        index, unknown, first = self.dictionary.indices, self.dictionary.unk(), self.dictionary.nspecial
        placed = _placed(text, self.tokenizer, self.scheme.target)
        symbols, starts, ends = zip(*placed) if placed else ((), (), ())
        found = (index.get(symbol, unknown) for symbol in symbols)
        ids = tuple(number if number >= first else unknown for number in found)  # a word "</s>" is no marker
        return Pieces(ids, tuple(accumulate(starts, max)), tuple(accumulate(ends, max)))

    def written(self, words: str) -> list[int]:
        """Return the token ids with which the decoder writes words inside a sentence; none where it cannot."""
        return self.slice(self.split_unchecked(words), 0, len(words)) or []

    @staticmethod
    def check_known(pieces: int, unknown: int) -> None:
        if pieces >= ENOUGH_PIECES and unknown > MAX_UNKNOWN_PIECES * pieces:
            raise ConfigurationError(
                f"{unknown / pieces:.0%} of the pieces of retrieved sentences are not in the target "
                "dictionary: the subword model of --bpe does not match it; give the --sentencepiece-model "
                "or --bpe-codes, and the --tokenizer, of the model's training data"
            )

    def slice(self, pieces: Pieces, start: int, end: int) -> list[int] | None:
        """Return the token ids with which the decoder emits text[start:end], whole words, in its sentence.

        A piece that is only the space before a word is written with it. None where a piece at a border holds
        part of the adjacent text, or a piece is unknown or was not found in the text.
        """
        first, stop = bisect_left(pieces.starts, start), bisect_left(pieces.starts, end)
        if (
            first == stop
            or not start < pieces.ends[stop - 1] <= end
            or (first and pieces.ends[first - 1] > start)
        ):
            return None
        ids = list(pieces.ids[first:stop])
        return None if self.dictionary.unk() in ids else ids

    def growing(self) -> list[bool]:
        """Tell for each symbol whether it extends the word before it, where that could have ended.

        Only SentencePiece leaves open whether a word has ended; in scripts without spaces nothing grows.
        """
        return list((self.borders.going_on & self.scheme.marks_beginnings).tolist())

    def recover(self, source_dictionary: Dictionary, ids: Tensor) -> str:
        """Recover the text of a source sentence from its ids [L]; padding and markers are left out."""
        left_out = self._left_out(source_dictionary)
        known = [i for i in ids.tolist() if i not in left_out]
        text = source_dictionary.string(known, unk_string=UNKNOWN_SIGN)
        if source_dictionary is not self._source_dictionary:
            self.scheme.refuse_other(
                source_dictionary, f"the source text cannot be recovered from its subwords ({text[:60]})"
            )
            self._source_dictionary = source_dictionary
        text = self.scheme.decode(text)
        return self.tokenizer.decode(text) if self.tokenizer is not None else text

    def _left_out(self, source_dictionary: Dictionary) -> set[int]:
        tags = {source_dictionary.index(tag) for tag in self.tags if tag in source_dictionary}
        return {*tags, source_dictionary.pad()}

    def place_source(
        self, source_dictionary: Dictionary, ids: Sequence[int], text: str
    ) -> list[tuple[int, int, int]] | None:
        """Find what each subword of a source sentence [S] stands for in its text.

        Returns:
            Of each subword, padding and markers aside, its place among the ids, and the characters that it
            stands for, end exclusive; None where the text has other subwords.
        """
        left_out = {*self._left_out(source_dictionary), source_dictionary.bos(), source_dictionary.eos()}
        placed = _placed(text, self._source_tokenizer, self.scheme)
        places = [place for place, i in enumerate(ids) if i not in left_out]
        places = places[max(0, len(places) - len(placed)) :]  # without a tag that the scheme put in front
        if [ids[place] for place in places] != [source_dictionary.index(symbol) for symbol, _, _ in placed]:
            return None
        return [(place, start, end) for place, (_, start, end) in zip(places, placed)]


class SplitSentences(NamedTuple):
    """The subwords of n sentences, T together, sentence after sentence; see `Pieces`."""

    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int32 [T], characters of the sentence
    ends: np.ndarray  # int32 [T]
    bounds: np.ndarray  # int64 [n + 1], the first subword of each sentence, and at last T

    @classmethod
    def of(cls, pieces: Sequence[np.ndarray]) -> SplitSentences:
        """Join sentences, each as `as_rows` gives it."""
        joined = np.concatenate([np.empty((3, 0), np.int32), *pieces], axis=1)
        ids, starts, ends = joined
        return cls(ids, starts, ends, np.cumsum([0, *[one.shape[1] for one in pieces]]))


class Cuts(NamedTuple):
    """Where R phrases are among subwords."""

    first: np.ndarray  # int64 [R], the first subword
    lengths: np.ndarray  # int64 [R], in subwords; 0 where the decoder cannot write the phrase


def as_rows(pieces: Pieces) -> np.ndarray:
    """Return the subwords of a sentence as ids, starts and ends, int32 [3, n]."""
    return np.array([pieces.ids, pieces.starts, pieces.ends], np.int32).reshape(3, -1)


def cut_phrases(spans: np.ndarray, split: SplitSentences, unknown: int) -> Cuts:
    """Find the subwords of phrases, as `DecoderSubwords.slice`.

    Spans are int64 [R, 3]: which of the n sentences, start and end in characters.
    """
    sentences, start, end = spans.T.astype(np.int64)
    ids, starts, ends, bounds = split
    # Characters counted through all sentences: starts never fall within one.
    beyond = 1 + max(int(starts.max(initial=0)), int(end.max(initial=0)))
    counted = np.repeat(np.arange(len(bounds) - 1) * beyond, np.diff(bounds)) + starts
    first, stop = (np.searchsorted(counted, sentences * beyond + at) for at in (start, end))
    ends = np.append(ends, 0)  # so that [first - 1] is something where first is 0
    last, before = ends[stop - 1], ends[first - 1]
    unknowns = np.append((ids == unknown).nonzero()[0], len(ids))
    next_unknown = unknowns[np.searchsorted(unknowns, first)]
    whole = (first < stop) & (start < last) & (last <= end) & (next_unknown >= stop)
    whole &= (first == bounds[sentences]) | (before <= start)
    return Cuts(first, np.where(whole, stop - first, 0))


def _placed(text: str, tokenizer: Any, scheme: Scheme) -> list[Placed]:
    """Split a text, and find what each symbol stands for."""
    if tokenizer is None:
        return scheme.place(text)
    tokenised = tokenizer.encode(text)
    units = MOSES_UNIT.findall(tokenised) if isinstance(tokenizer, MosesTokenizer) else tokenised
    origins = CharacterOrigins.trace(units, text)
    return [(symbol, *origins.span(start, end)) for symbol, start, end in scheme.place(tokenised)]


def split_text(sentence: str, steps: tuple[Any, ...]) -> str:
    """Split a sentence into subwords with spaces between them; fairseq's tokenizer or BPE may be None."""
    sentence = one_line(sentence)
    for step in steps:
        sentence = step.encode(sentence) if step is not None else sentence
    return sentence


@contextmanager
def loading_subwords(words: list[str]) -> Iterator[None]:
    """Raise a ConfigurationError where a tokenizer or subword model cannot be loaded; some of them exit."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except (SystemExit, ImportError, RuntimeError, OSError, ValueError, LookupError, AssertionError) as error:
        empty = [word for word in words if Path(word).is_file() and not Path(word).stat().st_size]
        said = " ".join(printed.getvalue().split("rror: ")[-1].split()) or str(error)
        raise ConfigurationError(
            f"the tokenizer or the subwords cannot be loaded, '{' '.join(words)}': "
            + (f"{empty[0]} is empty" if empty else said)
        ) from None


def target_steps(tokenizer: Any, bpe: Any) -> tuple[Any, Any]:
    """Return what splits target text, of fairseq's steps for source text; either may be None."""
    return _for_target_text(tokenizer), scheme_of(bpe).target.bpe


def _for_target_text(tokenizer: Any) -> Any:
    """Swap the languages of fairseq's Moses, which encodes by the source's rules."""
    if not isinstance(tokenizer, MosesTokenizer):
        return tokenizer
    given = tokenizer.cfg
    swapped = MosesTokenizerConfig(
        source_lang=given.target_lang,
        target_lang=given.source_lang,
        moses_no_dash_splits=given.moses_no_dash_splits,
        moses_no_escape=given.moses_no_escape,
    )
    return type(tokenizer)(swapped)
