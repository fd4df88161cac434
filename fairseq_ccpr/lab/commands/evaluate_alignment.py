"""`fairseq-ccpr evaluate alignment`: alignment error rate of the aligners on a gold set."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import command, markdown_table
from fairseq_ccpr.common_options import count_option, quiet_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.alignment_error import measure, read_gold
from fairseq_ccpr.phrases.aligners import ALIGNERS, ENCODER
from fairseq_ccpr.phrases.alignment import Aligner, AlignerOptions, SentencePair
from fairseq_ccpr.phrases.pair_build import ExtractionSettings, usable_pairs
from fairseq_ccpr.phrases.statistical_aligners import SYMMETRIZATIONS
from fairseq_ccpr.settings import option
from fairseq_ccpr.text.pairs import TextPairs, tell_skipped
from fairseq_ccpr.text.words import word_spans

HELP = """\
Alignment error rate (AER), precision and recall of aligners on sentences that were aligned by hand.

  fairseq-ccpr evaluate alignment gold.text gold.links --train pairs.tsv --aligners eflomal fast-align
  fairseq-ccpr evaluate alignment gold.text gold.links --aligners encoder --encoder encoders/mine --encoder-layers 7 8 9

GOLD_TEXT has one sentence pair per line, 'source ||| target', tokenised; GOLD_LINKS their links, counted from 1: 1-2 is
a sure link, 1p2 a possible one. The aligners are trained on --train and on the text of the gold sentences; encoder is not
trained.
"""


@dataclass
class Options:
    """The command's options."""

    text: Path = option(help="sentence pairs", positional=True, metavar="GOLD_TEXT")
    links: Path = option(help="links, line by line", positional=True, metavar="GOLD_LINKS")
    train: Optional[Path] = option(None, "sentence pairs to learn from", metavar="TSV")
    train_count: Optional[int] = count_option(None, "only the first N of them (all)")
    swap: bool = option(False, "--train has the gold set's target language first")
    aligners: list[str] = option(
        [name for name in ALIGNERS if name != ENCODER], f"any of {', '.join(ALIGNERS)}",
        choices=tuple(ALIGNERS), nargs="+", metavar="NAME",
    )  # fmt: skip
    symmetrizations: list[str] = option(
        [ExtractionSettings.symmetrization], f"any of {', '.join(SYMMETRIZATIONS)}",
        choices=tuple(SYMMETRIZATIONS), nargs="+", metavar="NAME",
    )  # fmt: skip
    encoder: Optional[Path] = option(None, "of the aligner encoder, made by fairseq-ccpr convert", metavar="DIR")
    encoder_layers: list[int] = option([], "layers to compare (the one it takes)", nargs="+", metavar="N")
    quiet: bool = quiet_option()


def evaluate(options: Options) -> int:
    """Train, align, print."""
    if ENCODER not in options.aligners and (options.encoder or options.encoder_layers):
        raise ConfigurationError("--encoder and --encoder-layers need --aligners encoder: add it, or leave them out")
    gold = read_gold(options.text, options.links)
    training = read_training(options)
    rows = [["aligner", "symmetrisation", "AER", "precision", "recall", "seconds of training"]]
    for name, aligner in make_aligners(options):
        start = time.perf_counter()
        aligner.train([*training, *(pair.pair for pair in gold)], not options.quiet)
        seconds = time.perf_counter() - start
        ways = options.symmetrizations if aligner.directed else [aligner.symmetrization]
        for aligner.symmetrization in ways:
            counts = measure(aligner, gold)
            numbers = (f"{number:.3f}" for number in (counts.error_rate, counts.precision, counts.recall))
            rows.append([name, aligner.symmetrization, *numbers, f"{seconds:.0f}"])
    print(f"{len(gold):,} gold sentence pairs, {len(training):,} to learn from\n")
    print(markdown_table(rows))
    return 0


def read_training(options: Options) -> list[SentencePair]:
    """Read the sentence pairs that the aligners learn from."""
    if options.train is None:
        if set(options.aligners) != {ENCODER}:
            raise ConfigurationError("give --train, sentence pairs to learn from: only the aligner encoder needs none")
        return []
    max_words = ExtractionSettings.max_words
    skipped = Counter[str]()
    pairs = usable_pairs(TextPairs(pairs=options.train), word_spans, max_words, skipped)
    training = list(islice(pairs, options.train_count))
    tell_skipped(f"--train {options.train}", skipped)
    if options.swap:
        training = [SentencePair(p.target, p.source, p.target_words, p.source_words) for p in training]
    if not training:
        raise ConfigurationError(
            f"{options.train} has no sentence pair of up to {max_words} words: there is nothing to learn from"
        )
    return training


def make_aligners(options: Options) -> Iterator[tuple[str, Aligner]]:
    """Make the chosen aligners, each with its name in the table."""
    for name in options.aligners:
        layers: list[int | None] = [*options.encoder_layers] if name == ENCODER else []
        for layer in layers or [None]:
            aligner = ALIGNERS[name](AlignerOptions(options.symmetrizations[0], options.encoder, layer))
            yield name if layer is None else f"{name}, layer {layer}", aligner


main = command(HELP, evaluate, Options)
