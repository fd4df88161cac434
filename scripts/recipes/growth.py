"""Measure what an index costs as a datastore grows, and what merging, removing a text and compacting do.

python scripts/recipes/growth.py KEYS.npy FOLDER [--index CHOICE]... [--store URI] [--plot PNG] [--merge DATASTORE] SIZE...

KEYS.npy has real keys, fp16 [N, d], of length 1; beyond N, more are made of them by small noise. For each size and index
(disk) this prints a row of a table: seconds of CPU time and of the clock, and peak memory with what is mapped, of building
it; seconds until it is open; milliseconds of the first search of 160 queries, k 8, by a new process, and the median of the
last ten of a hundred (of those of a minute, if they take longer), each of other queries, then those of 40 and of 5 queries
(32, 8 and 1 sentences with beam 5); recall; peak memory of these searches; bytes of the keys and of the index. Then a row
for each index has the exponents of the number of keys that fit its figures best (of their logarithms, by least squares, from
the first size on whose index is of the last one's kind). --plot draws the milliseconds. Set OMP_NUM_THREADS.

--index takes those of `build tokens --index`, with search parameters after a semicolon. Those that begin with milvus:, as
milvus:auto, are of the server at URI, whose own processor time and memory are not counted.

--merge: then two token datastores of half the keys, each with tokens and sentences as those of DATASTORE over and over, are
merged with --index disk; one of them is removed again; a pair is learned and compacted, then forgotten and compacted. Each
is a row: seconds of CPU time and of the clock, peak memory as above.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.building.merge import MergeSettings, merge_datastores
from fairseq_ccpr.building.part import Part
from fairseq_ccpr.datastore.learned import LearnedStore, NewPair
from fairseq_ccpr.datastore.manifest import TokenSection
from fairseq_ccpr.datastore.parts import PROVENANCE, SYMBOLS, VALUES
from fairseq_ccpr.datastore.source_index import write_source_index
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.lab.speed.search_speed import recall
from fairseq_ccpr.search import IndexDescription, RemoteKeys, StoreAddress, build_index, open_index
from fairseq_ccpr.search.exact import ExactIndex
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage.arrays import GrowingArray

BLOCK, NOISE = 1 << 16, 0.1  # rows at a time; noise, in standard deviations of a key
QUERIES, K, SEARCHES, COMPARED = (160, 40, 5), 8, 100, 32
LONGEST = 60.0  # seconds that searches of one number of queries take
TIMES = 5  # column of the first of their figures, without keys and index
COLUMNS = ["keys", "index", "build CPU s", "s", "peak GB", "open s", "first ms"]
COLUMNS += [*(f"{count} ms" for count in QUERIES), "recall %", "searching GB", "keys GB", "index GB"]
WAITING = 120.0  # seconds that a server may take to answer


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


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measured(work: Callable[..., object], *arguments: object) -> tuple[float, float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    work(*arguments)
    return time.process_time() - cpu, time.perf_counter() - start, peak()


def place(folder: Path, choice: str, store: str) -> tuple[np.ndarray, IndexDescription, RemoteKeys | None]:
    """Return the keys, the index over them, and where they are if a server has them."""
    keys = np.load(folder / "keys.npy", mmap_mode="r")
    (size, width), (name, _, parameters) = keys.shape, choice.partition(";")
    address = StoreAddress(store, f"growth_{folder.name}") if name.startswith("milvus:") else None
    description = plan_index(name.removeprefix("milvus:"), "ip", parameters, size, width, store=address)
    remote = RemoteKeys(address, size, width, {"index": str(description)}, WAITING) if address else None
    return keys, description, remote


def build(folder: Path, choice: str, store: str) -> tuple[float, float, float]:
    keys, description, remote = place(folder, choice, store)
    return measured(build_index, keys, description, remote or folder / description.file, lambda rows: None)


def search(folder: Path, choice: str, store: str) -> tuple[str, list[float], float, float]:
    """Return the index's name, seconds to open it and milliseconds (first search, then as `QUERIES`), recall, peak memory."""
    keys, description, remote = place(folder, choice, store)
    rng = np.random.default_rng(2)
    start = time.perf_counter()
    index = open_index(description, remote or keys, folder)
    index.check()
    figures = [time.perf_counter() - start]
    for count in QUERIES:
        times: list[float] = []
        while len(times) < SEARCHES and sum(times) < 1e3 * LONGEST:
            queries = torch.from_numpy(noisy(keys[np.sort(rng.integers(len(keys), size=count))], rng))
            start = time.perf_counter()
            index.search(queries, K)
            times.append(1e3 * (time.perf_counter() - start))
        figures += [times[0]] * (count == QUERIES[0]) + [float(np.median(times[-10:]))]
    used = peak()
    queries = torch.from_numpy(noisy(keys[np.sort(rng.integers(len(keys), size=COMPARED))], rng))
    found = recall(index, ExactIndex(keys, "ip"), queries, K)
    index.drop()
    return str(description), figures, found, used


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


