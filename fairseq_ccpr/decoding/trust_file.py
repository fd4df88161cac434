"""A file of learned trust: the network, and what it belongs to."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import PROJECTION, TokenDatastore
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.trust import LearnedTrust, Trust
from fairseq_ccpr.decoding.trust_features import VERSION
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.atomic import atomic_file

logger = logging.getLogger(__name__)

DIGEST = 64  # digits of a fingerprint

Parts = Mapping[str, TokenDatastore | PhraseDatastore]  # "token", "phrase", or both in this order


@dataclass(frozen=True)
class TrustDescription:
    """What a file of trust says of itself."""

    kind: str
    arguments: dict[str, Any]  # of the network's class
    needs: dict[str, str]  # what it can be used with, by name: see `needs_of`
    keys: dict[str, str]  # digests of the parts' keys it was learned with
    settings: dict[str, dict[str, Any]]  # of retrieval it was learned with, by the prefix of their options
    texts: dict[str, Any] = field(default_factory=dict)  # what it was worth when it was learned, by text and system
    features: int = VERSION
    weight: str = ""  # the policy of the token memory's weight it was learned with; older files do not say

    @property
    def parts(self) -> list[str]:
        """The parts of a datastore that it weighs."""
        return list(self.keys)


def needs_of(parts: Parts) -> dict[str, str]:
    """Return what trust in these parts depends on, by name: if any value differs, its features mean something else."""
    needs: dict[str, str] = {}
    for part in parts.values():
        if isinstance(part, TokenDatastore):
            section = part.section
            needs |= {
                "model": section.fingerprints["model"],
                "target dictionary": section.fingerprints["target_dictionary"],
                "key layer": section.key_layer,
                "metric": section.index.metric,
                "knowledge of its own text": "yes" if section.domain else "no",
                "projection": section.digest(PROJECTION) or "none",
            }
        else:
            needs |= {"phrase encoder": part.section.fingerprints["encoder"]}
    return needs


def save_trust(trust: Trust, described: TrustDescription, path: Path) -> None:
    """Write a safetensors file, under its final name only when it is complete."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trust.state_dict().items()}
    text = json.dumps(asdict(described))
    with atomic_file(path) as partial:
        save_file(tensors, partial, metadata={"trust": text, "checksum": _checksum(tensors, text)})


def load_trust(path: Path, parts: Parts, kind: type[Trust] = LearnedTrust) -> tuple[Trust, TrustDescription]:
    """Read trust, and check that it belongs to the parts of a datastore.

    Args:
        kind: of trust that is expected.

    Raises:
        ConfigurationError: the file is missing, damaged, of other features or another kind, or of another model, key layer,
            metric, projection or phrase encoder, or of parts that the datastore does not have.
    """
    tensors, described = _read(path)
    if described.kind != kind.KIND:
        raise ConfigurationError(
            f"{path} is trust of the kind {described.kind}, and --task takes {kind.KIND}: give the --task and --user-dir it "
            "was tuned with, tune again, or give --trust none"
        )
    if described.features != VERSION:
        raise ConfigurationError(
            f"{path} was learned by another version of fairseq-ccpr (features {described.features}, here {VERSION}): tune "
            "again, or give --trust none"
        )
    if "phrase" not in described.parts and described.settings.get(PhraseSettings.PREFIX, {}).get("lambda_") == 0:
        parts = {name: part for name, part in parts.items() if name != "phrase"}  # tuning left them out
    if described.parts != list(parts):
        raise ConfigurationError(
            f"{path} is trust in {' and '.join(described.parts)} parts, but --datastore has "
            f"{' and '.join(parts) or 'none'}: tune again, or name the datastore it was learned with"
        )
    for name, found in needs_of(parts).items():
        if described.needs.get(name) != found:
            raise ConfigurationError(
                f"{path} was learned with another {name} than --datastore has ({_short(described.needs.get(name))}, "
                f"here {_short(found)}): tune again, or give --trust none"
            )
    for name, part in parts.items():
        if described.keys[name] not in part.keys_fingerprints:
            logger.warning(
                "%s was learned with other %s keys than the datastore has: tune again if you can", path, name
            )
    trust = kind(**described.arguments)
    trust.load_state_dict(tensors)
    return trust.requires_grad_(False), described


def _short(value: str | None) -> str:
    """Return a digest's first digits, and what is no digest as it is."""
    return fingerprint.short(value) if value and len(value) == DIGEST else value or "none"


def _read(path: Path) -> tuple[dict[str, Tensor], TrustDescription]:
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - it is no mapping
        if metadata["checksum"] != _checksum(tensors, metadata["trust"]):
            raise ValueError("its checksum is not that of its content")
        return tensors, TrustDescription(**json.loads(metadata["trust"]))
    except FileNotFoundError:
        raise ConfigurationError(f"--trust {path} is missing: give a file that fairseq-ccpr tune wrote") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DatastoreError(f"{path} is damaged, or no file of trust ({error}): tune again") from None


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    parts = [text]
    for name, tensor in sorted(tensors.items()):
        parts += [name, hashlib.sha256(tensor.numpy().tobytes()).hexdigest()]
    return fingerprint.of_strings(parts)
