"""Speed of building and searching phrase datastores, and their size on disk and in memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from fairseq_ccpr.building.part import Processes
from fairseq_ccpr.building.phrase_build import PhraseBuildSettings, build_phrase_datastore
from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.parts import KEYS, SPANS
from fairseq_ccpr.lab.machine import peak_bytes, start_peak
from fairseq_ccpr.lab.speed.search_speed import time_search
from fairseq_ccpr.search import TIMEOUT, Index, RemoteKeys, build_index, open_index, read_address
from fairseq_ccpr.search.index_plan import PHRASE_DEPTH, PHRASE_EFFORT, plan_index

KEY_SEED, QUERY_SEED = 1, 2
BLOCK_ROWS = 1 << 16


@dataclass
class BuildingSpeed:
    """A phrase datastore that was built."""

    sentences: int
    phrases: int
    sentences_per_second: float  # while phrases were found and encoded
    phrases_per_second: float
    seconds: float  # that all of the build took
    bytes_per_phrase: dict[str, float]  # on disk, by part
    peak_bytes: int  # see `peak_bytes`


@dataclass
class SearchSpeed:
    """Searches for one batch of queries, again and again."""

    index: str  # as requested
    phrases: int
    queries_per_second: float  # median
    slowest: float  # queries per second
    fastest: float
    peak_bytes: int  # see `peak_bytes`


@dataclass
class SearchSettings:
    """What `fairseq-ccpr benchmark phrases` searches for."""

    dimension: int = 128  # of a random key
    queries: int = 512  # in a batch: the phrases of some sentences
    k: int = PHRASE_DEPTH  # entries found for each; retrieval begins with as many
    repeats: int = 5  # searches that are measured


def measure_building(sentences: list[str], encoder: Path, device: torch.device, quiet: bool) -> BuildingSpeed:
    """Build a phrase datastore in a temporary folder."""
    start_peak(device)
    with TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
        start = time.perf_counter()
        cpu, output = device.type == "cpu", Path(folder) / "datastore"
        settings = PhraseBuildSettings([text], encoder, output=output, cpu=cpu, quiet=quiet)
        built = build_phrase_datastore(settings, Processes())
        assert built is not None  # in the first process, which is the only one
        seconds = time.perf_counter() - start
    section = built.section
    return BuildingSpeed(
        section.sentences,
        section.size,
        section.sentences / built.seconds,
        section.size / built.seconds,
        seconds,
        bytes_per_entry(section),
        peak_bytes(device),
    )


def measure_search(
    choice: str, size: int, settings: SearchSettings, device: torch.device, store: str | None = None
) -> SearchSpeed:
    """Time searches of random keys: once to warm up, then `repeats` times."""
    start_peak(device)
    keys = _random_directions(size, settings.dimension, KEY_SEED)
    queries = (
        torch.from_numpy(_random_directions(settings.queries, settings.dimension, QUERY_SEED))
        .float()
        .to(device)
    )
    with TemporaryDirectory() as folder:
        index = _make_index(keys, choice, Path(folder), device, store)
        seconds = [time_search(index, queries, settings.k) for _ in range(1 + settings.repeats)][1:]
    index.drop()
    speeds = [settings.queries / once for once in seconds]
    name = choice if store is None else f"milvus:{choice}"
    return SearchSpeed(name, size, float(np.median(speeds)), min(speeds), max(speeds), peak_bytes(device))


def _make_index(
    keys: np.ndarray, choice: str, folder: Path, device: torch.device, store: str | None
) -> Index:
    address, token = read_address(store, f"benchmark_{len(keys)}") if store is not None else (None, "")
    gpu = device.type == "cuda"
    description = plan_index(choice, "ip", "", len(keys), keys.shape[1], gpu, PHRASE_EFFORT, address)
    remote = None
    if address is not None:
        remote = RemoteKeys(
            address, len(keys), keys.shape[1], {"benchmark": str(description)}, TIMEOUT, token
        )
    build_index(keys, description, remote or folder / description.file, lambda rows: None)
    return open_index(description, remote or keys, folder).to(device)


def _random_directions(size: int, dimension: int, seed: int) -> np.ndarray:
    """Draw vectors of length 1, fp16 [size, dimension], block by block; fewer are the first of more."""
    rng = np.random.default_rng(seed)
    vectors = np.empty((size, dimension), np.float16)
    for start in range(0, size, BLOCK_ROWS):
        block = rng.standard_normal((min(BLOCK_ROWS, size - start), dimension), np.float32)
        vectors[start : start + BLOCK_ROWS] = block / np.linalg.norm(block, axis=1, keepdims=True)
    return vectors


def bytes_per_entry(section: PhraseSection) -> dict[str, float]:
    """Compute the bytes that an entry takes on disk, on average: of keys, spans, sentences and index."""
    parts = {f"{section.folder}/{KEYS}.npy": KEYS, f"{section.folder}/{SPANS}.npy": SPANS}
    parts |= {f"{section.folder}/{name}": "index" for name in section.index.files}
    totals: dict[str, float] = {}
    for name, file in section.files.items():
        part = parts.get(name, "sentences")
        totals[part] = totals.get(part, 0.0) + file["bytes"] / section.size
    return totals
