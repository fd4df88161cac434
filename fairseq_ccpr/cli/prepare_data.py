"""`prepare_data.py`: from TSV files of sentence pairs to a DATA_BIN."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from fairseq_ccpr.cli.command import HelpFormatter, run
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extraction.preparation import binarise, train_sentencepiece, write_dictionary

HELP = """\
Make a DATA_BIN from sentence pairs (TSV: source, tab, target; plain or .xz) for a model with SentencePiece subwords.

  prepare_data.py --test test.tsv -s de -t en --spm spm.model --dict dict.en.txt --output data-bin

Give the SentencePiece model and dictionary of your translation model; without them, new ones are made from --train.
"""

SUBSETS = ("train", "valid", "test")


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="prepare_data.py", description=HELP, formatter_class=HelpFormatter)
    for name in SUBSETS:
        parser.add_argument(f"--{name}", type=Path, metavar="TSV", help=f"pairs of the subset '{name}'")
    parser.add_argument("-s", "--source-lang", required=True, metavar="LANG", help="language of the first column")
    parser.add_argument("-t", "--target-lang", required=True, metavar="LANG", help="language of the second column")
    parser.add_argument("--output", required=True, type=Path, metavar="DATA_BIN", help="folder to write")
    parser.add_argument("--spm", type=Path, metavar="MODEL", help="SentencePiece model")
    parser.add_argument("--dict", type=Path, metavar="FILE", help="the translation model's joint dictionary")
    parser.add_argument("--pieces", type=int, default=10000, help="size of a new SentencePiece model")
    return parser


def prepare(options: argparse.Namespace) -> int:
    """Make the DATA_BIN and say where."""
    subsets = {name: path for name in SUBSETS if (path := getattr(options, name)) is not None}
    if not subsets:
        raise ConfigurationError("there is nothing to prepare: give --train, --valid or --test")
    model, dictionary = options.spm, options.dict
    if (model is None) != (dictionary is None):
        raise ConfigurationError("--spm and --dict belong together: give both, of one translation model, or neither")
    if model is None and options.train is None:
        raise ConfigurationError("give --spm and --dict, or --train to make a new SentencePiece model from")
    for path in (*subsets.values(), model, dictionary):
        if path is not None and not path.is_file():
            raise ConfigurationError(f"there is no file {path}")
    if options.output.exists():
        raise ConfigurationError(f"--output {options.output} exists: give a new folder, or delete it")
    partial = options.output.with_name(options.output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    if model is None:
        train_sentencepiece(options.train, partial / "spm", options.pieces)
        model, dictionary = partial / "spm.model", partial / "dict.txt"
        write_dictionary(model, dictionary)
    binarise(subsets, options.source_lang, options.target_lang, model, dictionary, partial)
    partial.rename(options.output)
    print(f"{options.output}: {', '.join(subsets)}")
    return 0


def main() -> None:
    """Parse, prepare, print."""
    options = make_parser().parse_args()
    run("prepare_data.py", lambda: prepare(options))


if __name__ == "__main__":
    main()
