"""What decides how fairseq's tokenizers and subword models split text: their options, and the files these name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fairseq_ccpr.storage import fingerprint


def digest_options(options: Any) -> str | None:
    """Digest the options of a tokenizer or of a subword model; files count by their bytes, wherever they lie.

    Args:
        options: what fairseq builds it from, such as `cfg.bpe`; None where there is none.

    Returns:
        None where the options are of a kind that says too little.

    >>> one, two = (OmegaConf.create({"_name": "moses", "source_lang": lang}) for lang in ("de", "en"))
    >>> digest_options(one) == digest_options(one.copy()) != digest_options(two)
    True
    """
    if options is None:
        return fingerprint.of_strings(["none"])
    if not isinstance(options, DictConfig):
        return None
    values = OmegaConf.to_container(options)
    assert isinstance(values, dict)
    named = sorted((str(name), _digest(value)) for name, value in values.items())
    return fingerprint.of_strings(part for pair in named for part in pair)


def _digest(value: object) -> str:
    path = Path(value) if isinstance(value, str) and value else None
    return fingerprint.of_file(path) if path is not None and path.is_file() else repr(value)
