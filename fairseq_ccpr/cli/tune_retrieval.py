"""`tune_retrieval.py`: choose k, lambda and T on a held-out subset."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, own_arguments, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.test_set import load, parse_generation
from fairseq_ccpr.evaluation.tuning.heat_maps import draw_grids
from fairseq_ccpr.evaluation.tuning.tune import tune

HELP = """\
Choose --knn-k, --knn-lambda and --knn-temperature for tokens, and --phrase-k, --phrase-lambda, --phrase-temperature and
--phrase-enter for phrases, of a datastore. One teacher-forced pass over held-out pairs scores a grid of many hundred
settings by the likelihood of the references, those of phrases beside the likeliest of tokens; the best of them are decoded
with, and the one of the best BLEU goes to FILE, a picture of the grid to FILE.png. Use it as

  fairseq-generate DATA_BIN ... --datastore DIR $(cat FILE)

All other options are those of fairseq-generate --task translation_retrieval: --path, -s, -t, --datastore, --max-tokens,
and, as you give them there, those that make text of subwords (--remove-bpe or --bpe). For an adapter's keys the grid has
both a fixed lambda and lambda*; --knn-confidence or --no-knn-confidence leaves one of them. What is not tuned is as given
and goes into FILE as well: --knn-min-similarity, --knn-lambda-max, --phrase-min-similarity, --phrase-threshold,
--phrase-segmentation, --phrase-gate, --no-phrase-coverage, --retrieval-lambda-max.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's own options."""
    parser = argparse.ArgumentParser(
        prog="tune_retrieval.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data_bin", metavar="DATA_BIN", help="folder that fairseq-preprocess wrote")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the chosen options go")
    parser.add_argument("--subset", default="valid", metavar="NAME", help="the held-out pairs")
    parser.add_argument("--decode", type=int, default=8, metavar="N", help="how many settings to decode with")
    return parser


def tune_command(options: argparse.Namespace, rest: list[str]) -> int:
    """Tune, print what was tried, write what was chosen."""
    if options.decode < 1:
        raise ConfigurationError(f"--decode is {options.decode}: give at least 1")
    if not options.output.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--output {options.output} cannot be written: there is no folder {options.output.parent}"
        )
    cfg = parse_generation([options.data_bin, *rest, "--gen-subset", options.subset])
    tuned = tune(cfg, *load(cfg), count=options.decode)
    print(
        f"{len(tuned.token_grid) + len(tuned.phrase_grid):,} settings by likelihood in {tuned.grid_seconds:.1f} s, "
        f"{tuned.grid_seconds / tuned.base_seconds:.2f} times a plain decode of {options.subset}; the best by BLEU:"
    )
    for name, scores in sorted(tuned.scores.items(), key=lambda item: -item[1].bleu):
        print(f"{scores.bleu:7.2f}  {name}")
    print(f"BLEU {tuned.scores['base'].bleu_signature}")
    print(f"retrieval {tuned.signature}")
    options.output.write_text(tuned.options + "\n", encoding="utf-8")
    draw_grids(tuned.token_grid, tuned.phrase_grid, Path(f"{options.output}.png"))
    return 0


def main() -> None:
    """Parse, tune, print."""
    options, rest = make_parser().parse_known_args(own_arguments())
    run("tune_retrieval.py", lambda: tune_command(options, rest))


if __name__ == "__main__":
    main()
