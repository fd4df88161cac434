"""`fairseq-ccpr evaluate keys`: how often the keys of datastores find the right token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import check_folder, command, markdown_table, write_results
from fairseq_ccpr.common_options import count_option, json_option, quiet_option
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.plots import draw_clusters, draw_precision
from fairseq_ccpr.lab.accuracy.retrieval_accuracy import (
    BANDS,
    OVERALL,
    RAW,
    as_table,
    cluster_points,
    evaluate_retrieval,
    key_sets,
)
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.fingerprint import short

HELP = """\
Precision@k (fraction of the k nearest neighbours with the right token) and any-hit@k (whether one has it) of raw
keys, of raw keys after PCA, and of any number of datastores that --adapter made of them.

  fairseq-ccpr build tokens data-bin ... --output datastores/raw
  fairseq-ccpr build tokens data-bin ... --output datastores/clknn --adapter clknn --raw-datastore datastores/raw
  fairseq-ccpr build tokens data-bin ... --output datastores/valid --subset valid
  fairseq-ccpr evaluate keys datastores/raw clknn=datastores/clknn --held-out datastores/valid --plots accuracy

Queries are random tokens of --held-out, text that no adapter has seen. Without it they are random entries, on which adapters
may have been trained; neighbours from their own sentences are left out. Each band of token frequency has its own queries;
tokens that occur fewer than 10 times are in the first band only. All search is exact.
"""


@dataclass
class Options:
    """The command's options."""

    raw: Path = option(help="datastore of --adapter none", positional=True, metavar="RAW")
    projected: list[str] = option(
        [], "datastores of --adapter clknn or FILE", positional=True, nargs="*", metavar="[NAME=]DIR"
    )
    held_out: Optional[Path] = option(
        None, "raw datastore of held-out text (fairseq-ccpr build tokens --subset valid)", metavar="DIR"
    )
    count: int = count_option(1000, "queries in a band, at most")
    k: int = count_option(64, "the most neighbours")
    seed: int = option(1, "random seed", metavar="N")
    json: Optional[Path] = json_option()
    plots: Optional[Path] = option(None, "folder for pictures: curves by token frequency, and clusters", metavar="DIR")
    quiet: bool = quiet_option()


def evaluate(options: Options) -> int:
    """Evaluate, print, draw."""
    check_folder("--json", options.json)
    raw = TokenDatastore(options.raw)
    projected = {}
    for word in options.projected:
        name, _, folder = word.rpartition("=")
        name = name or Path(folder).name
        if name in projected or name == RAW:
            raise ConfigurationError(f"two kinds of keys are called '{name}': name them, as in NAME={folder}")
        projected[name] = TokenDatastore(folder)
    sets = key_sets(raw, projected)
    queries = TokenDatastore(options.held_out) if options.held_out else None
    accuracy = evaluate_retrieval(sets, raw, queries, options.count, options.k, options.seed, options.quiet)
    print("precision@k / any-hit@k, per cent\n")
    print(markdown_table(as_table(accuracy)) + "\n")
    for name, store in {RAW: raw, **projected, **({"queries": queries} if queries else {})}.items():
        keys = short(store.keys_fingerprint)
        print(f"{name} {store.directory} store:{keys}|entries:{store.section.size}|seed:{options.seed}")
    if options.json:
        write_results(options.json, asdict(accuracy))
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for band, stem in zip((OVERALL, *BANDS), ("overall", "high", "middle", "low")):
            if band in accuracy.precision:
                picture = options.plots / f"precision-{stem}.png"
                draw_precision(accuracy.precision[band], picture, band, "precision@k, %")
        panels = cluster_points(sets, raw, options.seed)
        if panels:
            draw_clusters(panels, len(panels) // len(sets), options.plots / "clusters.png")
    return 0


main = command(HELP, evaluate, Options)
