"""Alignment error rate (Och and Ney, 2003) against manual alignments.

A gold set is two files, line by line: sentence pairs, `source ||| target`, words between spaces; and links,
`i-j` where they are sure and `ipj` where they are possible, counted from 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.phrases.alignment import ALIGNERS, Aligner, AlignerOptions, SentencePair
from fairseq_ccpr.phrases.pair_build import ExtractionSettings, usable_pairs
from fairseq_ccpr.text.pairs import TextPairs, read_together
from fairseq_ccpr.text.words import space_spans, word_spans

_LINK = re.compile(r"(\d+)([-p])(\d+)")
Link = tuple[int, int]


@dataclass(frozen=True)
class AlignedPair:
    """A sentence pair and its links, counted from 0; sure links are possible as well."""

    pair: SentencePair
    sure: frozenset[Link]
    possible: frozenset[Link]


@dataclass
class AlignmentCounts:
    """Sufficient statistics of precision, recall and AER; those of several sentences add up."""

    found: int = 0  # A
    sure: int = 0  # S
    found_sure: int = 0  # A ∩ S
    found_possible: int = 0  # A ∩ P

    @property
    def precision(self) -> float:
        """|A ∩ P| / |A|, 0 where nothing was found."""
        return self.found_possible / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        """|A ∩ S| / |S|."""
        return self.found_sure / self.sure

    @property
    def error_rate(self) -> float:
        """AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)."""
        return 1 - (self.found_sure + self.found_possible) / (self.found + self.sure)


def read_gold(sentences: Path, links: Path) -> list[AlignedPair]:
    """Read a gold set."""
    gold = []
    for number, (text, marks) in enumerate(read_together(sentences, links), 1):
        sides = text.split("|||")
        if len(sides) != 2:
            raise ConfigurationError(
                f"{sentences}, line {number}: expected 'source ||| target', found '{text[:60]}'"
            )
        pair = SentencePair(sides[0], sides[1], space_spans(sides[0]), space_spans(sides[1]))
        sure, possible = set(), set()
        for mark in marks.split():
            match = _LINK.fullmatch(mark)
            link = (int(match[1]) - 1, int(match[3]) - 1) if match else (-1, -1)
            if match is None or not (
                0 <= link[0] < len(pair.source_words) and 0 <= link[1] < len(pair.target_words)
            ):
                raise ConfigurationError(
                    f"{links}, line {number}: '{mark}' is no link between words of the sentence, which has "
                    f"{len(pair.source_words)} source and {len(pair.target_words)} target words, counted from 1; write "
                    "sure links as 1-2, possible ones as 1p2"
                )
            possible.add(link)
            if match[2] == "-":
                sure.add(link)
        gold.append(AlignedPair(pair, frozenset(sure), frozenset(possible)))
    if not any(pair.sure for pair in gold):
        raise ConfigurationError(f"{links} holds no sure link: there is nothing to measure against")
    return gold


def measure(aligner: Aligner, gold: Sequence[AlignedPair]) -> AlignmentCounts:
    """Align the gold set with a trained aligner and count."""
    counts = AlignmentCounts()
    for links, expected in zip(aligner.align([one.pair for one in gold]), gold):
        found = {(int(i), int(j)) for i, j in links}
        counts.found += len(found)
        counts.sure += len(expected.sure)
        counts.found_sure += len(found & expected.sure)
        counts.found_possible += len(found & expected.possible)
    return counts


def aligned_words(
    training: Path, more: list[SentencePair] | None = None
) -> Iterator[tuple[SentencePair, list[list[int]]]]:
    """Yield pairs with their links: `more`, or those of a file, by a fast aligner that learns from both."""
    known = list(usable_pairs(TextPairs(pairs=training), word_spans, ExtractionSettings.max_words, Counter()))
    aligner = ALIGNERS["fast-align"](AlignerOptions(ExtractionSettings.symmetrization))
    aligner.train(known + (more or []), False)
    pairs = known if more is None else more
    yield from zip(pairs, (links.tolist() for links in aligner.align(pairs)))
