"""acc@1 of phrase types, and the systems that encode them from any number of example sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.accuracy.phrase_systems import BLOCK_TEXTS, MUSE, load_muse
from fairseq_ccpr.lab.xpr.lexicon import Lexicon, PhraseTypes
from fairseq_ccpr.lab.xpr.type_vectors import Encode, find_translations, type_means
from fairseq_ccpr.models.phrase_encoder import SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.pretrained.context_encoder import ContextEncoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder, span_means
from fairseq_ccpr.storage.fingerprint import of_strings

ORTHOGONAL = "orthogonal:"


@dataclass(frozen=True)
class TypeResult:
    """acc@1 of a system in one setting, per cent."""

    data: str
    system: str
    training: str  # see `setting_of`
    layer: int  # 0 where there is none to choose
    sentences: int
    forward: float  # source phrases that find a translation
    backward: float

    @property
    def mean(self) -> float:
        """Average both directions."""
        return (self.forward + self.backward) / 2

    def as_json(self) -> dict[str, Any]:
        """Convert to a dictionary, with the mean."""
        return asdict(self) | {"mean": self.mean}


def evaluate_types(
    systems: Mapping[str, TypeSystem], data: Mapping[str, Lexicon], counts: Sequence[int], show: bool
) -> list[TypeResult]:
    """Measure each system on each lexicon."""
    results = []
    for data_name, lexicon in data.items():
        for name, system in systems.items():
            training = setting_of(system.trained_on, lexicon.manifest.language_pair)
            for (layer, count), (source, target) in sorted(system.encode(lexicon, counts, show).items()):
                pairs = torch.from_numpy(lexicon.pairs.astype("int64")).to(source.device)
                found = (
                    find_translations(source, target, pairs),
                    find_translations(target, source, pairs.flip(1)),
                )
                forward, backward = (round(100 * float(right.float().mean()), 2) for right in found)
                results.append(TypeResult(data_name, name, training, layer, count, forward, backward))
    return results


def setting_of(trained_on: Sequence[str] | None, language_pair: str) -> str:
    """Name the paper's setting in which a system is tested on a language pair.

    >>> [setting_of(pairs, "de-en") for pairs in ([], ["en-de"], ["fr-en"], ["de-en", "fr-en"], None)]
    ['unsupervised', 'supervised', 'zero-shot', 'multilingual', 'other']
    """
    if trained_on is None:
        return "other"
    if not trained_on:
        return "unsupervised"
    if sorted(language_pair.split("-")) not in [sorted(pair.split("-")) for pair in trained_on]:
        return "zero-shot"
    return "supervised" if len(trained_on) == 1 else "multilingual"


def accuracy_rows(results: Sequence[TypeResult]) -> list[list[Any]]:
    """Tabulate the results, the header first."""
    table: list[list[Any]] = [["data", "system", "setting", "layer", "sentences", "→", "←", "mean"]]
    for one in results:
        cells = [one.data, one.system, one.training, one.layer or "", one.sentences]
        table.append([*cells, *(f"{value:.1f}" for value in (one.forward, one.backward, one.mean))])
    return table


Setting = tuple[int, int]  # layer, example sentences; the layer is 0 for a system that has none to choose
Both = tuple[Tensor, Tensor]  # of source and target phrases, fp32 [n, d], of length 1


class TypeSystem(Protocol):
    """An encoder of phrase types."""

    fingerprint: str  # of all that decides the vectors
    # language pairs of its phrase pairs; None if it was trained on something else
    trained_on: Sequence[str] | None

    def encode(self, lexicon: Lexicon, counts: Sequence[int], show: bool) -> dict[Setting, Both]:
        """Encode all phrases, for each layer and number of sentences; 0 is the phrase alone."""


class TransformerTypes:
    """A Transformer whose vectors of spans are averaged over sentences.

    Args:
        encode: tokens and spans -> a vector of each span for each layer, fp32 [J, S, d].
        finish: layer and means [n, d] -> vectors of length 1.
    """

    def __init__(
        self,
        context: ContextEncoder,
        layers: Sequence[int],
        encode: Encode,
        finish: Callable[[int, Tensor], Tensor],
        digest: str,
        trained_on: Sequence[str] | None,
    ) -> None:
        self.context, self.layers, self._encode, self._finish = context, layers, encode, finish
        self.fingerprint, self.trained_on = digest, trained_on

    @torch.inference_mode()
    def encode(self, lexicon: Lexicon, counts: Sequence[int], show: bool) -> dict[Setting, Both]:
        """Average the vectors of each phrase over its sentences."""
        context, device = self.context, next(self.context.parameters()).device
        source, target = (
            type_means(self._encode, context.tokenizer, types, counts, context.max_positions, device, show)
            for types in lexicon.sides
        )
        return {
            (layer, count): (self._finish(layer, source[c, j]), self._finish(layer, target[c, j]))
            for c, count in enumerate(counts)
            for j, layer in enumerate(self.layers)
        }


class MuseTypes:
    """A sentence encoder: the phrase's own vector, or the mean of those of its example sentences."""

    trained_on: Sequence[str] | None = None

    def __init__(self, device: torch.device) -> None:
        self.sentences = load_muse(device)
        self.fingerprint = self.sentences.fingerprint

    def encode(self, lexicon: Lexicon, counts: Sequence[int], show: bool) -> dict[Setting, Both]:
        """Encode the phrase alone, or average its example sentences."""
        source, target = ([self._means(types, count) for count in counts] for types in lexicon.sides)
        return {(0, count): (source[c], target[c]) for c, count in enumerate(counts)}

    def _means(self, types: PhraseTypes, count: int) -> Tensor:
        texts, owners = [], []
        for number in range(len(types)):
            places = range(min(count, int(types.counts[number])))
            phrase_texts = [types.example(number, place)[0] for place in places] or [types.phrases[number]]
            texts += phrase_texts
            owners += [number] * len(phrase_texts)
        blocks = (texts[start : start + BLOCK_TEXTS] for start in range(0, len(texts), BLOCK_TEXTS))
        encoded = [np.asarray(self.sentences.encode_sentences(block), np.float32) for block in blocks]
        vectors = torch.from_numpy(np.concatenate(encoded))
        sums = vectors.new_zeros(len(types), vectors.size(1)).index_add(0, torch.tensor(owners), vectors)
        return normalize(sums, dim=1).to(self.sentences.device)


