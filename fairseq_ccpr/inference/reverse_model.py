"""Loading the model that translates monolingual text back: from the target language of a DATA_BIN to its source language."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import torch
from fairseq.data import Dictionary

from fairseq_ccpr.datastore.preprocessing import Preprocessing, read_preprocessing
from fairseq_ccpr.decoding.task_options import task_words
from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.inference.arguments import parse_generation
from fairseq_ccpr.inference.resources import configure_system
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.models.checkpoint import embedded_symbols

SHARED = (
    "give a reverse model that shares the dictionaries, or one in a folder that fairseq-ccpr prepare or convert wrote"
)


def load_reverse_model(path: Path, forward: Preprocessing, words: list[str], device: torch.device) -> System:
    """Load a model of the opposite direction.

    Its dictionaries and subwords are those that `preprocessing.json` names in its own folder, if that is of its direction;
    otherwise it must share those of `forward`, source and target exchanged.

    Args:
        path: its checkpoint.
        forward: how text is made tokens in the other direction.
        words: options of fairseq-generate.
        device: of the model.

    Raises:
        CheckpointError: no checkpoint, or one of other dictionaries.
        ConfigurationError: its own folder lacks something.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}: --reverse-model is that of a fairseq model")
    back = forward.exchanged()
    languages = back.source_lang, back.target_lang
    words = ["--path", str(path), "-s", languages[0], "-t", languages[1], *words]
    own = read_preprocessing(path.parent)
    if own is not None and (own.source_lang, own.target_lang) == languages:
        return System(configure_system(words), device)
    of_task = task_words(path)
    if not of_task:  # a multilingual task adds symbols to those of the files
        _check_shared(path, back)
    return System(parse_generation([str(back.folder), *of_task, *back.words, *words]), device)


def _check_shared(path: Path, back: Preprocessing) -> None:
    """See that the model at `path` has the dictionaries of `back`, as far as files and sizes tell.

    Raises:
        CheckpointError: names the difference.
    """
    files = [back.folder / f"dict.{language}.txt" for language in (back.source_lang, back.target_lang)]
    dictionaries = [Dictionary.load(str(file)).symbols for file in files]
    sizes = tuple(map(len, dictionaries))
    if (embedded := embedded_symbols(path)) and embedded != sizes:
        raise CheckpointError(
            f"--reverse-model {path} has embeddings of {embedded[0]:,} source and {embedded[1]:,} target symbols, but "
            f"{files[0]} has {sizes[0]:,} and {files[1].name} {sizes[1]:,}: {SHARED}"
        )
    for file, symbols in zip(files, dictionaries):
        beside = path.parent / file.name
        if not beside.is_file():
            continue
        for number, (one, other) in enumerate(zip_longest(Dictionary.load(str(beside)).symbols, symbols)):
            if one != other:
                raise CheckpointError(
                    f"{beside}, next to --reverse-model, and {file} differ: symbol {number:,} is {_quoted(one)} in the "
                    f"first, and {_quoted(other)} in the second; {SHARED}"
                )


def _quoted(symbol: str | None) -> str:
    return "missing" if symbol is None else f"'{symbol}'"
