"""`fairseq-ccpr tune`: choose k, lambda and T on a held-out subset."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import check_folder, command
from fairseq_ccpr.common_options import count_option, data_bin_option
from fairseq_ccpr.datastore.preprocessing import remember, remembered
from fairseq_ccpr.datastore.tuned import write_tuned
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.comparison import BASE
from fairseq_ccpr.evaluation.tuning.heat_maps import draw_grids
from fairseq_ccpr.evaluation.tuning.tune import Tuned, tune
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.files import write_text

HELP = """\
Choose --knn-k, --knn-lambda and --knn-temperature for tokens, and --phrase-k, --phrase-lambda, --phrase-temperature and
--phrase-enter for phrases, of a datastore. One teacher-forced pass over held-out pairs scores a grid of many hundred
settings by the likelihood of the references, those of phrases together with the likeliest of tokens; the best of them are
decoded with, and the one of the best BLEU is left with the datastore, where every command and fairseq-generate find it:

  fairseq-ccpr tune data-bin --path model.pt --datastore datastores/mine
  fairseq-ccpr translate --datastore datastores/mine < in.txt > out.txt

Where no settings are better than the model alone, the interpolation weights become 0. The datastore has a picture of the
grid, tuned.png. --output FILE writes the options there instead, for $(cat FILE), and the picture to FILE.png.

For an adapter's keys the grid has both a fixed lambda and lambda*; --knn-confidence or --no-knn-confidence leaves one of
them. What is not tuned is as given, and is left as well: --knn-min-similarity, --knn-lambda-max, --phrase-min-similarity,
--phrase-threshold, --phrase-segmentation, --phrase-gate, --retrieval-lambda-max.
"""


@dataclass
class Options:
    """The command's own options."""

    data_bin: str = data_bin_option()
    output: Optional[Path] = option(None, "where the chosen options go (with the datastore)", metavar="FILE")
    subset: str = option("valid", "the held-out pairs", metavar="NAME")
    decode: int = count_option(8, "how many settings to decode with")


def tune_command(options: Options, rest: list[str]) -> int:
    """Tune, print what was tried, write what was chosen."""
    check_folder("--output", options.output)
    system = System.of([*rest, "--gen-subset", options.subset, "--untuned"], Path(options.data_bin))
    if system.cfg.task.no_phrase_coverage and options.output is None:
        raise ConfigurationError(
            "--no-phrase-coverage is an ablation, which is not left with a datastore: give --output"
        )
    folder = next(iter(system.task.parts.values())).directory if system.task.parts else None
    if options.output is None and folder is not None and not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{folder} cannot be written to: give --output FILE, where the options go instead")
    tuned = tune(system, options.decode)
    print(
        f"{len(tuned.token_grid) + len(tuned.phrase_grid):,} settings by likelihood in {tuned.grid_seconds:.1f} s, "
        f"{tuned.grid_seconds / tuned.base_seconds:.2f} times a plain decode of {options.subset}; the best by BLEU:"
    )
    for name, scores in sorted(tuned.scores.items(), key=lambda item: -item[1].bleu):
        print(f"{scores.bleu:7.2f}  {name}")
    print(f"BLEU {tuned.scores[BASE].bleu_signature}")
    print(f"retrieval {tuned.best.signature()}")
    if not tuned.helps:
        print("no settings are better than the model alone here: the interpolation weights are 0")
    if options.output is not None:
        path, picture = options.output, Path(f"{options.output}.png")
        write_text(path, tuned.options + "\n")
    else:
        path = leave(system, tuned)
        picture = path.with_suffix(".png")
    draw_grids(tuned.token_grid, tuned.phrase_grid, picture)
    print(f"{path}: {tuned.options}")
    return 0


def leave(system: System, tuned: Tuned) -> Path:
    """Leave the settings with the datastore, and how text is made, where it does not know that."""
    path = write_tuned(system.task.parts, tuned.settings, tuned.best.signature())
    known = remembered(path.parent)
    if known is None or not known.options:
        remember(system.preprocessing, path.parent)
    return path


main = command(HELP, tune_command, Options, rest=True)
