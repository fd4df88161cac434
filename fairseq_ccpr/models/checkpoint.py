"""Loading trained translation models from checkpoints, whose faults are told in one sentence."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils

from fairseq_ccpr.errors import CheckpointError, describe


def load_models(paths: list[str], task: Any, overrides: Mapping[str, Any] | None = None) -> list[Any]:
    """Load the models of an ensemble on the CPU, as they were saved.

    Args:
        paths: of their checkpoints.
        task: with the dictionaries they were trained for.
        overrides: settings of the models to replace, as in `--model-overrides`.

    Raises:
        CheckpointError: a missing checkpoint, one that is none of fairseq, is for other dictionaries, or would run code.
    """
    for path in paths:
        if not Path(path).is_file():
            raise CheckpointError(f"there is no checkpoint {path}")
    name = ", ".join(paths)
    try:
        models, _ = checkpoint_utils.load_model_ensemble(paths, arg_overrides=dict(overrides or {}), task=task)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{name}: {describe(error)}") from None
    except (KeyError, TypeError, EOFError, RuntimeError, AssertionError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{name} is no fairseq model for these dictionaries ({message[0]}): give the DATA_BIN it was trained for"
        ) from None
    return list(models)
