"""How long a pair takes until it counts, and the cost of decoding with so many pairs alongside a datastore.

python scripts/recipes/learning_speed.py DATASTORE PAIRS.tsv [PAIRS_LEARNED ...]

The datastore is copied first. The first 100 pairs of PAIRS.tsv are learned one by one and timed, then more of them, 256 at a
time, up to each of PAIRS_LEARNED (100 1000 10000). With as many the last 24 are translated, in turns with nothing learned,
and in the end once more when the datastore is compacted.
"""

import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from fairseq_ccpr import Translator
from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.cli.command import markdown_table
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.storage.journal import Journal
from fairseq_ccpr.text.pairs import read_pairs

TIMED, TRANSLATED, REPEATS = 100, 24, 3
TOGETHER = 256  # pairs


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__.strip())
    store, pairs, *counts = sys.argv[1:]
    sizes = [int(count) for count in counts] or [100, 1000, 10_000]
    rows = list(islice(read_pairs(Path(pairs)), max(sizes) + TRANSLATED))
    sentences = [source for source, _ in rows[-TRANSLATED:]]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(store, Path(folder) / "store"))
        plain, translator = Translator(datastore=copy), Translator(datastore=copy)
        print(
            f"{TokenDatastore(copy).section.size:,} entries of the datastore's own; one pair at a time, milliseconds"
        )
        learned, processed, appended = time_learning(translator, rows[:TIMED])
        table: list[list[Any]] = [["", "median", "95 in 100"]]
        timed = (
            ("until it counts", learned),
            ("the processor's time", processed),
            ("writing to disk", appended),
        )
        for name, took in timed:
            table.append([name, *(f"{1000 * q:.1f}" for q in np.quantile(took, [0.5, 0.95]))])
        print(markdown_table(table), flush=True)
        table = [["pairs", "entries", "sentences/s", "without", "speed"]]
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
