"""Entries in the decoder's subwords, each written once: against a stand-in for subwords that can say anything."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fairseq_ccpr.decoding.phrase_candidates import TokenisationCache
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, NO_TOKEN

ENTRIES = 300
REACH = 3


class Subwords:
    """A phrase is written as its entry's ids, which stand where its sentence would be."""

    def __init__(self) -> None:
        lengths = [1, 2, 3, MAX_SUBWORDS, MAX_SUBWORDS + 1]
        made = [[random.randint(4, 6) for _ in range(random.choice(lengths))] for _ in range(ENTRIES)]
        self.ids: list[list[int] | None] = [ids if random.random() < 0.8 else None for ids in made]
        self.after = [[random.randint(4, 6) for _ in range(random.randint(0, 5))] for _ in range(ENTRIES)]
        self.asked: list[int] = []
        self.broken = -1

    def split(self, sentence: int) -> int:
        if sentence == self.broken:
            raise ValueError
        return sentence

    def slice(self, pieces: int, start: int, end: int) -> list[int] | None:
        self.asked.append(pieces)
        return self.ids[pieces]

    def following(self, pieces: int, end: int, most: int) -> list[int]:
        return self.after[pieces][:most]


def test_every_entry_is_written_once_whatever_the_order(rng: np.random.Generator) -> None:
    subwords: Any = Subwords()
    store: Any = SimpleNamespace(spans=np.arange(ENTRIES)[:, None].repeat(3, 1), sentence=lambda number: number)
    write = TokenisationCache(store, subwords, REACH)
    wanted = [tuple(ids) if ids and len(ids) <= MAX_SUBWORDS else () for ids in subwords.ids]
    assert 0 < sum(not tokens for tokens in wanted) < ENTRIES and len({*wanted}) < ENTRIES
    subwords.broken = 7
    with pytest.raises(ValueError):
        write(np.arange(10))  # half way
    subwords.broken, subwords.asked = -1, []
    seen: dict[int, tuple[int, ...]] = {}
    for size in (0, 1, 5, 200, 0, 900):
        entries = rng.integers(0, ENTRIES, size)
        tokens, lengths, extents, hashes = write(entries)
        assert lengths.tolist() == [len(wanted[entry]) for entry in entries]
        for entry, row, length, extent, number in zip(entries.tolist(), tokens, lengths, extents, hashes.tolist()):
            after = subwords.after[entry][: min(REACH, MAX_SUBWORDS - length)] if wanted[entry] else []
            assert tuple(row[:length].tolist()) == wanted[entry] and (row[extent:] == NO_TOKEN).all()
            assert row[length:extent].tolist() == after
            assert (number == 0) == (not wanted[entry])
            assert seen.setdefault(number, wanted[entry]) == wanted[entry]
    assert len({*seen.values()}) == len(seen)
    assert len(subwords.asked) == len({*subwords.asked})
