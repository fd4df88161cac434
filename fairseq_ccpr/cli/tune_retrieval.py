"""`tune_retrieval.py`: choose k, lambda and T on a held-out subset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairseq_ccpr.cli.command import command
from fairseq_ccpr.common_options import count_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.test_set import load, parse_generation
from fairseq_ccpr.evaluation.tuning.heat_maps import draw_grids
from fairseq_ccpr.evaluation.tuning.tune import tune
from fairseq_ccpr.settings import option

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


@dataclass
class Options:
    """The command's own options."""

    data_bin: str = option(help="folder that fairseq-preprocess wrote", positional=True, metavar="DATA_BIN")
    output: Path = option(help="where the chosen options go", metavar="FILE")
    subset: str = option("valid", "the held-out pairs", metavar="NAME")
    decode: int = count_option(8, "how many settings to decode with")


def tune_command(options: Options, rest: list[str]) -> int:
    """Tune, print what was tried, write what was chosen."""
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


main = command(HELP, tune_command, Options, rest=True)

if __name__ == "__main__":
    main()
