"""What a search needs on this machine, memory and time: `fairseq-ccpr inspect --plan`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fairseq_ccpr.datastore.manifest import PhraseSection, TokenSection
from fairseq_ccpr.datastore.parts import SOURCE_FILES
from fairseq_ccpr.device import has_bf16
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import DISK
from fairseq_ccpr.search.exact import KEPT_NORMS
from fairseq_ccpr.search.faiss_index import (
    RESCORED,
    SUFFIX,
    automatic_factory,
    import_faiss,
    inverted_lists,
    list_count,
    make_index,
)
from fairseq_ccpr.search.index_plan import plan_index

COPY_BYTES = 1 << 28  # beyond any cache
SAMPLE_BYTES = 1 << 28  # of a file, read to learn how fast the disk is; less says little
LEAST_BYTES = 1 << 26


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Limits:
    """The peak speeds of a device."""

    bytes_per_second: float  # read or written
    operations_per_second: float  # additions and multiplications, in a product of matrices

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:,.0f} GB/s, {self.operations_per_second / 1e12:,.2f} TFLOP/s"

    def floor(self, size: int, dimension: int, queries: int) -> float:
        """Return the seconds below which no exact search of fp16 keys [size, dimension] can be."""
        read, computed = 2 * size * dimension, 2 * queries * size * dimension
        return max(read / self.bytes_per_second, computed / self.operations_per_second)


def measure_limits(device: torch.device) -> Limits:
    """Time copies larger than any cache, and products of large matrices in the fastest precision a search may use."""
    source = torch.ones(COPY_BYTES // 2, dtype=torch.float16, device=device)
    target = torch.empty_like(source)
    copying = _fastest(lambda: target.copy_(source), device)
    side = 8192 if device.type == "cuda" else 1024
    kinds = [torch.float16 if device.type == "cuda" else torch.float32, *[torch.bfloat16] * has_bf16(device)]
    # Of random numbers: with equal ones a GPU draws less power and is faster.
    matrices = [torch.randn(side, side, dtype=kind, device=device) for kind in kinds]
    multiplying = min(_fastest(partial(torch.matmul, matrix, matrix), device) for matrix in matrices)
    return Limits(2 * COPY_BYTES / copying, 2 * side**3 / multiplying)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(6):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Need:
    """The cost of one way to search: bytes, and the least seconds per step; None: not used, or not known.

    Attributes:
        index: as `--index` has it.
        place: where it is searched: `host`, `device`, which is one GPU, `devices`, or `disk`.
        disk: all files of the part.
        host, device: held in memory, of one machine and of its GPUs together.
        read: of keys or codes, a step, from the place.
        seconds: `read` by the bandwidth of the place; of exact search no less than its products take.
    """

    index: str
    place: str
    disk: float
    host: float
    device: float
    read: float
    seconds: float | None


def needs(
    section: TokenSection | PhraseSection,
    size: int,
    queries: int,
    speeds: dict[str, Limits],
    others: tuple[str, ...] = (),
) -> list[Need]:
    """Plan each way to search a part of a datastore, if it had `size` entries.

    Args:
        size: N.
        queries: H, hypotheses or phrases that are looked up together.
        speeds: of `host`, `device` and `disk`, as far as known.
        others: more of what `--index` may say, with inverted lists.
    """
    d, metric, is_token = section.dimension, section.index.metric, isinstance(section, TokenSection)
    keys, stored = section.KEY_FORM.row_bytes(d) * size, size * _stored_bytes(section)
    norms, values = 4 * size * (metric == "l2"), 4 * size * is_token
    kept = norms if size <= KEPT_NORMS else 0
    held = {"disk": (kept, 0), "host": (keys + kept, 0), "device": (0, keys + norms + values)}
    exact = [
        Need(
            "exact",
            place,
            stored,
            *memory,
            keys,
            speeds[place].floor(size, d, queries) if place in speeds else None,
        )
        for place, memory in held.items()
    ]
    ways = [
        (DISK, "disk"),
        (automatic_factory(size, d, metric), "host"),
        (f"IVF{list_count(size)},SQfp16", "devices"),  # which FAISS has for GPUs, and shares among them
        *((choice, "disk" if choice.partition(":")[0] == DISK else "host") for choice in others),
    ]
    return [*exact, *(_with_lists(section, size, queries, speeds, *way) for way in ways)]


def _with_lists(
    section: TokenSection | PhraseSection,
    size: int,
    queries: int,
    speeds: dict[str, Limits],
    choice: str,
    place: str,
) -> Need:
    d, metric, is_token = section.dimension, section.index.metric, isinstance(section, TokenSection)
    planned = plan_index(choice, metric, "", size, d, effort=section.EFFORT)
    index = make_index(d, planned.factory.removesuffix(SUFFIX), metric)
    if (ivf := inverted_lists(index)) is None:
        raise ConfigurationError(
            f"--index {choice} has no inverted lists, and nothing else can be planned for"
        )
    probed = int(dict(word.split("=") for word in planned.parameters.split(","))["nprobe"])
    coarse, entry = 4 * ivf.nlist * d, ivf.code_size + 8
    again = index.refine_index.sa_code_size() if hasattr(index, "refine_index") else 0  # for the best few
    # of keys, which a list of 4-bit codes ends with
    block = getattr(import_faiss().downcast_index(ivf), "bbs", 0)
    whole = size * (entry + again) + coarse + block // 2 * ivf.nlist * ivf.code_size
    # from which candidates are scored again
    mapped = section.KEY_FORM.row_bytes(d) * size if planned.backend == RESCORED else 0
    held = {"host": (whole + mapped, 0), "devices": (0, whole + 4 * size * is_token), "disk": (coarse, 0)}
    lists = queries * probed / ivf.nlist * size * entry
    # a list that several queries want is read once
    read = min(lists, size * entry) if place == "disk" else lists + coarse
    limits = speeds.get(place.removesuffix("s"))
    seconds = read / limits.bytes_per_second if limits else None
    return Need(str(planned), place, size * _stored_bytes(section) + whole, *held[place], read, seconds)


def measure_speeds(file: Path, given: dict[str, float]) -> dict[str, Limits]:
    """Measure the speeds of this machine that are not given, where there is something to measure.

    Args:
        given: bytes per second, by `host`, `device` and `disk`; how fast these multiply is then left out.
    """
    speeds = {place: Limits(bytes_per_second, float("inf")) for place, bytes_per_second in given.items()}
    if "host" not in speeds:
        speeds["host"] = measure_limits(torch.device("cpu"))
    if "device" not in speeds and torch.cuda.is_available():
        speeds["device"] = measure_limits(torch.device("cuda"))
    if "disk" not in speeds and file.is_file() and file.stat().st_size >= LEAST_BYTES:
        speeds["disk"] = Limits(_reading(file), speeds["host"].operations_per_second)
    return speeds


def describe_room(folder: Path) -> str:
    """Describe this machine: space on the disk of a folder, memory, and the memory of its GPUs."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    devices = f"GPUs of {', '.join(f'{size / 1e9:,.0f} GB' for size in gpus)}" if gpus else "no GPU"
    return f"{shutil.disk_usage(folder).free / 1e9:,.0f} GB free on disk, {memory / 1e9:,.0f} GB of memory, {devices}"


