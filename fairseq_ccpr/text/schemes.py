"""Subword schemes: how fairseq's kinds of `--bpe` write text as a dictionary's symbols, and join them.

One more is a class here and a line in `SUBWORD_SCHEMES`; its options are fairseq's own.
"""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Optional

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.encoders import register_bpe
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.text.sentencepiece import BLANK, piece_spans
from fairseq_ccpr.text.words import SPACE, kinds_of

SENTENCEPIECE_PAIR = "sentencepiece_pair"
# of fairseq's other kinds
OTHER_FILE_OPTIONS = ("bpe_vocab", "bpe_merges", "gpt2_encoder_json", "gpt2_vocab_bpe")
ENOUGH_KNOWN = (
    0.5  # fraction of a dictionary that its own SentencePiece model has; the rest are rare characters
)
# Fraction of a dictionary's symbols that may be before the one above; in a shuffled one, half of them are.
IN_ORDER = 0.2
RARE = 0.001  # fraction of a dictionary's symbols below which a mark in them is chance
# what names the target language, in front of a source sentence
_SOURCE_TAG = re.compile(r"\s*(>>[\w-]+<<)\s*")

# What Moses writes for a character, and for a hyphen within a word.
MOSES = {
    "&apos;": "'", "&quot;": '"', "&amp;": "&", "&#124;": "|", "&lt;": "<", "&gt;": ">", "&#91;": "[", "&#93;": "]",
    "@-@": "-",
}  # fmt: skip
MOSES_UNIT = re.compile("|".join([*map(re.escape, MOSES), "."]), re.DOTALL)

Placed = tuple[str, int, int]  # a symbol, and the characters of the text that it stands for, end exclusive


