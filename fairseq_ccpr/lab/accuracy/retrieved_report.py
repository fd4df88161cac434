"""Retrieval from several phrase datastores side by side, with intervals and p-values of the differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairseq_ccpr.lab.accuracy.retrieved_phrases import COVERAGES, MEASURES, Counts
from fairseq_ccpr.lab.accuracy.significance import INTERVAL, p_value, resample


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
