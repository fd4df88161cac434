"""The benchmark of phrase retrieval: gold phrases in their sentences among distractors, the same for every system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.phrase_systems import BLOCK_TEXTS, Phrases, PhraseSystem
from fairseq_ccpr.lab.samples import sample_occurrences, sample_sentences
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import ALL, LEARNED, PhraseFinder, Segmentation
from fairseq_ccpr.settings import check, count_option, option
from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.text.words import word_spans
from fairseq_ccpr.timing import progress_bar

COLUMNS = (
    "set",
    "source sentence",
    "target sentence",
    "source span",
    "target span",
    "source phrase",
    "target phrase",
)


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

        A sentence encoder gives all phrases of a sentence one vector, and could not tell its gold targets
        apart. Which pairs are taken does not depend on the order they are in.
        """
        by_sentence: dict[str, GoldPhrasePair] = {}
        for pair in sorted(pairs, key=lambda pair: digest(repr(pair))):
            by_sentence.setdefault(pair.target[0], pair)
        kept = list(by_sentence.values())
        targets, target_rows = _as_phrases(pair.target for pair in kept)
        chosen: list[int] = []
        for name in dict.fromkeys(pair.set for pair in pairs):
            chosen += [number for number, pair in enumerate(kept) if pair.set == name][:per_set]
        queries, query_rows = _as_phrases(kept[number].source for number in chosen)
        sets, words = zip(*((kept[number].set, kept[number].words) for number in chosen))
        return cls(list(sets), list(words), queries, query_rows, targets, target_rows[chosen])

    def answer_strings(self) -> list[str]:
        """List the string of each query's answer."""
        strings = self.targets.strings()
        return [strings[row] for row in self.answers]


def _as_phrases(places: Iterable[tuple[str, int, int]]) -> tuple[Phrases, np.ndarray]:
    numbers: dict[str, int] = {}
    placed = [(numbers.setdefault(text, len(numbers)), start, end) for text, start, end in places]
    spans, rows = np.unique(np.array(placed, np.int32).reshape(-1, 3), axis=0, return_inverse=True)
    return Phrases(list(numbers), spans), rows.reshape(-1)


def read_gold(path: Path) -> list[GoldPhrasePair]:
    """Read gold pairs, each once, in the order of the file."""
    if not path.is_file():
        raise ConfigurationError(f"there is no gold {path}: give a file of phrase pairs in their sentences")
    lines = enumerate(read_lines(path), 1)
    pairs = list(dict.fromkeys(_parse(line, f"{path}, line {number}") for number, line in lines))
    if not pairs:
        raise ConfigurationError(f"{path} has no phrase pair: give another gold file")
    return pairs


def _parse(line: str, where: str) -> GoldPhrasePair:
    columns = line.split("\t")
    if len(columns) != len(COLUMNS):
        raise ConfigurationError(
            f"{where}: {len(columns)} columns, and a gold pair has 7: {', '.join(COLUMNS)}"
        )
    name, *sentences_and_spans = columns
    places = []
    for side, sentence, span, phrase in zip(
        ("source", "target"), *(sentences_and_spans[n : n + 2] for n in (0, 2, 4))
    ):
        start, _, end = span.partition("-")
        if not (start.isdecimal() and end.isdecimal()):
            raise ConfigurationError(
                f"{where}: the {side} span is '{span}', and a span is two numbers such as 10-17"
            )
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
        nargs="+",
        metavar="TEXT",
    )
    distractor_phrases: int = count_option(500_000, "phrases of random sentences in the index, at most")
    segmentation: str = option(
        ALL,
        "which spans of words of the distractor text are phrases: all, those of N words, or what a phrase encoder finds",
        metavar="all|ngram:N|learned",
    )
    same_string: list[int] = option(
        [],
        "a second table: acc@1 by entry with C other occurrences of the string, such as 0 4 16",
        nargs="+",
        metavar="C",
        within="[0, inf)",
        needs="a number from 0, such as 0 4 16,",
    )
    whole_sentences: bool = option(
        False,
        "put all other phrases of the answers' sentences into the index, as a datastore of them would have it",
    )

    per_set: int = 200  # queries of a set, at most; always the same
    threshold: float = Segmentation.threshold  # above which the phrase encoder takes words for a phrase
    max_words: int = 4  # of such a phrase

    def check(self) -> Segmentation:
        """Check the settings, and make the segmentation."""
        check(self)
        for path in self.distractors:
            if not path.is_file():
                raise ConfigurationError(
                    f"there is no distractor text {path}: give files of one sentence per line"
                )
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
    settings: PhraseBenchmarkSettings,
    systems: Sequence[PhraseSystem],
    segmenter: PhraseEncoder | None,
    quiet: bool,
) -> PhraseBenchmark:
    """Read gold pairs and text, and find the phrases."""
    segmentation = settings.check()
    pairs = read_gold(settings.gold)
    mask = np.ones(len(pairs), bool)
    for phrases, rows in (
        _as_phrases(pair.source for pair in pairs),
        _as_phrases(pair.target for pair in pairs),
    ):
        mask &= _usable_mask(phrases, systems)[rows]
    usable = [pair for pair, works in zip(pairs, mask) if works]
    if not usable:
        raise ConfigurationError(
            f"{settings.gold}: in none of the {len(pairs):,} pairs can all systems encode both phrases"
        )
    gold = GoldPhrases.choose(usable, settings.per_set)
    find = _phrase_finder(segmentation, segmenter)
    excluded = set(gold.targets.texts)
    found = _find_distractors(
        settings.distractors, settings.distractor_phrases, excluded, find, systems, quiet
    )
    if settings.whole_sentences:
        others = _find_sentence_phrases(gold, find, systems)
        shifted = found.spans + np.array([len(others.texts), 0, 0], np.int32)
        found = Phrases([*others.texts, *found.texts], np.concatenate([others.spans, shifted]))
    most = max(settings.same_string, default=0)
    same_strings, rows = _find_same_strings(settings.distractors, gold, most, systems)
    return PhraseBenchmark(gold, found, same_strings, rows, len(pairs) - len(usable))


