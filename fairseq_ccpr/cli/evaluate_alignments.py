"""`evaluate_alignments.py`: alignment error rate of the aligners on a gold set."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, markdown_table, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.phrases.aligners import ALIGNERS, ENCODER
from fairseq_ccpr.phrases.alignment import Aligner, AlignerOptions, SentencePair
from fairseq_ccpr.phrases.alignment_error import measure, read_gold
from fairseq_ccpr.phrases.pair_build import ExtractionSettings, usable_pairs
from fairseq_ccpr.phrases.statistical_aligners import SYMMETRIZATIONS
from fairseq_ccpr.text.pairs import TextPairs
from fairseq_ccpr.text.words import word_spans

HELP = """\
Alignment error rate (AER), precision and recall of aligners against sentences that people have aligned.

  evaluate_alignments.py gold.text gold.links --train pairs.tsv --aligners eflomal fast-align
  evaluate_alignments.py gold.text gold.links --aligners encoder --encoder encoders/mine --encoder-layers 7 8 9

GOLD_TEXT has a sentence pair a line, 'source ||| target', tokenised; GOLD_LINKS their links, counted from 1: 1-2 a sure one,
1p2 a possible one. The aligners learn from --train and from the gold sentences, of which they see the text alone;
encoder learns from nothing.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="evaluate_alignments.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("text", type=Path, metavar="GOLD_TEXT", help="sentence pairs")
    parser.add_argument("links", type=Path, metavar="GOLD_LINKS", help="links, line by line")
    parser.add_argument("--train", type=Path, metavar="TSV", help="sentence pairs to learn from")
    parser.add_argument("--train-count", type=int, metavar="N", help="only the first N of them (all)")
    parser.add_argument("--swap", action="store_true", help="--train has the gold set's target language first")
    learning = [name for name in ALIGNERS if name != ENCODER]
    parser.add_argument(
        "--aligners",
        nargs="+",
        choices=ALIGNERS,
        default=learning,
        metavar="NAME",
        help=f"any of {', '.join(ALIGNERS)}",
    )
    parser.add_argument(
        "--symmetrizations", nargs="+", choices=SYMMETRIZATIONS, default=[ExtractionSettings.symmetrization], metavar="NAME",
        help=f"any of {', '.join(SYMMETRIZATIONS)}",
    )  # fmt: skip
    parser.add_argument(
        "--encoder", type=Path, metavar="DIR", help="of the aligner encoder, made by convert_encoder.py"
    )
    parser.add_argument(
        "--encoder-layers",
        nargs="+",
        type=int,
        default=[None],
        metavar="N",
        help="layers to compare (the one it takes)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def evaluate(options: argparse.Namespace) -> int:
    """Train, align, print."""
    if ENCODER not in options.aligners and (options.encoder or options.encoder_layers != [None]):
        raise ConfigurationError("--encoder and --encoder-layers need --aligners encoder: add it, or leave them out")
    if options.train_count is not None and options.train_count < 1:
        raise ConfigurationError(f"--train-count is {options.train_count}: give at least 1, or leave it out")
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


def read_training(options: argparse.Namespace) -> list[SentencePair]:
    """The sentence pairs that the aligners learn from."""
    if options.train is None:
        if set(options.aligners) != {ENCODER}:
            raise ConfigurationError("give --train, sentence pairs to learn from: only the aligner encoder needs none")
        return []
    max_words = ExtractionSettings.max_words
    pairs = usable_pairs(TextPairs(pairs=options.train), word_spans, max_words, Counter())
    training = list(islice(pairs, options.train_count))
    if options.swap:
        training = [SentencePair(p.target, p.source, p.target_words, p.source_words) for p in training]
    if not training:
        raise ConfigurationError(
            f"{options.train} has no sentence pair of up to {max_words} words: there is nothing to learn from"
        )
    return training


def make_aligners(options: argparse.Namespace) -> Iterator[tuple[str, Aligner]]:
    """The aligners asked for, each with its name in the table."""
    for name in options.aligners:
        for layer in options.encoder_layers if name == ENCODER else [None]:
            aligner = ALIGNERS[name](AlignerOptions(options.symmetrizations[0], options.encoder, layer))
            yield name if layer is None else f"{name}, layer {layer}", aligner


def main() -> None:
    """Parse, evaluate, print."""
    options = make_parser().parse_args()
    run("evaluate_alignments.py", lambda: evaluate(options))


if __name__ == "__main__":
    main()
