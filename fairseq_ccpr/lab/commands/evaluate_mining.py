"""`fairseq-ccpr evaluate mining`: how well translations are found among sentences many of which have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import check_folder, command, markdown_table, named, write_results
from fairseq_ccpr.common_options import bf16_option, cpu_option, json_option, plot_option, quiet_option
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.plots import draw_f1
from fairseq_ccpr.lab.mining.benchmark import QUESTIONS, MiningResult, evaluate_pairs, evaluate_questions
from fairseq_ccpr.lab.mining.benchmark_settings import AT_ONE, BASELINE, MiningBenchmarkSettings
from fairseq_ccpr.lab.mining.labelled import LabelledText, read_questions
from fairseq_ccpr.lab.mining.pair_sample import PairSample, draw_samples
from fairseq_ccpr.lab.mining.remembered import RememberedVectors
from fairseq_ccpr.lab.mining.report import (
    Comparison,
    ablation_table,
    comparison_table,
    comparisons,
    curve_table,
    curves,
    main_table,
    spread_table,
)
from fairseq_ccpr.lab.sentence_encoders import E5, MUSE, SentenceEncoder, load_sentence_encoder
from fairseq_ccpr.settings import option, signature
from fairseq_ccpr.storage import fingerprint

HELP = f"""\
Measure F1 of sentence retrieval. A fraction of the sources, and of as many targets, has no partner. All methods of
fairseq-ccpr mine use the same vectors. Each is tuned on --tuning-size other sentences with the same fraction, and also sets
its threshold without labels.

  fairseq-ccpr evaluate mining --pairs office.tsv bible.tsv --encoder {MUSE} {E5} --ablations --draws 5 --tuning-sets 5
  fairseq-ccpr evaluate mining --pairs office.tsv --encoder {MUSE} --curve 0 0.1 0.25 0.5 0.75 0.9 0.97 --plot curve.png

It takes --size pairs of each TSV, and more for the sentences without a partner (half as many for a fraction of 0.5); likewise
--tuning-size for each tuning set. Pairs with the same words as an earlier one are left out. p is McNemar's test against
{BASELINE} on which sources are answered correctly, "none" included; with several draws or tuning sets, p is of a paired
bootstrap over sources, also after Holm's correction for the rows of its table. {AT_ONE} is the margin ratio with a threshold
of 1, untuned.

--questions and --paragraphs ask for the paragraph that answers a question, with the settings tuned on the first of
--pairs. A paragraph is a line of id, tab, text; a question one of the paragraph's id, tab, text.
"""


@dataclass
class Options:
    """The command's options besides the test options; see `MiningBenchmarkSettings`."""

    pairs: list[str] = option(help="sets of sentence pairs, plain, .gz or .xz", nargs="+", metavar="[NAME=]TSV")
    encoder: list[str] = option(
        help=f"{MUSE}, {E5}, encoder directories, or folders of vectors; see fairseq-ccpr mine",
        nargs="+", metavar="[NAME=]ENCODER",
    )  # fmt: skip
    questions: Optional[Path] = option(None, "questions, for --paragraphs", metavar="TSV")
    paragraphs: Optional[Path] = option(None, "paragraphs that answer --questions", metavar="TSV")
    plot: Optional[Path] = plot_option("where the plot of --curve goes, as PNG")
    bf16: bool = bf16_option()
    json: Optional[Path] = json_option()
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


def evaluate(settings: MiningBenchmarkSettings, options: Options) -> int:
    """Draw, encode, tune, test, print."""
    check_folder("--json", options.json)
    check_folder("--plot", options.plot)
    if options.plot and not settings.curve:
        raise ConfigurationError("--plot draws the fractions of --curve: give some, such as 0 0.25 0.5 0.75 0.9")
    if (options.questions is None) != (options.paragraphs is None):
        raise ConfigurationError("--questions and --paragraphs belong together: give both or neither")
    questions = None
    files = {name: Path(path) for name, path in named(options.pairs, "sets").items()}
    inputs = {f"set {name}": path for name, path in files.items()}
    if options.questions is not None and options.paragraphs is not None:
        questions = read_questions(options.questions, options.paragraphs)
        inputs |= {"questions": options.questions, "paragraphs": options.paragraphs}
    samples = {name: draw_samples(path, settings) for name, path in files.items()}
    device = choose_device(options.cpu)
    words = named(options.encoder, "encoders")
    encoders = {name: load_sentence_encoder(word, device, options.bf16) for name, word in words.items()}
    results = list(_evaluate_all(samples, encoders, questions, options.quiet))
    line = _signature(settings, inputs, encoders, options.bf16)
    compared = _compare(results, settings)
    _print(results, compared, settings, questions is not None)
    print(line)
    if options.plot:
        draw_f1(curves(results), options.plot, f"{settings.size:,} sentences on either side")
    if options.json:
        done = {
            "signature": line,
            "results": [result.record() for result in results],
            "comparisons": [asdict(one) for one in compared],
        }
        write_results(options.json, done)
    return 0


