"""Speed: `fairseq-ccpr benchmark decoding` and `benchmark phrases`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.cli.command import SHOWN, check_folders, command, markdown_table, named
from fairseq_ccpr.cli.planning import measure_limits
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.retrieval_task import find_parts
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import configure
from fairseq_ccpr.lab.commands.report import write_results
from fairseq_ccpr.lab.machine import gigabytes, page_of_run
from fairseq_ccpr.lab.plots import draw_costs, draw_speed
from fairseq_ccpr.lab.samples import sample_sentences
from fairseq_ccpr.lab.speed.decoding_speed import ALONE, REST, DecodingSpeed, SpeedTest
from fairseq_ccpr.lab.speed.phrase_speed import (
    BuildingSpeed,
    SearchSettings,
    measure_building,
    measure_search,
)
from fairseq_ccpr.lab.speed.search_speed import SearchCost, Sweep, measure_searches
from fairseq_ccpr.provenance import machine_name
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.settings import count_option, counts_option, option
from fairseq_ccpr.timing import DECODER, FINDING, MERGE, PHRASES, PROJECTION, SEARCH, progress_bar

PHASES = (DECODER, PROJECTION, SEARCH, MERGE, FINDING, PHRASES, REST)


@command(
    """\
Measure, for token datastores of any size, decoding speed relative to plain fairseq in the same process, and search alone.

  fairseq-ccpr benchmark decoding DATA_BIN --path model.pt -s de -t en --bpe sentencepiece --sentencepiece-model spm.model \\
    --systems knn-mt=datastores/raw clknn=datastores/clknn clknn+phrases=datastores/clknn:datastores/phrases \\
    --sizes 10000 100000 1000000 --json benchmark.json --plot benchmark.png > benchmark.md

A system is a name and the --datastore of fairseq-generate; its token part is cut down or filled up to each of the
sizes, with keys around its own and tokens as frequent as its own. Two systems are always measured: base, which is plain
fairseq, and base+, the same with the beam search and the --precision of the others. Systems take turns, repeat by
repeat; systems without a token part are measured once, as they are. All other options
are those of fairseq-generate --task translation_retrieval, and hold for every system.

Decoding is measured with the first --index, in batches of sentences of about the median length; a batch of 1 token is a
single sentence. Search alone is measured with every --index, for every number of --queries and every --k. --only leaves out
one of the two.

