"""Measure what an index costs as a datastore grows.

python scripts/recipes/growth.py KEYS.npy FOLDER [--index CHOICE]... [--plot PNG] SIZE...

KEYS.npy has real keys, fp16 [N, d], of length 1; beyond N, more are made of them by small noise. For each size and index
(disk) this prints a row of a table: seconds of CPU time and of the clock, and peak memory with what is mapped, of building
it; seconds until it is open; milliseconds of the first search of 160 queries, k 8, by a new process, and the median of the
last ten of a hundred (of those of a minute, if they take longer), each of other queries, then those of 40 and of 5 queries
(32, 8 and 1 sentences with beam 5); recall; peak memory of these searches; bytes of the keys and of the index. Then a row
for each index has the exponents of the number of keys that fit its figures best (of their logarithms, by least squares, from
the first size on whose index is of the last one's kind). --plot draws the milliseconds. Set OMP_NUM_THREADS.

--index takes those of `build tokens --index`, with search parameters after a semicolon.
"""

from __future__ import annotations

import multiprocessing
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fairseq_ccpr.lab.machine import peak_bytes
from fairseq_ccpr.lab.speed.search_speed import recall, time_search
from fairseq_ccpr.search import IndexDescription, build_index, open_index
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage.arrays import GrowingArray

BLOCK, NOISE = 1 << 16, 0.1  # rows at a time; noise, in standard deviations of a key
QUERIES, K, SEARCHES, COMPARED = (160, 40, 5), 8, 100, 32
LONGEST = 60.0  # seconds that searches of one number of queries take
TIMES = 5  # column of the first of their figures, without keys and index
COLUMNS = ["keys", "index", "build CPU s", "s", "peak GB", "open s", "first ms"]
COLUMNS += [*(f"{count} ms" for count in QUERIES), "recall %", "searching GB", "keys GB", "index GB"]


def noisy(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    moved = rows.astype(np.float32)
    moved += rng.standard_normal(moved.shape, np.float32) * moved.std(axis=0) * NOISE
    return moved / np.linalg.norm(moved, axis=1, keepdims=True)


def write_keys(real: np.ndarray, size: int, path: Path) -> None:
    rng, array = np.random.default_rng(1), GrowingArray(path, real.shape[1:], "float16")
    order = rng.permutation(len(real))
    for start in range(0, size, BLOCK):
        places = np.arange(start, min(start + BLOCK, size))
        block = real[order[places % len(real)]]
        array.append(
            block
            if places[-1] < len(real)
            else np.where(places[:, None] < len(real), block, noisy(block, rng))
        )
    array.close()


def in_a_process(work: Callable[..., Any], *arguments: object) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def place(folder: Path, choice: str) -> tuple[np.ndarray, IndexDescription]:
    """Return the keys, and the index over them."""
    keys = np.load(folder / "keys.npy", mmap_mode="r")
    name, _, parameters = choice.partition(";")
    return keys, plan_index(name, "ip", parameters, *keys.shape)


def peak() -> float:
    return peak_bytes(torch.device("cpu")) / 2**30


def build(folder: Path, choice: str) -> tuple[float, float, float]:
    """Return seconds of CPU time and of the clock, and peak memory."""
    keys, description = place(folder, choice)
    start, cpu = time.perf_counter(), time.process_time()
    build_index(keys, description, folder / description.file, lambda rows: None)
    return time.process_time() - cpu, time.perf_counter() - start, peak()


def search(folder: Path, choice: str) -> tuple[str, list[float], float, float]:
    """Return the index's name, seconds to open it and milliseconds (first search, then as `QUERIES`), recall, peak memory."""
    keys, description = place(folder, choice)
    rng = np.random.default_rng(2)
    start = time.perf_counter()
    index = open_index(description, keys, folder)
    figures = [time.perf_counter() - start]

    def queries(count: int) -> torch.Tensor:
        return torch.from_numpy(noisy(keys[np.sort(rng.integers(len(keys), size=count))], rng))

    for count in QUERIES:
        times: list[float] = []
        while len(times) < SEARCHES and sum(times) < 1e3 * LONGEST:
            times.append(1e3 * time_search(index, queries(count), K))
        figures += [times[0]] * (count == QUERIES[0]) + [float(np.median(times[-10:]))]
    used = peak()
    return str(description), figures, recall(index, ExactIndex(keys, "ip"), queries(COMPARED), K), used


def exponent(sizes: list[int], figures: list[float], indexes: list[str]) -> float:
    """Fit the power of N, from the first size on whose index is of the last one's kind: `auto` is exact for few keys."""
    first = next(
        place for place, index in enumerate(indexes) if (index == "exact") == (indexes[-1] == "exact")
    )
    if len(sizes) - first < 2:
        return float("nan")
    return float(np.polyfit(np.log(sizes[first:]), np.log(np.maximum(figures[first:], 1e-9)), 1)[0])


def draw(
    rows: dict[str, list[list[float]]], indexes: dict[str, list[str]], sizes: list[int], path: Path
) -> None:
    """Draw milliseconds by number of keys, a panel for each number of queries."""
    figure = Figure((10, 3.5), layout="constrained")
    for axes, (place, count) in zip(figure.subplots(1, len(QUERIES), sharey=True), enumerate(QUERIES)):
        for choice, of_index in rows.items():
            times = [row[TIMES + place] for row in of_index]
            axes.loglog(
                sizes, times, marker="o", label=f"{choice}: N^{exponent(sizes, times, indexes[choice]):.2f}"
            )
        axes.set_title(f"{count} queries")
        axes.set_xlabel("keys")
        axes.legend()
    figure.axes[0].set_ylabel("ms per search")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = ArgumentParser(usage=__doc__)
    parser.add_argument("keys", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--index", action="append")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("sizes", nargs="+", type=int)
    settings = parser.parse_intermixed_args()
    real = np.load(settings.keys, mmap_mode="r")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows: dict[str, list[list[float]]] = {choice: [] for choice in settings.index or ["disk"]}
    indexes: dict[str, list[str]] = {choice: [] for choice in rows}
    for size in settings.sizes:
        made = settings.folder / str(size)
        made.mkdir(parents=True, exist_ok=True)
        write_keys(real, size, made / "keys.npy")
        for choice, of_index in rows.items():
            built = in_a_process(build, made, choice)
            index, times, found, used = in_a_process(search, made, choice)
            disk = [
                sum(path.stat().st_size for path in made.glob(name)) / 1e9 for name in ("keys.npy", "index-*")
            ]
            of_index.append([*built, *times, 100 * found, used, *disk])
            indexes[choice].append(index)
            print(
                f"| {size:,} | {index} | {' | '.join(f'{figure:.4g}' for figure in of_index[-1])} |",
                flush=True,
            )
            for path in made.glob("index-*"):
                path.unlink()
    if len(settings.sizes) > 1:
        for choice, of_index in rows.items():
            fitted = [exponent(settings.sizes, list(figures), indexes[choice]) for figures in zip(*of_index)]
            print(f"| exponent | {choice} | {' | '.join(f'{power:.2f}' for power in fitted)} |")
    if settings.plot:
        draw(rows, indexes, settings.sizes, settings.plot)


if __name__ == "__main__":
    main()
