"""`tuned.json`: the settings that tuning left with a datastore; decoding takes them where an option is left out.

A datastore's tokens and phrases may be used alone or together, and each way has settings of its own. They lie
in the folder of the token part, or of the phrase part where it is used alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_ccpr.datastore.manifest import TEXT
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.text import TextDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.files import read_checked_json, write_checked_json
from fairseq_ccpr.storage.fingerprint import of_file

TUNED = "tuned.json"
FORMAT_VERSION = 1
UNTUNED = "the settings of an empty datastore"  # in place of a signature, where no tuning chose them

logger = logging.getLogger(__name__)

Datastore = TokenDatastore | PhraseDatastore | TextDatastore
Parts = Mapping[str, Datastore]  # "token", "phrase", "text", or several in this order


def trust_path(parts: Parts) -> Path:
    """Locate trust in these parts: `trust-token.safetensors` in their folder, for example."""
    return _file_of(parts).with_name(f"trust-{_name_of(parts)}.safetensors")


def write_tuned(
    parts: Parts,
    settings: Mapping[str, Mapping[str, Any]],
    signature: str,
    trust: bool = False,
    confidence: Mapping[str, Any] | str | None = None,
) -> Path:
    """Leave settings with the parts that they were tuned for, in place of earlier ones; returns the file.

    Args:
        settings: values of the fields of `decoding.options`, by the prefix of their options.
        trust: whether trust, already stored at `trust_path`, goes with them.
        confidence: what was calibrated with them, see `inference.confidence`; or why nothing was.
    """
    path = _file_of(parts)
    written = _read(path)
    keys = {name: part.keys_fingerprint for name, part in parts.items()}
    written[_name_of(parts)] = {"keys": keys, "settings": settings, "signature": signature}
    if trust:
        written[_name_of(parts)]["trust"] = of_file(trust_path(parts))
    if confidence is not None:
        written[_name_of(parts)]["confidence"] = confidence
    write_checked_json(path, {"format_version": FORMAT_VERSION, "tuned": written})
    return path


def read_tuned(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return what was tuned for these parts together, or else for each alone, as `write_tuned` took it."""
    if not parts:
        return {}
    known = _tuned_together(parts)
    if (together := _tuned_of(known)) or len(parts) == 1:
        added = {} if known is parts else {TEXT: {"alpha": 0.0}}
        if added:
            logger.warning(
                "the text was added after tuning, and is not used: tune again, or give --text-alpha"
            )
        return {**together["settings"], **added} if together else {}
    alone = (_tuned_of({name: part}) or {"settings": {}} for name, part in parts.items())
    return {prefix: values for tuned in alone for prefix, values in tuned["settings"].items()}


def tuned_trust(parts: Parts) -> Path | None:
    """Return the trust file that tuning stored with exactly these parts, if any; it must be what tuning left."""
    parts = _tuned_together(parts)
    tuned = _tuned_of(parts)
    if tuned is None or "trust" not in tuned:
        return None
    path = trust_path(parts)
    if not path.is_file() or of_file(path) != tuned["trust"]:
        raise DatastoreError(f"{path} is missing, or not what tuning left: tune again, or give --trust none")
    return path


def tuned_confidence(parts: Parts) -> dict[str, Any] | str | None:
    """Return what tuning calibrated with exactly these parts, at least one; or why nothing; or None."""
    tuned = _tuned_of(_tuned_together(parts))
    return tuned.get("confidence") if tuned is not None else None


def tuned_signatures(directory: Path) -> dict[str, str]:
    """Return the signatures of all that was tuned for a datastore, by its parts."""
    return {name: tuned["signature"] for name, tuned in _read(directory / TUNED).items()}


def _tuned_together(parts: Parts) -> Parts:
    """Return the parts, but for a text that was added to parts that had been tuned."""
    others = {name: part for name, part in parts.items() if name != TEXT}
    if len(others) in (0, len(parts)) or _tuned_of(parts) is not None:
        return parts
    tuned = _tuned_of(others)
    return parts if tuned is None or tuned["signature"] == UNTUNED else others


def _tuned_of(parts: Parts) -> dict[str, Any] | None:
    path = _file_of(parts)
    tuned: dict[str, Any] | None = _read(path).get(_name_of(parts))
    if tuned is not None and any(
        tuned["keys"].get(name) not in part.keys_fingerprints for name, part in parts.items()
    ):
        logger.warning(
            "%s was tuned for keys that the datastore no longer has, and is not used: tune again", path
        )
        return None
    return tuned


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(read_checked_json(path, FORMAT_VERSION)["tuned"])
    except (ValueError, KeyError) as error:
        raise DatastoreError(f"{path} is damaged ({error}): delete it, and tune again") from None


def _file_of(parts: Parts) -> Path:
    return next(iter(parts.values())).directory / TUNED


def _name_of(parts: Parts) -> str:
    return "+".join(parts)
