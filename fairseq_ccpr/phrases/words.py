"""Where the words of a text are: the units that are aligned, and at whose edges phrases begin and end."""

from __future__ import annotations

import re
import unicodedata

_NOT_SPACE = re.compile(r"\S+")

# Scripts that put no spaces between words; there each character, with the marks on it, stands for a word.
_UNSPACED = (
    "\u0e00-\u0e7f"  # Thai
    "\u0e80-\u0eff"  # Lao
    "\u1000-\u109f"  # Myanmar
    "\u1780-\u17ff"  # Khmer
    "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Hiragana and Katakana
)
_UNSPACED_OR_RUN = re.compile(f"[{_UNSPACED}]|[^{_UNSPACED}]+")


def word_spans(text: str) -> list[tuple[int, int]]:
    """Character spans (start, end) of the words of `text`, in order and without overlaps; end is exclusive.

    Words are what stands between white space, less the punctuation (Unicode category P) before and behind, each
    character of which is a word of its own, or each run of the same. In scripts that know no spaces each character is one.

    >>> [text[a:b] for text in ["  (It's a well-known  trick...)"] for a, b in word_spans(text)]
    ['(', "It's", 'a', 'well-known', 'trick', '...', ')']
    >>> [text[a:b] for text in ["用Linux吧。"] for a, b in word_spans(text)]
    ['用', 'Linux', '吧', '。']
    """
    spans: list[tuple[int, int]] = []
    for match in _NOT_SPACE.finditer(text):
        word = match.group()
        if word.isascii():
            if word.isalnum():  # most words: nothing to split
                spans.append(match.span())
            else:
                _split_punctuation(text, *match.span(), spans)
            continue
        for piece in _UNSPACED_OR_RUN.finditer(text, *match.span()):
            start, end = piece.span()
            if spans and spans[-1][1] == start and unicodedata.category(text[start])[0] == "M":
                spans[-1] = (spans[-1][0], start + 1)  # a vowel sign or tone mark belongs to the letter before it
                start += 1
            if start < end:
                _split_punctuation(text, start, end, spans)
    return spans


def space_spans(text: str) -> list[tuple[int, int]]:
    """Character spans of what stands between white space: the words of text that was tokenised before.

    >>> space_spans("don 't ")
    [(0, 3), (4, 6)]
    """
    return [match.span() for match in _NOT_SPACE.finditer(text)]


def _split_punctuation(text: str, start: int, end: int, spans: list[tuple[int, int]]) -> None:
    """Append the words of `text[start:end]`, a stretch without spaces: punctuation, the rest, punctuation."""
    first, last = start, end
    while first < end and _is_punctuation(text[first]):
        first += 1
    while last > first and _is_punctuation(text[last - 1]):
        last -= 1
    _append_runs(text, start, first, spans)
    if first < last:
        spans.append((first, last))
    _append_runs(text, last, end, spans)


def _append_runs(text: str, start: int, end: int, spans: list[tuple[int, int]]) -> None:
    """Append each run of one and the same character."""
    for at in range(start, end):
        if at > start and text[at] == text[at - 1]:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            spans.append((at, at + 1))


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] == "P"
