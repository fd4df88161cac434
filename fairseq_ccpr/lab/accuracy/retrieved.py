"""Precision and coverage of retrieved phrases against reference translations, and their report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.significance import INTERVAL, p_value, resample
from fairseq_ccpr.lab.samples import by_first_word, occurrences
from fairseq_ccpr.models.phrase_finder import PhraseFinder
from fairseq_ccpr.text.pairs import read_lines, read_together
from fairseq_ccpr.text.words import has_letters, word_spans
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

    actual: np.ndarray  # int64 [T, M, 2, S]: for each of MEASURES what counts and out of how many
    chance: np.ndarray  # the same against the reference of another sentence
    # int64 [T, O, 2, 2, S]: both coverages by strings that each of O translations has as well
    written: np.ndarray


def read_text(
    source: Path, target: Path, outputs: Sequence[Path]
) -> tuple[list[tuple[str, str]], list[list[str]], int]:
    """Read sentences with their references and translations; the number of lines skipped because one side is empty."""
    lines = list(read_together(source, target))
    kept = [bool(one.strip() and two.strip()) for one, two in lines]
    if sum(kept) < 2:
        raise ConfigurationError(
            f"{source} and {target} have {sum(kept)} sentence pairs without an empty side: give at least 2"
        )
    translations = []
    for path in outputs:
        texts = list(read_lines(path))
        if len(texts) != len(lines):
            raise ConfigurationError(
                f"--hypotheses {path} has {len(texts):,} lines, and {source} {len(lines):,}: give a translation of each line"
            )
        translations.append([*compress(texts, kept)])
    return [*compress(lines, kept)], translations, len(lines) - sum(kept)


def make_references(finder: PhraseFinder, texts: Sequence[str], quiet: bool) -> tuple[list[Reference], int]:
    """Find the phrases of reference translations, and count those longer than the encoder reads."""
    references, too_long = [], 0
    for batch in _batches(texts, "references", quiet, BATCH):
        found = finder.find(batch)
        too_long += found.too_long
        phrases: list[set[str]] = [set() for _ in batch]
        for number, start, end in found.spans.tolist():
            phrases[number].add(batch[number][start:end])
        for text, strings in zip(batch, phrases):
            references.append(Reference(text, lettered_words(text), frozenset(filter(has_letters, strings))))
    if not any(reference.phrases for reference in references):
        raise ConfigurationError(
            f"no phrase was found in the references, each less likely than {finder.segmentation.threshold}: give other text"
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
    """Retrieve for sentences, and count what is in their references, and by chance in those half of the text away."""
    size = len(sources)
    actual, chance = (np.zeros((len(tops), len(MEASURES), 2, size), np.int64) for _ in range(2))
    written = np.zeros((len(tops), len(outputs), len(MEASURES[COVERAGES]), 2, size), np.int64)
    number = 0
    for texts in _batches(sources, name, quiet, batch):
        for queries in retriever.retrieve(texts):
            other = references[(number + size // 2) % size]
            for row, top in enumerate(tops):
                strings = distinct_strings(queries, top)
                actual[row, :, :, number] = measure(references[number], strings)
                chance[row, :, :, number] = measure(other, strings)
                by_word = by_first_word(strings)
                for column, lines in enumerate(outputs):
                    in_output = measure(references[number], occurrences(lines[number], by_word))
                    written[row, column, :, :, number] = in_output[COVERAGES]
            number += 1
    return Counts(actual, chance, written)


def count_held(store: PhraseDatastore, references: Sequence[Reference]) -> np.ndarray:
    """Count likewise all strings of a datastore that are in a reference: the most that retrieval could find.

    Runs of up to MOST_WORDS words of each reference are looked up; int64 [M, 2, S].
    """
    runs = []
    for text in (reference.text for reference in references):
        spans = word_spans(text)
        windows = ((start, spans[i : i + MOST_WORDS]) for i, (start, _) in enumerate(spans))
        runs.append(
            {
                text[start:end]
                for start, window in windows
                for _, end in window
                if has_letters(text[start:end])
            }
        )
    held = set[str]().union(*runs).intersection(store.phrase(entry)[0] for entry in range(store.section.size))
    counts = [measure(reference, strings & held) for reference, strings in zip(references, runs)]
    return np.array(counts).transpose(1, 2, 0)


def distinct_strings(queries: Sequence[QueryPhrase], top: int) -> set[str]:
    """Collect the first `top` strings of each query phrase, without those of punctuation alone."""
    return {found.string for query in queries for found in query.retrieved[:top] if has_letters(found.string)}


def measure(reference: Reference, strings: Collection[str]) -> list[tuple[int, int]]:
    """Count for each of MEASURES: hits, and out of how many.

    1. Retrieved strings that are in the reference as whole words, of all of them.
    2. Words of the reference inside such a string, of all its words; 3. inside one of several words.
    4. Phrases of the reference that were retrieved, of all its phrases.
    """
    found = occurrences(reference.text, by_first_word(strings))
    places = [place for spans in found.values() for place in spans]
    several = [place for string, spans in found.items() if len(lettered_words(string)) > 1 for place in spans]
    return [
        (len(found), len(strings)),
        (_inside(reference.words, places), len(reference.words)),
        (_inside(reference.words, several), len(reference.words)),
        (len(reference.phrases.intersection(strings)), len(reference.phrases)),
    ]


def lettered_words(text: str) -> list[tuple[int, int]]:
    """Locate the words of a text that have a letter or a digit, in characters."""
    return [span for span in word_spans(text) if has_letters(text[slice(*span)])]


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


def report(
    results: dict[str, StoreResult],
    tops: Sequence[int],
    outputs: Sequence[str],
    skipped: int,
    references_too_long: int,
    samples: int,
) -> dict[str, Any]:
    """Summarise the strings retrieved from each datastore, the first being the baseline; fractions in per cent."""
    actual = np.stack([result.counts.actual for result in results.values()])  # [N, T, M, 2, S]
    chance = _share(np.stack([result.counts.chance for result in results.values()]))  # [N, T, M]
    sentences = actual.shape[-1]
    compared = [
        [_compare(actual[:, row, column], samples) for column in range(len(MEASURES))]
        for row in range(len(tops))
    ]
    phrases = round(float(actual[0, 0, MEASURES.index("reference phrases"), 1].mean()), 2)
    stores = []
    for number, (name, result) in enumerate(results.items()):
        by_top = []
        for row, top in enumerate(tops):
            measures = {
                measure: {**compared[row][column][number], "chance": _percent(chance[number, row, column])}
                for column, measure in enumerate(MEASURES)
            }
            strings = round(float(actual[number, row, 0, 1].mean()), 2)
            shares = _share(result.counts.written[row])  # [O, 2]
            written = {
                output: dict(zip(MEASURES[COVERAGES], map(_percent, shares_of)))
                for output, shares_of in zip(outputs, shares.tolist())
            }
            by_top.append(
                {"top": top, "strings per sentence": strings, "measures": measures, "written": written}
            )
        stores.append({
            "store": name, "entries": result.entries,
            "bytes per entry": {part: round(count, 2) for part, count in result.bytes_per_entry.items()},
            "phrases per sentence": round(result.phrases / sentences, 2), "tops": by_top,
            "held": dict(zip(MEASURES[1:], map(_percent, _share(result.held)[1:].tolist()))),
            "signature": result.signature,
        })  # fmt: skip
    return {
        "sentences": sentences,
        "skipped": skipped,  # lines with an empty side
        "reference_phrases": phrases,  # different ones in a reference, on average
        "too_long": next(iter(results.values())).too_long,  # sentences that the encoder reads in windows
        "references_too_long": references_too_long,
        "stores": stores,
    }


def _compare(counts: np.ndarray, samples: int) -> list[dict[str, Any]]:
    """Compute each datastore's fraction of a measure, counts int64 [N, 2, S], and its difference from the first."""
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


def retrieved_table(stores: list[dict[str, Any]]) -> list[list[Any]]:
    """Tabulate the results, a column a datastore."""

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
        table.append(
            [label + "strings per sentence", *(f"{top['strings per sentence']:.1f}" for top in tops)]
        )
        for measure in MEASURES:
            values = [top["measures"][measure] for top in tops]
            table.append([label + measure, *map(_cell, values)])
            table.append(["by chance", *(f"{value['chance']:.1f}" for value in values)])
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
