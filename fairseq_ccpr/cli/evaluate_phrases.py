"""`evaluate_phrases.py`: how often a phrase finds its translation among those of much other text."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from fairseq_ccpr.cli import evaluate_phrase_types
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
from fairseq_ccpr.evaluation.accuracy.phrase_accuracy import score_system
from fairseq_ccpr.evaluation.accuracy.phrase_benchmark import PhraseBenchmarkSettings, make_benchmark
from fairseq_ccpr.evaluation.accuracy.phrase_report import (
    PhraseReport,
    accuracy_table,
    report,
    same_string_table,
)
from fairseq_ccpr.evaluation.accuracy.phrase_systems import PhraseSystem, load_system
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import LEARNED
from fairseq_ccpr.models.pretrained.sentence_encoders import MUSE
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.version import __version__

HELP = """\
acc@1 of phrase retrieval: of gold phrases, each in its sentence, how many have their translation, in its sentence, as the
nearest entry of an index. The index holds all gold targets and phrases of --distractors, the same for every system. Of
gold pairs with the same target sentence one is taken, always the same one, and the others are not in the index either: a
sentence encoder gives all phrases of a sentence one vector, and could never tell them apart. --whole-sentences puts all
other phrases of the answers' sentences into the index: then the right words must be found, too, no more and no fewer.

  evaluate_phrases.py --gold gold.tsv.xz --distractors mono.en.txt.xz \\
    --encoder raw=encoders/xlmr muse cpr=cpr/phrase-encoder/ccpr.pt ccpr=ccpr/phrase-encoder/ccpr.pt

--encoder takes any number of systems; what each is decides what its vectors are:

  CKPT   checkpoint of fairseq-train --task phrase_contrast: its phrase vectors (CCPR, CPR)
  DIR    directory of convert_encoder.py: states of the last layer at the phrase's first and last subword, length 1
  muse   multilingual universal sentence encoder: the vector of the phrase's sentence (pip install 'fairseq-ccpr[muse]')

Each cell of the table has two numbers: how often the gold entry itself comes first, and how often an entry with its string
does, in whichever sentence. Ties count against the system; "tied" says how often the gold entry shared the first place.
Under the average of the sets stand its 95% interval and p, the chance of a difference to the first system as large as
this one between equal systems (paired bootstrap).

Phrases of a dictionary, which have no sentence of their own, are another task: see evaluate_phrases.py --task xpr --help.

--same-string 0 4 16 asks whether context tells the same words apart: the index then has, of each gold target, that many
other occurrences in the distractor text, and otherwise only phrases with other strings.

A gold line has seven columns with tabs between them: set, source sentence, target sentence, span of the source phrase
(10-17: in characters, end exclusive), span of the target phrase, source phrase, target phrase.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="evaluate_phrases.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    default = PhraseBenchmarkSettings
    add = parser.add_argument
    add("--task", choices=("ccpr", "xpr"), default="ccpr", help="phrases in their sentences, or of a dictionary")
    add("--gold", required=True, type=Path, metavar="TSV", help="phrase pairs in their sentences, plain, .gz or .xz")
    add(
        "--distractors", required=True, nargs="+", type=Path, metavar="TEXT",
        help="target-language text, a sentence a line; the same sentence counts once, those of gold targets not at all",
    )  # fmt: skip
    add(
        "--encoder",
        required=True,
        nargs="+",
        metavar="[NAME=]SYSTEM",
        help=f"CKPT, DIR or {MUSE}; the first is the baseline",
    )
    add("--sets", nargs="+", metavar="NAME", help="sets of the gold file, a row each (all)")
    add("--per-set", type=int, default=default.per_set, metavar="N", help="queries of a set, at most; always the same")
    add("--multi-word", action="store_true", help="only gold pairs of which one side has several words")
    add(
        "--distractor-phrases", type=int, default=default.distractor_phrases, metavar="N",
        help="phrases of random sentences in the index, at most",
    )  # fmt: skip
    add(
        "--segmentation", default=default.segmentation, metavar="all|ngram:N|learned",
        help="which spans of words of the distractor text are phrases: all, those of N words, or what a phrase encoder finds",
    )  # fmt: skip
    add("--max-words", type=int, default=default.max_words, metavar="N", help="words of such a phrase, at most")
    add("--segmenter", type=Path, metavar="CKPT", help="phrase encoder for learned (the first of --encoder)")
    add(
        "--threshold",
        type=float,
        default=default.threshold,
        metavar="P",
        help="probability above which it finds a phrase",
    )
    add(
        "--same-string", nargs="+", type=int, default=default.same_string, metavar="C",
        help="a second table: acc@1 by entry with C other occurrences of the string, such as 0 4 16",
    )  # fmt: skip
    add(
        "--whole-sentences", action="store_true",
        help="put all other phrases of the answers' sentences into the index, as a datastore of them would have it",
    )  # fmt: skip
    add("--samples", type=int, default=1000, metavar="N", help="bootstrap samples")
    add("--bf16", action="store_true", help="run the encoders in bfloat16, faster where the processor has it")
    add_evaluation_options(parser)
    return parser


