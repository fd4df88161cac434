"""Tokenises target text as the decoder would emit it, and recovers source text from its subwords."""

from __future__ import annotations

import io
import re
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
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.pairs import one_line
from fairseq_ccpr.text.sentencepiece import for_target
from fairseq_ccpr.text.tokenizers import BLANK, piece_spans
from fairseq_ccpr.text.words import LETTER, MARK, SIGNS, SPACE, kinds_of

MAX_UNKNOWN = 0.1  # fraction of unknown pieces above which the subwords are not the model's
ENOUGH_PIECES = 1000  # before that fraction says anything: one line in another script may have a dozen
# fraction of a dictionary that its own SentencePiece model has; the rest are rare characters
ENOUGH_KNOWN = 0.5
# Fraction of a dictionary's symbols that may be before the one above; in a shuffled one, half of them are.
IN_ORDER = 0.2
RARE = 0.001  # fraction of a dictionary's symbols below which a mark in them is chance
SIGN = '"'  # for any that words may stand after
SEPARATOR = "@@"  # how subword-nmt and fastBPE mark a piece inside a word
# an unknown piece in recovered text, as SentencePiece writes it; no letter, so no word of a phrase
UNKNOWN = "⁇"
# What Moses writes for a character, and for a hyphen within a word.
MOSES = {
    "&apos;": "'", "&quot;": '"', "&amp;": "&", "&#124;": "|", "&lt;": "<", "&gt;": ">", "&#91;": "[", "&#93;": "]",
    "@-@": "-",
}  # fmt: skip
_MOSES_UNIT = re.compile("|".join([*map(re.escape, MOSES), "."]), re.DOTALL)
# By the mark that a dictionary's symbols bear: what they are.
_KINDS_OF_SYMBOLS = {
    BLANK: "pieces of SentencePiece, so give --bpe sentencepiece and --sentencepiece-model",
    SEPARATOR: "pieces of BPE, so give --bpe subword_nmt (or fastbpe) and --bpe-codes, and --tokenizer if the text was "
    "tokenised before",
    "": "whole words, so leave out --bpe",
}


