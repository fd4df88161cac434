"""Loading trained translation models from checkpoints, and faults of checkpoints in one sentence."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairseq_ccpr.errors import CheckpointError, describe

ENCODER_TASKS = ("phrase_contrast", "phrase_lexicon", "phrase_distillation", "token_contrast")
# of what is no such checkpoint
FAULTS = (KeyError, TypeError, ValueError, AttributeError, EOFError, RuntimeError, AssertionError)
OTHER_DATA = "give the DATA_BIN it was trained for, or another checkpoint"
MESSAGE_CHARACTERS = 200  # of such a fault that are shown
# what draws the first values of parameters, which takes longer than reading the last ones
DRAWING = {
    nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_,
    Tensor.uniform_, Tensor.normal_,
}  # fmt: skip


def load_models(paths: list[str], task: Any, overrides: Mapping[str, Any] | None = None) -> list[Any]:
    """Load the models of an ensemble on the CPU, as they were saved but for the settings in `overrides`.

    Raises:
        CheckpointError: a missing checkpoint, one that is not fairseq's, is for other dictionaries, would run
        code, or has weights that are no numbers.
    """
    for path in paths:
        if not Path(path).is_file():
            raise CheckpointError(f"there is no checkpoint {path}")
        if (task_name := read_task(Path(path)).get("_name")) in ENCODER_TASKS:
            raise CheckpointError(
                f"{path} was trained with --task {task_name}: it is not a translation model; give the "
                "model's checkpoint"
            )
    with reading(", ".join(paths), "no fairseq model for these dictionaries", OTHER_DATA), Undrawn():
        models, _ = checkpoint_utils.load_model_ensemble(
            paths, arg_overrides=dict(overrides) if overrides else None, task=task
        )
    for path, model in zip(paths, models):
        for name, weights in model.named_parameters():
            # beam search would end without a hypothesis, or write anything; the sum is a fast answer, and may overflow
            if not weights.detach().sum().isfinite() and not weights.isfinite().all():
                raise CheckpointError(
                    f"{path}: its weights {name} hold NaN or infinity, as after training that diverged: "
                    "give a checkpoint from before that"
                )
    return list(models)


class Undrawn(TorchFunctionMode):
    """Leaves the parameters of what is made at 0, as a file is about to fill all of them.

    So torch's random numbers stay as they were, and sampling is the same with memories of no weight.
    """

    def __torch_function__(
        self, function: Any, kinds: Any, args: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        weights = args[0] if args else (named or {}).get("tensor")
        if isinstance(weights, nn.Parameter) and function in DRAWING:
            weights.data.zero_()
            return weights
        return function(*args, **(named or {}))


def read_task(path: Path) -> Mapping[str, Any]:
    """Read the options of the task that a checkpoint was trained with; its weights are not read."""
    found = path.stat()
    return _read_task(path, found.st_mtime_ns, found.st_size, found.st_ino)


@lru_cache(4)
def _read_task(path: Path, *version: int) -> Mapping[str, Any]:
    with reading(path, "no checkpoint of fairseq", OTHER_DATA):
        state = _read_state(path)
        options = (state.get("cfg") or {}).get("task") or state.get("args") or {}
    return options if isinstance(options, Mapping) else vars(options)


def embedded_symbols(path: Path) -> tuple[int, ...]:
    """Read how many symbols the source and the target embeddings of a translation model have.

    () where it has none.
    """
    names = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    with reading(path, "no checkpoint of fairseq", OTHER_DATA):
        weights = _read_state(path)["model"]
        return tuple(len(weights[name]) for name in names) if set(names) <= weights.keys() else ()


def refuse_other_sizes(path: Path, files: list[Path], what_to_do: str) -> None:
    """Refuse dictionaries of source and target with more or fewer symbols than a translation model embeds."""
    sizes, embedded = tuple(len(Dictionary.load(str(file))) for file in files), embedded_symbols(path)
    if embedded and embedded != sizes:
        raise CheckpointError(
            f"{path} has embeddings of {embedded[0]:,} source and {embedded[1]:,} target symbols, but "
            f"{files[0]} has {sizes[0]:,} and {files[1].name} {sizes[1]:,}: {what_to_do}"
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
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)


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
def reading(name: Path | str, what: str, instead: str) -> Iterator[None]:
    """Report in one sentence what stops reading a checkpoint: it is `what`, and what to do `instead`."""
    try:
        yield
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise CheckpointError(f"{name} is truncated: copy or download the checkpoint again") from None
        raise CheckpointError(f"{name}: {describe(error)}") from None
    except FAULTS as error:
        message = " ".join(str(error).split())[:MESSAGE_CHARACTERS] or type(error).__name__
        raise CheckpointError(f"{name} is {what} ({message}): {instead}") from None
