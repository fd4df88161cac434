"""Converting a Marian model as Hugging Face stores it: a folder that fairseq and every command of this package take."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from fairseq_ccpr.conversion.marian_settings import read_settings
from fairseq_ccpr.conversion.marian_vocabulary import Vocabulary, read_vocabularies
from fairseq_ccpr.conversion.marian_weights import convert_weights
from fairseq_ccpr.datastore.preprocessing import Preprocessing
from fairseq_ccpr.errors import CheckpointError, ConfigurationError, did_you_mean
from fairseq_ccpr.models.pretrained.hub_folder import TOKENIZER_CONFIG, read_json, read_weights
from fairseq_ccpr.storage.atomic import scratch_directory
from fairseq_ccpr.text.sentencepiece_pair import PAIR

CHECKPOINT = "model.pt"
SOURCE_PIECES, TARGET_PIECES = "source.spm", "target.spm"
ENOUGH_KNOWN = 0.5  # fraction of a SentencePiece model that its own vocabulary has at least


@dataclass(frozen=True)
class Direction:
    """The languages of a converted model; None: as its folder says.

    Attributes:
        tag: what names the target language in front of a source sentence, in a model of several target languages.
    """

    source: str | None
    target: str | None
    tag: str | None


@dataclass(frozen=True)
class Converted:
    """A converted model."""

    source: str
    target: str
    tag: str
    arguments: Namespace
    parameters: int


def convert_marian(folder: Path, output: Path, direction: Direction) -> Converted:
    """Write checkpoint, dictionaries and SentencePiece models to `output`, which appears when it is complete.

    Raises:
        CheckpointError: a file is missing or damaged, they do not go together, or the model cannot be converted.
        ConfigurationError: the languages are not known.
    """
    settings = read_settings(folder)
    vocabularies = read_vocabularies(folder)
    for name, vocabulary in zip((SOURCE_PIECES, TARGET_PIECES), vocabularies):
        _check_pieces(folder / name, vocabulary)
    source, target = _languages(folder, direction)
    tag = _tag(vocabularies[0].tags, target, direction.tag)
    arguments, weights = convert_weights(read_weights(folder), settings, vocabularies, folder)
    options: dict[str, Any] = {
        "bpe": PAIR,
        "sentencepiece_model": str(folder / SOURCE_PIECES),
        "sentencepiece_target_model": str(folder / TARGET_PIECES),
        **({"source_tag": tag} if tag else {}),
    }
    output = output.resolve()
    with scratch_directory(output) as partial:
        for language, vocabulary in zip((source, target), vocabularies):
            vocabulary.dictionary().save(str(partial / f"dict.{language}.txt"))
        torch.save(_checkpoint(arguments, weights, source, target), partial / CHECKPOINT)
        Preprocessing(partial, source, target, options).save(partial)
        for name in (SOURCE_PIECES, TARGET_PIECES):
            shutil.copymode(partial / CHECKPOINT, partial / name)  # downloads may be read-only
        partial.replace(output)
    parameters = sum(tensor.numel() for tensor in {tensor.data_ptr(): tensor for tensor in weights.values()}.values())
    return Converted(source, target, tag, arguments, parameters)


def _languages(folder: Path, direction: Direction) -> tuple[str, str]:
    """Return source and target language: those given, or else those of the folder's tokenizer."""
    told = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    source, target = direction.source or told.get("source_lang"), direction.target or told.get("target_lang")
    if not source or not target:
        raise ConfigurationError(f"{folder} does not say which languages it translates: give -s and -t")
    if source == target:
        raise ConfigurationError(f"source and target language are both {source}: give -s and -t")
    return str(source), str(target)


def _tag(known: list[str], target: str, given: str | None) -> str:
    """Return the tag of the target language: the one given, or the only one, or that of its name; else nothing."""
    if given is not None:
        if given not in known:
            several = did_you_mean(given, known) or f": it has {', '.join(known[:5]) or 'none'}"
            raise ConfigurationError(f"--source-tag {given} is not in the model's vocabulary{several}")
        return given
    if len(known) <= 1:
        return known[0] if known else ""
    if f">>{target}<<" in known:
        return f">>{target}<<"
    raise ConfigurationError(
        f"the model translates into {len(known)} languages, and none is called {target}: choose one with --source-tag, such "
        f"as {', '.join(known[:5])}"
    )


def _check_pieces(path: Path, vocabulary: Vocabulary) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}: copy the model's whole folder")
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise CheckpointError(f"{path} is no SentencePiece model: copy it again") from None
    pieces = set(processor.id_to_piece(list(range(len(processor)))))
    known = len(pieces & set(vocabulary.symbols)) / max(1, len(pieces))
    if known < ENOUGH_KNOWN:
        raise CheckpointError(
            f"only {known:.0%} of the pieces of {path} are in {vocabulary.path.name}: they are not of one model; copy the "
            "model's whole folder again"
        )


def _checkpoint(arguments: Namespace, weights: dict[str, Tensor], source: str, target: str) -> dict[str, Any]:
    """Make a checkpoint in the format of fairseq's trainer, without what only training needs."""
    history = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam", "num_updates": 0}
    task = {
        "task": "translation",
        "data": ".",
        "source_lang": source,
        "target_lang": target,
        "criterion": "cross_entropy",
    }
    return {
        "args": Namespace(**task, **vars(arguments)),
        "model": weights,
        "optimizer_history": [history | {"lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
