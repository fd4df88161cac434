"""The benchmark of phrase retrieval: gold phrases in their sentences among distractors, the same for every system.

A line of gold phrases has seven columns with tabs between them: set, source sentence, target sentence, span of the
source phrase (a-b, in characters, end exclusive), span of the target phrase, source phrase, target phrase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.phrase_systems import BLOCK_TEXTS, Phrases, PhraseSystem
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import ALL, LEARNED, PhraseFinder, Segmentation
from fairseq_ccpr.phrases.pair_store import sample_occurrences, sample_sentences
from fairseq_ccpr.settings import check, count_option, option
from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import word_spans
from fairseq_ccpr.timing import progress_bar

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


Finder = Callable[[list[str]], np.ndarray]  # texts -> int32 [K, 3], spans in characters, by text


@dataclass
class PhraseBenchmarkSettings:
    """Gold phrases, and the index they are searched in; options of `fairseq-ccpr evaluate phrases`."""

    gold: Path = option(help="phrase pairs in their sentences, plain, .gz or .xz", metavar="TSV")
    distractors: list[Path] = option(
        help="target-language text, a sentence per line; the same sentence counts once, those of gold targets not at all",
        nargs="+", metavar="TEXT",
    )  # fmt: skip
    sets: Optional[list[str]] = option(None, "sets of the gold file, a row each (all)", nargs="+", metavar="NAME")
    per_set: int = count_option(200, "queries of a set, at most; always the same")
    multi_word: bool = option(False, "only gold pairs of which one side has several words")
    distractor_phrases: int = count_option(500_000, "phrases of random sentences in the index, at most")
    segmentation: str = option(
        ALL,
        "which spans of words of the distractor text are phrases: all, those of N words, or what a phrase encoder finds",
        metavar="all|ngram:N|learned",
    )
    threshold: float = option(
        Segmentation.threshold, "probability above which the phrase encoder takes words for a phrase",
        within="[0, 1)", needs="a probability in [0, 1)", metavar="P",
    )  # fmt: skip
    max_words: int = option(4, "words of such a phrase, at most", metavar="N")
    same_string: list[int] = option(
        [], "a second table: acc@1 by entry with C other occurrences of the string, such as 0 4 16", nargs="+", metavar="C",
        within="[0, inf)", needs="a number from 0, such as 0 4 16,",
    )  # fmt: skip
    whole_sentences: bool = option(
        False, "put all other phrases of the answers' sentences into the index, as a datastore of them would have it"
    )

    def check(self) -> Segmentation:
        """Check the settings, and make the segmentation.

        Raises:
            ConfigurationError: an option is out of its range, or a file is missing.
        """
        check(self)
        for path in self.distractors:
            if not path.is_file():
                raise ConfigurationError(f"there is no distractor text {path}: give files of one sentence per line")
        return Segmentation(self.segmentation, self.threshold, self.max_words)


@dataclass
class PhraseBenchmark:
    """Queries, and the index that every system searches."""

    gold: GoldPhrases
    distractors: Phrases
    same_strings: Phrases  # occurrences of the answers' strings in other sentences, apart from the index
    same_string_rows: np.ndarray  # int64 [Q, C], which of them are for which query; -1 for none
    left_out: int  # gold pairs with a phrase that one of the systems cannot encode

    @property
    def entries(self) -> int:
        """Size of the index: gold targets and distractors."""
        return len(self.gold.targets.spans) + len(self.distractors.spans)


def make_benchmark(
    settings: PhraseBenchmarkSettings, systems: Sequence[PhraseSystem], segmenter: PhraseEncoder | None, quiet: bool
) -> PhraseBenchmark:
    """Read gold pairs and text, and find the phrases.

    Args:
        settings: what to measure.
        systems: those that are to be compared.
        segmenter: finds the phrases where segmentation is learned.
        quiet: no progress bar.

    Raises:
        ConfigurationError: options, gold or text that cannot work.
    """
    segmentation = settings.check()
    pairs = read_gold(settings.gold, settings.sets, settings.multi_word)
    usable = _usable_pairs(pairs, systems)
    if not usable:
        raise ConfigurationError(
            f"{settings.gold}: in none of the {len(pairs):,} pairs can all systems encode both phrases"
        )
    gold = GoldPhrases.choose(usable, settings.per_set)
    excluded = set(gold.targets.texts)
    find = phrase_finder(segmentation, segmenter)
    found = find_distractors(settings.distractors, settings.distractor_phrases, excluded, find, systems, quiet)
    if settings.whole_sentences:
        found = _join(find_sentence_phrases(gold, find, systems), found)
    most = max(settings.same_string, default=0)
    same_strings, rows = find_same_strings(settings.distractors, gold, most, systems)
    return PhraseBenchmark(gold, found, same_strings, rows, len(pairs) - len(usable))


def phrase_finder(segmentation: Segmentation, segmenter: PhraseEncoder | None) -> Finder:
    """Choose how phrases are found in text: by the segmenter's head, or as all spans of some number of words.

    Args:
        segmentation: which spans are phrases.
        segmenter: a phrase encoder, where segmentation is learned.
    """
    if segmentation.kind == LEARNED:
        assert segmenter is not None, "the command asks for one"
        finder = PhraseFinder(segmenter, segmentation)
        return lambda texts: finder.find(texts).spans
    return lambda texts: _word_phrases(texts, *segmentation.words)


def _word_phrases(texts: list[str], fewest: int, most: int) -> np.ndarray:
    found = []
    for number, text in enumerate(texts):
        words = word_spans(text)
        for first, (start, _) in enumerate(words):
            found += [(number, start, end) for _, end in words[first + fewest - 1 : first + most]]
    return np.array(found, np.int32).reshape(-1, 3)


def find_distractors(
    paths: list[Path], count: int, excluded: set[str], find: Finder, systems: Sequence[PhraseSystem], quiet: bool
) -> Phrases:
    """Collect phrases of random sentences, until there are `count`, or no more sentences.

    All phrases of a sentence are taken, as in a datastore, the same string once, but none that one of the systems
    cannot encode. The choice of sentences does not depend on their order; a larger count continues a smaller one.

    Args:
        paths: texts, a sentence per line.
        count: phrases wanted.
        excluded: sentences that are no distractors.
        find: finds the phrases of texts.
        systems: those that are to be compared.
        quiet: no progress bar.

    Raises:
        ConfigurationError: there is no phrase.
    """
    sentences = sample_sentences(paths, count, excluded)
    spans = np.empty((0, 3), np.int32)
    with progress_bar("distractors", "phrase", total=count, quiet=quiet) as bar:
        for start in range(0, len(sentences), BLOCK_TEXTS):
            texts = sentences[start : start + BLOCK_TEXTS]
            phrases = _deduplicate(Phrases(texts, find(texts)))
            phrases = phrases.keep(usable_mask(phrases, systems))
            wanted = phrases.spans[: count - len(spans)] + np.array([start, 0, 0], np.int32)
            spans = np.concatenate([spans, wanted])
            bar.update(len(wanted))
            if len(spans) == count:
                break
    if not len(spans):
        names = ", ".join(map(str, paths))
        raise ConfigurationError(
            f"{names}: there is no phrase in it that is not gold: give text of sentences, one per line"
        )
    return Phrases(sentences[: spans[-1, 0] + 1], spans)


def find_sentence_phrases(gold: GoldPhrases, find: Finder, systems: Sequence[PhraseSystem]) -> Phrases:
    """Find the other phrases of the sentences that the answers are in.

    Args:
        gold: those that are among its targets are left out.
        find: finds the phrases of texts.
        systems: a phrase that one of them cannot encode is left out.
    """
    texts = gold.targets.texts
    numbers = np.unique(gold.targets.spans[gold.answers, 0])
    spans = find([texts[number] for number in numbers])
    spans[:, 0] = numbers[spans[:, 0]]
    targets = set(map(tuple, gold.targets.spans.tolist()))
    others = np.array([tuple(span) not in targets for span in spans.tolist()], bool)
    found = _deduplicate(Phrases(texts, spans[others]))
    return found.keep(usable_mask(found, systems))


def _join(one: Phrases, two: Phrases) -> Phrases:
    return Phrases(
        [*one.texts, *two.texts], np.concatenate([one.spans, two.spans + np.array([len(one.texts), 0, 0], np.int32)])
    )


def find_same_strings(
    paths: list[Path], gold: GoldPhrases, size: int, systems: Sequence[PhraseSystem]
) -> tuple[Phrases, np.ndarray]:
    """Find for each query at most `size` phrases with the string of its answer, each in another sentence.

    Args:
        paths: texts, a sentence per line.
        gold: the sentences of its targets are left out.
        size: phrases wanted for each.
        systems: a phrase that one of them cannot encode is left out.

    Returns:
        The phrases; for each query their rows, int64 [Q, size], -1 where there are fewer.
    """
    strings = gold.answer_strings()
    rows_of = np.full((len(strings), size), -1)
    if not size:
        return Phrases([], np.empty((0, 3), np.int32)), rows_of
    occurrences = sample_occurrences(paths, dict.fromkeys(strings), size, set(gold.targets.texts))
    phrases, rows = as_phrases(place for places in occurrences.values() for place in places)
    usable = usable_mask(phrases, systems)
    new_rows = np.where(usable, usable.cumsum() - 1, -1)[rows]
    ends = np.cumsum([len(places) for places in occurrences.values()])
    by_string = dict(zip(occurrences, np.split(new_rows, ends[:-1])))
    for query, string in enumerate(strings):
        found = by_string[string][by_string[string] >= 0]
        rows_of[query, : len(found)] = found
    return phrases.keep(usable), rows_of


def usable_mask(phrases: Phrases, systems: Sequence[PhraseSystem]) -> np.ndarray:
    """Mark the phrases that every system can encode, bool [K]."""
    return np.logical_and.reduce([np.ones(len(phrases.spans), bool), *(system.usable(phrases) for system in systems)])


def _usable_pairs(pairs: list[GoldPhrasePair], systems: Sequence[PhraseSystem]) -> list[GoldPhrasePair]:
    """Keep the pairs of which every system can encode both phrases."""
    usable = np.ones(len(pairs), bool)
    for places in ((pair.source for pair in pairs), (pair.target for pair in pairs)):
        phrases, rows = as_phrases(places)
        usable &= usable_mask(phrases, systems)[rows]
    return [pairs[number] for number in usable.nonzero()[0]]


def _deduplicate(phrases: Phrases) -> Phrases:
    """Keep the first of equal strings in a sentence."""
    places: dict[tuple[int, str], int] = {}
    for row, (text, string) in enumerate(zip(phrases.spans[:, 0].tolist(), phrases.strings())):
        places.setdefault((text, string), row)
    return Phrases(phrases.texts, phrases.spans[list(places.values())])
