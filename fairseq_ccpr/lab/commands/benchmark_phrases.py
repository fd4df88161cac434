"""`fairseq-ccpr benchmark phrases`: speed of building and searching phrase datastores, and their size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from fairseq_ccpr.cli.command import check_folder, command, markdown_table, write_results
from fairseq_ccpr.common_options import counts_option, cpu_option, json_option, plot_option, quiet_option
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.machine import describe_run, gigabytes
from fairseq_ccpr.lab.speed.phrase_speed import (
    BuildingSpeed,
    SearchSettings,
    SearchSpeed,
    measure_building,
    measure_search,
)
from fairseq_ccpr.lab.speed.plots import draw_speed
from fairseq_ccpr.phrases.samples import sample_sentences
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.settings import option

HELP = """\
Speed and size of phrase datastores.

  fairseq-ccpr benchmark phrases --text mono.en.txt --encoder ccpr/phrase-encoder/ccpr.pt --sentences 1000 10000 \\
    --sizes 10000 100000 1000000 10000000 --json speed.json --plot speed.png

Building, if --text and --encoder are given: a datastore of --sentences random sentences of the text, as `fairseq-ccpr build
phrases` makes it, in a temporary folder. Search: random keys of length 1 instead of phrases, searched a batch at a time by
the classes that retrieval uses, once unmeasured and then --repeats times. A FAISS index is written to a temporary folder,
which TMPDIR places.

Peak memory is what tensors held on the GPU in each measurement; on a CPU, what the process held so far.
"""


@dataclass
class Options:
    """The command's options besides `SearchSettings`."""

    text: list[Path] = option([], "files of one sentence per line, to build datastores of", nargs="+", metavar="TEXT")
    encoder: Optional[Path] = option(None, "the phrase encoder to build them with", metavar="CKPT")
    sentences: list[int] = counts_option([1000, 10_000], "of each datastore built")
    sizes: list[int] = counts_option([10_000, 100_000, 1_000_000, 10_000_000], "phrases of each index searched")
    index: list[str] = option(["exact"], "exact search, FAISS factory strings", nargs="+", metavar="exact|FACTORY")
    store: Optional[str] = option(
        None, "search the same keys in this Milvus too, by exact search", metavar="URI|FILE.db"
    )
    plot: Optional[Path] = plot_option("where a picture of the searches goes, as PNG")
    json: Optional[Path] = json_option()
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


def benchmark(options: Options, settings: SearchSettings) -> int:
    """Build, search, print."""
    check_folder("--json", options.json)
    check_folder("--plot", options.plot)
    device = choose_device(options.cpu)
    # The peak memory of a process only grows: the small ones first.
    runs = [(choice, size) for size in sorted(set(options.sizes)) for choice in options.index]
    for choice, size in runs:
        plan_index(choice, "ip", "", size, settings.dimension)  # a typing error shows now
    building = _build(options, device)
    stores = [("exact", size, options.store) for size in sorted(set(options.sizes)) if options.store]
    bar = progress_bar(
        "searches", "index", [*((choice, size, None) for choice, size in runs), *stores], quiet=options.quiet
    )
    searches = [measure_search(choice, size, settings, device, store) for choice, size, store in bar]
    machine = describe_run(device)
    if building:
        print(markdown_table(building_table(building)) + "\n")
    print(markdown_table(search_table(searches)) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in machine.items()))
    if options.json:
        parts: dict[str, Any] = {"building": building, "search": searches}
        rows = {name: [asdict(row) for row in part] for name, part in parts.items()}
        results = {"machine": machine, "settings": asdict(settings), **rows}
        write_results(options.json, results)
    if options.plot:
        draw_speed(
            searches, options.plot, f"{settings.queries} queries per batch, k = {settings.k}, {machine['device']}"
        )
    return 0


def _build(options: Options, device: torch.device) -> list[BuildingSpeed]:
    """Build datastores of more and more sentences."""
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
    """Tabulate builds, a row per datastore."""
    parts = list(building[0].bytes_per_phrase)
    head = ["sentences", "phrases", "sentences/s", "phrases/s", "seconds", "bytes per phrase", *parts, "peak memory"]
    rows = [
        [
            f"{row.sentences:,}",
            f"{row.phrases:,}",
            f"{row.sentences_per_second:.0f}",
            f"{row.phrases_per_second:,.0f}",
            f"{row.seconds:.1f}",
            f"{sum(row.bytes_per_phrase.values()):.0f}",
            *(f"{row.bytes_per_phrase[part]:.0f}" for part in parts),
            gigabytes(row.peak_bytes),
        ]
        for row in building
    ]
    return [head, *rows]


def search_table(searches: list[SearchSpeed]) -> list[list[Any]]:
    """Tabulate searches, a row per index."""
    head = ["index", "phrases", "queries/s", "slowest", "fastest", "peak memory"]
    rows = []
    for row in searches:
        speeds = (f"{speed:,.0f}" for speed in (row.queries_per_second, row.slowest, row.fastest))
        rows.append([row.index, f"{row.phrases:,}", *speeds, gigabytes(row.peak_bytes)])
    return [head, *rows]


main = command(HELP, benchmark, Options, SearchSettings)