def _reading(file: Path) -> float:
    with file.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start, count = time.perf_counter(), 0
        while count < SAMPLE_BYTES and (block := stream.read(1 << 24)):
            count += len(block)
        return count / (time.perf_counter() - start)


def parse_speeds(words: list[str]) -> dict[str, float]:
    """Parse words such as host=20, in GB/s, into bytes per second."""
    speeds = {}
    for word in words:
        place, _, number = word.partition("=")
        try:
            speeds[place] = float(number) * 1e9
        except ValueError:
            speeds[place] = 0.0
        if place not in ("host", "device", "disk") or not 0 < speeds[place] < float("inf"):
            raise ConfigurationError(
                f"--speeds has '{word}': give GB/s of host, device or disk, such as disk=3"
            )
    return speeds


def _stored_bytes(section: TokenSection | PhraseSection) -> float:
    sizes = {Path(name).name: file["bytes"] for name, file in section.files.items()}
    key = section.KEY_FORM.row_bytes(section.dimension)
    if isinstance(section, TokenSection):
        sources = sum(sizes.get(one.file, 0) for one in SOURCE_FILES)
        return key + 4 + 8 + sources / max(section.size, 1)  # key, value, provenance
    text = sum(sizes[name] for name in sizes if name.startswith("sentence"))
    return key + 12 + 8 + text / section.size  # key, span, hash
