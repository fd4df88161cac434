"""acc@1 of phrase retrieval: how often the nearest entry of an index is the gold translation, and its report.

The index is never in memory: as entries stream by, three scores of each query are kept, that of its gold
entry, and the best of other entries with the same string and with other strings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.lab.accuracy.phrase_benchmark import GoldPhrases, PhraseBenchmark
from fairseq_ccpr.lab.accuracy.phrase_systems import BLOCK_TEXTS, Phrases, PhraseSystem
from fairseq_ccpr.lab.accuracy.significance import INTERVAL, p_value, resample
from fairseq_ccpr.timing import progress_bar

TILE_NUMBERS = 1 << 24  # scores at a time
TIE = 1e-6  # scores that differ by less are equal, as a fraction of the lengths of query and gold vector
NONE = float("-inf")
LONG = 4  # words of a phrase; longer ones are counted with it


@dataclass
class QueryScores:
    """The scores that decide Q queries, fp32 on the CPU."""

    gold: Tensor  # [Q], of the right entry
    same: Tensor  # [Q], the best of the other entries with the right string
    other: Tensor  # [Q], the best of those with other strings
    same_strings: Tensor  # [Q, C], of the query's `same_strings`; -inf for none
    tie: Tensor  # [Q], differences up to this are none

    def by_entry(self) -> np.ndarray:
        """Tell whether the right entry ranks first, bool [Q]; a tie counts against the system."""
        return self._above(self.gold, torch.maximum(self.same, self.other))

    def by_string(self) -> np.ndarray:
        """Tell whether an entry with the right string ranks first."""
        return self._above(torch.maximum(self.gold, self.same), self.other)

    def tied(self) -> np.ndarray:
        """Tell whether the right entry shares the first place with another."""
        best = torch.maximum(self.same, self.other)
        return self._above(self.gold, best - 2 * self.tie) & ~self.by_entry()

    def among_same_strings(self, count: int) -> np.ndarray:
        """Tell whether the right entry is first among entries with other strings and at most `count` `same_strings`."""
        padded = torch.column_stack([self.other, self.same_strings[:, :count]])
        return self._above(self.gold, padded.amax(dim=1))

    def _above(self, one: Tensor, two: Tensor) -> np.ndarray:
        return (one > two + self.tie).numpy()


@torch.inference_mode()
def score_system(
    system: PhraseSystem, benchmark: PhraseBenchmark, name: str, quiet: bool, block: int = BLOCK_TEXTS
) -> QueryScores:
    """Score a system on the benchmark, whose entries are encoded `block` texts at a time; only memory depends on it."""
    gold = benchmark.gold
    sizes = [
        len(part.texts)
        for part in (gold.queries, gold.targets, benchmark.distractors, benchmark.same_strings)
    ]
    with progress_bar(name, "text", total=sum(sizes), quiet=quiet) as bar:

        def encode(phrases: Phrases) -> Iterator[tuple[slice, Tensor]]:
            for rows, part in phrases.blocks(block):
                if len(part.spans):
                    yield rows, system.encode(part)
                bar.update(len(part.texts))

        queries = torch.cat([vectors for _, vectors in encode(gold.queries)])[gold.query_rows]  # [Q, d]
        targets = torch.cat([vectors for _, vectors in encode(gold.targets)])  # [G, d]
        best = _Best(queries, targets, gold)
        target_strings = gold.targets.strings()
        for start in range(0, len(targets), 1 << 12):
            rows = slice(start, start + (1 << 12))
            best.add(targets[rows], target_strings[rows], start)
        strings = benchmark.distractors.strings()
        for rows, vectors in encode(benchmark.distractors):
            best.add(vectors, strings[rows])
        other_rows = torch.from_numpy(benchmark.same_string_rows)
        same_strings = torch.full(other_rows.shape, NONE)
        for rows, vectors in encode(benchmark.same_strings):
            query, place = ((other_rows >= rows.start) & (other_rows < rows.stop)).nonzero(as_tuple=True)
            products = queries[query] * vectors[other_rows[query, place] - rows.start]
            same_strings[query, place] = products.sum(dim=1).cpu()
    return QueryScores(best.gold.cpu(), best.same.cpu(), best.other.cpu(), same_strings, best.tie.cpu())


class _Best:
    """Running scores of queries [Q, d] whose answers are among targets [G, d]."""

    def __init__(self, queries: Tensor, targets: Tensor, gold: GoldPhrases) -> None:
        self.queries, self.device = queries, queries.device
        self.answers = torch.from_numpy(gold.answers).to(self.device)
        right = targets[self.answers]
        self.gold = (queries * right).sum(dim=1)
        self.tie = TIE * queries.norm(dim=1) * right.norm(dim=1)
        self.same, self.other = torch.full_like(self.gold, NONE), torch.full_like(self.gold, NONE)
        self.codes: dict[str, int] = {}
        codes = [self.codes.setdefault(string, len(self.codes)) for string in gold.answer_strings()]
        self.strings = torch.tensor(codes, device=self.device)

    def add(self, vectors: Tensor, strings: Sequence[str], first_target: int | None = None) -> None:
        """Update the scores with entries [K, d]; targets from `first_target` on do not rival themselves."""
        codes = torch.tensor([self.codes.get(string, -1) for string in strings], device=self.device)
        size = max(1, TILE_NUMBERS // len(self.queries))
        for start in range(0, len(vectors), size):
            rows = slice(start, start + size)
            scores = self.queries @ vectors[rows].T  # [Q, tile]
            if first_target is not None:
                numbers = torch.arange(start, start + scores.size(1), device=self.device) + first_target
                scores.masked_fill_(numbers == self.answers[:, None], NONE)
            same = codes[rows] == self.strings[:, None]
            self.same = torch.maximum(self.same, scores.masked_fill(~same, NONE).amax(dim=1))
            self.other = torch.maximum(self.other, scores.masked_fill_(same, NONE).amax(dim=1))


def report(
    benchmark: PhraseBenchmark, scores: dict[str, QueryScores], same_string: list[int], samples: int
) -> dict[str, Any]:
    """Summarise the scores of systems, the first being the baseline; the average gives each set the same weight.

    All is in per cent but p. `same_string` are numbers of other occurrences of the answer's string.
    """
    sets = np.array(benchmark.gold.sets)
    rows = {name: np.flatnonzero(sets == name) for name in dict.fromkeys(benchmark.gold.sets)}
    entry, string, tied = (
        np.stack([getattr(system, kind)() for system in scores.values()])
        for kind in ("by_entry", "by_string", "tied")
    )
    resampled = resample(entry, np.ones(entry.shape, int), list(rows.values()), samples)
    low, high = np.percentile(resampled, INTERVAL, axis=0)
    done: dict[str, Any] = {
        "queries": {name: len(columns) for name, columns in rows.items()},
        "entries": benchmark.entries,  # gold targets and distractors
        "gold_targets": len(benchmark.gold.targets.spans),
        "left_out": benchmark.left_out,  # gold pairs with a phrase that one of the systems cannot encode
        "systems": [],
        "lengths": [],  # words of the longer side, queries, acc@1 by system
        "same_string": [],
    }

    def both(number: int, columns: np.ndarray) -> dict[str, float]:
        return {"entry": _percent(entry[number, columns]), "string": _percent(string[number, columns])}

    for number, name in enumerate(scores):
        by_set = {label: both(number, columns) for label, columns in rows.items()}
        average = {
            kind: round(_mean(accuracy[kind] for accuracy in by_set.values()), 2)
            for kind in ("entry", "string")
        }
        tied_average = round(_mean(_percent(tied[number, columns]) for columns in rows.values()), 2)
        interval = [round(100 * float(limit[number]), 2) for limit in (low, high)]
        p = round(p_value(resampled, number), 4) if number else None
        done["systems"].append(
            {
                "system": name,
                "sets": by_set,
                "average": average,
                "interval": interval,
                "p": p,
                "tied": tied_average,
            }
        )
    for label, columns in _by_length(np.array(benchmark.gold.words)).items():
        accuracy = {name: both(number, columns) for number, name in enumerate(scores)}
        done["lengths"].append({"words": label, "queries": len(columns), "accuracy": accuracy})
    for count in same_string:
        found = (benchmark.same_string_rows[:, :count] >= 0).sum(axis=1)
        percent = {
            name: round(
                _mean(_percent(system.among_same_strings(count)[columns]) for columns in rows.values()), 2
            )
            for name, system in scores.items()
        }
        done["same_string"].append(
            {"count": count, "mean found": round(float(found.mean()), 2), "entry": percent}
        )
    return done


def _by_length(words: np.ndarray) -> dict[str, np.ndarray]:
    """Group queries by the words of their phrases, int64 [Q]: the rows of each group that has any, by its name."""
    groups = {str(count): words == count for count in range(1, LONG)}
    groups |= {f"{LONG} or more": words >= LONG, "several": words > 1}
    return {label: np.flatnonzero(group) for label, group in groups.items() if group.any()}


def tables(done: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """Tabulate acc@1 by entry / by string for each set, by the words of the phrase, and among the same strings."""
    systems, names = done["systems"], [system["system"] for system in done["systems"]]
    by_set = [["set", "queries", *names]]
    by_set += [
        [name, count, *(_both(one["sets"][name]) for one in systems)]
        for name, count in done["queries"].items()
    ]
    by_set += [
        ["average", sum(done["queries"].values()), *(_both(system["average"]) for system in systems)],
        ["95% interval", "", *("{:.1f} to {:.1f}".format(*system["interval"]) for system in systems)],
        ["p", "", *("" if system["p"] is None else f"{system['p']:.3f}" for system in systems)],
        ["tied", "", *(f"{system['tied']:.1f}" for system in systems)],
    ]
    by_length = [["words", "queries", *names]]
    by_length += [
        [row["words"], row["queries"], *map(_both, row["accuracy"].values())] for row in done["lengths"]
    ]
    made = {
        "acc@1 by entry / by string, per cent": by_set,
        "the same by the words of the phrase or its translation, whichever has more, all sets together": by_length,
    }
    if done["same_string"]:
        found = [["same string", "found", *names]]
        for row in done["same_string"]:
            found.append(
                [row["count"], f"{row['mean found']:.1f}", *(f"{one:.1f}" for one in row["entry"].values())]
            )
        made[
            "acc@1 by entry, average of the sets, with other occurrences of the same string in the index"
        ] = found
    return made


def _both(accuracy: dict[str, float]) -> str:
    return f"{accuracy['entry']:.1f} / {accuracy['string']:.1f}"


def _percent(correct: np.ndarray) -> float:
    return round(100 * float(correct.mean()), 2)


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
