"""Words of a text as character spans, and the cuts of a sentence into phrases."""

from __future__ import annotations

import re
import unicodedata

# Scripts that write no spaces between words: each character is a word. First and last code point of each
# block.
UNSPACED_BLOCKS = [
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x312F),  # CJK radicals, kana, Bopomofo
    (0x31A0, 0x9FFF),  # kana and ideographs
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),  # halfwidth katakana
    (0x1AFF0, 0x1B16F),  # more kana
    (0x20000, 0x3FFFF),  # more ideographs
]
# Their punctuation, which has no spaces next to it either. It always ends a word.
UNSPACED_PUNCTUATION = [(0x3000, 0x303F), (0xFE30, 0xFE4F), (0xFF00, 0xFFEF)]
INVISIBLE_SPACES = "\u200b\u200e\u200f\u061c\ufeff"  # zero width, direction marks: no letters of a word
SPACE, PUNCTUATION, SEPARATOR, MARK, CHARACTER, LETTER = "spimcw"
# A letter to the last letter before a space or a character of its own; a character; a sign. Marks go with
# what they follow.
_WORD = re.compile("[wm](?:[wpm]*w)?m*|cm*|[pi]m*")
SIGNS = PUNCTUATION + SEPARATOR
_LETTERS = re.compile("[wc]")


class _Kinds(dict[int, str]):
    def __missing__(self, code: int) -> str:
        kind = self[code] = _kind(code)
        return kind


def _kind(code: int) -> str:
    character = chr(code)
    category = unicodedata.category(character)
    if character.isspace() or category[0] == "Z" or category == "Cc" or character in INVISIBLE_SPACES:
        return SPACE
    # joiners, and skin tones of emoji
    if category[0] == "M" or category == "Cf" or 0x1F3FB <= code <= 0x1F3FF:
        return MARK
    if category[0] in "PS":
        return SEPARATOR if _within(code, UNSPACED_PUNCTUATION) else PUNCTUATION
    return CHARACTER if _within(code, UNSPACED_BLOCKS) else LETTER


def _within(code: int, blocks: list[tuple[int, int]]) -> bool:
    return any(first <= code <= last for first, last in blocks)


_KINDS = _Kinds()


def kinds_of(text: str) -> str:
    """Return one letter for each character of the text: space, punctuation, punctuation of an unspaced
    script, mark, character of such a script, letter.

    >>> kinds_of("Oh, 中。")
    'wwpsci'
    """
    return text.translate(_KINDS)


def has_letters(text: str) -> bool:
    """Check for characters other than spaces, punctuation, symbols and marks."""
    return _LETTERS.search(kinds_of(text)) is not None


def word_spans(text: str) -> list[tuple[int, int]]:
    """Find the words of a text, as (start, end) in characters, end exclusive.

    What stands between spaces is a word, less the punctuation and symbols at its ends, which are words of
    their own (a run of one sign, such as "...", is one). In scripts without spaces each character is a word.
    Combining marks and joiners stay with the character before them.

    >>> text = 'He said: "don\\'t..." (東京)'
    >>> [text[start:end] for start, end in word_spans(text)]
    ['He', 'said', ':', '"', "don't", '...', '"', '(', '東', '京', ')']
    """
    kinds = kinds_of(text)
    spans: list[tuple[int, int]] = []
    for match in _WORD.finditer(kinds):
        start, end = match.span()
        if kinds[start] in SIGNS and spans and spans[-1][1] == start:
            before = spans[-1][0]
            if kinds[before] in SIGNS and text[before:start].endswith(text[start:end]):
                start, _ = spans.pop()
        spans.append((start, end))
    return spans


def space_spans(text: str) -> list[tuple[int, int]]:
    """Find the spans between white space, in characters: the words of text that was tokenised before."""
    return [match.span() for match in re.finditer(r"\S+", text)]
