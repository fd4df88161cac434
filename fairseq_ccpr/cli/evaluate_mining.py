"""`evaluate_mining.py`: how well translations are found among sentences many of which have none."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from fairseq_ccpr.cli.command import (
    HelpFormatter,
    add_evaluation_options,
    check_folder,
    markdown_table,
    named,
    own_arguments,
    run,
)
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.plots import draw_f1
from fairseq_ccpr.mining.benchmark import (
    QUESTIONS,
    MiningBenchmarkSettings,
    PairSample,
    Result,
    evaluate_pairs,
    evaluate_questions,
)
from fairseq_ccpr.mining.labelled import LabelledText
from fairseq_ccpr.mining.questions import read_questions
from fairseq_ccpr.mining.report import (
    ablation_table,
    curve_table,
    curves,
    main_table,
    tuning_table,
)
from fairseq_ccpr.models.pretrained.sentence_encoders import (
    E5,
    MUSE,
    SentenceEncoder,
    load_sentence_encoder,
)
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.version import __version__

HELP = f"""\
F1 of sentence retrieval: sources and as many targets, of which a share has no partner on the other side. RFR (fragments)
and the margin-ratio baseline (whole sentences) have the same vectors, and each is tuned on --tuning-size other sentences.

  evaluate_mining.py --pairs office.tsv bible.tsv --encoder {MUSE} {E5} --ablations --tuning-sets 5
  evaluate_mining.py --pairs office.tsv --encoder {MUSE} --shares 0 .1 .25 .5 .75 .9 .97 --plot curve.png

Of each TSV it takes --size pairs, more for the sentences without a partner (half as many for a share of .5), and 1.5 times
--tuning-size for each tuning set; pairs with the same words as an earlier one are left out. p is McNemar's test on which
sources are answered rightly, "none" included.

--questions and --paragraphs ask for the paragraph that answers a question, with the settings tuned on the first of
--pairs. A paragraph is a line of id, tab, text; a question one of the paragraph's id, tab, text.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="evaluate_mining.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    default = MiningBenchmarkSettings
    add = parser.add_argument
    add("--pairs", required=True, nargs="+", metavar="[NAME=]TSV", help="sets of sentence pairs, plain, .gz or .xz")
    add(
        "--encoder", required=True, nargs="+", metavar="[NAME=]ENCODER",
        help=f"{MUSE}, {E5}, encoder directories, or folders of vectors; see mine_bitext.py",
    )  # fmt: skip
    add("--size", type=int, default=default.size, metavar="N", help="sentences on either side of a test")
    add("--non-pairing", type=float, default=default.non_pairing, metavar="SHARE", help="of them without a partner")
    add("--shares", type=float, nargs="+", default=[], metavar="SHARE", help="a curve: tests with these shares as well")
    add(
        "--tuning-size", type=int, default=default.tuning_size, metavar="N", help="sentences that settings are tuned on"
    )
    add("--tuning-sets", type=int, default=default.tuning_sets, metavar="N", help="how many times, on others each time")
    add("--ablations", action="store_true", help="RFR without the sentence half, and without the entropy filter, too")
    add("--questions", type=Path, metavar="TSV", help="questions, for --paragraphs")
    add("--paragraphs", type=Path, metavar="TSV", help="paragraphs that answer --questions")
    add("--seed", type=int, default=default.seed, metavar="N", help="of the draw of sentences")
    add("--bf16", action="store_true", help="run Transformers in bfloat16, faster where the processor has it")
    add("--plot", type=Path, metavar="PNG", help="where the curve of --shares goes")
    add_evaluation_options(parser)
    return parser


def evaluate(options: argparse.Namespace) -> int:
    """Draw, encode, tune, test, print."""
    settings = MiningBenchmarkSettings(
        options.size, options.non_pairing, tuple(options.shares), options.tuning_size, options.tuning_sets,
        options.ablations, options.seed,
    )  # fmt: skip
    check_folder("--json", options.json)
    check_folder("--plot", options.plot)
    if options.plot and not options.shares:
        raise ConfigurationError("--plot draws a curve over --shares: give some, such as 0 .25 .5 .75 .9")
    if (options.questions is None) != (options.paragraphs is None):
        raise ConfigurationError("--questions and --paragraphs belong together: give both or neither")
    questions = read_questions(options.questions, options.paragraphs) if options.questions else None
    files = {name: Path(path) for name, path in named(options.pairs, "sets").items()}
    samples = {name: PairSample.draw(path, settings) for name, path in files.items()}
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    words = named(options.encoder, "encoders")
    encoders = {name: load_sentence_encoder(word, device, options.bf16) for name, word in words.items()}
    results = list(_evaluate_all(samples, encoders, questions, options.quiet))
    asked = {"questions": options.questions, "paragraphs": options.paragraphs} if options.questions else {}
    signature = _signature(
        settings, {**{f"set {name}": path for name, path in files.items()}, **asked}, encoders, options.bf16
    )
    _print(results, settings, questions is not None)
    print(signature)
    if options.plot:
        draw_f1(curves(results), options.plot, f"{settings.size:,} sentences on either side")
    if options.json:
        done = {"signature": signature, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    return 0


def _evaluate_all(
    samples: dict[str, PairSample], encoders: dict[str, SentenceEncoder], questions: LabelledText | None, quiet: bool
) -> Iterator[Result]:
    for encoder_name, encoder in encoders.items():
        for name, sample in samples.items():
            yield from evaluate_pairs(name, sample, encoder_name, encoder, quiet)
        if questions is not None:
            yield from evaluate_questions(questions, next(iter(samples.values())), encoder_name, encoder, quiet)


def _signature(
    settings: MiningBenchmarkSettings, files: dict[str, Path], encoders: dict[str, SentenceEncoder], bf16: bool
) -> str:
    """All that decides the numbers."""
    parts = {
        **{name: fingerprint.short(fingerprint.of_file(path)) for name, path in files.items()},
        "size": settings.size,
        "non-pairing": ",".join(f"{share:g}" for share in (settings.non_pairing, *settings.shares)),
        "bf16": "yes" if bf16 else "no",
        "tuning": f"{settings.tuning_sets}x{settings.tuning_size}",
        "seed": settings.seed,
        **{f"encoder {name}": fingerprint.short(encoder.fingerprint) for name, encoder in encoders.items()},
        "v": __version__,
    }
    return "|".join(f"{name}:{value}" for name, value in parts.items())


def _print(results: list[Result], settings: MiningBenchmarkSettings, asked: bool) -> None:
    pairs = [result for result in results if result.set != QUESTIONS]
    share = settings.non_pairing
    print(f"{settings.size:,} sentences on either side, {share:.0%} of them non-pairing; per cent\n")
    print(markdown_table(main_table(pairs, share)) + "\n")
    if settings.ablations:
        print("F1 of what RFR is made of\n")
        print(markdown_table(ablation_table(pairs, share)) + "\n")
    if settings.tuning_sets > 1:
        print(f"F1 over {settings.tuning_sets} tuning sets, mean and standard deviation\n")
        print(markdown_table(tuning_table(pairs, share)) + "\n")
    if settings.shares:
        print("F1 by the share of non-pairing sentences\n")
        print(markdown_table(curve_table(pairs)) + "\n")
    if asked:
        print("paragraphs that answer questions\n")
        print(markdown_table(main_table([result for result in results if result.set == QUESTIONS], 0.0)) + "\n")


def main() -> None:
    """Parse, evaluate, print."""
    options = make_parser().parse_args(own_arguments())
    run("evaluate_mining.py", lambda: evaluate(options))


if __name__ == "__main__":
    main()
