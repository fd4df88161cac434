"""`evaluate_retrieval.py`: how often the keys of datastores find the right token."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, markdown_table, own_arguments, run
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.accuracy.retrieval_accuracy import (
    BANDS,
    OVERALL,
    RAW,
    as_table,
    cluster_points,
    evaluate_retrieval,
    key_sets,
)
from fairseq_ccpr.evaluation.plots import draw_clusters, draw_precision
from fairseq_ccpr.storage.fingerprint import short

HELP = """\
Precision@k (share of the k nearest neighbours that have the right token) and any-hit@k (whether one has it) of raw
keys, of raw keys after PCA, and of any number of datastores that --adapter made of them.

  build_datastore.py tokens data-bin ... --output datastores/raw
  build_datastore.py tokens data-bin ... --output datastores/clknn --adapter clknn --raw-datastore datastores/raw
  evaluate_retrieval.py datastores/raw clknn=datastores/clknn --output accuracy

Queries are random tokens of --queries, text that no adapter has seen; without it random entries, whose own sentences are
left out of what they find, but on which adapters may have been trained. Each band of token frequency has its own; tokens
that occur less than 10 times are in none but the first. All search is exact.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="evaluate_retrieval.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("raw", type=Path, metavar="RAW", help="datastore of --adapter none")
    parser.add_argument("projected", nargs="*", metavar="[NAME=]DIR", help="datastores of --adapter clknn or FILE")
    parser.add_argument(
        "--queries", type=Path, metavar="DIR", help="raw datastore of held-out text (build_datastore.py --subset valid)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where accuracy.json and the pictures go")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="queries in a band, at most")
    parser.add_argument("--k", type=int, default=64, metavar="N", help="the most neighbours")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is random")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate, print, draw."""
    for name in ("count", "k"):
        if (value := getattr(options, name)) < 1:
            raise ConfigurationError(f"--{name} is {value}: give at least 1")
    raw = TokenDatastore(options.raw)
    projected = {}
    for word in options.projected:
        name, _, folder = word.rpartition("=")
        name = name or Path(folder).name
        if name in projected or name == RAW:
            raise ConfigurationError(f"two kinds of keys are called '{name}': name them, as in NAME={folder}")
        projected[name] = TokenDatastore(folder)
    sets = key_sets(raw, projected)
    queries = TokenDatastore(options.queries) if options.queries else None
    accuracy = evaluate_retrieval(sets, raw, queries, options.count, options.k, options.seed, options.quiet)
    print("precision@k / any-hit@k, per cent\n")
    print(markdown_table(as_table(accuracy)) + "\n")
    for name, store in {RAW: raw, **projected, **({"queries": queries} if queries else {})}.items():
        keys = short(store.section.files["token/keys.npy"]["sha256"])
        print(f"{name} {store.directory} store:{keys}|entries:{store.section.size}|seed:{options.seed}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "accuracy.json").write_text(json.dumps(asdict(accuracy), indent=1) + "\n", encoding="utf-8")
        for band, stem in zip((OVERALL, *BANDS), ("overall", "high", "middle", "low")):
            if band in accuracy.precision:
                picture = options.output / f"precision-{stem}.png"
                draw_precision(accuracy.precision[band], picture, band, "precision@k, %")
        panels = cluster_points(sets, raw, options.seed)
        if panels:
            draw_clusters(panels, len(panels) // len(sets), options.output / "clusters.png")
    return 0


def main() -> None:
    """Parse, evaluate, print."""
    options = make_parser().parse_args(own_arguments())
    run("evaluate_retrieval.py", lambda: evaluate(options))


if __name__ == "__main__":
    main()
