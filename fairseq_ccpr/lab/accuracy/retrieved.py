"""Precision and coverage of retrieved phrases against reference translations, and their report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.significance import INTERVAL, p_value, resample
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


@dataclass
class StoreResult:
    """A datastore, and the counts of strings retrieved from it."""

    entries: int
    bytes_per_entry: dict[str, float]  # by part
    phrases: int  # queried
    too_long: int  # sentences longer than the encoder, which all share, reads
    counts: Counts
    held: np.ndarray  # int64 [M, 2, S], the counts for all its strings
    signature: str


@dataclass
class RetrievedReport:
    """Results of an evaluation; fractions and differences in per cent."""

    sentences: int
    skipped: int  # lines with an empty side
    reference_phrases: float  # different ones in a reference, on average
    too_long: int  # source sentences longer than the encoder reads, read in windows
    references_too_long: int  # the same of references
    stores: list[dict[str, Any]] = field(default_factory=list)


def report(
    results: dict[str, StoreResult],
    tops: Sequence[int],
    outputs: Sequence[str],
    skipped: int,
    references_too_long: int,
    samples: int,
) -> RetrievedReport:
    """Summarise the strings retrieved from each datastore.

    Args:
        results: by datastore, the first being the baseline.
        tops: numbers of strings of each query phrase, as in the counts.
        outputs: names of the translations, likewise.
        skipped: lines with an empty side.
        references_too_long: those longer than the encoder reads.
        samples: of the bootstrap.
    """
    own = np.stack([result.counts.own for result in results.values()])  # [N, T, M, 2, S]
    chance = _share(np.stack([result.counts.chance for result in results.values()]))  # [N, T, M]
    sentences = own.shape[-1]
    compared = [[_compare(own[:, row, column], samples) for column in range(len(MEASURES))] for row in range(len(tops))]
    phrases = round(float(own[0, 0, MEASURES.index("reference phrases"), 1].mean()), 2)
    too_long = next(iter(results.values())).too_long
    done = RetrievedReport(sentences, skipped, phrases, too_long, references_too_long)
    for number, (name, result) in enumerate(results.items()):
        by_top = []
        for row, top in enumerate(tops):
            measures = {
                measure: {**compared[row][column][number], "chance": _percent(chance[number, row, column])}
                for column, measure in enumerate(MEASURES)
            }
            strings = round(float(own[number, row, 0, 1].mean()), 2)
            shares = _share(result.counts.written[row])  # [O, 2]
            written = {
                output: dict(zip(MEASURES[COVERAGES], map(_percent, of_output)))
                for output, of_output in zip(outputs, shares.tolist())
            }
            by_top.append({"top": top, "strings per sentence": strings, "measures": measures, "written": written})
        done.stores.append(
            {
                "store": name,
                "entries": result.entries,
                "bytes per entry": {part: round(count, 2) for part, count in result.bytes_per_entry.items()},
                "phrases per sentence": round(result.phrases / sentences, 2),
                "tops": by_top,
                "held": dict(zip(MEASURES[1:], map(_percent, _share(result.held)[1:].tolist()))),
                "signature": result.signature,
            }
        )
    return done


def _compare(counts: np.ndarray, samples: int) -> list[dict[str, Any]]:
    """Compute each datastore's fraction of a measure, and its difference from the first.

    Args:
        counts: int64 [N, 2, S].
        samples: of the bootstrap.
    """
    shares = _share(counts)
    resampled = resample(counts[:, 0], counts[:, 1], [np.arange(counts.shape[2])], samples)
    low, high = np.percentile(resampled - resampled[:, :1], INTERVAL, axis=0)
    compared: list[dict[str, Any]] = [{"share": _percent(shares[0])}]
    for number in range(1, len(counts)):
        compared.append(
            {
                "share": _percent(shares[number]),
                "difference": _percent(shares[number] - shares[0]),
                "interval": [_percent(low[number]), _percent(high[number])],
                "p": round(p_value(resampled, number), 4),
            }
        )
    return compared


def _share(counts: np.ndarray) -> np.ndarray:
    """Divide hits by totals over all sentences, [..., 2, S] -> [...]; 0 out of 0 is 0."""
    totals = counts.sum(axis=-1)
    return totals[..., 0] / totals[..., 1].clip(1)


def _percent(share: float) -> float:
    return round(100 * float(share), 2)


def retrieved_table(done: RetrievedReport) -> list[list[Any]]:
    """Tabulate the results, a column a datastore."""
    stores = done.stores

    def row(label: str, cell: Callable[[dict[str, Any]], Any]) -> list[Any]:
        return [label, *(cell(store) for store in stores)]

    table = [
        row("", lambda store: store["store"]),
        row("entries", lambda store: f"{store['entries']:,}"),
        row("bytes per entry", lambda store: f"{sum(store['bytes per entry'].values()):.0f}"),
        row("query phrases per sentence", lambda store: f"{store['phrases per sentence']:.1f}"),
    ]
    for number, by_top in enumerate(stores[0]["tops"]):
        tops = [store["tops"][number] for store in stores]
        label = f"top {by_top['top']}: "
        table.append([label + "strings per sentence", *(f"{top['strings per sentence']:.1f}" for top in tops)])
        for measure in MEASURES:
            of_measure = [top["measures"][measure] for top in tops]
            table.append([label + measure, *map(_cell, of_measure)])
            table.append(["by chance", *(f"{value['chance']:.1f}" for value in of_measure)])
            for output, written in tops[0]["written"].items():
                if measure in written:
                    shares = (top["written"][output][measure] for top in tops)
                    table.append([f"and in {output}", *(f"{share:.1f}" for share in shares)])
    for measure in stores[0]["held"]:
        table.append([f"held: {measure}", *(f"{store['held'][measure]:.1f}" for store in stores)])
    return table


def _cell(value: dict[str, Any]) -> str:
    if "p" not in value:
        return f"{value['share']:.1f}"
    low, high = value["interval"]
    return f"{value['share']:.1f} ({value['difference']:+.1f}: {low:+.1f} to {high:+.1f}, p {value['p']:.3f})"