The floor is the least time of exact search: to read 2Nd bytes or to do 2HNd operations, whichever takes longer at the
bandwidth and the operations a second that are measured first. Peak memory is what tensors held on the GPU in each
measurement; on a CPU, what the process held so far.
""",
    shown=SHOWN - {"--nbest", "--replace-unk"},
)
def benchmark_decoding(
    rest: list[str],
    data_bin: Path,
    systems: list[str] = option(help="systems to compare with the base model", nargs="+", metavar="NAME=DIR"),
    sizes: list[int] = counts_option([10_000, 100_000, 1_000_000], "keys of a datastore"),
    index: list[str] = option(["auto"], "what is searched", nargs="+", metavar="exact|auto|FACTORY"),
    batches: list[int] = counts_option([1, 800, 12_800], "target tokens of a batch"),
    queries: list[int] = counts_option([5, 160, 800], "hypotheses that search at once", metavar="H"),
    k: list[int] = counts_option([8, 1, 64], "neighbours that are searched for", metavar="K"),
    repeats: int = count_option(5, "measurements of each thing"),
    only: Optional[str] = option(None, "measure one of the two", choices=("decoding", "search")),
    json: Optional[Path] = None,
    plot: Optional[Path] = None,
    quiet: bool = False,
) -> int:
    check_folders(json=json, plot=plot)
    if plot and only == "decoding":
        raise ConfigurationError(
            "--plot draws searches, and --only decoding leaves them out: give one of the two"
        )
    by_name = named(systems, "systems")
    for name in ALONE:
        if name in by_name:
            raise ConfigurationError(f"'{name}' is always measured: give the system another name")
    # each once, by the name of the first system that has it
    opened: dict[str, tuple[str, TokenDatastore]] = {}
    for name, paths in by_name.items():
        parts = find_parts(paths)
        if "token" in parts:
            opened.setdefault(parts["token"], (name, TokenDatastore(parts["token"])))
    if only == "search" and not opened:
        raise ConfigurationError(
            "--only search measures token parts, and none of --systems has one: give one that has, "
            "or leave it out"
        )
    for _, store in opened.values():
        for choice, size in ((choice, size) for choice in index for size in sizes):
            # A typing error shows now.
            plan_index(choice, store.section.index.metric, "", size, store.section.dimension)
    cfg = configure(rest, data_bin)
    cfg.common.no_progress_bar = True
    device = choose_device(cfg.common.cpu)
    limits = measure_limits(device)
    searches: list[SearchCost] = []
    decoding: list[DecodingSpeed] = []
    signatures: dict[str, str] = {}
    if only != "decoding":
        sweep = Sweep(sizes, index, queries, k, repeats)
        with progress_bar("searches", "search", total=len(sweep) * len(opened), quiet=quiet) as bar:
            for name, store in opened.values():
                for cost in measure_searches(name, store, sweep, device, limits):
                    searches.append(cost)
                    bar.update()
    if only != "search":
        test = SpeedTest(cfg, *load(cfg), by_name)
        with progress_bar("decoding", "load", total=len(sizes) * len(batches), quiet=quiet) as bar:
            for size in sorted(sizes):
                test.resize(size, index[0])
                for batch in batches:
                    decoding += test.measure(batch, repeats, limits)
                    bar.update()
        signatures = test.signatures
    described = {"limits": str(limits)}
    described |= {f"signature of {name}": line for name, line in signatures.items()}
    tables = [_decoding_table(decoding)] * bool(decoding) + [_cost_table(searches)] * bool(searches)
    print("\n\n".join([*map(markdown_table, tables), page_of_run(device)]) + "\n")
    print("\n".join(f"- {name}: `{value}`" for name, value in described.items()))
    results: dict[str, Any] = {"limits": asdict(limits), "signatures": signatures}
    results |= {"decoding": [asdict(row) for row in decoding], "search": [asdict(row) for row in searches]}
    write_results(json, results, device)
    if plot:
        draw_costs(searches, plot, machine_name(device))
    return 0


def _decoding_table(rows: list[DecodingSpeed]) -> list[list[Any]]:
    head = ["keys", "batch", "hypotheses", "system", "tokens/s", "slowest–fastest", "speed", "of base+"]
    head += [f"{phase}, ms per step" for phase in PHASES]
    table: list[list[Any]] = [[*head, "operations per step", "search ÷ floor", "peak memory"]]
    for row in rows:
        around = f"{row.slowest:,.0f}–{row.fastest:,.0f}"
        what = [f"{row.entries:,}" if row.entries else "", f"{row.batch:,}", row.hypotheses, row.system]
        phases = [f"{row.parts[phase]:.2f}" if phase in row.parts else "" for phase in PHASES]
        floor = f"{row.parts[SEARCH] / row.floor:.1f}" if row.floor and SEARCH in row.parts else ""
        speeds = [f"{row.tokens_per_second:,.0f}", around, f"{row.speed:.0%}", f"{row.speed_equipped:.0%}"]
        table.append([*what, *speeds, *phases, f"{row.operations:.0f}", floor, gigabytes(row.peak_bytes)])
    return table


def _cost_table(rows: list[SearchCost]) -> list[list[Any]]:
    head = [
        "keys of",
        "width",
        "keys",
        "index",
        "H",
        "k",
        "ms",
        "fastest–slowest",
        "floor, ms",
        "÷ floor",
        "recall",
    ]
    table: list[list[Any]] = [[*head, "bytes per key", "built in, s", "peak memory"]]
    for row in rows:
        table.append([
            row.store, row.dimension, f"{row.keys:,}", row.index, row.queries, row.k, f"{row.milliseconds:.2f}",
            f"{row.fastest:.2f}–{row.slowest:.2f}", f"{row.floor:.3f}", f"{row.milliseconds / row.floor:.1f}",
            f"{row.recall:.1%}", f"{row.bytes_per_key:.0f}", f"{row.build_seconds:.1f}", gigabytes(row.peak_bytes),
        ])  # fmt: skip
    return table


@command("""\
Speed and size of phrase datastores.

  fairseq-ccpr benchmark phrases --text mono.en.txt --encoder ccpr/phrase-encoder/ccpr.pt --sentences 1000 10000 \\
    --sizes 10000 100000 1000000 10000000 --json speed.json --plot speed.png

