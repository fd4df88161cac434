"""acc@1 of phrase retrieval: how often the nearest entry of an index is the gold translation of a phrase.

The index is never in memory. Three scores decide a query: that of its gold entry, and the best of the other entries with
the same string and with other strings. They are updated as entries stream by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.lab.accuracy.gold_phrases import GoldPhrases
from fairseq_ccpr.lab.accuracy.phrase_benchmark import PhraseBenchmark
from fairseq_ccpr.lab.accuracy.phrase_systems import BLOCK_TEXTS, Phrases, PhraseSystem
from fairseq_ccpr.timing import progress_bar

TILE_NUMBERS = 1 << 24  # scores at a time
TIE = 1e-6  # scores that differ by less are equal, as a fraction of the lengths of query and gold vector
NONE = float("-inf")


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
        """Tell whether the right entry is first when exactly `count` others, or as many as there are, have its string.

        Those are its `same_strings`; of the index only entries with other strings count.
        """
        padded = torch.column_stack([self.other, self.same_strings[:, :count]])
        return self._above(self.gold, padded.amax(dim=1))

    def _above(self, one: Tensor, two: Tensor) -> np.ndarray:
        return (one > two + self.tie).numpy()


@torch.inference_mode()
def score_system(
    system: PhraseSystem, benchmark: PhraseBenchmark, name: str, quiet: bool, block: int = BLOCK_TEXTS
) -> QueryScores:
    """Score a system on the benchmark.

    1. Encode queries and gold targets, which are entries too.
    2. Encode the distractors block by block, and keep the best scores.
    3. Score the other occurrences of each answer's string.

    Args:
        system: gives phrases their vectors.
        benchmark: queries and index.
        name: of the system, for the progress bar.
        quiet: no progress bar.
        block: texts encoded at a time; only memory depends on it.
    """
    gold = benchmark.gold
    sizes = [len(part.texts) for part in (gold.queries, gold.targets, benchmark.distractors, benchmark.same_strings)]
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
        wanted = torch.from_numpy(benchmark.same_string_rows)
        same_strings = torch.full(wanted.shape, NONE)
        for rows, vectors in encode(benchmark.same_strings):
            query, place = ((wanted >= rows.start) & (wanted < rows.stop)).nonzero(as_tuple=True)
            products = queries[query] * vectors[wanted[query, place] - rows.start]
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
        """Update the scores with further entries.

        Args:
            vectors: [K, d].
            strings: of the entries.
            first_target: the row of the first, where they are targets: an answer does not compete with itself.
        """
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
