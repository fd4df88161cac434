"""Trust: how much the model and each memory are worth, token by token.

A small network looks at features of the step and moves the interpolation weights that the settings give:

    w_m = f_m exp(a_m) / (1 + sum of f_m (exp(a_m) - 1)),    a = clamp(W2 tanh(W1 z + b1) + b2, -6, 6)

with f_m the weight of memory m by its settings, z the features, normalised. With W2 = b2 = 0 the weights are
f to the bit, and a memory with nothing to say (f_m = 0) gets nothing. The features are the model's, each
memory's own (`Memory.features`), and of each two memories whether they agree. Letters: N tokens, M memories,
F features, C tokens that a memory names.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fairseq_ccpr.datastore.manifest import TEXT
from fairseq_ccpr.datastore.parts import PROJECTION_FILE
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import Parts
from fairseq_ccpr.decoding.gate import Gate
from fairseq_ccpr.decoding.memory import Memory
from fairseq_ccpr.decoding.mixture import ModelEvidence, Vote
from fairseq_ccpr.decoding.options import PhraseSettings
from fairseq_ccpr.decoding.token_memory import TokenMemory, name_of
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.models.checkpoint import Undrawn
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import atomic_file

logger = logging.getLogger(__name__)

HIDDEN = 32
MOST_LOG_ODDS = 6.0  # of a, either way: a factor of 400
FORMER_PREFIXES = {"knn", "phrase"}  # of options and settings, today "tokens" and "phrases"
DIGEST = 64  # digits of a fingerprint
MEMORY = "memory."  # begins the names of what belongs to a memory, before the memory's name

Features = Mapping[str, Sequence[str]]  # names of the features of each memory
Trained = Mapping[str, Mapping[str, Tensor]]  # by memory


class TrustStep(NamedTuple):
    """What is known at N tokens when the interpolation weights are decided."""

    model: ModelEvidence
    votes: list[Vote]  # of each memory, with evidence
    weights: Tensor  # fp32 [N, M], f


class Decision(NamedTuple):
    """What trust makes of N tokens."""

    weights: Tensor  # fp32 [N, M]
    spread: Tensor | None = None  # fp32 [N, C], p over what the first memory names; None: as its vote has it


class Trust(nn.Module):
    """A way to decide interpolation weights that is trained on held-out sentences.

    Decoding calls `decide(inputs(step), step.weights)`; training computes the inputs once. A task names its
    kind as `trust_class`; `user_dir/` has one of its own.

    Args:
        memories: the names of the features of each memory that it weighs, at least one.
    """

    KIND: ClassVar[str]
    SPREADS: ClassVar[bool] = False  # whether it decides over the distribution of the first memory as well

    def __init__(self, memories: Features) -> None:
        super().__init__()
        self.memories = {name: list(features) for name, features in memories.items()}

    @classmethod
    def untrained(cls, memories: Sequence[Memory], small: bool) -> Trust:
        """Make one to be trained on top of the settings of memories.

        Args:
            small: whether the text has too few tokens for a hidden layer.
        """
        return cls({memory.name: memory.features for memory in memories})

    def arguments(self) -> dict[str, Any]:
        """Return what makes another of the same shape."""
        return {"memories": self.memories}

    def inputs(self, step: TrustStep) -> Tensor:
        """Collect all that the decision looks at, fp32 [N, I]; nothing that is trained is part of it."""
        raise NotImplementedError

    def prepare(self, inputs: Tensor) -> None:
        """Fit what is computed rather than trained to the inputs [N, I] of the training texts."""

    def decide(self, inputs: Tensor, weights: Tensor) -> Decision:
        """Decide for N tokens, by their inputs and the weights f that the settings give, fp32 [N, M]."""
        raise NotImplementedError

    def forward(self, step: TrustStep) -> Decision:
        return self.decide(self.inputs(step), step.weights)

    def stored(self) -> dict[str, Tensor]:
        """Return what a file keeps of it, as `load_state_dict` takes it."""
        return dict(self.state_dict())

    def signature(self) -> str:
        """Name all that decides the weights, in one word."""
        return f"trust:{self.KIND}-{fingerprint.short(fingerprint.of_parameters(self.state_dict().items()))}"


class LearnedTrust(Trust):
    """The network described above: a gate of which each memory has an output."""

    KIND = "learned"

    def __init__(self, memories: Features, hidden: int = HIDDEN) -> None:
        super().__init__(memories)
        self.gate = Gate(feature_names(memories), len(memories), hidden, MOST_LOG_ODDS)

    @classmethod
    def untrained(cls, memories: Sequence[Memory], small: bool) -> LearnedTrust:
        """Make one that leaves the weights as they are."""
        return cls({memory.name: memory.features for memory in memories}, 0 if small else HIDDEN)

    def arguments(self) -> dict[str, Any]:
        hidden = self.gate.hidden
        return {**super().arguments(), "hidden": hidden.out_features if hidden is not None else 0}

    def inputs(self, step: TrustStep) -> Tensor:
        return trust_features(step.model, step.votes)

    def prepare(self, inputs: Tensor) -> None:
        self.gate.prepare(inputs)

    def decide(self, inputs: Tensor, weights: Tensor) -> Decision:
        return Decision(reweigh(weights, self.gate(inputs)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gate's, under its names: files and signatures are older than the gate."""
        return self.gate.state_dict(*args, **kwargs)

    def stored(self) -> dict[str, Tensor]:
        return self.gate.stored()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return self.gate.load_state_dict(state_dict, strict, assign)