def _phrase_finder(segmentation: Segmentation, segmenter: PhraseEncoder | None) -> Finder:
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


def _find_distractors(
    paths: list[Path],
    count: int,
    excluded: set[str],
    find: Finder,
    systems: Sequence[PhraseSystem],
    quiet: bool,
) -> Phrases:
    """Collect phrases of random sentences, until there are `count`, or no more sentences.

    All phrases of a sentence are taken, as in a datastore, the same string once, but none that one of the
    systems cannot encode. The choice of sentences does not depend on their order; a larger count continues a
    smaller one.
    """
    sentences = sample_sentences(paths, count, excluded)
    spans = np.empty((0, 3), np.int32)
    with progress_bar("distractors", "phrase", total=count, quiet=quiet) as bar:
        for start in range(0, len(sentences), BLOCK_TEXTS):
            texts = sentences[start : start + BLOCK_TEXTS]
            phrases = _deduplicate(Phrases(texts, find(texts)))
            phrases = phrases.keep(_usable_mask(phrases, systems))
            taken = phrases.spans[: count - len(spans)] + np.array([start, 0, 0], np.int32)
            spans = np.concatenate([spans, taken])
            bar.update(len(taken))
            if len(spans) == count:
                break
    if not len(spans):
        names = ", ".join(map(str, paths))
        raise ConfigurationError(
            f"{names}: there is no phrase in it that is not gold: give text of sentences, one per line"
        )
    return Phrases(sentences[: spans[-1, 0] + 1], spans)


def _find_sentence_phrases(gold: GoldPhrases, find: Finder, systems: Sequence[PhraseSystem]) -> Phrases:
    texts = gold.targets.texts
    numbers = np.unique(gold.targets.spans[gold.answers, 0])
    spans = find([texts[number] for number in numbers])
    spans[:, 0] = numbers[spans[:, 0]]
    targets = set(map(tuple, gold.targets.spans.tolist()))
    others = np.array([tuple(span) not in targets for span in spans.tolist()], bool)
    found = _deduplicate(Phrases(texts, spans[others]))
    return found.keep(_usable_mask(found, systems))


def _find_same_strings(
    paths: list[Path], gold: GoldPhrases, size: int, systems: Sequence[PhraseSystem]
) -> tuple[Phrases, np.ndarray]:
    """Find for each query at most `size` phrases with the string of its answer, each in another sentence.

    Returns:
        The phrases; for each query their rows, int64 [Q, size], -1 where there are fewer.
    """
    strings = gold.answer_strings()
    rows_of = np.full((len(strings), size), -1)
    if not size:
        return Phrases([], np.empty((0, 3), np.int32)), rows_of
    occurrences = sample_occurrences(paths, dict.fromkeys(strings), size, set(gold.targets.texts))
    phrases, rows = _as_phrases(place for places in occurrences.values() for place in places)
    usable = _usable_mask(phrases, systems)
    new_rows = np.where(usable, usable.cumsum() - 1, -1)[rows]
    ends = np.cumsum([len(places) for places in occurrences.values()])
    by_string = dict(zip(occurrences, np.split(new_rows, ends[:-1])))
    for query, string in enumerate(strings):
        found = by_string[string][by_string[string] >= 0]
        rows_of[query, : len(found)] = found
    return phrases.keep(usable), rows_of


def _usable_mask(phrases: Phrases, systems: Sequence[PhraseSystem]) -> np.ndarray:
    """Mark the phrases that every system can encode, bool [K]."""
    return np.logical_and.reduce(
        [np.ones(len(phrases.spans), bool), *(system.usable(phrases) for system in systems)]
    )


def _deduplicate(phrases: Phrases) -> Phrases:
    places: dict[tuple[int, str], int] = {}
    for row, (text, string) in enumerate(zip(phrases.spans[:, 0].tolist(), phrases.strings())):
        places.setdefault((text, string), row)
    return Phrases(phrases.texts, phrases.spans[list(places.values())])
