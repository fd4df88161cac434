"""A file of trust: the network, what tuning trained of the memories besides, and what both belong to."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import PROJECTION, TokenDatastore
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.phrase_memory import PhraseMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.trust import VERSION, LearnedTrust, Trust
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.atomic import atomic_file

logger = logging.getLogger(__name__)

DIGEST = 64  # digits of a fingerprint
OF_MEMORY = "memory."  # begins the names of what belongs to a memory, before the memory's name
OLD_VOTES = "votes."  # the same for the phrases, in files of version 0.2

Trained = Mapping[str, Mapping[str, Tensor]]  # by memory
Parts = Mapping[str, TokenDatastore | PhraseDatastore]  # "token", "phrase", or both in this order


@dataclass(frozen=True)
class TrustDescription:
    """What a file of trust says of itself."""

    kind: str
    arguments: dict[str, Any]  # of the network's class
    needs: dict[str, str]  # what it can be used with, by name: see `needs_of`
    keys: dict[str, str]  # digests of the parts' keys it was trained with
    settings: dict[str, dict[str, Any]]  # of retrieval it was trained with, by the prefix of their options
    texts: dict[str, Any] = field(default_factory=dict)  # what it was worth when it was trained, by text and system
    features: int = VERSION
    weight: str = ""  # the policy of the token memory's weight it was trained with; older files do not say

    @property
    def parts(self) -> list[str]:
        """The parts of a datastore that it weighs."""
        return list(self.keys)


class LoadedTrust(NamedTuple):
    """What a file of trust holds."""

    trust: Trust
    trained: Trained
    described: TrustDescription


def needs_of(parts: Parts) -> dict[str, str]:
    """Name what trust in these parts depends on: if any value differs, its features mean something else."""
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


def save_trust(trust: Trust, trained: Trained, described: TrustDescription, path: Path) -> None:
    """Write a safetensors file, under its final name only when it is complete."""
    both = trust.state_dict() | {
        f"{OF_MEMORY}{memory}.{name}": one for memory, state in trained.items() for name, one in state.items()
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in both.items()}
    text = json.dumps(asdict(described))
    with atomic_file(path) as partial:
        save_file(tensors, partial, metadata={"trust": text, "checksum": _checksum(tensors, text)})


def load_trust(path: Path, parts: Parts, kind: type[Trust] = LearnedTrust) -> LoadedTrust:
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
            f"{path} was trained by another version of fairseq-ccpr (features {described.features}, here {VERSION}): tune "
            "again, or give --trust none"
        )
    if "phrase" not in described.parts and described.settings.get(PhraseSettings.PREFIX, {}).get("lambda_") == 0:
        parts = {name: part for name, part in parts.items() if name != "phrase"}  # tuning left them out
    if described.parts != list(parts):
        raise ConfigurationError(
            f"{path} is trust in {' and '.join(described.parts)} parts, but --datastore has "
            f"{' and '.join(parts) or 'none'}: tune again, or name the datastore it was trained with"
        )
    for name, found in needs_of(parts).items():
        if described.needs.get(name) != found:
            raise ConfigurationError(
                f"{path} was trained with another {name} than --datastore has ({_short(described.needs.get(name))}, "
                f"here {_short(found)}): tune again, or give --trust none"
            )
    for name, part in parts.items():
        if described.keys[name] not in part.keys_fingerprints:
            logger.warning(
                "%s was trained with other %s keys than the datastore has: tune again if you can", path, name
            )
    trained: dict[str, dict[str, Tensor]] = {}
    for name in [name for name in tensors if name.startswith((OF_MEMORY, OLD_VOTES))]:
        full = name.replace(OLD_VOTES, f"{OF_MEMORY}{PhraseMemory.name}.", 1) if name.startswith(OLD_VOTES) else name
        memory, one = full.removeprefix(OF_MEMORY).split(".", 1)
        trained.setdefault(memory, {})[one] = tensors.pop(name)
    trust = kind(**_arguments(described.arguments))
    trust.load_state_dict(tensors)
    return LoadedTrust(trust.requires_grad_(False), trained, described)


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a network; those of version 0.2 say whether there are tokens and phrases."""
    if "memories" in arguments:
        return arguments
    kinds = [kind for kind in (TokenMemory, PhraseMemory) if arguments[kind.name]]
    others = {name: value for name, value in arguments.items() if name not in (TokenMemory.name, PhraseMemory.name)}
    return {"memories": {kind.name: kind.features for kind in kinds}, **others}


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
