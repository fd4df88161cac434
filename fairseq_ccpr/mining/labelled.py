"""Sentences of which it is known what pairs with what."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.mining.fragments import fragments
from fairseq_ccpr.text.pairs import read_pairs


@dataclass
class LabelledText:
    """S source sentences, T target sentences, and which belong together."""

    sources: list[str]
    targets: list[str]
    gold: np.ndarray  # int64 [S], the number of each one's partner, -1 where it has none

    @property
    def paired(self) -> int:
        """How many sources have a partner."""
        return int((self.gold >= 0).sum())


def read_labelled(path: Path, offered: Container[str] = frozenset()) -> LabelledText:
    """Labelled sentences of a TSV: source, tab, target; one of the two is empty where a sentence has no partner.

    Where every line is a pair, the first third of the pairs stays, the second loses its targets, and the third its
    sources, so that half of either side has no partner.

    Args:
        path: the file.
        offered: targets that are there besides, which no source can lose.

    Raises:
        ConfigurationError: the file is missing or no such TSV, or has no pair.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    rows = [(source.strip(), target.strip()) for source, target in read_pairs(path, empty_lines=True)]
    pairs = [row for row in rows if all(row)]
    if not pairs:
        raise ConfigurationError(f"{path} has no pair: give lines of source, tab, target")
    alone = [row for row in rows if any(row) and not all(row)]
    if alone:
        sources = [source for source, _ in [*pairs, *alone] if source]
        targets = [target for _, target in [*pairs, *alone] if target]
        partners = [target if target else None for source, target in [*pairs, *alone] if source]
        return label(sources, targets, partners)
    taken, kept, _ = part(max(1, len(pairs) * 2 // 3), 0.5)
    there = {pairs[row][1] for row in kept}
    targets = [pairs[row][1] for row in taken]
    partners = [target if target in there or target in offered else None for target in targets]
    found = [target for target in partners if target is not None]
    return label([pairs[row][0] for row in taken], [*found, *(pairs[row][1] for row in kept)], partners)


def label(sources: Sequence[str], targets: Sequence[str], partners: Sequence[str | None]) -> LabelledText:
    """Number the distinct targets, and say which is each source's partner."""
    numbers: dict[str, int] = {}
    for target in targets:
        numbers.setdefault(target, len(numbers))
    gold = np.array([-1 if partner is None else numbers[partner] for partner in partners], np.int64)
    return LabelledText(list(sources), list(numbers), gold)


def part(size: int, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which sides of pairs make up `size` sources and as many targets, a share of which have no partner.

    The first sources have a partner. The others lose it, and the targets of further pairs take its place.

    Returns:
        Pairs whose sources are taken, pairs whose targets are, and the place of each source's target or -1, int64 [size].

    >>> part(4, 0.5)
    (array([0, 1, 2, 3]), array([0, 1, 4, 5]), array([ 0,  1, -1, -1]))
    """
    kept = size - round(share * size)
    rows = np.arange(size)
    paired = rows < kept
    return rows, np.where(paired, rows, rows + size - kept), np.where(paired, rows, -1)


def distinct_pairs(path: Path) -> list[tuple[str, str]]:
    """The pairs of a TSV, less those of which one side has the words of an earlier pair, or none.

    Raises:
        ConfigurationError: the file is missing or no such TSV.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    seen: tuple[set[str], set[str]] = (set(), set())
    kept = []
    for source, target in read_pairs(path, empty_lines=True):
        words = ["".join(fragments(text, window=len(text) or 1)) for text in (source, target)]
        if all(words) and not any(word in known for word, known in zip(words, seen)):
            kept.append((source.strip(), target.strip()))
            for word, known in zip(words, seen):
                known.add(word)
    return kept