def _evaluate_all(
    samples: dict[str, list[PairSample]],
    encoders: dict[str, SentenceEncoder],
    questions: LabelledText | None,
    quiet: bool,
) -> Iterator[MiningResult]:
    for encoder_name, encoder in encoders.items():
        for name, draws in samples.items():
            remembered = RememberedVectors(encoder)  # sentences common to several draws are encoded once
            for draw, sample in enumerate(draws):
                yield from evaluate_pairs(name, sample, draw, encoder_name, remembered, quiet)
        if questions is not None:
            yield from evaluate_questions(questions, next(iter(samples.values()))[0], encoder_name, encoder, quiet)


def _compare(results: list[MiningResult], settings: MiningBenchmarkSettings) -> list[Comparison]:
    """Compare the systems over several draws or tuning sets, with labels and without."""
    if settings.draws * settings.tuning_sets == 1:
        return []
    pairs = [result for result in results if result.set != QUESTIONS]
    return [one for labels in (True, False) for one in comparisons(pairs, settings.non_pairing, labels)]


def _signature(
    settings: MiningBenchmarkSettings, files: dict[str, Path], encoders: dict[str, SentenceEncoder], bf16: bool
) -> str:
    """Name all that decides the numbers."""
    return signature({
        **{name: fingerprint.short(fingerprint.of_file(path)) for name, path in files.items()},
        "size": settings.size,
        "non-pairing": ",".join(f"{fraction:g}" for fraction in (settings.non_pairing, *settings.curve)),
        "bf16": "yes" if bf16 else "no",
        "tuning": f"{settings.tuning_sets}x{settings.tuning_size}",
        "draws": settings.draws,
        **({"pool": settings.pool} if settings.pool else {}),
        "systems": ",".join(settings.compared),
        "seed": settings.seed,
        **{f"encoder {name}": fingerprint.short(encoder.fingerprint) for name, encoder in encoders.items()},
    })  # fmt: skip


def _print(
    results: list[MiningResult], compared: list[Comparison], settings: MiningBenchmarkSettings, asked: bool
) -> None:
    pairs = [result for result in results if result.set != QUESTIONS]
    fraction = settings.non_pairing
    print(f"{settings.size:,} sentences on either side, {fraction:.0%} of them non-pairing; per cent\n")
    print(markdown_table(main_table(pairs, fraction)) + "\n")
    if settings.ablations:
        print("F1 of what RFR is made of\n")
        print(markdown_table(ablation_table(pairs, fraction)) + "\n")
    if compared:
        times = f"{settings.draws} tests and {settings.tuning_sets} tuning sets of each, mean and standard deviation"
        for labels, word in ((True, "F1"), (False, "F1 without labels")):
            print(f"{word} over {times}\n")
            print(markdown_table(spread_table(pairs, fraction, labels)) + "\n")
            print(
                f"{word} against {BASELINE}, all tests together, with 95% intervals; p by paired bootstrap over sources\n"
            )
            print(markdown_table(comparison_table([one for one in compared if one.labels == labels])) + "\n")
    if settings.curve:
        print("F1 by the fraction of non-pairing sentences\n")
        print(markdown_table(curve_table(pairs)) + "\n")
    if asked:
        print("paragraphs that answer questions\n")
        print(markdown_table(main_table([result for result in results if result.set == QUESTIONS], 0.0)) + "\n")


main = command(HELP, evaluate, MiningBenchmarkSettings, Options)
