"""Precision and coverage of retrieved phrases, measured against reference translations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_finder import PhraseFinder
from fairseq_ccpr.text.pairs import read_lines, read_together
from fairseq_ccpr.text.words import by_first_word, has_letters, occurrences, word_spans
from fairseq_ccpr.timing import progress_bar

MEASURES = "precision", "coverage", "coverage by several words", "reference phrases"
COVERAGES = slice(1, 3)  # of MEASURES
BATCH = 64  # sentences
MOST_WORDS = 7  # of a phrase that is looked for in a whole datastore


@dataclass(frozen=True)
class Reference:
    """A reference translation, prepared for comparison with retrieved strings."""

    text: str
    words: list[tuple[int, int]]  # those with a letter or a digit, in characters
    phrases: frozenset[str]  # those found in it


@dataclass
class Counts:
    """Counts for S sentences, by the number of strings taken of each query phrase, of which there are T."""

    own: np.ndarray  # int64 [T, M, 2, S]: for each of MEASURES what counts and out of how many
    chance: np.ndarray  # the same against the reference of another sentence
    written: np.ndarray  # int64 [T, O, 2, 2, S]: both coverages by strings that each of O translations has as well


def read_text(source: Path, target: Path) -> tuple[list[tuple[str, str]], int]:
    """Read sentences with their references, and count the lines skipped because one side is empty.

    Raises:
        ConfigurationError: files of different lengths, or fewer than two pairs.
    """
    lines = list(read_together(source, target))
    pairs = [(one, two) for one, two in lines if one.strip() and two.strip()]
    if len(pairs) < 2:
        raise ConfigurationError(
            f"{source} and {target} have {len(pairs)} sentence pairs without an empty side: give at least 2"
        )
    return pairs, len(lines) - len(pairs)


def read_outputs(paths: Sequence[Path], source: Path, target: Path) -> list[list[str]]:
    """Read translations of the sentences that `read_text` keeps.

    Raises:
        ConfigurationError: a file has another number of lines than the source.
    """
    kept = [bool(one.strip() and two.strip()) for one, two in read_together(source, target)]
    outputs = []
    for path in paths:
        lines = list(read_lines(path))
        if len(lines) != len(kept):
            raise ConfigurationError(
                f"--hypotheses {path} has {len(lines):,} lines, and {source} {len(kept):,}: give a translation of each line"
            )
        outputs.append([line for line, keep in zip(lines, kept) if keep])
    return outputs


def make_references(finder: PhraseFinder, texts: Sequence[str], quiet: bool) -> tuple[list[Reference], int]:
    """Find the phrases of reference translations, and count those longer than the encoder reads.

    Raises:
        ConfigurationError: no phrase is found in any of them.
    """
    references, too_long = [], 0
    for batch in _batches(texts, "references", quiet, BATCH):
        found = finder.find(batch)
        too_long += found.too_long
        phrases: list[set[str]] = [set() for _ in batch]
        for number, start, end in found.spans.tolist():
            phrases[number].add(batch[number][start:end])
        for text, of_text in zip(batch, phrases):
            references.append(Reference(text, lettered_words(text), frozenset(filter(has_letters, of_text))))
    if not any(reference.phrases for reference in references):
        raise ConfigurationError(
            f"no phrase was found in the references with --reference-threshold {finder.segmentation.threshold}: lower it"
        )
    return references, too_long


def count_retrieved(
    retriever: PhraseRetriever,
    sources: Sequence[str],
    references: Sequence[Reference],
    tops: Sequence[int],
    outputs: Sequence[Sequence[str]],
    name: str,
    quiet: bool,
    batch: int = BATCH,
) -> Counts:
    """Retrieve for sentences, and count what is in their references, and by chance in those half of the text away.

    Args:
        retriever: over the datastore that is to be judged.
        sources: S sentences, at least 2.
        references: their translations.
        tops: T numbers of strings of each query phrase, at most the retriever's k.
        outputs: O translations of them, by systems that may have written what was retrieved.
        name: of the datastore, for the progress bar.
        quiet: no progress bar.
        batch: sentences at a time, on which memory depends.
    """
    size = len(sources)
    own, chance = (np.zeros((len(tops), len(MEASURES), 2, size), np.int64) for _ in range(2))
    written = np.zeros((len(tops), len(outputs), len(MEASURES[COVERAGES]), 2, size), np.int64)
    number = 0
    for texts in _batches(sources, name, quiet, batch):
        for queries in retriever.retrieve(texts):
            other = references[(number + size // 2) % size]
            for row, top in enumerate(tops):
                strings = distinct_strings(queries, top)
                own[row, :, :, number] = measure(references[number], strings)
                chance[row, :, :, number] = measure(other, strings)
                by_word = by_first_word(strings)
                for column, lines in enumerate(outputs):
                    in_output = measure(references[number], occurrences(lines[number], by_word))
                    written[row, column, :, :, number] = in_output[COVERAGES]
            number += 1
    return Counts(own, chance, written)


def count_held(store: PhraseDatastore, references: Sequence[Reference]) -> np.ndarray:
    """Count likewise all strings of a datastore that are in a reference: the most that retrieval could find.

    Runs of up to MOST_WORDS words of each reference are looked up; those of all references are held in memory.

    Returns:
        int64 [M, 2, S].
    """
    runs = [set(_runs(reference)) for reference in references]
    wanted: set[str] = set().union(*runs)
    held = wanted.intersection(store.phrase(entry)[0] for entry in range(store.section.size))
    counts = [measure(reference, of_one & held) for reference, of_one in zip(references, runs)]
    return np.array(counts).transpose(1, 2, 0)


def distinct_strings(queries: Sequence[QueryPhrase], top: int) -> set[str]:
    """Collect the first `top` strings of each query phrase, without those of punctuation alone."""
    return {found.string for query in queries for found in query.retrieved[:top] if has_letters(found.string)}


def measure(reference: Reference, strings: Collection[str]) -> list[tuple[int, int]]:
    """Count for each of MEASURES: hits, and out of how many.

    1. Retrieved strings that are in the reference as whole words, of all of them.
    2. Words of the reference inside such a string, of all its words; 3. inside one of several words.
    4. Phrases of the reference that were retrieved, of all its phrases.

    >>> reference = Reference("The house is big.", [(0, 3), (4, 9), (10, 12), (13, 16)], frozenset({"The house", "big"}))
    >>> measure(reference, {"house", "house is", "house is big", "The", "hous", "small", "big"})
    [(5, 7), (4, 4), (3, 4), (1, 2)]
    """
    found = occurrences(reference.text, by_first_word(strings))
    places = [place for of_string in found.values() for place in of_string]
    several = [place for string, of_string in found.items() if len(lettered_words(string)) > 1 for place in of_string]
    return [
        (len(found), len(strings)),
        (_inside(reference.words, places), len(reference.words)),
        (_inside(reference.words, several), len(reference.words)),
        (len(reference.phrases.intersection(strings)), len(reference.phrases)),
    ]


def lettered_words(text: str) -> list[tuple[int, int]]:
    """Locate the words of a text that have a letter or a digit, in characters."""
    return [span for span in word_spans(text) if has_letters(text[slice(*span)])]


def _runs(reference: Reference) -> Iterator[str]:
    spans = word_spans(reference.text)
    for first, (start, _) in enumerate(spans):
        for _, end in spans[first : first + MOST_WORDS]:
            if has_letters(run := reference.text[start:end]):
                yield run


def _inside(words: list[tuple[int, int]], places: list[tuple[int, int]]) -> int:
    return sum(any(first <= start and end <= last for first, last in places) for start, end in words)


def _batches(texts: Sequence[str], name: str, quiet: bool, size: int) -> Iterator[list[str]]:
    with progress_bar(name, "sentence", total=len(texts), quiet=quiet) as bar:
        for start in range(0, len(texts), size):
            batch = list(texts[start : start + size])
            yield batch
            bar.update(len(batch))
