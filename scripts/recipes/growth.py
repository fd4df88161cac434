"""Measure what an index on disk costs as a datastore grows.

python scripts/recipes/growth.py KEYS.npy FOLDER SIZE...

KEYS.npy has real keys, fp16 [N, d], of length 1; beyond N, more are made of them by small noise. For each size this prints
a row of a table: the index; seconds of CPU time and of the clock, and peak memory with what is mapped, of building it;
seconds until it is open; milliseconds of the first search of 160 queries, k 8, by a new process, and of the hundredth, each
of other queries; recall; bytes of the keys and of the index. Set OMP_NUM_THREADS.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_ccpr.search import build_index, open_index
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.search.recall import recall
from fairseq_ccpr.storage.arrays import GrowingArray

BLOCK, NOISE = 1 << 16, 0.1  # rows at a time; noise, in standard deviations of a key
QUERIES, K, SEARCHES, COMPARED = 160, 8, 100, 32


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
            block if places[-1] < len(real) else np.where(places[:, None] < len(real), block, noisy(block, rng))
        )
    array.close()


def in_a_process(work: Callable[..., Any], *arguments: object) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def build(folder: Path) -> tuple[float, float, float]:
    keys = np.load(folder / "keys.npy", mmap_mode="r")
    description = plan_index("disk", "ip", "", *keys.shape)
    start, cpu = time.perf_counter(), time.process_time()
    build_index(keys, description, folder / description.file, lambda rows: None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return time.process_time() - cpu, time.perf_counter() - start, peak


def search(folder: Path) -> tuple[str, float, float, float, float]:
    keys = np.load(folder / "keys.npy", mmap_mode="r")
    description, rng = plan_index("disk", "ip", "", *keys.shape), np.random.default_rng(2)
    start = time.perf_counter()
    index = open_index(description, keys, folder)
    opened, times = time.perf_counter() - start, []
    for _ in range(SEARCHES):
        queries = torch.from_numpy(noisy(keys[np.sort(rng.integers(len(keys), size=QUERIES))], rng))
        start = time.perf_counter()
        index.search(queries, K)
        times.append(1e3 * (time.perf_counter() - start))
    found = recall(index, ExactIndex(keys, "ip"), queries[:COMPARED], K)
    return str(description), opened, times[0], float(np.median(times[-10:])), found


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__.strip())
    real, folder = np.load(sys.argv[1], mmap_mode="r"), Path(sys.argv[2])
    print(
        "| keys | index | build CPU s | s | peak GB | open s | first ms | hundredth ms | recall | keys GB | index GB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for size in map(int, sys.argv[3:]):
        made = folder / str(size)
        made.mkdir(parents=True, exist_ok=True)
        write_keys(real, size, made / "keys.npy")
        cpu, seconds, peak = in_a_process(build, made)
        index, opened, first, last, found = in_a_process(search, made)
        disk = [sum(path.stat().st_size for path in made.glob(name)) / 1e9 for name in ("keys.npy", "index-*")]
        print(
            f"| {size:,} | {index} | {cpu:.0f} | {seconds:.0f} | {peak:.2f} | {opened:.2f} | {first:.0f} | {last:.0f} "
            f"| {100 * found:.1f}% | {disk[0]:.3f} | {disk[1]:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