Placed = tuple[str, int, int]  # a symbol, and the characters of the text that it stands for, end exclusive


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
        self.model = model
        self.tokenizer, self.bpe, self.dictionary = _for_target_text(tokenizer), bpe, dictionary
        self.tags = frozenset(tags)
        self.mark = _mark_of_bpe(bpe)
        self.pieces = self.unknown = 0
        self._source_dictionary: Dictionary | None = None
        self._check_mark(
            dictionary, "the target text cannot be split into the model's subwords", _examples(dictionary)
        )

    @property
    def marks_beginnings(self) -> bool:
        """Whether the first piece of a word tells that a space is before it, and is another elsewhere."""
        return self.mark == BLANK

    @cached_property
    def borders(self) -> WordBorders:
        """Where words may begin: not between letters, unless a piece says that its word begins or ends there."""
        symbols = self.dictionary.symbols
        if not self.mark:
            return WordBorders(*np.zeros((2, len(symbols)), bool))
        in_words = LETTER + MARK
        mark = "" if self.mark == BLANK else self.mark  # whose pieces leave open how their words end
        ends = kinds_of("".join(s.removesuffix(mark)[-1:] * s.endswith(mark) or " " for s in symbols))
        begins = kinds_of("".join(s[:1] or " " for s in symbols))
        found = WordBorders(*(np.array([kind in in_words for kind in kinds]) for kinds in (ends, begins)))
        for markers in found:
            markers[: self.dictionary.nspecial] = False
        return found

    def split(self, text: str) -> Pieces:
        """Tokenise a sentence as fairseq does; refuse where more than `MAX_UNKNOWN` of the pieces so far are unknown."""
        pieces = self.split_unchecked(text)
        self.pieces += len(pieces.ids)
        self.unknown += pieces.ids.count(self.dictionary.unk())
        self.check_known(self.pieces, self.unknown)
        return pieces

    def split_unchecked(self, text: str) -> Pieces:
        """Do the same regardless of how many pieces are unknown, and count none."""
        index, unknown, first = self.dictionary.indices, self.dictionary.unk(), self.dictionary.nspecial
        placed = self._place(text)
        symbols, starts, ends = zip(*placed) if placed else ((), (), ())
        found = (index.get(symbol, unknown) for symbol in symbols)
        ids = tuple(number if number >= first else unknown for number in found)  # a word "</s>" is no marker
        return Pieces(ids, tuple(accumulate(starts, max)), tuple(accumulate(ends, max)))

    @staticmethod
    def check_known(pieces: int, unknown: int) -> None:
        """Refuse subwords of which the dictionary lacks too many."""
        if pieces >= ENOUGH_PIECES and unknown > MAX_UNKNOWN * pieces:
            raise ConfigurationError(
                f"{unknown / pieces:.0%} of the pieces of retrieved sentences are not in the target dictionary: "
                "the subword model of --bpe does not match it; give the --sentencepiece-model or --bpe-codes, and the "
                "--tokenizer, of the model's training data"
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
        """Tell for each symbol of the dictionary whether it extends the word before it, where that could have ended.

        Only SentencePiece leaves open whether a word has ended; in scripts without spaces nothing grows.
        """
        return list((self.borders.going_on & self.marks_beginnings).tolist())

    def recover(self, source_dictionary: Dictionary, ids: Tensor) -> str:
        """Recover the text of a source sentence from its ids [L]; padding and markers are left out."""
        left_out = {source_dictionary.index(tag) for tag in self.tags if tag in source_dictionary}
        left_out.add(source_dictionary.pad())
        known = [i for i in ids.tolist() if i not in left_out]
        text = source_dictionary.string(known, unk_string=UNKNOWN)
        if source_dictionary is not self._source_dictionary:
            self._check_mark(source_dictionary, "the source text cannot be recovered from its subwords", text)
            self._source_dictionary = source_dictionary
        text = self.bpe.decode(text) if self.bpe is not None else text
        return self.tokenizer.decode(text) if self.tokenizer is not None else text

    def _place(self, text: str) -> list[Placed]:
        if self.tokenizer is None:
            return self._place_pieces(text)
        tokenised = self.tokenizer.encode(text)
        units = _MOSES_UNIT.findall(tokenised) if isinstance(self.tokenizer, MosesTokenizer) else tokenised
        origins = _Origins.trace(units, text)
        return [(symbol, *origins.span(start, end)) for symbol, start, end in self._place_pieces(tokenised)]

    def _place_pieces(self, text: str) -> list[Placed]:
        bpe = for_target(self.bpe)
        if self.mark == BLANK:
            pieces = piece_spans(bpe.sp, text)
            return [(symbol, start, end) for piece, start, end in pieces for symbol in piece.split()]
        symbols = (text if bpe is None else bpe.encode(text)).split()
        if self.mark and self.mark in text:  # which pieces continue is ambiguous
            return [(symbol, 0, len(text) + 1) for symbol in symbols]
        surfaces = [symbol.removesuffix(self.mark) for symbol in symbols]
        origins = _Origins.trace("".join(surfaces), text)
        ends = [*accumulate(map(len, surfaces))]
        return [(symbol, *origins.span(end - len(s), end)) for symbol, s, end in zip(symbols, surfaces, ends)]

    def _check_mark(self, dictionary: Dictionary, trouble: str, example: str) -> None:
        found = _mark_of_dictionary(dictionary)
        if found != self.mark and (found or self.mark == BLANK):
            raise ConfigurationError(f"{trouble} ({example[:60]}): they are {_KINDS_OF_SYMBOLS[found]}")


@dataclass(frozen=True)
class _Origins:
    """For each of n characters, the characters of another text that it was made from; and one entry for what lies beyond."""

    starts: list[int]
    ends: list[int]

    @classmethod
    def trace(cls, units: Sequence[str], text: str) -> _Origins:
        """Walk along the text with characters made from it, and what Moses writes for one, spaces aside.

        Where one is not found next, the walk ends: it and all after it stand for the rest of the text and
        what lies beyond.

        >>> _Origins.trace(["a", " ", "&amp;", " ", "b"], "a&b").starts
        [0, 1, 1, 1, 1, 1, 1, 2, 2, 3]
        """
        starts: list[int] = []
        ends: list[int] = []
        at = 0
        for unit in units:
            if unit.isspace():
                starts.append(at)
                ends.append(at)
                continue
            character = MOSES.get(unit, unit)
            while at < len(text) and text[at] != character and kinds_of(text[at]) == SPACE:
                at += 1
            if not text.startswith(character, at):
                break
            starts += [at] * len(unit)
            ends += [at + len(character)] * len(unit)
            at += len(character)
        rest = sum(map(len, units)) - len(starts)
        return cls([*starts, *[at] * rest, len(text)], [*ends, *[len(text) + 1] * (rest + 1)])

    def span(self, start: int, end: int) -> tuple[int, int]:
        return self.starts[start], self.ends[end - 1] if end > start else self.starts[start]


def split_text(sentence: str, steps: tuple[Any, ...]) -> str:
    """Split a sentence into subwords with spaces between them; fairseq's tokenizer or BPE may be None."""
    sentence = one_line(sentence)
    for step in steps:
        sentence = step.encode(sentence) if step is not None else sentence
    return sentence


@contextmanager
def loading_subwords(words: list[str]) -> Iterator[None]:
    """Raise a ConfigurationError where options name a tokenizer or a subword model that cannot be loaded; some exit then."""
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


def check_subwords(dictionary: Dictionary, bpe: Any, post_process: str | None = None) -> None:
    """Refuse a subword model or `--remove-bpe` that does not turn a dictionary's symbols into text."""
    found = _mark_of_dictionary(dictionary)
    if bpe is None:
        if found and (post_process is None or (found == BLANK) != (post_process == "sentencepiece")):
            raise ConfigurationError(
                f"the text of the model is in subwords ({_examples(dictionary)}): they are {_KINDS_OF_SYMBOLS[found]}"
            )
        return
    given = BLANK if isinstance(bpe, SentencepieceBPE) else getattr(bpe, "bpe_symbol", found).strip()
    if found != given and (found or given == BLANK):
        raise ConfigurationError(
            f"the subwords of the model ({_examples(dictionary)}) are not those of --bpe: they are "
            f"{_KINDS_OF_SYMBOLS[found]}"
        )
    if isinstance(bpe, SentencepieceBPE):
        models = (bpe.sp, for_target(bpe).sp)
        pieces = {piece for sp in models for piece in sp.id_to_piece(list(range(len(sp))))}
        symbols = dictionary.symbols[dictionary.nspecial :]
        known = sum(symbol in pieces for symbol in symbols) / max(1, len(symbols))
        if known < ENOUGH_KNOWN:
            raise ConfigurationError(
                f"only {known:.0%} of the model's dictionary is in the SentencePiece model, which was made for another: give "
                "the model's own with --sentencepiece-model"
            )


def looks_shuffled(dictionary: Dictionary, bpe: Any) -> bool:
    """Tell whether the symbols are in neither order that dictionaries have: by falling counts, or SentencePiece's."""
    counts = np.array(dictionary.count[dictionary.nspecial :])
    orders = [-counts] if len(set(counts.tolist())) > 1 else []
    if isinstance(bpe, SentencepieceBPE) and for_target(bpe) is bpe:
        ids = np.array(bpe.sp.piece_to_id(dictionary.symbols[dictionary.nspecial :]))
        orders.append(ids[ids != bpe.sp.unk_id()])
    return min((float((np.diff(one) < 0).mean()) for one in orders if len(one) > 1), default=0.0) > IN_ORDER


def _for_target_text(tokenizer: Any) -> Any:
    """Swap the languages of fairseq's Moses, which encodes by the rules of the source and decodes by the target's."""
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


def _mark_of_bpe(bpe: Any) -> str:
    if bpe is None:
        return ""
    if isinstance(bpe, SentencepieceBPE):
        return BLANK
    if not hasattr(bpe, "bpe_symbol"):
        raise ConfigurationError(
            f"phrases cannot be joined with the subwords of {type(bpe).__name__}: the model needs to have --bpe "
            "sentencepiece, subword_nmt or fastbpe, or none"
        )
    return bpe.bpe_symbol.strip()


def _mark_of_dictionary(dictionary: Dictionary) -> str:
    symbols = dictionary.symbols[dictionary.nspecial :]
    counts = {mark: sum(mark in symbol for symbol in symbols) for mark in (BLANK, SEPARATOR)}
    mark = max(counts, key=counts.__getitem__)
    return mark if counts[mark] > RARE * len(symbols) else ""


def _examples(dictionary: Dictionary) -> str:
    return " ".join(dictionary.symbols[dictionary.nspecial :][:5])
