"""Which characters of a text those that were made of it stand for: spaces aside, and as Moses writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fairseq_ccpr.text.words import SPACE, kinds_of

# What Moses writes for a character, and for a hyphen within a word.
MOSES = {
    "&apos;": "'", "&quot;": '"', "&amp;": "&", "&#124;": "|", "&lt;": "<", "&gt;": ">", "&#91;": "[", "&#93;": "]",
    "@-@": "-",
}  # fmt: skip
MOSES_UNIT = re.compile("|".join([*map(re.escape, MOSES), "."]), re.DOTALL)

Placed = tuple[str, int, int]  # a symbol, and the characters of the text that it stands for, end exclusive


@dataclass(frozen=True)
class Origins:
    """For each of n characters, the characters of another text it was made from; and an entry for what is beyond."""

    starts: list[int]
    ends: list[int]

    @classmethod
    def trace(cls, units: Sequence[str], text: str) -> Origins:
        """Walk along the text with characters made from it, and what Moses writes for one, spaces aside.

        Where one is not found next, the walk ends: it and all after it stand for the rest of the text and
        what lies beyond.

        >>> Origins.trace(["a", " ", "&amp;", " ", "b"], "a&b").starts
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