@dataclass(frozen=True)
class CharacterOrigins:
    """For each of n characters, those of another text it was made from; and an entry for what is beyond."""

    starts: list[int]
    ends: list[int]

    @classmethod
    def trace(cls, units: Sequence[str], text: str) -> "CharacterOrigins":
        """Walk along the text with characters made from it, and what Moses writes for one, spaces aside.

        Where one is not found next, the walk ends: it and all after it stand for the rest of the text and
        what lies beyond.

        >>> CharacterOrigins.trace(["a", " ", "&amp;", " ", "b"], "a&b").starts
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


class Scheme:
    """A kind of subwords; this one is any without a class here, whose pieces are not found in text.

    Attributes:
        bpe: fairseq's own, which splits and joins.
        mark: what its symbols bear; None where that is not known.
        made_of: what a dictionary of its symbols has, and the options to give for it.
        marks_beginnings: whether the first piece of a word tells that a space is before it, and is another
            elsewhere.
        file_options: fairseq's options that name its files.
        filenames: what its file is called next to a checkpoint.
    """

    mark: str | None = None
    made_of = ""
    marks_beginnings = False
    file_options: tuple[str, ...] = ()
    filenames: tuple[str, ...] = ()

    def __init__(self, bpe: Any) -> None:
        self.bpe = bpe

    @classmethod
    def takes(cls, bpe: Any) -> bool:
        """Tell whether an object of fairseq is of this kind."""
        return False

    @classmethod
    def count(cls, symbols: Sequence[str]) -> int:
        """Count the symbols that bear its mark."""
        return sum(cls.mark in symbol for symbol in symbols) if cls.mark else 0

    @classmethod
    def options_of(cls, file: Path, tokenizer: str | None) -> dict[str, str]:
        """Return fairseq's options for a file that lies next to a checkpoint."""
        raise NotImplementedError

    @classmethod
    def exchanged(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a model of the opposite direction."""
        return dict(options)

    @property
    def target(self) -> "Scheme":
        """The scheme of the target language, where it has a model of its own."""
        return self

    def encode(self, text: str) -> str:
        return str(self.bpe.encode(text))

    def decode(self, symbols: str) -> str:
        return str(self.bpe.decode(symbols))

    def untagged(self, text: str) -> str:
        """Return a source text without the tag that the model takes in front of it."""
        return text

    def place(self, text: str) -> list[Placed]:
        """Split a text, and find what each symbol stands for."""
        known = [name for name, kind in SUBWORD_SCHEMES.items() if name and name != SENTENCEPIECE_PAIR]
        raise ConfigurationError(
            f"phrases cannot be joined with the subwords of {type(self.bpe).__name__}: the model needs to "
            f"have --bpe {', '.join(known[:-1])} or {known[-1]}, or none"
        )

    def as_given(self, text: str, symbols: list[str], first: int, last: int) -> str:
        """Write symbols[first : last + 1] of a text with the characters that were given."""
        return " ".join(symbols[first : last + 1])

    def text_of(self, symbol: str) -> str:
        """Return the text of a symbol, which may have a mark."""
        return symbol

    def begins_with(self, symbol: str) -> str:
        """Return a symbol's first character, which may continue a word; nothing where none does."""
        return self.text_of(symbol)[:1]

    def ends_with(self, symbol: str) -> str:
        """Return the last character of a symbol after which its word may go on; nothing where it may not."""
        return self.text_of(symbol)[-1:]

    def order(self, symbols: list[str]) -> np.ndarray:
        """Return what rises in a dictionary of the model's own pieces, [at most V]; empty if nothing does."""
        return np.empty(0)

    def refuse_other(self, dictionary: Dictionary, trouble: str) -> None:
        """Refuse a dictionary whose symbols are of another scheme."""
        found = scheme_of_symbols(dictionary)
        if self.mark not in (None, found.mark) and (found.mark or self.marks_beginnings):
            raise ConfigurationError(f"{trouble}: they are {found.made_of}")

    def refuse_foreign(self, dictionary: Dictionary) -> None:
        """Refuse a dictionary of the same scheme, but of another model, where that can be told."""


@dataclass
class SentencepiecePairConfig(SentencepieceConfig):
    """Options of `--bpe sentencepiece_pair`."""

    sentencepiece_model: str = field(
        default="???", metadata={"help": "SentencePiece model of the source language"}
    )
    sentencepiece_target_model: str = field(
        default="???", metadata={"help": "SentencePiece model of the target language"}
    )
    source_tag: Optional[str] = field(
        default=None,
        metadata={"help": "what the model wants in front of every source sentence, such as >>deu<<"},
    )


@register_bpe(SENTENCEPIECE_PAIR, dataclass=SentencepiecePairConfig)
class SentencepiecePair(SentencepieceBPE):
    """Split source text; `target` splits target text.

    A sentence that begins with a tag such as >>deu<< keeps it as one subword; any other gets that of
    `--source-tag`. Joining leaves tags out.
    """

    def __init__(self, cfg: SentencepiecePairConfig) -> None:
        super().__init__(cfg)
        self.tag = cfg.source_tag or ""
        self.target = SentencepieceBPE(
            SentencepieceConfig(
                sentencepiece_model=cfg.sentencepiece_target_model,
                sentencepiece_enable_sampling=cfg.sentencepiece_enable_sampling,
                sentencepiece_alpha=cfg.sentencepiece_alpha,
            )
        )

    def encode(self, x: str) -> str:
        """Split a source sentence into pieces, with its tag in front; nothing stays nothing."""
        tag, text = self.without_tag(x)
        pieces = super().encode(text)
        return " ".join(filter(None, (tag or self.tag, pieces))) if pieces else ""

    def decode(self, x: str) -> str:
        return str(super().decode(self.without_tag(x)[1]))

    @staticmethod
    def without_tag(text: str) -> tuple[str, str]:
        """Divide a text into its tag, if any, and what follows."""
        found = _SOURCE_TAG.match(text)
        return (found[1], text[found.end() :]) if found else ("", text)


class SentencePiece(Scheme):
    """Pieces of SentencePiece, of which the first of a word has a blank, and which normalise characters."""

    mark: str = BLANK
    made_of = "pieces of SentencePiece, so give --bpe sentencepiece and --sentencepiece-model"
    marks_beginnings = True
    file_options: tuple[str, ...] = ("sentencepiece_model",)
    filenames: tuple[str, ...] = ("spm.model", "sentencepiece.model", "sentencepiece.bpe.model")

    @classmethod
    def takes(cls, bpe: Any) -> bool:
        return isinstance(bpe, SentencepieceBPE)

    @classmethod
    def options_of(cls, file: Path, tokenizer: str | None = None) -> dict[str, str]:
        return {"bpe": "sentencepiece", "sentencepiece_model": str(file)}

    def place(self, text: str) -> list[Placed]:
        pieces = piece_spans(self.bpe.sp, text)
        return [(symbol, start, end) for piece, start, end in pieces for symbol in piece.split()]

    def as_given(self, text: str, symbols: list[str], first: int, last: int) -> str:
        """Write … where three dots were read; symbols where a character has other pieces, too."""
        pieces = self.place(text)
        ahead = len(symbols) - len(pieces)  # a tag
        before, after = pieces[: max(0, first - ahead)], pieces[last - ahead + 1 :]
        start, end = (pieces[first - ahead][1], pieces[last - ahead][2]) if first >= ahead else (0, 0)
        # ½ is three pieces, of which one may be unknown.
        if start < end and not (before and before[-1][2] > start) and not (after and after[0][1] < end):
            return BLANK * symbols[first].startswith(BLANK) + text[start:end].replace(" ", BLANK)
        return super().as_given(text, symbols, first, last)

    def order(self, symbols: list[str]) -> np.ndarray:
        ids = np.array(self.bpe.sp.piece_to_id(symbols))
        return ids[ids != self.bpe.sp.unk_id()]

    def refuse_foreign(self, dictionary: Dictionary) -> None:
        models = (self.bpe.sp, self.target.bpe.sp)
        pieces = {piece for sp in models for piece in sp.id_to_piece(list(range(len(sp))))}
        symbols = symbols_of(dictionary)
        known = sum(symbol in pieces for symbol in symbols) / max(1, len(symbols))
        if known < ENOUGH_KNOWN:
            raise ConfigurationError(
                f"only {known:.0%} of the model's dictionary is in the SentencePiece model, which was made "
                "for another: give the model's own with --sentencepiece-model"
            )


class PairOfSentencePiece(SentencePiece):
    """The same with a model for each language; source sentences may begin with a tag."""

    file_options: tuple[str, ...] = ("sentencepiece_model", "sentencepiece_target_model")
    filenames: tuple[str, ...] = ()

    @classmethod
    def takes(cls, bpe: Any) -> bool:
        return isinstance(bpe, SentencepiecePair)

    @classmethod
    def exchanged(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        ours, theirs = cls.file_options
        others = {
            name: value for name, value in options.items() if name != "source_tag"
        }  # of the target language
        return others | {ours: options[theirs], theirs: options[ours]}

    @property
    def target(self) -> Scheme:
        return SentencePiece(self.bpe.target)

    def untagged(self, text: str) -> str:
        return str(self.bpe.without_tag(text)[1])

    def order(self, symbols: list[str]) -> np.ndarray:
        return np.empty(0)


class Separated(Scheme):
    """BPE as subword-nmt and fastBPE write it, with a mark at a piece that does not end its word."""

    mark: str = "@@"
    made_of = (
        "pieces of BPE, so give --bpe subword_nmt (or fastbpe) and --bpe-codes, and "
        "--tokenizer if the text was tokenised before"
    )
    file_options: tuple[str, ...] = ("bpe_codes",)
    filenames: tuple[str, ...] = ("bpecodes", "bpe.codes", "bpe-codes", "codes", "code")

    def __init__(self, bpe: Any) -> None:
        super().__init__(bpe)
        self.mark = bpe.bpe_symbol.strip()

    @classmethod
    def takes(cls, bpe: Any) -> bool:
        return hasattr(bpe, "bpe_symbol")

    @classmethod
    def options_of(cls, file: Path, tokenizer: str | None) -> dict[str, str]:
        if tokenizer is None:
            raise ConfigurationError(
                f"{file} does not say whether its text was tokenised before: give --tokenizer moses, as for "
                "most BPE models, or --tokenizer space if it was not"
            )
        with file.open(encoding="utf-8") as stream:
            kind = "subword_nmt" if stream.readline().startswith("#version") else "fastbpe"
        return {"bpe": kind, "bpe_codes": str(file)}

    def place(self, text: str) -> list[Placed]:
        symbols = self.encode(text).split()
        if self.mark and self.mark in text:  # which pieces continue is ambiguous
            return [(symbol, 0, len(text) + 1) for symbol in symbols]
        surfaces = [symbol.removesuffix(self.mark) for symbol in symbols]
        origins = CharacterOrigins.trace("".join(surfaces), text)
        ends = [*accumulate(map(len, surfaces))]
        return [(symbol, *origins.span(end - len(s), end)) for symbol, s, end in zip(symbols, surfaces, ends)]

    def ends_with(self, symbol: str) -> str:
        return symbol.removesuffix(self.mark)[-1:] if symbol.endswith(self.mark) else ""


class Words(Separated):
    """Whole words, where there is no `--bpe`."""

    mark = ""
    made_of = "whole words, so leave out --bpe"
    file_options: tuple[str, ...] = ()
    filenames: tuple[str, ...] = ()

    def __init__(self, bpe: Any = None) -> None:
        self.bpe = bpe

    @classmethod
    def takes(cls, bpe: Any) -> bool:
        return bpe is None

    def encode(self, text: str) -> str:
        return text

    def decode(self, symbols: str) -> str:
        return symbols

    def begins_with(self, symbol: str) -> str:
        return ""

    def ends_with(self, symbol: str) -> str:
        return ""


# By the name of fairseq's `--bpe`; of several that take an object, the last one counts.
SUBWORD_SCHEMES: dict[str, type[Scheme]] = {
    "": Words,
    "sentencepiece": SentencePiece,
    SENTENCEPIECE_PAIR: PairOfSentencePiece,
    "subword_nmt": Separated,
    "fastbpe": Separated,
}
KINDS = tuple(dict.fromkeys(SUBWORD_SCHEMES.values()))
FILE_OPTIONS = frozenset(OTHER_FILE_OPTIONS).union(*(kind.file_options for kind in KINDS))
# what `--post-process` removes; any other a mark
REMOVED_BY: dict[str | None, type[Scheme]] = {None: Words, "sentencepiece": SentencePiece}


def scheme_of(bpe: Any) -> Scheme:
    """Return the scheme of what fairseq made of `--bpe`, or of None."""
    return next((kind for kind in reversed(KINDS) if kind.takes(bpe)), Scheme)(bpe)


def symbols_of(dictionary: Dictionary) -> list[str]:
    """Return the symbols of a dictionary, without fairseq's own."""
    symbols: list[str] = dictionary.symbols[dictionary.nspecial :]
    return symbols


def examples_of(dictionary: Dictionary) -> str:
    """Return the first symbols of a dictionary."""
    return " ".join(symbols_of(dictionary)[:5])


def scheme_of_symbols(dictionary: Dictionary) -> type[Scheme]:
    """Return the scheme whose mark most symbols of a dictionary bear; where none do, they are words."""
    symbols = symbols_of(dictionary)
    counts = {kind: kind.count(symbols) for kind in KINDS}
    kind = max(counts, key=counts.__getitem__)
    return kind if counts[kind] > RARE * len(symbols) else Words


def check_subwords(dictionary: Dictionary, bpe: Any, post_process: str | None = None) -> None:
    """Refuse a subword model or `--remove-bpe` that does not turn a dictionary's symbols into text."""
    scheme = scheme_of(bpe)
    if bpe is not None:
        scheme.refuse_other(
            dictionary, f"the subwords of the model ({examples_of(dictionary)}) are not those of --bpe"
        )
        scheme.refuse_foreign(dictionary)
    elif scheme_of_symbols(dictionary) is not REMOVED_BY.get(post_process, Separated):
        scheme.refuse_other(dictionary, f"the text of the model is in subwords ({examples_of(dictionary)})")


def looks_shuffled(dictionary: Dictionary, bpe: Any) -> bool:
    """Tell whether symbols are in neither order of dictionaries: by falling counts, or the model's."""
    counts = np.array(dictionary.count[dictionary.nspecial :])
    falling = -counts if len(set(counts.tolist())) > 1 else np.empty(0)
    orders = (falling, scheme_of(bpe).order(symbols_of(dictionary)))
    return min((float((np.diff(one) < 0).mean()) for one in orders if len(one) > 1), default=0.0) > IN_ORDER


def subword_files(folder: Path) -> list[Path]:
    """List what look like files of subword models in a folder."""
    return [folder / name for kind in KINDS for name in kind.filenames if (folder / name).is_file()]


def options_of_file(file: Path, tokenizer: str | None) -> dict[str, str]:
    """Return fairseq's options for one of these files; `tokenizer` as given by `--tokenizer`."""
    return next(kind for kind in KINDS if file.name in kind.filenames).options_of(file, tokenizer)


def implied_bpe(words: list[str]) -> list[str]:
    """Return words of a command line with the --bpe that its SentencePiece models mean, where it is left out.

    >>> implied_bpe(["--sentencepiece-model", "spm.model"])
    ['--bpe', 'sentencepiece', '--sentencepiece-model', 'spm.model']
    """
    names = {word.partition("=")[0] for word in words}
    if "--bpe" in names or "--sentencepiece-model" not in names:
        return words
    return [
        "--bpe",
        SENTENCEPIECE_PAIR if "--sentencepiece-target-model" in names else "sentencepiece",
        *words,
    ]
