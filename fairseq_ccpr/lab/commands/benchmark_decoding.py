"""`fairseq-ccpr benchmark decoding`: speed of decoding and search with datastores of any size, against the least time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from fairseq_ccpr.cli.command import check_folder, command, markdown_table, named, write_results
from fairseq_ccpr.common_options import (
    count_option,
    counts_option,
    data_bin_option,
    json_option,
    plot_option,
    quiet_option,
)
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.retrieval_task import find_parts
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.machine import Limits, describe_run, gigabytes, measure_limits
from fairseq_ccpr.evaluation.translation.test_set import load
from fairseq_ccpr.inference.resources import configure
from fairseq_ccpr.lab.speed.decoding_speed import ALONE, REST, DecodingSpeed, SpeedTest
from fairseq_ccpr.lab.speed.plots import draw_costs
from fairseq_ccpr.lab.speed.search_speed import SearchCost, Sweep, measure_searches
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.settings import option
from fairseq_ccpr.timing import DECODER, FINDING, MERGE, PHRASES, PROJECTION, SEARCH

HELP = """\
Measure, for token datastores of any size, decoding speed relative to plain fairseq in the same process, and search alone.

  fairseq-ccpr benchmark decoding DATA_BIN --path model.pt -s de -t en --bpe sentencepiece --sentencepiece-model spm.model \\
    --systems knn-mt=datastores/raw clknn=datastores/clknn clknn+phrases=datastores/clknn:datastores/phrases \\
    --sizes 10000 100000 1000000 --json benchmark.json --plot benchmark.png > benchmark.md

A system is a name and what fairseq-generate is told as --datastore; its token part is cut down or filled up to each of the
sizes, with keys around its own and tokens as frequent as its own. Two systems are always measured: base, which is plain
fairseq, and base+, the same with the beam search that retrieval brings along. Systems take turns, repeat by
repeat. All other options are those of fairseq-generate --task translation_retrieval, and hold for every system.

Decoding is measured with the first --index, in batches of sentences of about the median length; a batch of 1 token is a
single sentence. Search alone is measured with every --index, for every number of --queries and every --k. --only leaves out
one of the two.

The floor is the least time of exact search: to read 2Nd bytes or to do 2HNd operations, whichever takes longer at the
bandwidth and the operations a second that are measured first. Peak memory is what tensors held on the GPU in each
measurement; on a CPU, what the process held so far.
"""
PHASES = (DECODER, PROJECTION, SEARCH, MERGE, FINDING, PHRASES, REST)


@dataclass
class Options:
    """The command's own options."""

    data_bin: str = data_bin_option()
    systems: list[str] = option(help="systems to compare with the base model", nargs="+", metavar="NAME=DIR")
    sizes: list[int] = counts_option([10_000, 100_000, 1_000_000], "keys of a datastore")
    index: list[str] = option(["auto"], "what is searched", nargs="+", metavar="exact|auto|FACTORY")
    batches: list[int] = counts_option([1, 800, 12_800], "target tokens of a batch")
    queries: list[int] = counts_option([5, 160, 800], "hypotheses that search at once", metavar="H")
    k: list[int] = counts_option([8, 1, 64], "neighbours that are searched for", metavar="K")
    repeats: int = count_option(5, "measurements of each thing")
    only: Optional[str] = option(None, "measure one of the two", choices=("decoding", "search"))
    json: Optional[Path] = json_option()
    plot: Optional[Path] = plot_option("where a picture of the searches goes, as PNG")
    quiet: bool = quiet_option()


def benchmark(options: Options, rest: list[str]) -> int:
    """Measure, print, write."""
    systems = _check(options)
    cfg = configure(rest, Path(options.data_bin))
    cfg.common.no_progress_bar = True
    device = choose_device(cfg.common.cpu)
    machine = describe_run(device)
    limits = measure_limits(device)
    searches = [] if options.only == "decoding" else _search(options, systems, device, limits)
    decoding, signatures = ([], {}) if options.only == "search" else _decode(options, cfg, systems, limits)
    described = {
        **machine,
        "limits": str(limits),
        **{f"signature of {name}": line for name, line in signatures.items()},
    }
    tables = [decoding_table(decoding)] * bool(decoding) + [search_table(searches)] * bool(searches)
    page = "\n\n".join(map(markdown_table, tables)) + "\n\n"
    page += "\n".join(f"- {name}: `{value}`" for name, value in described.items())
    print(page)
    if options.json:
        results: dict[str, Any] = {"machine": machine, "limits": asdict(limits), "signatures": signatures}
        results |= {"decoding": [asdict(row) for row in decoding], "search": [asdict(row) for row in searches]}
        write_results(options.json, results)
    if options.plot:
        draw_costs(searches, options.plot, machine["device"])
    return 0


