"""`fairseq-ccpr prepare`: make a DATA_BIN from sentence pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.building.preparation import binarise, pair_files, train_sentencepiece, write_dictionary
from fairseq_ccpr.cli.command import command
from fairseq_ccpr.common_options import source_language_option, target_language_option
from fairseq_ccpr.datastore.preprocessing import Preprocessing
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference.resources import find_beside
from fairseq_ccpr.models.checkpoint import read_task
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.atomic import atomic_directory
from fairseq_ccpr.text.languages import same_language
from fairseq_ccpr.text.sentencepiece_pair import implied_bpe

HELP = """\
Make a DATA_BIN from sentence pairs: TSV (source, tab, target; plain, .gz or .xz), or two files, PREFIX.de and PREFIX.en.

  fairseq-ccpr prepare --test test.tsv -s de -t en --sentencepiece-model spm.model --dict dict.en.txt --output data-bin
  fairseq-ccpr prepare --test text/test -s de -t en --tokenizer moses --bpe fastbpe --bpe-codes bpecodes --dict dict.en.txt \\
    --output data-bin

Subwords and dictionaries are those of your translation model: the files next to the checkpoint of --path, or --dict together
with fairseq's own options (--sentencepiece-model, or --bpe, --bpe-codes and --tokenizer, as in decoding). Without either, a
SentencePiece model is trained on --train. DATA_BIN stores them, so that later commands need no such options.

Lines that are no pair or not UTF-8, and pairs with an empty side, are left out and counted by reason. Repeated pairs are
counted and kept. Characters inside a line that other programs take for its end become spaces.
"""

SUBSETS = ("train", "valid", "test")


@dataclass
class Options:
    """The command's own options."""

    source_lang: str = source_language_option(help="language of the first column")
    target_lang: str = target_language_option(help="language of the second column")
    output: Path = option(help="folder to write", metavar="DATA_BIN")
    train: Optional[Path] = option(None, "pairs of the subset 'train'", metavar="TSV|PREFIX")
    valid: Optional[Path] = option(None, "pairs of the subset 'valid'", metavar="TSV|PREFIX")
    test: Optional[Path] = option(None, "pairs of the subset 'test'", metavar="TSV|PREFIX")
    path: Optional[Path] = option(
        None, "checkpoint of the translation model; its dictionaries and subword model are next to it", metavar="MODEL"
    )
    dict: list[Path] = option(
        [], "the translation model's joint dictionary, or both of them", nargs="+", metavar="FILE"
    )
    pieces: int = option(10000, "size of a new SentencePiece model", metavar="N")


def prepare(options: Options, subwords: list[str]) -> int:
    """Make the DATA_BIN and say where.

    Args:
        subwords: fairseq's options of tokenizer and BPE.
    """
    subsets = {name: path for name in SUBSETS if (path := getattr(options, name)) is not None}
    if not subsets:
        raise ConfigurationError("there is nothing to prepare: give --train, --valid or --test")
    languages = options.source_lang, options.target_lang
    dictionaries = options.dict
    subwords = implied_bpe(subwords)
    if options.path is not None:
        subwords, dictionaries = of_model(options, subwords)
    if bool(subwords) != bool(dictionaries):
        raise ConfigurationError(
            "--dict belongs together with --sentencepiece-model, or --bpe: give both, of one model, or neither"
        )
    if len(dictionaries) > 2:
        raise ConfigurationError(f"--dict names {len(dictionaries)} files: give a joint one, or source and target")
    if not subwords and options.train is None:
        raise ConfigurationError(
            "give --path, or --sentencepiece-model and --dict, or --train to make a new model from"
        )
    for path in subsets.values():
        for file in pair_files(path, *languages):
            if not file.is_file():
                raise ConfigurationError(
                    f"there is neither a file {path} nor {file}: give a TSV, or a prefix of two files"
                )
    for path in dictionaries:
        if not path.is_file():
            raise ConfigurationError(f"there is no file {path}")
    with atomic_directory(options.output) as folder:
        if not subwords:
            assert options.train is not None  # see above
            train_sentencepiece(options.train, languages, folder / "spm", options.pieces)
            model, dictionaries = folder / "spm.model", [folder / "dict.txt"]
            write_dictionary(model, dictionaries[0])
            subwords = ["--bpe", "sentencepiece", "--sentencepiece-model", str(model)]
        counts = binarise(subsets, languages, subwords, dictionaries, folder)
        Preprocessing(folder, *languages, named_options(subwords)).save(folder)
    print(f"{options.output}: {', '.join(f'{name} {count:,}' for name, count in counts.items())} pairs")
    return 0


def of_model(options: Options, subwords: list[str]) -> tuple[list[str], list[Path]]:
    """Return the options of subwords and the dictionaries next to the model."""
    if options.dict:
        raise ConfigurationError("--path takes the dictionaries next to the model: leave out --dict")
    assert options.path is not None
    languages = options.source_lang, options.target_lang
    if not options.path.is_file():
        raise ConfigurationError(f"--path: there is no checkpoint {options.path}")
    trained = read_task(options.path)
    own = trained.get("source_lang") or "", trained.get("target_lang") or ""
    as_given = [all(map(same_language, order, languages)) for order in (own, own[::-1])]
    if own[::-1] == languages or as_given == [False, True]:
        raise ConfigurationError(
            f"{options.path} translates from {own[0]} to {own[1]}, but -s is {languages[0]} and -t is "
            f"{languages[1]}: exchange them"
        )
    found = find_beside(options.path, *languages, named_options(subwords))
    if found is None or not found.options:
        raise ConfigurationError(
            f"next to {options.path} there are no dict.{languages[0]}.txt and dict.{languages[1]}.txt, or no subword model "
            "such as spm.model or bpecodes: put them there, or give --dict, and --sentencepiece-model or --bpe"
        )
    return found.words, [found.folder / f"dict.{language}.txt" for language in languages]


def named_options(words: list[str]) -> dict[str, Any]:
    """Read options by name; one without a value is True.

    >>> named_options(["--bpe", "fastbpe", "--moses-no-escape"])
    {'bpe': 'fastbpe', 'moses_no_escape': True}
    """
    named: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            last, equals, value = word[2:].partition("=")
            last = last.replace("-", "_")
            named[last] = value if equals else True
        else:
            named[last] = word
    return named


main = command(HELP, prepare, Options, rest=True, retrieval=False)
