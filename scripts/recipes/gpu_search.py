"""Check the searches of this GPU against brute force, and measure them: exact ones, and FAISS's where faiss-gpu is installed.

python scripts/recipes/gpu_search.py OUTPUT

OUTPUT gets search.json and search.md. The exit code is 1 if a search is wrong. REHEARSE=1 goes through it on a CPU.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
if (
    "fairseq_ccpr" not in sys.modules
):  # as a package without its own module, which registers models with fairseq
    package = ModuleType("fairseq_ccpr")
    package.__path__ = [str(ROOT / "fairseq_ccpr")]
    sys.modules["fairseq_ccpr"] = package

from fairseq_ccpr.cli.planning import measure_limits
from fairseq_ccpr.lab.machine import page_of_run
from fairseq_ccpr.lab.speed.search_speed import SearchCost, Sweep, make_index, measure_searches
from fairseq_ccpr.provenance import describe_run
from fairseq_ccpr.search import ExactIndex, Index

REHEARSED = bool(os.environ.get("REHEARSE"))
WIDTHS, HYPOTHESES = ((8, 16), (2, 5)) if REHEARSED else ((128, 256, 512, 1024), (5, 64, 65, 240, 800))
METRICS = ("ip", "l2")
LISTS = "IVF64,SQfp16"  # all of which are searched
KEYS, NEIGHBOURS = 3_003 if REHEARSED else 50_003, 8  # not a multiple of a tile
ON_GPU = bool(find_spec("faiss")) and hasattr(import_module("faiss"), "StandardGpuResources")
REAL = 1_000 if REHEARSED else 50_000  # keys around which larger stores are made
MILLION = 3_000 if REHEARSED else 10**6
SWEEPS = (  # width, metric, what is searched
    *((width, "ip", Sweep([MILLION], ["exact"], list(HYPOTHESES), [8], 10)) for width in WIDTHS[1:]),
    (256, "l2", Sweep([MILLION], ["exact"], list(HYPOTHESES), [8], 10)),
    (
        128,
        "ip",
        Sweep([MILLION], ["exact", *(["IVF1024,SQfp16"] if ON_GPU else [])], list(HYPOTHESES), [8, 64], 10),
    ),
    (128, "ip", Sweep([10 * MILLION, 19 * MILLION], ["exact"], list(HYPOTHESES), [8], 10)),
)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    if not torch.cuda.is_available() and not REHEARSED:
        sys.exit(
            f"gpu_search.py needs a GPU, and torch {torch.__version__} sees none: run it where there is one"
        )
    output, device = Path(sys.argv[1]), torch.device("cpu" if REHEARSED else "cuda")
    output.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING)
    wrong = list(faults(device, KEYS))
    print("\n".join(wrong) or "every search finds what brute force finds", flush=True)
    rows = [row for width, metric, sweep in SWEEPS for row in measure(width, metric, sweep, device)]
    page = f"{table(rows)}\n{page_of_run(device)}\n"
    (output / "search.md").write_text(page, encoding="utf-8")
    found = describe_run(device) | {"faults": wrong, "search": [asdict(row) for row in rows]}
    (output / "search.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(page)
    sys.exit(bool(wrong))


def faults(device: torch.device, size: int) -> Iterator[str]:
    for width, metric in product(WIDTHS, METRICS):
        keys = unit_keys(size, width, device)
        indexes: dict[str, Index] = {"exact": ExactIndex(keys, metric)}
        if ON_GPU:
            indexes[LISTS] = make_index(keys, LISTS, metric, "nprobe=64")[0]
        for (name, index), count, dtype in product(
            indexes.items(), HYPOTHESES, (torch.float32, torch.float16)
        ):
            queries = unit_keys(count, width, device, seed=2).to(dtype)
            if trouble := difference(index, keys, queries, metric):
                yield f"WRONG: {name}, width {width}, {metric}, {count} queries in {dtype}: {trouble}"


def difference(index: Index, keys: Tensor, queries: Tensor, metric: str) -> str:
    scores, ids = index.search(queries, NEIGHBOURS)
    every = queries.double() @ keys.double().T
    if metric == "l2":
        every = 2 * every - keys.double().square().sum(1) - queries.double().square().sum(1, keepdim=True)
    best = every.topk(NEIGHBOURS, dim=1).values
    if not torch.allclose(scores.double(), best, rtol=1e-4, atol=1e-4):
        return f"scores differ by {float((scores - best).abs().max()):.2g}"
    if not torch.allclose(scores.double(), every.gather(1, ids), rtol=1e-4, atol=1e-4):
        return "ids are of other keys than scores"
    return ""


def unit_keys(size: int, width: int, device: torch.device, seed: int = 1) -> Tensor:
    """Make keys of length 1 in clusters, fp16 [size, width]: each is near one of sixteen others."""
    chance = torch.Generator(device).manual_seed(seed)
    centres = torch.randn(16, width, generator=torch.Generator(device).manual_seed(0), device=device)
    which = torch.randint(16, (size,), generator=chance, device=device)
    noise = torch.randn(size, width, generator=chance, device=device)
    return torch.nn.functional.normalize(centres[which] + noise, dim=1).half()


def measure(width: int, metric: str, sweep: Sweep, device: torch.device) -> Iterator[SearchCost]:
    keys = unit_keys(REAL, width, device).cpu().numpy()
    section = SimpleNamespace(projection="unit length", index=SimpleNamespace(metric=metric))
    store: Any = SimpleNamespace(keys=keys, values=torch.zeros(REAL).int().numpy(), section=section)
    for row in measure_searches("random", store, sweep, device, measure_limits(device)):
        yield replace(row, index=f"{row.index}, {metric}")


def table(rows: list[SearchCost]) -> str:
    # Not by `markdown_table`: its module needs more than a machine with nothing but torch has.
    lines = [
        "| width | keys | index | H | k | ms | fastest–slowest | floor, ms | ÷ floor | recall |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        cells = (
            row.dimension, f"{row.keys:,}", row.index, row.queries, row.k, f"{row.milliseconds:.2f}",
            f"{row.fastest:.2f}–{row.slowest:.2f}", f"{row.floor:.3f}", f"{row.milliseconds / row.floor:.1f}",
            f"{row.recall:.1%}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
