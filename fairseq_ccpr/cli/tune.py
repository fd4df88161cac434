"""`fairseq-ccpr tune`: choose settings and learn trust on a held-out subset."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import check_folder, command
from fairseq_ccpr.common_options import count_option, data_bin_option
from fairseq_ccpr.datastore.preprocessing import remember, remembered
from fairseq_ccpr.datastore.tuned import trust_path, write_tuned
from fairseq_ccpr.decoding.trust_file import save_trust
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.translation.comparison import BASE
from fairseq_ccpr.evaluation.tuning.other_text import OtherText, other_texts
from fairseq_ccpr.evaluation.tuning.tune import Tuned, tune
from fairseq_ccpr.evaluation.tuning.worth import table
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.files import write_text

LEARNED, FIXED = "learned", "fixed"
FEW = 150  # sentences, of which a point of BLEU may be chance
HELP = """\
Tune retrieval on held-out pairs: settings (--knn-k, --knn-lambda, --knn-temperature for tokens; --phrase-lambda with
--combiner fixed), the votes of retrieved phrases, and trust, a small network that weighs model, tokens and phrases at each
token. The result is stored with the datastore, where every command and fairseq-generate find it:

  fairseq-ccpr tune data-bin --path model.pt --datastore datastores/mine --also other-data-bin
  fairseq-ccpr translate --datastore datastores/mine < in.txt > out.txt

--also names pairs of other domains, a few hundred or more, whose translations should lose nothing. Trust that has seen only
the datastore's domain helps there and harms elsewhere.

One teacher-forced pass over each text scores hundreds of settings by the likelihood of the references. Trust is learned
with the best temperature, for 8 and for 32 neighbours, and starts from a weight of 0.5. A third of the held-out pairs is
then decoded with each candidate and with the model alone. If none beats the model, all weights are set to 0. Trust
in tokens and phrases together takes the number of neighbours that was tuned for the tokens alone, or else 32. Where the
tokens alone are better, the weight of phrases becomes 0. --output FILE writes the options there instead, for $(cat FILE),
and trust to FILE.trust.

For an adapter's keys the grid has both a fixed lambda and lambda*; --knn-confidence or --no-knn-confidence restricts it to
one of them, --knn-k and --knn-temperature to one value. These are not tuned, and are stored as given:
--knn-lambda-star, --knn-min-similarity, --knn-lambda-max, --knn-guard, --phrase-k, --phrase-min-similarity,
--phrase-threshold, --phrase-segmentation, --phrase-queries, --phrase-reach, --retrieval-lambda-max.
"""


@dataclass
class Options:
    """The command's own options."""

    data_bin: str = data_bin_option()
    output: Optional[Path] = option(None, "where the chosen options go (with the datastore)", metavar="FILE")
    subset: str = option("valid", "the held-out pairs", metavar="NAME")
    also: list[str] = option(
        [], "held-out pairs of other domains, which are to lose nothing (subset: valid)", nargs="+",
        metavar="DATA_BIN[:SUBSET]",
    )  # fmt: skip
    combiner: str = option(
        LEARNED, "what decides the weights: learned trust, or fixed, the settings", choices=(LEARNED, FIXED)
    )
    decode: int = count_option(8, "how many settings to decode with (--combiner fixed)")


def tune_command(options: Options, rest: list[str]) -> int:
    """Tune, print what was tried, write what was chosen."""
    check_folder("--output", options.output)
    if any(word.split("=")[0] == "--gen-subset" for word in rest):
        raise ConfigurationError("--gen-subset is for decoding: name the held-out pairs with --subset")
    system = System.of([*rest, "--gen-subset", options.subset, "--untuned"], Path(options.data_bin))
    _check(options, system)
    also = other_texts(options.also, OtherText(Path(options.data_bin), options.subset))
    for text in also:
        text.check(system)
    tuned = tune(system, also, options.combiner == LEARNED, options.decode)
    _print_what_was_tried(tuned, options.subset)
    if tuned.left_out is not None and tuned.helps:
        print("phrases bring nothing here: their weight is 0, and they are not retrieved")
    if not tuned.helps:
        print("nothing is better than the model alone here: the interpolation weights are 0")
    if options.output is not None:
        path, words = options.output, tuned.options
        if tuned.best.ensemble.trust is not None:
            file = Path(f"{options.output}.trust")
            save_trust(tuned.best.ensemble.trust, tuned.description(system.task.parts), file)
            words += f" --trust {shlex.quote(str(file))}"
        write_text(path, words + "\n")
    else:
        path = leave(system, tuned)
    print(f"{path}: {tuned.best.name}")
    return 0


def _check(options: Options, system: System) -> None:
    task = system.cfg.task
    if task.trust is not None:
        raise ConfigurationError(
            f"--trust is {task.trust}, but tuning learns it: leave it out, or give --combiner fixed"
        )
    if options.also and options.combiner == FIXED:
        raise ConfigurationError("--also is for what is learned, and --combiner is fixed: leave one of them out")
    folder = next(iter(system.task.parts.values())).directory if system.task.parts else None
    if options.output is None and folder is not None and not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{folder} cannot be written to: give --output FILE, where the options go instead")


def _print_what_was_tried(tuned: Tuned, subset: str) -> None:
    if tuned.linear:
        print(f"{subset} is small: trust is a linear function of its features")
    print("\n".join(table(tuned.texts)))
    for name, scores in sorted(tuned.scores.items(), key=lambda item: -item[1].bleu):
        print(f"{scores.bleu:7.2f}  {name}")
    print(f"BLEU {tuned.scores[BASE].bleu_signature}, of {tuned.sentences:,} sentences, a third of {subset}")
    if tuned.sentences < FEW:
        print(f"{tuned.sentences:,} sentences are few: differences of a point of BLEU may be chance")
    print(f"retrieval {tuned.best.ensemble.signature()}")
    print(
        f"{len(tuned.token_grid) + len(tuned.phrase_grid):,} settings by likelihood, {len(tuned.scores) - 1} by BLEU, in "
        f"{tuned.seconds:.0f} s: {tuned.seconds / tuned.base_seconds:.1f} times a decoding of {subset} without retrieval"
    )


def leave(system: System, tuned: Tuned) -> Path:
    """Store the settings with the datastore, and the preprocessing if it has none yet."""
    parts, trust = system.task.parts, tuned.best.ensemble.trust
    if trust is not None:
        save_trust(trust, tuned.description(parts), trust_path(parts))
    path = write_tuned(parts, tuned.settings, tuned.best.ensemble.signature(), trust is not None)
    known = remembered(path.parent)
    if known is None or not known.options:
        remember(system.preprocessing, path.parent)
    return path


main = command(HELP, tune_command, Options, rest=True)
