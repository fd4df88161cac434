"""`benchmark_phrases.py`: how fast phrases are indexed and found, what they weigh, and how all of it grows."""

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

from fairseq_ccpr.cli.command import (
    HelpFormatter,
    add_evaluation_options,
    check_folder,
    markdown_table,
    own_arguments,
    run,
)
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.plots import draw_speed
from fairseq_ccpr.evaluation.speed.machine import machine_name, versions
from fairseq_ccpr.evaluation.speed.phrase_speed import (
    BuildingSpeed,
    SearchSettings,
    SearchSpeed,
    measure_building,
    measure_search,
)
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.text.samples import sample_sentences

HELP = """\
Speed and size of phrase datastores.

  benchmark_phrases.py --text mono.en.txt --encoder ccpr/phrase-encoder/ccpr.pt --sentences 1000 10000 \\
    --sizes 10000 100000 1000000 10000000 --json speed.json --plot speed.png

Building, where --text and --encoder are given: a datastore of so many random sentences of the text, as
`build_datastore.py phrases` makes it, in a temporary folder. Search: random keys of length 1 take the place of phrases,
searched by the classes that retrieval searches with, a batch at a time, once for nothing and then --repeats times. An index
of FAISS is written to the temporary folder, which TMPDIR says where to make.

Peak memory is what tensors held on the GPU in each measurement; on a CPU, what the process held so far.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="benchmark_phrases.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    default = SearchSettings
    add = parser.add_argument
    add("--text", nargs="+", type=Path, metavar="TEXT", help="files of one sentence a line, to build datastores of")
    add("--encoder", type=Path, metavar="CKPT", help="the phrase encoder to build them with")
    add("--sentences", nargs="+", type=int, default=[1000, 10_000], metavar="N", help="of each datastore built")
    add(
        "--sizes", nargs="+", type=int, default=[10_000, 100_000, 1_000_000, 10_000_000], metavar="N",
        help="phrases of each index searched",
    )  # fmt: skip
    add("--index", nargs="+", default=["exact"], metavar="exact|FACTORY", help="exact search, FAISS factory strings")
    add("--store", metavar="URI|FILE.db", help="search the same keys in this Milvus too, by exact search")
    add("--dimension", type=int, default=default.dimension, metavar="N", help="width of a random key")
    add("--queries", type=int, default=default.queries, metavar="N", help="in a batch: the phrases of some sentences")
    add("--k", type=int, default=default.k, metavar="N", help="entries found for each; retrieval begins with as many")
    add("--repeats", type=int, default=default.repeats, metavar="N", help="searches that are measured")
    add("--plot", type=Path, metavar="FILE", help="where a picture of the searches goes, as PNG")
    add_evaluation_options(parser)
    return parser


def benchmark(options: argparse.Namespace) -> int:
    """Build, search, print."""
    for name in ("sentences", "sizes", "dimension", "queries", "k", "repeats"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise ConfigurationError(f"--{name} has {value}: give at least 1")
    for option in ("json", "plot"):
        check_folder(f"--{option}", getattr(options, option))
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    # The most that a process held only grows: the small ones first.
    runs = [(choice, size) for size in sorted(set(options.sizes)) for choice in options.index]
    for choice, size in runs:
        plan_index(choice, "ip", "", size, options.dimension)  # a typing error shows now
    building = _build(options, device)
    settings = SearchSettings(options.dimension, options.queries, options.k, options.repeats)
    stores = [("exact", size, options.store) for size in sorted(set(options.sizes)) if options.store]
    bar = tqdm(
        [*((choice, size, None) for choice, size in runs), *stores], "searches", unit="index", disable=options.quiet
    )
    searches = [measure_search(choice, size, settings, device, store) for choice, size, store in bar]
    machine = {
        "device": machine_name(device),
        **versions(),
        "command": shlex.join(["benchmark_phrases.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if building:
        print(markdown_table(building_table(building)) + "\n")
    print(markdown_table(search_table(searches)) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in machine.items()))
    if options.json:
        parts: dict[str, Any] = {"building": building, "search": searches}
        rows = {name: [asdict(row) for row in part] for name, part in parts.items()}
        results = {"machine": machine, "settings": asdict(settings), **rows}
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw_speed(searches, options.plot, f"{options.queries} queries a batch, k = {options.k}, {machine['device']}")
    return 0


def _build(options: argparse.Namespace, device: torch.device) -> list[BuildingSpeed]:
    """Datastores of more and more sentences."""
    if not options.text and not options.encoder:
        return []
    if not options.text or not options.encoder:
        given, missing = ("--text", "--encoder") if options.text else ("--encoder", "--text")
        raise ConfigurationError(f"{given} needs {missing} to build datastores with: give both, or neither")
    most = max(options.sentences)
    sentences = sample_sentences(options.text, most, ())
    if len(sentences) < most:
        names = ", ".join(map(str, options.text))
        raise ConfigurationError(
            f"--sentences has {most:,}, and {names} {len(sentences):,} different sentences: give fewer, or more text"
        )
    return [
        measure_building(sentences[:count], options.encoder, device, options.quiet)
        for count in sorted(set(options.sentences))
    ]


def building_table(building: list[BuildingSpeed]) -> list[list[Any]]:
    """Rows of a table, a datastore each."""
    parts = list(building[0].bytes_per_phrase)
    head = ["sentences", "phrases", "sentences/s", "phrases/s", "seconds", "bytes a phrase", *parts, "peak memory"]
    rows = [
        [
            f"{row.sentences:,}",
            f"{row.phrases:,}",
            f"{row.sentences_per_second:.0f}",
            f"{row.phrases_per_second:,.0f}",
            f"{row.seconds:.1f}",
            f"{sum(row.bytes_per_phrase.values()):.0f}",
            *(f"{row.bytes_per_phrase[part]:.0f}" for part in parts),
            _gigabytes(row.peak_bytes),
        ]
        for row in building
    ]
    return [head, *rows]


def search_table(searches: list[SearchSpeed]) -> list[list[Any]]:
    """Rows of a table, an index each."""
    head = ["index", "phrases", "queries/s", "slowest", "fastest", "peak memory"]
    rows = []
    for row in searches:
        speeds = (f"{speed:,.0f}" for speed in (row.queries_per_second, row.slowest, row.fastest))
        rows.append([row.index, f"{row.phrases:,}", *speeds, _gigabytes(row.peak_bytes)])
    return [head, *rows]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def main() -> None:
    """Parse, measure, print."""
    options = make_parser().parse_args(own_arguments())
    run("benchmark_phrases.py", lambda: benchmark(options))


if __name__ == "__main__":
    main()