def feature_names(memories: Features) -> tuple[str, ...]:
    """Name the features of memories, in the order of `trust_features`."""
    pairs = [
        (f"{one} and {other} agree", f"{one} say favourite of {other}")
        for one, other in combinations(memories, 2)
    ]
    return *ModelEvidence.names(), *(name for names in (*memories.values(), *pairs) for name in names)


def trust_features(model: ModelEvidence, votes: Sequence[Vote]) -> Tensor:
    """Compute the features, fp32 [N, F]: the model's, each memory's, and those of each two memories."""
    columns = list(model.columns().values())
    columns += [vote.evidence.features(model) for vote in votes if vote.evidence is not None]
    if len(votes) > 1:
        highest = [vote.log_probs.max(dim=1, keepdim=True) for vote in votes]
        favourites = [vote.values.gather(1, most.indices) for vote, most in zip(votes, highest)]
        for one, other in combinations(range(len(votes)), 2):
            both = (highest[one].values > float("-inf")) & (highest[other].values > float("-inf"))
            named = votes[one].log_probs.masked_fill(votes[one].values != favourites[other], float("-inf"))
            agree = (favourites[one] == favourites[other]) & both
            columns += [agree.float(), named.amax(dim=1, keepdim=True).exp() * both]
    return torch.cat(columns, dim=1)


def reweigh(weights: Tensor, log_odds: Tensor) -> Tensor:
    """Multiply the odds of each memory against the model by exp(a), fp32 [N, M]; with a = 0 weights stay.

    >>> reweigh(torch.tensor([[0.5, 0.0]]), torch.tensor([[1.0986, 6.0]]))
    tensor([[0.7500, 0.0000]])
    """
    more = weights * log_odds.expm1()
    total = more.sum(dim=1, keepdim=True) if more.size(1) > 1 else more
    return (weights + more) / (1 + total)


@dataclass(frozen=True)
class TrustDescription:
    """What a file of trust says of itself."""

    kind: str
    arguments: dict[str, Any]  # of the network's class
    needs: dict[str, str]  # what it can be used with, by name: see `needs_of`
    keys: dict[str, str]  # digests of the parts' keys it was trained with
    settings: dict[str, dict[str, Any]]  # of retrieval it was trained with, by the prefix of their options
    # what it was worth when it was trained, by text and system
    texts: dict[str, Any] = field(default_factory=dict)
    weight: str = ""  # the policy of the token memory's weight it was trained with; older files do not say
    classes: dict[str, str] = field(default_factory=dict)  # see `trained_with`; older files do not say

    @classmethod
    def of(
        cls, trust: Trust, identity: str, memories: Sequence[Memory], parts: Parts, **others: Any
    ) -> TrustDescription:
        """Describe trust in memories, alongside models of this identity, for their parts of a datastore."""
        known = [memory.part for memory in memories]
        parts = {name: part for name, part in parts.items() if name in known}
        keys = {name: part.keys_fingerprint for name, part in parts.items()}
        weights = [name_of(memory.policy) for memory in memories if isinstance(memory, TokenMemory)]
        classes = trained_with(identity, memories)
        return cls(
            trust.KIND,
            trust.arguments(),
            needs_of(parts),
            keys,
            weight="".join(weights),
            classes=classes,
            **others,
        )


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
                "projection": section.digest(PROJECTION_FILE) or "none",
            }
        elif isinstance(part, PhraseDatastore):
            needs |= {"phrase encoder": part.section.fingerprints["encoder"]}
        else:
            needs |= {"target dictionary": part.section.fingerprints["target_dictionary"]}
    return needs