def _check(options: Options) -> dict[str, str]:
    """Check the options before any work is done, and return the systems by name."""
    for name in ("json", "plot"):
        check_folder(f"--{name}", getattr(options, name))
    if options.plot and options.only == "decoding":
        raise ConfigurationError("--plot draws searches, and --only decoding leaves them out: give one of the two")
    systems = named(options.systems, "systems")
    for name in ALONE:
        if name in systems:
            raise ConfigurationError(f"'{name}' is always measured: give the system another name")
    for store in _stores(systems).values():
        section = store.section
        for choice in options.index:
            for size in options.sizes:
                plan_index(choice, section.index.metric, "", size, section.dimension)
    return systems


def _stores(systems: dict[str, str]) -> dict[str, TokenDatastore]:
    """Open the token datastores, each once, by the name of the first system that has it."""
    opened: dict[str, tuple[str, TokenDatastore]] = {}
    for name, paths in systems.items():
        parts = find_parts(paths)
        if "token" not in parts:
            raise ConfigurationError(f"{name}={paths} has no token part: give TOKENS:PHRASES, or leave it out")
        opened.setdefault(parts["token"], (name, TokenDatastore(parts["token"])))
    return dict(opened.values())


def _search(options: Options, systems: dict[str, str], device: torch.device, limits: Limits) -> list[SearchCost]:
    sweep = Sweep(options.sizes, options.index, options.queries, options.k, options.repeats)
    stores = _stores(systems)
    with progress_bar("searches", "search", total=len(sweep) * len(stores), quiet=options.quiet) as bar:
        costs = []
        for name, store in stores.items():
            for cost in measure_searches(name, store, sweep, device, limits):
                costs.append(cost)
                bar.update()
    return costs


def _decode(
    options: Options, cfg: Any, systems: dict[str, str], limits: Limits
) -> tuple[list[DecodingSpeed], dict[str, str]]:
    test = SpeedTest(cfg, *load(cfg), systems)
    rows = []
    with progress_bar("decoding", "load", total=len(options.sizes) * len(options.batches), quiet=options.quiet) as bar:
        for size in sorted(options.sizes):
            test.resize(size, options.index[0])
            for batch in options.batches:
                rows += test.measure(batch, size, options.repeats, limits)
                bar.update()
    return rows, test.signatures


def decoding_table(rows: list[DecodingSpeed]) -> list[list[Any]]:
    """Tabulate speed, and where the time of a step goes, a row per system and load."""
    head = ["keys", "batch", "hypotheses", "system", "tokens/s", "slowest–fastest", "speed"]
    head += [f"{phase}, ms per step" for phase in PHASES]
    table: list[list[Any]] = [[*head, "search ÷ floor", "peak memory"]]
    for row in rows:
        around = f"{row.slowest:,.0f}–{row.fastest:,.0f}"
        what = [f"{row.entries:,}" if row.entries else "", f"{row.batch:,}", row.hypotheses, row.system]
        phases = [f"{row.parts[phase]:.2f}" if phase in row.parts else "" for phase in PHASES]
        floor = f"{row.parts[SEARCH] / row.floor:.1f}" if row.floor else ""
        speeds = [f"{row.tokens_per_second:,.0f}", around, f"{row.speed:.0%}"]
        table.append([*what, *speeds, *phases, floor, gigabytes(row.peak_bytes)])
    return table


def search_table(rows: list[SearchCost]) -> list[list[Any]]:
    """Tabulate the cost of a search, a row for each combination."""
    head = ["keys of", "width", "keys", "index", "H", "k", "ms", "fastest–slowest", "floor, ms", "÷ floor", "recall"]
    table: list[list[Any]] = [[*head, "bytes per key", "built in, s", "peak memory"]]
    for row in rows:
        table.append([
            row.store, row.dimension, f"{row.keys:,}", row.index, row.queries, row.k, f"{row.milliseconds:.2f}",
            f"{row.fastest:.2f}–{row.slowest:.2f}", f"{row.floor:.3f}", f"{row.milliseconds / row.floor:.1f}",
            f"{row.recall:.1%}", f"{row.bytes_per_key:.0f}", f"{row.build_seconds:.1f}", gigabytes(row.peak_bytes),
        ])  # fmt: skip
    return table


main = command(HELP, benchmark, Options, rest=True)