class OrthogonalTypes:
    """Another system, its source vectors rotated towards the targets of training pairs: W = U V^T of X^T Y = U S V^T."""

    def __init__(self, system: TransformerTypes, train: Sequence[Lexicon]) -> None:
        self.system, self.train = system, train
        self.trained_on: Sequence[str] | None = sorted({lexicon.manifest.language_pair for lexicon in train})
        self.fingerprint = of_strings(
            [system.fingerprint, *(lexicon.manifest.fingerprints["pairs"] for lexicon in train)]
        )

    def encode(self, lexicon: Lexicon, counts: Sequence[int], show: bool) -> dict[Setting, Both]:
        """Encode with the other system, and rotate the source vectors."""
        parts = [self.system.encode(pair_lexicon, counts, show) for pair_lexicon in self.train]
        found = self.system.encode(lexicon, counts, show)
        for setting, (source, target) in found.items():
            covariance = source.new_zeros(source.size(1), source.size(1))
            for pair_lexicon, vectors in zip(self.train, parts):
                rows = torch.from_numpy(pair_lexicon.pairs.T.astype(np.int64))
                covariance += vectors[setting][0][rows[0]].T @ vectors[setting][1][rows[1]]
            left, _, right = torch.linalg.svd(covariance)
            found[setting] = source @ left @ right, target
        return found


def load_type_system(
    word: str, layers: Sequence[int] | None, train: Sequence[Lexicon], device: torch.device, bf16: bool
) -> TypeSystem:
    """Load a system by its word on the command line."""
    if word.startswith(ORTHOGONAL):
        if not train:
            raise ConfigurationError(f"--encoder {word} learns from phrase pairs: give --train FOLDER")
        plain = load_type_system(word.removeprefix(ORTHOGONAL), layers, train, device, bf16)
        if not isinstance(plain, TransformerTypes):
            raise ConfigurationError(
                f"--encoder {word}: give the folder of a pretrained encoder after {ORTHOGONAL}"
            )
        return OrthogonalTypes(plain, train)
    path = Path(word)
    if path.is_dir():
        context = ContextEncoder.load(path, bf16=bf16).to(device)
        layers = layers or [context.layers]
        return TransformerTypes(
            context, layers, _means_of_layers(context, layers), _unit, context.fingerprint(), []
        )
    if path.is_file():
        encoder = load_phrase_encoder(path, bf16=bf16).to(device)
        return _xpr_types(encoder, layers) if isinstance(encoder, XprEncoder) else _context_types(encoder)
    if word == MUSE:
        return MuseTypes(device)
    raise ConfigurationError(
        f"there is no encoder '{word}': give a checkpoint of fairseq-train --task phrase_lexicon or phrase_contrast, the "
        f"folder of a pretrained encoder, the same after {ORTHOGONAL}, or {MUSE}"
    )


def _means_of_layers(context: ContextEncoder, layers: Sequence[int]) -> Encode:
    def encode(tokens: Tensor, spans: Tensor) -> Tensor:
        return torch.stack([span_means(states, spans) for states in context.states_of_layers(tokens, layers)])

    return encode


def _unit(_: int, means: Tensor) -> Tensor:
    return normalize(means, dim=1)


def _xpr_types(encoder: XprEncoder, layers: Sequence[int] | None) -> TransformerTypes:
    layers = layers or [encoder.layer]  # its head belongs to that; other layers are averaged without one

    def finish(layer: int, means: Tensor) -> Tensor:
        return encoder.project(means) if layer == encoder.layer else _unit(layer, means)

    encode = _means_of_layers(encoder.context, layers)
    return TransformerTypes(
        encoder.context, layers, encode, finish, encoder.fingerprint(), encoder.trained_on
    )


def _context_types(encoder: SpanEncoder) -> TransformerTypes:
    def encode(tokens: Tensor, spans: Tensor) -> Tensor:
        return encoder.vectors(encoder.states(tokens), spans).unsqueeze(0)

    context = encoder.context
    assert isinstance(context, ContextEncoder)  # as of every phrase encoder with a checkpoint of its own
    return TransformerTypes(context, [context.layers], encode, _unit, encoder.fingerprint(), None)
