"""Labelled text: sentences, questions and paragraphs whose pairing is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.encoded_text import fragments
from fairseq_ccpr.text.pairs import read_pairs, tell_skipped


@dataclass
class LabelledText:
    """S source texts, T distinct target texts, and which belong together."""

    sources: list[str]
    targets: list[str]
    gold: np.ndarray  # int64 [S], the row of each source's partner, -1 where it has none

    @property
    def paired(self) -> int:
        """Count the sources that have a partner."""
        return int((self.gold >= 0).sum())


class Labels(NamedTuple):
    """The labels of L sources of a text."""

    rows: np.ndarray  # int64 [L], their numbers
    hidden: np.ndarray  # int64 [L], the target hidden from each, or -1
    gold: np.ndarray  # int64 [L], the partner of each among the others, or -1


def with_negatives(rows: np.ndarray, gold: np.ndarray) -> Labels:
    """Let each pair serve twice, the second time with its target hidden.

    Pairs alone do not teach what to reject, and a few sentences without a partner teach hardly anything. A
    source with several partners is not used again, since the others would be right.

    >>> with_negatives(np.array([3, 5]), np.array([7, -1]))
    Labels(rows=array([3, 5, 3]), hidden=array([-1, -1,  7]), gold=array([ 7, -1, -1]))
    """
    partners = {*zip(rows.tolist(), gold.tolist())}
    single = [row for row, count in Counter(row for row, _ in partners).items() if count == 1]
    again = np.isin(rows, single) & (gold >= 0)
    nothing = np.full(len(rows), -1)
    return Labels(
        np.append(rows, rows[again]), np.append(nothing, gold[again]), np.append(gold, nothing[again])
    )


def check_file(path: Path) -> None:
    """Refuse a file that is missing."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")


def read_labelled(path: Path) -> LabelledText:
    """Read a TSV: source, tab, target; one of the two is empty where a sentence has no partner."""
    check_file(path)
    skipped = Counter[str]()
    rows = [(source.strip(), target.strip()) for source, target in read_pairs(path, True, skipped)]
    tell_skipped(path, skipped)
    if not any(all(row) for row in rows):
        raise ConfigurationError(f"{path} has no pair: give lines of source, tab, target")
    partners = [(source, target or None) for source, target in rows if source]
    targets = [target for _, target in rows if target]
    return label([source for source, _ in partners], targets, [target for _, target in partners])


def read_questions(questions: Path, paragraphs: Path) -> LabelledText:
    """Read questions as sources and paragraphs as targets, out of two TSVs."""
    texts: dict[str, str] = {}
    for name, text in _read_texts(paragraphs):
        if name in texts:
            raise ConfigurationError(f"{paragraphs} has two paragraphs '{name}': give each an id of its own")
        texts[name] = text
    rows = _read_texts(questions)
    unknown = next((name for name, _ in rows if name not in texts), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{questions} has a question on '{unknown}', and {paragraphs} has no such paragraph"
        )
    return label([text for _, text in rows], list(texts.values()), [texts[name] for name, _ in rows])


def label(sources: Sequence[str], targets: Sequence[str], partners: Sequence[str | None]) -> LabelledText:
    """Number the distinct targets, and look up each source's partner."""
    numbers: dict[str, int] = {}
    for target in targets:
        numbers.setdefault(target, len(numbers))
    gold = np.array([-1 if partner is None else numbers[partner] for partner in partners], np.int64)
    return LabelledText(list(sources), list(numbers), gold)


def remove_partners(size: int, fraction: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose sides of pairs for `size` sources and as many targets, a fraction of which have no partner.

    The first sources keep their partner; the others lose it to the targets of further pairs.

    Returns:
        Rows of the sources, rows of the targets, and for each source the index of its target or -1; int64
        [size] each.

    >>> remove_partners(4, 0.5)
    (array([0, 1, 2, 3]), array([0, 1, 4, 5]), array([ 0,  1, -1, -1]))
    """
    kept = size - round(fraction * size)
    rows = np.arange(size)
    paired = rows < kept
    return rows, np.where(paired, rows, rows + size - kept), np.where(paired, rows, -1)


def distinct_pairs(path: Path) -> list[tuple[str, str]]:
    """Read the pairs of a TSV, without those of which one side has the words of an earlier pair, or none."""
    check_file(path)
    seen: tuple[set[str], set[str]] = (set(), set())
    kept = []
    skipped = Counter[str]()
    for source, target in read_pairs(path, True, skipped):
        words = ["".join(fragments(text, window=len(text) or 1)) for text in (source, target)]
        if all(words) and not any(word in known for word, known in zip(words, seen)):
            kept.append((source.strip(), target.strip()))
            for word, known in zip(words, seen):
                known.add(word)
    tell_skipped(path, skipped)
    return kept


def _read_texts(path: Path) -> list[tuple[str, str]]:
    check_file(path)
    rows = list(read_pairs(path))
    if not rows:
        raise ConfigurationError(f"{path} is empty: give lines of id, tab, text")
    for number, (_, text) in enumerate(rows, 1):
        if not fragments(text, 1):
            raise ConfigurationError(f"{path}, line {number}: there is no word in '{text[:80]}'")
    return rows
