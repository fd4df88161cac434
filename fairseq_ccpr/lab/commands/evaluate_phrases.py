"""`fairseq-ccpr evaluate phrases`: how often a phrase finds its translation among those of much other text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import torch

from fairseq_ccpr.cli.command import check_folder, command, markdown_table, named, write_results
from fairseq_ccpr.common_options import bf16_option, count_option, cpu_option, json_option, quiet_option
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extras import installing
from fairseq_ccpr.lab.accuracy.phrase_accuracy import score_system
from fairseq_ccpr.lab.accuracy.phrase_benchmark import PhraseBenchmarkSettings, make_benchmark
from fairseq_ccpr.lab.accuracy.phrase_report import (
    PhraseReport,
    accuracy_table,
    length_table,
    report,
    same_string_table,
)
from fairseq_ccpr.lab.accuracy.phrase_systems import PhraseSystem, load_system
from fairseq_ccpr.lab.sentence_encoders import MUSE
from fairseq_ccpr.models.phrase_encoder import PhraseEncoder
from fairseq_ccpr.models.phrase_finder import LEARNED
from fairseq_ccpr.settings import option, signature
from fairseq_ccpr.storage.fingerprint import of_files, short

HELP = f"""\
acc@1 of phrase retrieval: the fraction of gold phrases whose translation, in its sentence, is the nearest entry of an index.
The index holds all gold targets and phrases of --distractors, the same for every system. Each target sentence contributes
one gold pair, always the same one: a sentence encoder gives all phrases of a sentence one vector, and could not tell them
apart. --whole-sentences adds all other phrases of the answers' sentences to the index, so that exactly the right words
must be found.

  fairseq-ccpr evaluate phrases --gold gold.tsv.xz --distractors mono.en.txt.xz \\
    --encoder raw=encoders/xlmr muse cpr=cpr/phrase-encoder/ccpr.pt ccpr=ccpr/phrase-encoder/ccpr.pt

--encoder accepts any number of systems; the kind of each decides what its vectors are:

  CKPT   checkpoint of fairseq-train --task phrase_contrast: its phrase vectors (CCPR, CPR)
  DIR    directory of fairseq-ccpr convert: states of the last layer at the phrase's first and last subword, length 1
  muse   multilingual universal sentence encoder: the vector of the phrase's sentence ({installing("muse")})

Each cell of the table has two numbers: how often the gold entry itself comes first, and how often any entry with its string
does. Ties count as errors; "tied" shows how often the gold entry shared the first place. Below the average of the sets are
its 95% interval and p, the probability of a difference to the first system as large between equal systems (paired
bootstrap). A second table has the same by the length of the phrases; its last row is all those of several words.

For phrases of a dictionary, which have no sentence of their own, see fairseq-ccpr evaluate types.

--same-string 0 4 16 tests whether context tells the same words apart: the index then has that many other occurrences of each
gold target in the distractor text, and otherwise only phrases with other strings.

A gold line has seven columns with tabs between them: set, source sentence, target sentence, span of the source phrase
(10-17: in characters, end exclusive), span of the target phrase, source phrase, target phrase.
"""


@dataclass
class Options:
    """The command's options besides the index options."""

    encoder: list[str] = option(
        help=f"CKPT, DIR or {MUSE}; the first is the baseline", nargs="+", metavar="[NAME=]SYSTEM"
    )
    segmenter: Optional[Path] = option(None, "phrase encoder for learned (the first of --encoder)", metavar="CKPT")
    samples: int = count_option(1000, "bootstrap samples")
    bf16: bool = bf16_option()
    json: Optional[Path] = json_option()
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


def evaluate(settings: PhraseBenchmarkSettings, options: Options) -> int:
    """Load systems, score them, print."""
    settings.check()
    check_folder("--json", options.json)
    words = named(options.encoder, "systems")
    device = choose_device(options.cpu)
    segmenter = _load_segmenter(options.segmenter, settings.segmentation, list(words.values()), device)
    systems = {name: load_system(word, device, options.bf16) for name, word in words.items()}
    benchmark = make_benchmark(settings, list(systems.values()), segmenter, options.quiet)
    scores = {name: score_system(system, benchmark, name, options.quiet) for name, system in systems.items()}
    done = report(benchmark, scores, settings.same_string, options.samples)
    line = _signature(settings, done, segmenter, systems, options.bf16)
    _print(done, line)
    if options.json:
        write_results(options.json, asdict(done) | {"signature": line})
    return 0


def _load_segmenter(
    path: Path | None, segmentation: str, systems: list[str], device: torch.device
) -> PhraseEncoder | None:
    """Load the phrase encoder that finds phrases, where one does: the one given, or the first of the systems."""
    if segmentation != LEARNED:
        if path:
            raise ConfigurationError(f"--segmenter is not used with --segmentation {segmentation}: give learned")
        return None
    path = path or next((Path(system) for system in systems if Path(system).is_file()), None)
    if path is None:
        raise ConfigurationError("--segmentation learned needs a phrase encoder: give --segmenter CKPT")
    return PhraseEncoder.load(path).to(device)


def _signature(
    settings: PhraseBenchmarkSettings,
    done: PhraseReport,
    segmenter: PhraseEncoder | None,
    systems: dict[str, PhraseSystem],
    bf16: bool,
) -> str:
    """Name all that decides the numbers."""
    kind = settings.segmentation
    kind += f":{short(segmenter.fingerprint())}>{settings.threshold}" if segmenter else ""
    return signature({
        "gold": short(of_files([settings.gold])), "sets": ",".join(done.queries),
        "multi-word": "yes" if settings.multi_word else "no", "queries": sum(done.queries.values()),
        "text": short(of_files(settings.distractors)), "segmentation": kind, "max-words": settings.max_words,
        "whole-sentences": "yes" if settings.whole_sentences else "no", "entries": done.entries,
        "bf16": "yes" if bf16 else "no", **{f"encoder {name}": short(one.fingerprint) for name, one in systems.items()},
    })  # fmt: skip


def _print(done: PhraseReport, signature: str) -> None:
    print("acc@1 by entry / by string, per cent\n")
    print(markdown_table(accuracy_table(done)) + "\n")
    print("the same by the words of the phrase or its translation, whichever has more, all sets together\n")
    print(markdown_table(length_table(done)) + "\n")
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


main = command(HELP, evaluate, PhraseBenchmarkSettings, Options)