Building, if --text and --encoder are given: a datastore of --sentences random sentences of the text, as `fairseq-ccpr build
phrases` makes it, in a temporary folder. Search: random keys of length 1 instead of phrases, searched a batch at a time by
the classes that retrieval uses, once unmeasured and then five times. A FAISS index is written to a temporary folder,
which TMPDIR places.

Peak memory is what tensors held on the GPU in each measurement; on a CPU, what the process held so far.
""")
def benchmark_phrases(
    text: list[Path] = option(
        [], "files of one sentence per line, to build datastores of", nargs="+", metavar="TEXT"
    ),
    encoder: Optional[Path] = option(None, "the phrase encoder to build them with", metavar="CKPT"),
    sentences: list[int] = counts_option([1000, 10_000], "of each datastore built"),
    sizes: list[int] = counts_option(
        [10_000, 100_000, 1_000_000, 10_000_000], "phrases of each index searched"
    ),
    index: list[str] = option(
        ["exact"], "exact search, FAISS factory strings", nargs="+", metavar="exact|FACTORY"
    ),
    store: Optional[str] = option(
        None, "search the same keys in this Milvus too, by exact search", metavar="URI|FILE.db"
    ),
    plot: Optional[Path] = None,
    json: Optional[Path] = None,
    cpu: bool = False,
    quiet: bool = False,
) -> int:
    settings = SearchSettings()
    check_folders(json=json, plot=plot)
    device = choose_device(cpu)
    # The peak memory of a process only grows: the small ones first.
    runs: list[tuple[str, int, str | None]] = [
        (choice, size, None) for size in sorted(set(sizes)) for choice in index
    ]
    for choice, size, _ in runs:
        plan_index(choice, "ip", "", size, settings.dimension)  # a typing error shows now
    building: list[BuildingSpeed] = []
    if text and encoder:
        most = max(sentences)
        drawn = sample_sentences(text, most, ())
        if len(drawn) < most:
            names = ", ".join(map(str, text))
            raise ConfigurationError(
                f"--sentences has {most:,}, and {names} {len(drawn):,} different sentences: give fewer, or more text"
            )
        building = [
            measure_building(drawn[:count], encoder, device, quiet) for count in sorted(set(sentences))
        ]
    elif text or encoder:
        given, missing = ("--text", "--encoder") if text else ("--encoder", "--text")
        raise ConfigurationError(f"{given} needs {missing} to build datastores with: give both, or neither")
    runs += [("exact", size, store) for size in sorted(set(sizes)) if store]
    bar = progress_bar("searches", "index", runs, quiet=quiet)
    searches = [measure_search(choice, size, settings, device, place) for choice, size, place in bar]
    if building:
        print(markdown_table(_building_table(building)) + "\n")
    rows = [["index", "phrases", "queries/s", "slowest", "fastest", "peak memory"]]
    for row in searches:
        speeds = (f"{speed:,.0f}" for speed in (row.queries_per_second, row.slowest, row.fastest))
        rows.append([row.index, f"{row.phrases:,}", *speeds, gigabytes(row.peak_bytes)])
    print(f"{markdown_table(rows)}\n\n{page_of_run(device)}")
    results = {"building": [asdict(row) for row in building], "search": [asdict(row) for row in searches]}
    write_results(json, {"settings": asdict(settings), **results}, device)
    if plot:
        draw_speed(
            searches, plot, f"{settings.queries} queries per batch, k = {settings.k}, {machine_name(device)}"
        )
    return 0


def _building_table(building: list[BuildingSpeed]) -> list[list[Any]]:
    parts = list(building[0].bytes_per_phrase)
    head = [
        "sentences",
        "phrases",
        "sentences/s",
        "phrases/s",
        "seconds",
        "bytes per phrase",
        *parts,
        "peak memory",
    ]
    table: list[list[Any]] = [head]
    for row in building:
        table.append([
            f"{row.sentences:,}", f"{row.phrases:,}", f"{row.sentences_per_second:.0f}", f"{row.phrases_per_second:,.0f}",
            f"{row.seconds:.1f}", f"{sum(row.bytes_per_phrase.values()):.0f}",
            *(f"{row.bytes_per_phrase[part]:.0f}" for part in parts), gigabytes(row.peak_bytes),
        ])  # fmt: skip
    return table
