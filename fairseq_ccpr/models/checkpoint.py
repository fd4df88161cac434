"""Loading trained translation models from checkpoints; faults are reported in one sentence."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils

from fairseq_ccpr.errors import CheckpointError, describe

ENCODER_TASKS = ("phrase_contrast", "phrase_lexicon", "phrase_queries", "token_contrast")


def load_models(paths: list[str], task: Any, overrides: Mapping[str, Any] | None = None) -> list[Any]:
    """Load the models of an ensemble on the CPU, as they were saved.

    Args:
        paths: of their checkpoints.
        task: with the dictionaries they were trained for.
        overrides: settings of the models to replace, as in `--model-overrides`.

    Raises:
        CheckpointError: a missing checkpoint, one that is not fairseq's, is for other dictionaries, or would run code.
    """
    for path in paths:
        if not Path(path).is_file():
            raise CheckpointError(f"there is no checkpoint {path}")
        if (task_name := read_task(Path(path)).get("_name")) in ENCODER_TASKS:
            raise CheckpointError(
                f"{path} was trained with --task {task_name}: it is not a translation model; give the model's checkpoint"
            )
    with _faults_told(", ".join(paths), "no fairseq model for these dictionaries"):
        models, _ = checkpoint_utils.load_model_ensemble(paths, arg_overrides=dict(overrides or {}), task=task)
    return list(models)


def read_task(path: Path) -> Mapping[str, Any]:
    """Read the options of the task that a checkpoint was trained with; its weights are not read.

    Raises:
        CheckpointError: it is not a fairseq checkpoint, or would run code.
    """
    with _faults_told(str(path), "no checkpoint of fairseq"):
        state = _read_state(path)
        options = (state.get("cfg") or {}).get("task") or state.get("args") or {}
    return options if isinstance(options, Mapping) else vars(options)


def embedded_symbols(path: Path) -> tuple[int, ...]:
    """Read how many symbols the source and the target embeddings of a translation model have; nothing where it has none.

    Raises:
        CheckpointError: it is not a checkpoint of fairseq, or would run code.
    """
    names = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    with _faults_told(str(path), "no checkpoint of fairseq"):
        weights = _read_state(path)["model"]
        return tuple(len(weights[name]) for name in names) if set(names) <= weights.keys() else ()


def _read_state(path: Path) -> Mapping[str, Any]:
    """Map a checkpoint into memory, which older ones do not allow.

    Raises:
        CheckpointError: it is seen to be no checkpoint, or not all of one.
    """
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
    state: Mapping[str, Any] = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    return state


@contextmanager
def _faults_told(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise CheckpointError(f"{name} is truncated: copy or download the checkpoint again") from None
        raise CheckpointError(f"{name}: {describe(error)}") from None
    except (KeyError, TypeError, ValueError, AttributeError, EOFError, RuntimeError, AssertionError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{name} is {what} ({message[0]}): give the DATA_BIN it was trained for, or another checkpoint"
        ) from None