def evaluate(options: argparse.Namespace) -> int:
    """Load, ask, print."""
    if options.samples < 1:
        raise ConfigurationError(f"--samples is {options.samples}: give at least 1")
    settings = PhraseBenchmarkSettings(
        options.gold, options.distractors, options.sets, options.per_set, options.multi_word, options.distractor_phrases,
        options.segmentation, options.threshold, options.max_words, tuple(options.same_string), options.whole_sentences,
    )  # fmt: skip
    settings.check()
    check_folder("--json", options.json)
    words = named(options.encoder, "systems")
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    segmenter = _load_segmenter(options, list(words.values()), device)
    systems = {name: load_system(word, device, options.bf16) for name, word in words.items()}
    benchmark = make_benchmark(settings, list(systems.values()), segmenter, options.quiet)
    scores = {name: score_system(system, benchmark, name, options.quiet) for name, system in systems.items()}
    done = report(benchmark, scores, settings.same_string, options.samples)
    signature = _signature(options, settings, done, segmenter, systems)
    _print(done, signature)
    if options.json:
        options.json.write_text(json.dumps(asdict(done) | {"signature": signature}, indent=1) + "\n", encoding="utf-8")
    return 0


def _load_segmenter(options: argparse.Namespace, systems: list[str], device: torch.device) -> PhraseEncoder | None:
    """The phrase encoder that finds phrases, where one does."""
    if options.segmentation != LEARNED:
        if options.segmenter:
            raise ConfigurationError(
                f"--segmenter has no work with --segmentation {options.segmentation}: give learned"
            )
        return None
    path = options.segmenter or next((Path(system) for system in systems if Path(system).is_file()), None)
    if path is None:
        raise ConfigurationError("--segmentation learned needs a phrase encoder: give --segmenter CKPT")
    return PhraseEncoder.load(path).to(device)


def _signature(
    options: argparse.Namespace,
    settings: PhraseBenchmarkSettings,
    done: PhraseReport,
    segmenter: PhraseEncoder | None,
    systems: dict[str, PhraseSystem],
) -> str:
    """All that decides the numbers."""
    kind = settings.segmentation + (f":{fingerprint.short(segmenter.fingerprint())}" if segmenter else "")
    parts = {
        "gold": fingerprint.short(fingerprint.of_files([settings.gold])),
        "sets": ",".join(done.queries),
        "multi-word": "yes" if settings.multi_word else "no",
        "queries": sum(done.queries.values()),
        "text": fingerprint.short(fingerprint.of_files(settings.distractors)),
        "segmentation": kind + (f">{settings.threshold}" if segmenter else ""),
        "max-words": settings.max_words,
        "whole-sentences": "yes" if settings.whole_sentences else "no",
        "entries": done.entries,
        "bf16": "yes" if options.bf16 else "no",
        **{f"encoder {name}": fingerprint.short(system.fingerprint) for name, system in systems.items()},
        "v": __version__,
    }
    return "|".join(f"{name}:{value}" for name, value in parts.items())


def _print(done: PhraseReport, signature: str) -> None:
    print("acc@1 by entry / by string, per cent\n")
    print(markdown_table(accuracy_table(done)) + "\n")
    if done.same_string:
        print("acc@1 by entry, average of the sets, with other occurrences of the same string in the index\n")
        print(markdown_table(same_string_table(done)) + "\n")
    distractors = done.entries - done.gold_targets
    print(f"{done.entries:,} index entries: {done.gold_targets:,} gold targets, {distractors:,} phrases of other text")
    if done.left_out:
        print(
            f"{done.left_out:,} gold pairs were left out: a system's subwords, or its longest text, do not allow them"
        )
    print(signature)


def main() -> None:
    """Parse, evaluate, print."""
    words = own_arguments()
    task = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    task.add_argument("--task")
    of_types = task.parse_known_args(words)[0].task == "xpr"
    options = (evaluate_phrase_types.make_parser() if of_types else make_parser()).parse_args(words)
    run("evaluate_phrases.py", lambda: (evaluate_phrase_types.evaluate if of_types else evaluate)(options))


if __name__ == "__main__":
    main()
