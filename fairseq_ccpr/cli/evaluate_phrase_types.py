"""`evaluate_phrases.py --task xpr`: how often a phrase of a dictionary finds its translation among the others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from fairseq_ccpr.cli.command import HelpFormatter, add_evaluation_options, check_folder, markdown_table, named
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.evaluation.accuracy.phrase_systems import MUSE
from fairseq_ccpr.evaluation.accuracy.type_accuracy import accuracy_rows, evaluate_types
from fairseq_ccpr.evaluation.accuracy.type_systems import ORTHOGONAL, TypeSystem, load_type_system
from fairseq_ccpr.evaluation.plots import draw_types
from fairseq_ccpr.phrases.lexicon_store import Lexicon
from fairseq_ccpr.storage.fingerprint import of_strings, short
from fairseq_ccpr.version import __version__

HELP = f"""\
acc@1 of phrases of a dictionary: how many have a translation as the nearest of all phrases of the other language, both ways.
Any of several translations counts, and ties count against the system.

  evaluate_phrases.py --task xpr --data de-en=lexicon/de-en/test --sentences 0 1 4 32 \\
    --encoder raw=encoder map={ORTHOGONAL}encoder {MUSE} xpr=xpr/phrase-encoder/xpr.pt --train lexicon/de-en/train

--encoder takes any number of systems; what each is decides what a phrase's vector is:

  CKPT            fairseq-train --task phrase_lexicon (XPR): the mean over sentences of its states, projected; or
                  --task phrase_contrast (CCPR): the mean of its vectors
  DIR             directory of convert_encoder.py: the mean of its states, without training
  {ORTHOGONAL}DIR  the same, source vectors turned by an orthogonal matrix learnt from the pairs of --train
  {MUSE}            multilingual universal sentence encoder: of the phrase (--sentences 0), or the mean of its sentences

The setting says what a system was trained on: unsupervised, supervised (this language pair), zero-shot (another one),
multilingual (this one and others); other, where it learnt from something else.
"""


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="evaluate_phrases.py --task xpr", description=HELP, formatter_class=HelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--task", choices=("ccpr", "xpr"), default="xpr", help="phrases in their sentences, or of a dictionary")
    add(
        "--data", required=True, nargs="+", metavar="[NAME=]DIR", help="parts of build_lexicon_dataset.py, such as test"
    )
    add("--encoder", required=True, nargs="+", metavar="[NAME=]SYSTEM", help=f"CKPT, DIR, {ORTHOGONAL}DIR or {MUSE}")
    add("--train", nargs="+", default=[], metavar="DIR", help=f"parts that {ORTHOGONAL}DIR learns from")
    add(
        "--sentences", nargs="+", type=int, default=[32], metavar="M",
        help="example sentences of a phrase, at most; 0 is the phrase alone",
    )  # fmt: skip
    add(
        "--layers",
        nargs="+",
        type=int,
        metavar="L",
        help="layers of Transformers (the last, or that of the checkpoint)",
    )
    add("--plot", type=Path, metavar="PNG", help="where a picture goes: acc@1 by sentences and by layers")
    add("--bf16", action="store_true", help="run Transformers in bfloat16, faster where the processor has it")
    add_evaluation_options(parser)
    return parser


def evaluate(options: argparse.Namespace) -> int:
    """Load, ask, print."""
    counts = sorted(set(options.sentences))
    if counts[0] < 0:
        raise ConfigurationError(f"--sentences has {counts[0]}: give numbers from 0, such as 0 1 4 32")
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        check_folder(option, path)
    data = {name: Lexicon(word) for name, word in named(options.data, "lexicons").items()}
    train = [Lexicon(word) for word in options.train]
    layers = sorted(set(options.layers)) if options.layers else None
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    systems = {
        name: load_type_system(word, layers, train, device, options.bf16)
        for name, word in named(options.encoder, "systems").items()
    }
    results = evaluate_types(systems, data, counts, not options.quiet)
    signature = _signature(options, data, systems)
    print("acc@1, per cent\n")
    print(markdown_table(accuracy_rows(results)) + "\n")
    for name, lexicon in data.items():
        phrases = " and ".join(f"{count:,}" for count in lexicon.manifest.phrases)
        print(f"{name}: {lexicon.manifest.pairs:,} pairs of {phrases} phrases")
    print(signature)
    if options.json:
        found = {"results": [one.as_json() for one in results], "signature": signature}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw_types(results, options.plot)
    return 0


def _signature(options: argparse.Namespace, data: dict[str, Lexicon], systems: dict[str, TypeSystem]) -> str:
    """All that decides the numbers."""
    parts = {
        **{f"data {name}": short(_digest(lexicon)) for name, lexicon in data.items()},
        "bf16": "yes" if options.bf16 else "no",
        **{f"encoder {name}": short(system.fingerprint) for name, system in systems.items()},
        "v": __version__,
    }
    return "|".join(f"{name}:{value}" for name, value in parts.items())


def _digest(lexicon: Lexicon) -> str:
    """Of all files of a lexicon."""
    return of_strings(file["sha256"] for _, file in sorted(lexicon.manifest.files.items()))
