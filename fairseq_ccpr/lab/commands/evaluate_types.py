"""`fairseq-ccpr evaluate types`: how often a phrase of a dictionary finds its translation among the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fairseq_ccpr.cli.command import check_folder, command, markdown_table, named, write_results
from fairseq_ccpr.common_options import bf16_option, cpu_option, json_option, plot_option, quiet_option
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.lab.accuracy.phrase_systems import MUSE
from fairseq_ccpr.lab.accuracy.plots import draw_types
from fairseq_ccpr.lab.accuracy.type_accuracy import accuracy_rows, evaluate_types
from fairseq_ccpr.lab.accuracy.type_systems import ORTHOGONAL, TypeSystem, load_type_system
from fairseq_ccpr.lab.xpr.lexicon_store import Lexicon
from fairseq_ccpr.settings import option, signature
from fairseq_ccpr.storage.fingerprint import of_strings, short

HELP = f"""\
acc@1 of phrases of a dictionary, in both directions: the fraction whose nearest phrase of the other language is a
translation. Any of several translations counts; ties count as errors.

  fairseq-ccpr evaluate types --data de-en=lexicon/de-en/test --sentences 0 1 4 32 \\
    --encoder raw=encoder map={ORTHOGONAL}encoder {MUSE} xpr=xpr/phrase-encoder/xpr.pt --train lexicon/de-en/train

--encoder accepts any number of systems; the kind of each decides what a phrase's vector is:

  CKPT            fairseq-train --task phrase_lexicon (XPR): the mean over sentences of its states, projected; or
                  --task phrase_contrast (CCPR): the mean of its vectors
  DIR             directory of fairseq-ccpr convert: the mean of its states, without training
  {ORTHOGONAL}DIR  the same, source vectors turned by an orthogonal matrix learnt from the pairs of --train
  {MUSE}            multilingual universal sentence encoder: of the phrase (--sentences 0), or the mean of its sentences

The setting says what a system was trained on: unsupervised, supervised (this language pair), zero-shot (another one),
multilingual (this one and others); other, where it learnt from something else.
"""


@dataclass
class Options:
    """The command's options."""

    data: list[str] = option(help="parts of fairseq-ccpr lexicon, such as test", nargs="+", metavar="[NAME=]DIR")
    encoder: list[str] = option(help=f"CKPT, DIR, {ORTHOGONAL}DIR or {MUSE}", nargs="+", metavar="[NAME=]SYSTEM")
    train: list[Path] = option([], f"parts that {ORTHOGONAL}DIR learns from", nargs="+", metavar="DIR")
    sentences: list[int] = option(
        [32], "example sentences of a phrase, at most; 0 is the phrase alone", nargs="+", metavar="M",
        within="[0, inf)", needs="a number from 0, such as 0 1 4 32,",
    )  # fmt: skip
    layers: Optional[list[int]] = option(
        None, "layers of Transformers (the last, or that of the checkpoint)", nargs="+", metavar="L"
    )
    plot: Optional[Path] = plot_option("where a picture goes, as PNG: acc@1 by sentences and by layers")
    bf16: bool = bf16_option()
    json: Optional[Path] = json_option()
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


def evaluate(options: Options) -> int:
    """Load, ask, print."""
    counts = sorted(set(options.sentences))
    check_folder("--json", options.json)
    check_folder("--plot", options.plot)
    data = {name: Lexicon(word) for name, word in named(options.data, "lexicons").items()}
    train = [Lexicon(word) for word in options.train]
    layers = sorted(set(options.layers)) if options.layers else None
    device = choose_device(options.cpu)
    systems = {
        name: load_type_system(word, layers, train, device, options.bf16)
        for name, word in named(options.encoder, "systems").items()
    }
    results = evaluate_types(systems, data, counts, not options.quiet)
    line = _signature(options, data, systems)
    print("acc@1, per cent\n")
    print(markdown_table(accuracy_rows(results)) + "\n")
    for name, lexicon in data.items():
        phrases = " and ".join(f"{count:,}" for count in lexicon.manifest.phrases)
        print(f"{name}: {lexicon.manifest.pairs:,} pairs of {phrases} phrases")
    print(line)
    if options.json:
        done = {"results": [one.as_json() for one in results], "signature": line}
        write_results(options.json, done)
    if options.plot:
        draw_types(results, options.plot)
    return 0


def _signature(options: Options, data: dict[str, Lexicon], systems: dict[str, TypeSystem]) -> str:
    """Name all that decides the numbers."""
    return signature({
        **{f"data {name}": short(_digest(lexicon)) for name, lexicon in data.items()},
        "bf16": "yes" if options.bf16 else "no",
        **{f"encoder {name}": short(system.fingerprint) for name, system in systems.items()},
    })  # fmt: skip


def _digest(lexicon: Lexicon) -> str:
    """Digest all files of a lexicon."""
    return of_strings(file["sha256"] for _, file in sorted(lexicon.manifest.files.items()))


main = command(HELP, evaluate, Options)
