"""`benchmark.py`: what retrieval costs beside plain fairseq, how that grows, and how far it is from the least."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fairseq_ccpr.cli.command import HelpFormatter, check_folder, markdown_table, named, own_arguments, run
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.task import find_parts
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.plots import draw_costs
from fairseq_ccpr.evaluation.speed.benchmark_report import decoding_table, search_table
from fairseq_ccpr.evaluation.speed.decoding_speed import DecodingSpeed, SpeedTest
from fairseq_ccpr.evaluation.speed.machine import (
    Limits,
    machine_name,
    measure_limits,
    versions,
)
from fairseq_ccpr.evaluation.speed.search_speed import SearchCost, Sweep, measure_searches
from fairseq_ccpr.evaluation.translation.test_set import load, parse_generation
from fairseq_ccpr.search.index_plan import plan_index

HELP = """\
Speed with token datastores of any size: of decoding, beside plain fairseq in the same process, and of search alone.

  benchmark.py DATA_BIN --path model.pt -s de -t en --bpe sentencepiece --sentencepiece-model spm.model \\
    --systems knn-mt=datastores/raw clknn=datastores/clknn clknn+phrases=datastores/clknn:datastores/phrases \\
    --sizes 10000 100000 1000000 --json benchmark.json --markdown benchmark.md --plot benchmark.png

A system is a name and what fairseq-generate is told as --datastore; its token part is cut down or filled up to each of the
sizes, with keys around its own and tokens as frequent as its own. Systems take turns, repeat by repeat. All other options
are those of fairseq-generate --task translation_retrieval, and hold for every system.

Decoding is measured with the first --index, in batches of sentences of about the median length; a batch of 1 token is a
single sentence. Search alone is measured with every --index, for every number of --queries and every --k. --only leaves out
one of the two.

The floor is what exact search cannot beat: 2Nd bytes to be read or 2HNd operations to be done, whichever takes longer by the
bandwidth and the operations a second that are measured first. Peak memory is what tensors held on the GPU in each
measurement; on a CPU, what the process held so far.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's own options."""
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("data_bin", metavar="DATA_BIN", help="folder that fairseq-preprocess wrote")
    add("--systems", nargs="+", required=True, metavar="NAME=DIR", help="systems beside the base model")
    add("--sizes", nargs="+", type=int, default=[10_000, 100_000, 1_000_000], metavar="N", help="keys of a datastore")
    add("--index", nargs="+", default=["auto"], metavar="exact|auto|torch-ivf|FACTORY", help="what is searched")
    add("--batches", nargs="+", type=int, default=[1, 800, 12_800], metavar="N", help="target tokens of a batch")
    add("--queries", nargs="+", type=int, default=[5, 160, 800], metavar="H", help="hypotheses that search at once")
    add("--k", nargs="+", type=int, default=[8, 1, 64], metavar="K", help="neighbours that are searched for")
    add("--repeats", type=int, default=5, metavar="N", help="measurements of each thing")
    add("--only", choices=["decoding", "search"], help="measure one of the two")
    add("--json", type=Path, metavar="FILE", help="where the figures go")
    add("--markdown", type=Path, metavar="FILE", help="where the tables go, beside stdout")
    add("--plot", type=Path, metavar="FILE", help="where a picture of the searches goes, as PNG")
    add("--quiet", action="store_true", help="no progress bars")
    return parser


def benchmark(options: argparse.Namespace, rest: list[str]) -> int:
    """Measure, print, write."""
    systems = _check(options)
    cfg = parse_generation([options.data_bin, *rest])
    cfg.common.no_progress_bar = True
    device = torch.device("cuda" if torch.cuda.is_available() and not cfg.common.cpu else "cpu")
    machine = {
        "device": machine_name(device),
        **versions(),
        "command": shlex.join(["benchmark.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
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
    if options.markdown:
        options.markdown.write_text(page + "\n", encoding="utf-8")
    if options.json:
        results: dict[str, Any] = {"machine": machine, "limits": asdict(limits), "signatures": signatures}
        results |= {"decoding": [asdict(row) for row in decoding], "search": [asdict(row) for row in searches]}
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw_costs(searches, options.plot, machine["device"])
    return 0


def _check(options: argparse.Namespace) -> dict[str, str]:
    """The systems by name; errors of the command line show before any work is done."""
    for name in ("sizes", "batches", "queries", "k", "repeats"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ConfigurationError(f"--{name} has {value}: give at least 1")
    for option in ("json", "markdown", "plot"):
        check_folder(f"--{option}", getattr(options, option))
    if options.plot and options.only == "decoding":
        raise ConfigurationError("--plot draws searches, and --only decoding leaves them out: give one of the two")
    systems = named(options.systems, "systems")
    if "base" in systems:
        raise ConfigurationError("'base' is plain fairseq, which is always measured: give the system another name")
    for store in _stores(systems).values():
        section = store.section
        for choice in options.index:
            for size in options.sizes:
                plan_index(choice, section.index.metric, "", size, section.dimension)
    return systems


def _stores(systems: dict[str, str]) -> dict[str, TokenDatastore]:
    """The token datastores, each once, by the name of the first system that has it."""
    found: dict[str, tuple[str, TokenDatastore]] = {}
    for name, paths in systems.items():
        parts = find_parts(paths)
        if "token" not in parts:
            raise ConfigurationError(f"{name}={paths} has no token part: give TOKENS:PHRASES, or leave it out")
        found.setdefault(parts["token"], (name, TokenDatastore(parts["token"])))
    return dict(found.values())


def _search(
    options: argparse.Namespace, systems: dict[str, str], device: torch.device, limits: Limits
) -> list[SearchCost]:
    sweep = Sweep(options.sizes, options.index, options.queries, options.k, options.repeats)
    stores = _stores(systems)
    with tqdm(desc="searches", total=len(sweep) * len(stores), unit="search", disable=options.quiet) as bar:
        found = []
        for name, store in stores.items():
            for cost in measure_searches(name, store, sweep, device, limits):
                found.append(cost)
                bar.update()
    return found


def _decode(
    options: argparse.Namespace, cfg: Any, systems: dict[str, str], limits: Limits
) -> tuple[list[DecodingSpeed], dict[str, str]]:
    test = SpeedTest(cfg, *load(cfg), systems)
    rows = []
    with tqdm(
        desc="decoding", total=len(options.sizes) * len(options.batches), unit="load", disable=options.quiet
    ) as bar:
        for size in sorted(options.sizes):
            test.resize(size, options.index[0])
            for batch in options.batches:
                rows += test.measure(batch, size, options.repeats, limits)
                bar.update()
    return rows, test.signatures


def main() -> None:
    """Parse, measure, print."""
    options, rest = make_parser().parse_known_args(own_arguments())
    run("benchmark.py", lambda: benchmark(options, rest))


if __name__ == "__main__":
    main()