def write_tokens(like: Path, real: np.ndarray, size: int, folder: Path) -> None:
    """Write a token datastore of these keys, with the tokens and sentences of another, over and over."""
    base, part = TokenDatastore(like), Part(folder, TokenSection, False)
    part.partial.mkdir(parents=True)
    write_keys(real, size, part.partial / "keys.npy")
    rounds, sentences = -(-size // base.section.size), sum(base.section.subsets.values())
    arrays = {name: base.section.grow(part.partial, name) for name in (VALUES, PROVENANCE)}
    for start in range(rounds):
        rows = min(base.section.size, size - start * base.section.size)
        arrays["values"].append(base.values[:rows])
        arrays["provenance"].append(base.provenance[:rows] + np.array([start * sentences, 0], np.int32))
    for array in arrays.values():
        array.close()
    copyfile(base.folder / SYMBOLS, part.partial / SYMBOLS)
    last = base.provenance[rows - 1, 0]  # of the last round
    repeated = (
        (number + start * sentences, source)
        for start in range(rounds)
        for number, source in base.source_index.sources()
        if start < rounds - 1 or number <= last
    )
    index, provenance = base.section.source_index, np.load(part.partial / f"{PROVENANCE}.npy", mmap_mode="r")
    described = write_source_index(part.partial, repeated, provenance, index.vocabulary, index.unknown)
    prints = base.section.fingerprints | {"corpus": folder.name}
    exact = plan_index("exact", base.section.index.metric, "", size, real.shape[1])
    part.publish(replace(base.section, size=size, dimension=real.shape[1], fingerprints=prints, index=exact, files={},
                         subsets={"train": rounds * sentences}, projection=None, source_index=described))  # fmt: skip


def learn(folder: Path) -> None:
    with closing(LearnedStore(store := TokenDatastore(folder))) as learned:
        learned.learn([NewPair("Haus", "house", np.array(store.values[:2]), np.array(store.keys[:2]))])


def forget(folder: Path) -> None:
    with closing(LearnedStore(TokenDatastore(folder))) as learned:
        learned.forget([pair.id for pair in learned.find("")])


def rewrite(like: Path, real: np.ndarray, size: int, folder: Path) -> None:
    """Print the rows of merging, removing and compacting."""
    rmtree(folder, ignore_errors=True)
    halves = {name: folder / name for name in ("one", "two")}
    for half in halves.values():
        in_a_process(write_tokens, like, real, size // 2, half)
    merged = folder / "merged"
    merge = MergeSettings(merged, index="disk", cpu=True, quiet=True, datastores=halves)
    remove = MergeSettings(
        folder / "removed", ["two"], "disk", cpu=True, quiet=True, datastores={"merged": merged}
    )
    compact = CompactSettings(merged, cpu=True, quiet=True)
    for name, work, settings, before in (
        ("merge", merge_datastores, merge, None),
        ("merge --remove half", merge_datastores, remove, None),
        ("learn, compact", compact_datastore, compact, learn),
        ("forget, compact", compact_datastore, compact, forget),
    ):
        if before:
            in_a_process(before, merged)
        cpu, seconds, peak = in_a_process(measured, work, settings)
        print(f"| {size:,} | {name} | {cpu:.0f} | {seconds:.0f} | {peak:.2f} |", flush=True)
        rmtree(folder / "removed", ignore_errors=True)
    rmtree(folder)


def main() -> None:
    parser = ArgumentParser(usage=__doc__)
    parser.add_argument("keys", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--index", action="append")
    parser.add_argument("--store", default="")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--merge", type=Path)
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
            built = in_a_process(build, made, choice, settings.store)
            index, times, found, used = in_a_process(search, made, choice, settings.store)
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
    if settings.merge:
        print("\n| keys | command | CPU s | s | peak GB |\n|---|---|---|---|---|")
        for size in settings.sizes:
            rewrite(settings.merge, real, size, settings.folder / "datastores")


if __name__ == "__main__":
    main()
