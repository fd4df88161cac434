"""Gold phrase pairs: phrases in their sentences, with the translations that a retriever should find.

A line has seven columns with tabs between them: set, source sentence, target sentence, span of the source phrase (a-b, in
characters, end exclusive), span of the target phrase, source phrase, target phrase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.phrase_systems import Phrases
from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import word_spans

COLUMNS = "set", "source sentence", "target sentence", "source span", "target span", "source phrase", "target phrase"


@dataclass(frozen=True)
class GoldPhrasePair:
    """A phrase and its translation."""

    set: str
    source: tuple[str, int, int]  # sentence, start and end in characters
    target: tuple[str, int, int]

    @property
    def words(self) -> int:
        """Words of the longer side."""
        return max(len(word_spans(text[start:end])) for text, start, end in (self.source, self.target))

    @property
    def multi_word(self) -> bool:
        """Whether one side has several words."""
        return self.words > 1


@dataclass
class GoldPhrases:
    """Q queries, and the G target phrases among which each has its answer."""

    sets: list[str]  # of each query
    words: list[int]  # of each query's pair, on the longer side
    queries: Phrases
    query_rows: np.ndarray  # int64 [Q], into `queries`
    targets: Phrases
    answers: np.ndarray  # int64 [Q], into `targets`

    @classmethod
    def choose(cls, pairs: list[GoldPhrasePair], per_set: int) -> GoldPhrases:
        """Choose at most `per_set` queries of each set, among the targets of all sets: one pair of each target sentence.

        A sentence encoder gives all phrases of a sentence one vector, so it could never tell one gold target of a
        sentence from another. Which pairs are taken does not depend on the order they are in.
        """
        by_sentence: dict[str, GoldPhrasePair] = {}
        for pair in sorted(pairs, key=lambda pair: digest(repr(pair))):
            by_sentence.setdefault(pair.target[0], pair)
        kept = list(by_sentence.values())
        targets, target_rows = as_phrases(pair.target for pair in kept)
        chosen: list[int] = []
        for name in dict.fromkeys(pair.set for pair in pairs):
            chosen += [number for number, pair in enumerate(kept) if pair.set == name][:per_set]
        queries, query_rows = as_phrases(kept[number].source for number in chosen)
        sets, words = zip(*((kept[number].set, kept[number].words) for number in chosen))
        return cls(list(sets), list(words), queries, query_rows, targets, target_rows[chosen])

    def answer_strings(self) -> list[str]:
        """List the string of each query's answer."""
        strings = self.targets.strings()
        return [strings[row] for row in self.answers]


def as_phrases(places: Iterable[tuple[str, int, int]]) -> tuple[Phrases, np.ndarray]:
    """Collect phrases out of sentences with spans, each once.

    Returns:
        The phrases; int64, the row of each place.
    """
    numbers: dict[str, int] = {}
    wanted = [(numbers.setdefault(text, len(numbers)), start, end) for text, start, end in places]
    spans, rows = np.unique(np.array(wanted, np.int32).reshape(-1, 3), axis=0, return_inverse=True)
    return Phrases(list(numbers), spans), rows.reshape(-1)


def read_gold(path: Path, sets: list[str] | None, multi_word: bool) -> list[GoldPhrasePair]:
    """Read gold pairs, each once, in the order of the file.

    Args:
        path: plain, .gz or .xz.
        sets: those wanted; all where None.
        multi_word: only pairs of which one side has several words.

    Raises:
        ConfigurationError: no such file, a line that is no gold pair, a set that it does not have, nothing left.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no gold {path}: give a file of phrase pairs in their sentences")
    pairs = list(
        dict.fromkeys(_parse(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path), 1))
    )
    names = dict.fromkeys(pair.set for pair in pairs)
    for name in sets or []:
        if name not in names:
            raise ConfigurationError(f"{path} has no set '{name}': give any of {', '.join(names)}")
    pairs = [pair for pair in pairs if (not sets or pair.set in sets) and (not multi_word or pair.multi_word)]
    if not pairs:
        raise ConfigurationError(
            f"{path} has no phrase pair" + " of several words" * multi_word + ": give another gold file"
        )
    return pairs


def _parse(line: str, where: str) -> GoldPhrasePair:
    columns = line.split("\t")
    if len(columns) != len(COLUMNS):
        raise ConfigurationError(f"{where}: {len(columns)} columns, and a gold pair has 7: {', '.join(COLUMNS)}")
    name, *sentences_and_spans = columns
    places = []
    for side, sentence, span, phrase in zip(("source", "target"), *(sentences_and_spans[n : n + 2] for n in (0, 2, 4))):
        start, _, end = span.partition("-")
        if not (start.isdecimal() and end.isdecimal()):
            raise ConfigurationError(f"{where}: the {side} span is '{span}', and a span is two numbers such as 10-17")
        found = sentence[int(start) : int(end)]
        if found != phrase or not found:
            raise ConfigurationError(
                f"{where}: the {side} phrase is '{phrase}', but characters {span} of the {side} sentence are '{found}': "
                "count characters from 0, the end exclusive"
            )
        places.append((sentence, int(start), int(end)))
    return GoldPhrasePair(name, places[0], places[1])
