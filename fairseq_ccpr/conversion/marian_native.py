"""Refusing a model in Marian's own format, in a sentence that tells whether Hugging Face's converter can take it."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fairseq_ccpr.errors import CheckpointError

SETTINGS = "special:model.yml"  # the array of a model.npz that holds its settings as text
NATIVE = ("*.npz", "*.alphas.bin", "*.intgemm*.bin", "*decoder.yml")
SELF_ATTENTION = "self-attention"


def refuse_native(folder: Path) -> None:
    """Refuse a folder that holds a model as Marian or Bergamot store it.

    Raises:
        CheckpointError: it does.
    """
    files = sorted(path for kind in NATIVE for path in folder.glob(kind))
    if not files:
        return
    for path in files:
        settings = _settings(path) if path.suffix == ".npz" else {}
        decoder = settings.get("transformer-decoder-autoreg", SELF_ATTENTION)
        if decoder != SELF_ATTENTION:
            cell = str(settings.get("dec-cell", decoder)).upper()
            raise CheckpointError(
                f"{path} has a decoder of {cell} cells in place of self-attention, as the students of Bergamot and Firefox "
                "have: it cannot be converted; give its teacher, or another Transformer"
            )
        if settings.get("transformer-tied-layers"):
            raise CheckpointError(f"{path} has layers that are tied to each other: it cannot be converted")
    raise CheckpointError(
        f"{files[0]} is in Marian's own format: convert it with transformers' "
        "convert_marian_to_pytorch.py, and give that folder; SSRU decoders (Bergamot, Firefox) cannot be converted"
    )


def _settings(path: Path) -> Mapping[str, Any]:
    """Read the settings inside a model.npz; none of a file that is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            text = arrays[SETTINGS].tobytes().decode("utf-8").rstrip("\0") if SETTINGS in arrays else ""
        settings = yaml.safe_load(text)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, dict) else {}
