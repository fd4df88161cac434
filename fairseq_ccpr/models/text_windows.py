"""Texts longer than an encoder reads, cut into windows that overlap by half."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from fairseq_ccpr.text.subwords import Subwords
from fairseq_ccpr.text.words import word_spans

ENCODED_ELSEWHERE = 2  # extra subwords that a text may have where it does not begin with its first word


class Window(NamedTuple):
    """A part of a text, and which of its phrases are found there."""

    subwords: Subwords  # of the part alone
    offset: int  # where the part begins in the text, in characters
    begin: int  # phrases of the text that begin from here
    end: int  # up to, but not, here are found in this window, which has most of their context


def whole(subwords: Subwords) -> Window:
    """Return the only window of a text that is short enough."""
    return Window(subwords, 0, 0, len(subwords.text) + 1)


def windows(subwords: Subwords, encode: Callable[[str], Subwords], limit: int) -> list[Window]:
    """Cut a text at its words into windows of at most `limit` subwords, each beginning in the middle of the one before.

    A phrase is found in one window: where two contain it, in the one with more of its sentence around it. A word with more
    subwords than `limit` is in none.

    Args:
        subwords: of the whole text.
        encode: makes such subwords.
        limit: subwords that the encoder reads, markers aside.
    """
    text, words = subwords.text, word_spans(subwords.text)
    inside = len(subwords.ids) - 1
    first = [bisect_right(subwords.ends, start, 1, inside) for start, _ in words]
    stop = [bisect_left(subwords.starts, end, 1, inside) for _, end in words]
    cut: list[tuple[int, int, Subwords]] = []  # first and last word, and what they are cut into
    at = 0
    while at < len(words):
        last = bisect_right(stop, first[at] + limit - ENCODED_ELSEWHERE, at) - 1
        while last >= at:
            part = encode(text[words[at][0] : words[last][1]])
            if part.count <= limit:
                break
            last -= 1
        if last < at:  # a word of too many subwords
            at += 1
            continue
        cut.append((at, last, part))
        if last + 1 == len(words):
            break
        middle = bisect_left(first, (first[at] + stop[last]) // 2, at + 1)
        at = min(middle, last + 1)
    borders = [
        0,
        *(words[max((last + at + 1) // 2, at)][0] for (_, last, _), (at, _, _) in pairwise(cut)),
        len(text) + 1,
    ]
    return [Window(part, words[one][0], begin, end) for (one, _, part), begin, end in zip(cut, borders, borders[1:])]
