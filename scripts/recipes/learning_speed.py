"""How long a pair takes until it counts, and the cost of decoding with so many pairs alongside a datastore.

python scripts/recipes/learning_speed.py DATASTORE PAIRS.tsv [PAIRS_LEARNED ...]

The datastore is copied first. The first 100 pairs of PAIRS.tsv are learned one by one and timed, then more of them, 256 at a
time, up to each of PAIRS_LEARNED (100 1000 10000). With as many the last 24 are translated, in turns with nothing learned,
and in the end once more when the datastore is compacted.

Before that, as many of the datastore's keys as `SIZES` says stand for what was learned, and 120 others for hypotheses: how
fast they are searched in lists and one by one, in seconds of this process, the fewest of several, and what the lists find.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.search.exact import half_norms
from fairseq_ccpr.search.live import GrowingLists, Segment
from fairseq_ccpr.storage.journal import Journal
from fairseq_ccpr.text.pairs import read_pairs

TIMED, TRANSLATED, REPEATS = 100, 24, 3
TOGETHER = 256  # pairs
SIZES, HYPOTHESES, K, SEARCHES = (1000, 20_000, 200_000), 120, 8, 7


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__.strip())
    store, pairs, *counts = sys.argv[1:]
    sizes = [int(count) for count in counts] or [100, 1000, 10_000]
    rows = list(islice(read_pairs(Path(pairs)), max(sizes) + TRANSLATED))
    print(f"{markdown_table(searched(TokenDatastore(store)))}\n")
    sentences = [source for source, _ in rows[-TRANSLATED:]]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(store, Path(folder) / "store"))
        plain, translator = Translator(datastore=copy), Translator(datastore=copy)
        print(
            f"{TokenDatastore(copy).section.size:,} entries of the datastore's own; one pair at a time, milliseconds"
        )
        table: list[list[Any]] = [["", "median", "95 in 100"]]
        kinds = "until it counts", "the processor's time", "writing to disk"
        for name, took in zip(kinds, time_learning(translator, rows[:TIMED])):
            table.append([name, *(f"{1000 * q:.1f}" for q in np.quantile(took, [0.5, 0.95]))])
        print(f"{markdown_table(table)}\n", flush=True)
        table = [["pairs", "entries", "sentences per second", "without", "speed"]]
        for size in sizes:
            for first in range(len(translator.memory()), size, TOGETHER):
                translator.learn_all(rows[first : min(size, first + TOGETHER)])
            table.append(compare(f"{size:,}", translator, plain, sentences))
        translator.close()
        start = time.perf_counter()
        compact_datastore(CompactSettings(copy, quiet=True))
        spent = time.perf_counter() - start
        table.append(compare(f"{size:,}, compacted", Translator(datastore=copy), plain, sentences))
        print(markdown_table(table))
        print(f"compacting took {spent:.0f} s")


def searched(datastore: TokenDatastore) -> list[list[Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    metric, rng = datastore.section.index.metric, np.random.default_rng(1)
    sizes = [size for size in SIZES if size + HYPOTHESES <= datastore.section.size]
    rows = rng.choice(np.arange(max(sizes, default=0), datastore.section.size), HYPOTHESES, replace=False)
    queries = torch.from_numpy(datastore.keys[np.sort(rows)].astype(np.float32))
    heads = f"entries|one by one, ms|in lists, ms|of the {K} nearest found|of the nearest|lists made in, s"
    table: list[list[Any]] = [heads.split("|")]
    for size in sizes:
        keys = torch.from_numpy(np.array(datastore.keys[:size]))
        norms = half_norms(keys)
        made, lists = timed(partial(GrowingLists.of, keys, np.arange(size), metric), 1)
        one_by_one, in_lists = Segment(keys, norms, metric), Segment(keys, norms, metric, lists, size)
        exact, (_, wanted) = timed(partial(one_by_one.search, queries, K))
        listed, (_, found) = timed(partial(in_lists.search, queries, K))
        hits = (wanted.unsqueeze(2) == found.unsqueeze(1)).any(dim=2).float()
        table.append([f"{size:,}", f"{1000 * exact:.1f}", f"{1000 * listed:.1f}", f"{hits.mean():.1%}",
                      f"{hits[:, 0].mean():.1%}", f"{made:.1f}"])  # fmt: skip
    torch.set_num_threads(threads)
    return table


def timed(work: Callable[[], Any], repeats: int = SEARCHES) -> tuple[float, Any]:
    """Do work several times; returns the fewest seconds of CPU that it took, and what it gave."""
    took = []
    for _ in range(repeats):
        start = time.process_time()
        result = work()
        took.append(time.process_time() - start)
    return min(took), result


def compare(name: str, translator: Translator, plain: Translator, sentences: list[str]) -> list[Any]:
    """Translate with what was learned and without, in turns; returns a row of the table."""
    speeds = [[speed(one, sentences) for one in (translator, plain)] for _ in range(REPEATS)]
    own, other = np.median(speeds, axis=0)
    entries = sum(pair.tokens for pair in translator.memory())
    share = np.median([a / b for a, b in speeds])
    return [name, f"{entries:,}", f"{own:.2f}", f"{other:.2f}", f"{share:.1%}"]


def time_learning(
    translator: Translator, rows: list[tuple[str, str]]
) -> tuple[list[float], list[float], list[float]]:
    """Learn pairs one by one; returns the seconds that each took, those of the processor, and those of writing it to disk."""
    learned, processed, appended = [], [], []
    append = Journal.append

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        append(*args)
        appended.append(time.perf_counter() - start)

    with patch.object(Journal, "append", timed):
        for source, target in rows:
            start, processor = time.perf_counter(), time.process_time()
            translator.learn(source, target)
            learned.append(time.perf_counter() - start)
            processed.append(time.process_time() - processor)
    return learned, processed, appended


def speed(translator: Translator, sentences: list[str]) -> float:
    start = time.perf_counter()
    list(translator.translate(sentences))
    return len(sentences) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