def trained_with(identity: str, memories: Iterable[Memory]) -> dict[str, str]:
    """Name what trust learns to weigh: models, and the classes of memories and of what searches the tokens."""
    found = {"model": identity}
    for memory in memories:
        found[f"memory {memory.name}"] = type(memory).__name__
        if isinstance(memory, TokenMemory):
            found["retriever"] = type(memory.retriever).__name__
    return found


def save_trust(trust: Trust, trained: Trained, described: TrustDescription, path: Path) -> None:
    """Write a safetensors file, under its final name only when it is complete."""
    both = trust.stored() | {
        f"{MEMORY}{memory}.{name}": one for memory, state in trained.items() for name, one in state.items()
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in both.items()}
    text = json.dumps(asdict(described))
    with atomic_file(path) as partial:
        save_file(tensors, partial, metadata={"trust": text, "checksum": _checksum(tensors, text)})


def load_trust(path: Path, parts: Parts, kind: type[Trust] = LearnedTrust) -> LoadedTrust:
    """Read trust, and check that it belongs to the parts of a datastore."""
    tensors, described = _read(path)
    if described.kind != kind.KIND:
        raise ConfigurationError(
            f"{path} is trust of the kind {described.kind}, and --task takes {kind.KIND}: give the --task and --user-dir it "
            "was tuned with, tune again, or give --trust none"
        )
    if (
        "phrase" not in described.keys
        and described.settings.get(PhraseSettings.PREFIX, {}).get("lambda_") == 0
    ):
        parts = {name: part for name, part in parts.items() if name != "phrase"}  # tuning left them out
    if TEXT not in described.keys:  # it was added after tuning
        parts = {name: part for name, part in parts.items() if name != TEXT}
    if list(described.keys) != list(parts):
        raise ConfigurationError(
            f"{path} is trust in {' and '.join(described.keys)} parts, but --datastore has "
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
    for name in [name for name in tensors if name.startswith(MEMORY)]:
        memory, one = name.removeprefix(MEMORY).split(".", 1)
        trained.setdefault(memory, {})[one] = tensors.pop(name)
    with Undrawn():
        trust = kind(**described.arguments)
    trust.load_state_dict(tensors)
    return LoadedTrust(trust.requires_grad_(False), trained, described)


def _short(value: str | None) -> str:
    return fingerprint.short(value) if value and len(value) == DIGEST else value or "none"


def _read(path: Path) -> tuple[dict[str, Tensor], TrustDescription]:
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - it is no mapping
        if metadata["checksum"] != _checksum(tensors, metadata["trust"]):
            raise ValueError("its checksum is not that of its content")
        said = json.loads(metadata["trust"])
        if "memories" not in said["arguments"] or FORMER_PREFIXES & said["settings"].keys():
            raise ConfigurationError(
                f"{path} was trained by an earlier version of fairseq-ccpr, on other features or settings: tune "
                "again, or give --trust none"
            )
        return tensors, TrustDescription(**said)
    except FileNotFoundError:
        raise ConfigurationError(
            f"--trust {path} is missing: give a file that fairseq-ccpr tune wrote"
        ) from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DatastoreError(f"{path} is damaged, or no file of trust ({error}): tune again") from None


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digests = (
        (name, hashlib.sha256(one.numpy().tobytes()).hexdigest()) for name, one in sorted(tensors.items())
    )
    return fingerprint.of_strings([text, *(part for both in digests for part in both)])
