"""The files of a model folder of Hugging Face: settings as JSON, weights as safetensors or as a pickle of tensors alone."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fairseq_ccpr.errors import CheckpointError, describe

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SAFETENSORS, PICKLED = "model*.safetensors", "pytorch_model*.bin"  # sharded ones have numbers in their names


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}: copy the model's whole folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged (it holds no settings): copy it again")
    return content


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, by name. No code in a pickle is run: torch's weights_only is on.

    Raises:
        CheckpointError: there are none, a file of them is missing or damaged, or would run code.
    """
    for kind, load in ((SAFETENSORS, _load_safetensors), (PICKLED, _load_pickled)):
        if files := sorted(folder.glob(kind)):
            _check_whole(folder, kind)
            return {name: tensor for path in files for name, tensor in load(path).items()}
    others = [path.name for kind in ("*.h5", "*.msgpack", "*.bin") for path in sorted(folder.glob(kind))]
    found = f"only {others[0]}" if others else "none"
    raise CheckpointError(
        f"{folder} has no model.safetensors or pytorch_model.bin ({found}): copy the model's whole folder, or save it "
        "again with transformers' save_pretrained"
    )


def _check_whole(folder: Path, kind: str) -> None:
    """Check that all files listed in the index of a sharded model exist."""
    for index in folder.glob(f"{kind}.index.json"):
        named = read_json(index).get("weight_map")
        for name in sorted(set(named.values())) if isinstance(named, dict) else ():
            if not (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} has no {name}, which {index.name} names: copy the model's whole folder"
                )


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy it again") from None


def _load_pickled(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as stream:
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {describe(error)}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({_first_line(error)}): copy it again") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no weights by name: copy the model's whole folder again")
    return content


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
