"""acc@1 of several systems side by side: by set, on average, with intervals and p-values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairseq_ccpr.lab.accuracy.phrase_accuracy import QueryScores
from fairseq_ccpr.lab.accuracy.phrase_benchmark import PhraseBenchmark
from fairseq_ccpr.lab.accuracy.significance import INTERVAL, p_value, resample

LONG = 4  # words of a phrase; longer ones are counted with it


@dataclass
class PhraseReport:
    """Results of an evaluation; all in per cent but p."""

    queries: dict[str, int]  # by set
    entries: int  # of the index: gold targets and distractors
    gold_targets: int
    left_out: int  # gold pairs with a phrase that one of the systems cannot encode
    systems: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[dict[str, Any]] = field(default_factory=list)  # words of the longer side, queries, acc@1 by system
    same_string: list[dict[str, Any]] = field(default_factory=list)  # count, mean found, acc@1 by system


def report(
    benchmark: PhraseBenchmark, scores: dict[str, QueryScores], same_string: list[int], samples: int
) -> PhraseReport:
    """Summarise the scores of systems; the average gives each set the same weight.

    Args:
        benchmark: queries and index.
        scores: by system, the first being the baseline.
        same_string: numbers of other occurrences of the answer's string.
        samples: of the bootstrap.
    """
    sets = np.array(benchmark.gold.sets)
    rows = {name: np.flatnonzero(sets == name) for name in dict.fromkeys(benchmark.gold.sets)}
    entry, string, tied = (
        np.stack([getattr(system, kind)() for system in scores.values()]) for kind in ("by_entry", "by_string", "tied")
    )
    resampled = resample(entry, np.ones(entry.shape, int), list(rows.values()), samples)
    low, high = np.percentile(resampled, INTERVAL, axis=0)
    done = PhraseReport(
        {name: len(columns) for name, columns in rows.items()},
        benchmark.entries,
        len(benchmark.gold.targets.spans),
        benchmark.left_out,
    )
    for number, name in enumerate(scores):
        by_set = {
            label: {"entry": _percent(entry[number, columns]), "string": _percent(string[number, columns])}
            for label, columns in rows.items()
        }
        average = {
            kind: round(_mean(accuracy[kind] for accuracy in by_set.values()), 2) for kind in ("entry", "string")
        }
        tied_average = round(_mean(_percent(tied[number, columns]) for columns in rows.values()), 2)
        interval = [round(100 * float(limit[number]), 2) for limit in (low, high)]
        p = round(p_value(resampled, number), 4) if number else None
        done.systems.append(
            {"system": name, "sets": by_set, "average": average, "interval": interval, "p": p, "tied": tied_average}
        )
    for label, columns in _by_length(np.array(benchmark.gold.words)).items():
        accuracy = {
            name: {"entry": _percent(entry[number, columns]), "string": _percent(string[number, columns])}
            for number, name in enumerate(scores)
        }
        done.lengths.append({"words": label, "queries": len(columns), "accuracy": accuracy})
    for count in same_string:
        found = (benchmark.same_string_rows[:, :count] >= 0).sum(axis=1)
        percent = {
            name: round(_mean(_percent(system.among_same_strings(count)[columns]) for columns in rows.values()), 2)
            for name, system in scores.items()
        }
        done.same_string.append({"count": count, "mean found": round(float(found.mean()), 2), "entry": percent})
    return done


def _by_length(words: np.ndarray) -> dict[str, np.ndarray]:
    """Group queries by the words of their phrases, int64 [Q]: the rows of each group that has any, by its name."""
    groups = {str(count): words == count for count in range(1, LONG)}
    groups |= {f"{LONG} or more": words >= LONG, "several": words > 1}
    return {label: np.flatnonzero(group) for label, group in groups.items() if group.any()}


def length_table(done: PhraseReport) -> list[list[Any]]:
    """Tabulate acc@1 by entry / by string by the words of the phrase, over the queries of all sets."""
    table: list[list[Any]] = [["words", "queries", *(system["system"] for system in done.systems)]]
    for row in done.lengths:
        table.append([row["words"], row["queries"], *map(_both, row["accuracy"].values())])
    return table


def accuracy_table(done: PhraseReport) -> list[list[Any]]:
    """Tabulate for each set, and on average, the number of queries and each system's acc@1 by entry / by string."""
    systems = done.systems
    table: list[list[Any]] = [["set", "queries", *(system["system"] for system in systems)]]
    for name, count in done.queries.items():
        table.append([name, count, *(_both(system["sets"][name]) for system in systems)])
    table.append(["average", sum(done.queries.values()), *(_both(system["average"]) for system in systems)])
    table.append(["95% interval", "", *("{:.1f} to {:.1f}".format(*system["interval"]) for system in systems)])
    table.append(["p", "", *("" if system["p"] is None else f"{system['p']:.3f}" for system in systems)])
    table.append(["tied", "", *(f"{system['tied']:.1f}" for system in systems)])
    return table


def same_string_table(done: PhraseReport) -> list[list[Any]]:
    """Tabulate acc@1 by entry by the number of other occurrences: wanted, and found on average."""
    table: list[list[Any]] = [["same string", "found", *(system["system"] for system in done.systems)]]
    for row in done.same_string:
        table.append([row["count"], f"{row['mean found']:.1f}", *(f"{value:.1f}" for value in row["entry"].values())])
    return table


def _both(accuracy: dict[str, float]) -> str:
    return f"{accuracy['entry']:.1f} / {accuracy['string']:.1f}"


def _percent(correct: np.ndarray) -> float:
    return round(100 * float(correct.mean()), 2)


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
