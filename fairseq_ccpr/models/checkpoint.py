"""Loading trained translation models from checkpoints, and cutting long text into windows; faults in one sentence."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError, describe
from fairseq_ccpr.text.subwords import Subwords
from fairseq_ccpr.text.words import word_spans

ENCODER_TASKS = ("phrase_contrast", "phrase_lexicon", "phrase_distillation", "token_contrast")
# of what is no such checkpoint
FAULTS = (KeyError, TypeError, ValueError, AttributeError, EOFError, RuntimeError)
ENCODED_ELSEWHERE = 2  # extra subwords that a text may have where it does not begin with its first word


def load_models(paths: list[str], task: Any, overrides: Mapping[str, Any] | None = None) -> list[Any]:
    """Load the models of an ensemble on the CPU, as they were saved, but for settings replaced by `overrides`.

    Raises:
        CheckpointError: a missing checkpoint, one that is not fairseq's, is for other dictionaries, would run
        code, or has
            weights that are no numbers.
    """
    for path in paths:
        if not Path(path).is_file():
            raise CheckpointError(f"there is no checkpoint {path}")
        if (task_name := read_task(Path(path)).get("_name")) in ENCODER_TASKS:
            raise CheckpointError(
                f"{path} was trained with --task {task_name}: it is not a translation model; give the model's checkpoint"
            )
    with _reporting(", ".join(paths), "no fairseq model for these dictionaries"):
        models, _ = checkpoint_utils.load_model_ensemble(
            paths, arg_overrides=dict(overrides) if overrides else None, task=task
        )
    for path, model in zip(paths, models):
        for name, weights in model.named_parameters():
            if not weights.isfinite().all():  # beam search would end without a hypothesis, or write anything
                raise CheckpointError(
                    f"{path}: its weights {name} hold NaN or infinity, as after training that diverged: "
                    "give a checkpoint from before that"
                )
    return list(models)


def read_task(path: Path) -> Mapping[str, Any]:
    """Read the options of the task that a checkpoint was trained with; its weights are not read."""
    with _reporting(str(path), "no checkpoint of fairseq"):
        state = _read_state(path)
        options = (state.get("cfg") or {}).get("task") or state.get("args") or {}
    return options if isinstance(options, Mapping) else vars(options)


def embedded_symbols(path: Path) -> tuple[int, ...]:
    """Read how many symbols the source and the target embeddings of a translation model have; () where it has none."""
    names = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    with _reporting(str(path), "no checkpoint of fairseq"):
        weights = _read_state(path)["model"]
        return tuple(len(weights[name]) for name in names) if set(names) <= weights.keys() else ()


def refuse_other_sizes(path: Path, files: list[Path], what_to_do: str) -> None:
    """Refuse dictionaries, of source and target, that have more or fewer symbols than a translation model embeds."""
    sizes, embedded = tuple(len(Dictionary.load(str(file))) for file in files), embedded_symbols(path)
    if embedded and embedded != sizes:
        raise CheckpointError(
            f"{path} has embeddings of {embedded[0]:,} source and {embedded[1]:,} target symbols, but {files[0]} has "
            f"{sizes[0]:,} and {files[1].name} {sizes[1]:,}: {what_to_do}"
        )


def _read_state(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as stream:
        head = stream.read(100)
    if not head or (head.startswith(b"PK") and not zipfile.is_zipfile(path)):
        what = "truncated" if head else "empty"
        raise CheckpointError(
            f"{path} is {what} ({path.stat().st_size:,} bytes): copy or download the checkpoint again"
        )
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a pointer of Git LFS, not the checkpoint itself: fetch that with git lfs pull"
        )
    if head[8:9] == b"{":
        raise CheckpointError(
            f"{path} holds weights alone, as safetensors: give a checkpoint of fairseq, as convert makes"
        )
    state: Mapping[str, Any] = torch.load(
        path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True
    )
    return state


def as_checkpoint(arguments: Namespace, weights: dict[str, Tensor], criterion: str) -> dict[str, Any]:
    """Make a checkpoint in the format of fairseq's trainer, without the parts that only training needs."""
    history = {
        "criterion_name": criterion,
        "optimizer_name": "FairseqAdam",
        "num_updates": 0,
        "lr_scheduler_state": {},
    }
    extra = {"train_iterator": {"epoch": 1}}
    return {"args": arguments, "model": weights, "optimizer_history": [history], "extra_state": extra}


@contextmanager
def _reporting(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise CheckpointError(f"{name} is truncated: copy or download the checkpoint again") from None
        raise CheckpointError(f"{name}: {describe(error)}") from None
    except (*FAULTS, AssertionError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{name} is {what} ({message[0]}): give the DATA_BIN it was trained for, or another checkpoint"
        ) from None


class Window(NamedTuple):
    """A part of a text, and which of its phrases are found there."""

    subwords: Subwords  # of the part alone
    offset: int  # where the part begins in the text, in characters
    begin: int  # phrases of the text that begin from here
    end: int  # up to, but not, here are found in this window, which has most of their context


def windows(subwords: Subwords, encode: Callable[[str], Subwords], limit: int) -> list[Window]:
    """Cut a text at its words into windows of at most `limit` subwords, each beginning in the middle of the one before.

    A phrase is found in one window: where two contain it, in the one with more of its sentence around it. A
    word with more subwords than `limit` is in none.
    """
    text, words = subwords.text, word_spans(subwords.text)
    inside = len(subwords.ids) - 1
    first = [bisect_right(subwords.ends, start, 1, inside) for start, _ in words]
    stop = [bisect_left(subwords.starts, end, 1, inside) for _, end in words]
    cut: list[tuple[int, int, Subwords]] = []  # first and last word, and what they are cut into
    begin = 0
    while begin < len(words):
        last = bisect_right(stop, first[begin] + limit - ENCODED_ELSEWHERE, begin) - 1
        while last >= begin and (part := encode(text[words[begin][0] : words[last][1]])).count > limit:
            last -= 1
        if last < begin:  # a word of too many subwords
            begin += 1
            continue
        cut.append((begin, last, part))
        if last + 1 == len(words):
            break
        begin = min(bisect_left(first, (first[begin] + stop[last]) // 2, begin + 1), last + 1)
    middles = [words[max((last + word + 1) // 2, word)][0] for (_, last, _), (word, _, _) in pairwise(cut)]
    borders = [0, *middles, len(text) + 1]
    return [Window(part, words[word][0], *ends) for (word, _, part), ends in zip(cut, pairwise(borders))]
