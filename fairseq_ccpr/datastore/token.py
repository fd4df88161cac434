"""The token datastore: a key g(h) and a target token for each position, and the projection g."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fairseq_ccpr import timing
from fairseq_ccpr.datastore.manifest import TokenSection
from fairseq_ccpr.datastore.opened_part import KeyedPart
from fairseq_ccpr.datastore.parts import PROJECTION_FILE, PROVENANCE, SYMBOLS, VALUES
from fairseq_ccpr.datastore.source_index import SourceIndex
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import TIMEOUT
from fairseq_ccpr.storage.files import atomic_file
from fairseq_ccpr.storage.fingerprint import short

# Of what was measured: so much are 99% of its own sentences like the most alike one with another target.
FAMILIAR = "familiar"
# fairseq's symbol for what the dictionary does not have; retrieval never proposes it
UNKNOWN_SYMBOL = "<unk>"
HASHED_ROWS = 1 << 20  # entries at a time


class KeyProjection(nn.Module):
    """g(h) = Norm(PCA(FFN(h))), section 3 of the CLKNN paper: unit vectors, whose inner products are cosines.

    PCA is linear, so it folds into the last layer of the adapter, and g is two matrices however wide the
    adapter's output.
    """

    def __init__(self, hidden: nn.Linear, output: nn.Linear) -> None:
        super().__init__()
        self.hidden, self.output = hidden, output

    @classmethod
    def fold(cls, hidden: nn.Linear, output: nn.Linear, pca: Pca | None) -> KeyProjection:
        """Fold a PCA of an adapter's output into the adapter's two layers."""
        if pca is None:
            return cls(hidden, output)
        weight, bias = output.weight.double(), output.bias.double()
        components = pca.components
        return cls(hidden, _linear(components @ weight, components @ (bias - pca.mean)))

    @classmethod
    def scaling(cls, dimension: int) -> KeyProjection:
        """Scale states to length 1 and do nothing else: relu(h) - relu(-h) = h."""
        identity = torch.eye(dimension, dtype=torch.float64)
        both = torch.cat([identity, -identity])
        return cls(_linear(both, both.new_zeros(2 * dimension)), _linear(both.T, both.new_zeros(dimension)))

    @timing.phase(timing.PROJECTION)
    def forward(self, states: Tensor) -> Tensor:
        """Compute g(h), [H, d] of any float dtype -> fp32 [H, d_key], each of length 1."""
        z = self.output(torch.relu(self.hidden(states.to(self.hidden.weight.dtype))))
        return nn.functional.normalize(z, dim=-1)

    @property
    def dimension(self) -> int:
        return self.output.out_features

    def save(self, path: Path) -> None:
        with atomic_file(path) as partial:
            save_file(
                {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}, partial
            )

    @classmethod
    def load(cls, path: Path) -> KeyProjection:
        try:
            tensors = load_file(path)
            layers = [
                _linear(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in ("hidden", "output")
            ]
            return cls(*layers)
        except (SafetensorError, KeyError, TypeError) as error:
            raise DatastoreError(f"{path} is damaged ({error}): build the datastore again") from None


@dataclass
class Pca:
    """A principal component analysis: x -> components (x - mean)."""

    mean: Tensor  # fp64 [d]
    components: Tensor  # fp64 [dimension, d], rows of length 1, by falling variance


def fit_pca(rows: Tensor, dimension: int) -> Pca:
    """Compute principal components of `rows` [n, d], in fp64."""
    if not 1 <= dimension <= rows.size(1):
        raise ConfigurationError(
            f"--pca-dim is {dimension}, but the adapter's vectors are {rows.size(1)} wide: give 1 to "
            f"{rows.size(1)}"
        )
    mean = rows.mean(dim=0, dtype=torch.float64)
    covariance = torch.zeros(rows.size(1), rows.size(1), dtype=torch.float64, device=rows.device)
    for block in rows.split(1 << 14):
        centred = block.double() - mean
        covariance += centred.T @ centred
    _, vectors = torch.linalg.eigh(covariance)  # by rising variance
    return Pca(mean, vectors.T.flip(0)[:dimension].contiguous())


def sample_rows(count: int, seed: int = 1, most: int = 1 << 18) -> np.ndarray:
    """Draw which of `count` rows to fit a PCA on, in order; a few hundred dimensions need no more."""
    return np.sort(np.random.default_rng(seed).choice(count, min(most, count), replace=False))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.size(1), weight.size(0), device=weight.device)
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    return layer.requires_grad_(False)


class TokenDatastore(KeyedPart[TokenSection]):
    """A token datastore opened for reading: memory-mapped, checked for size and shape.

    Attributes:
        values: int32 [N].
        provenance: int32 [N, 2], sentence and position.
        source_index: of the source sentences.

    Raises:
        DatastoreError: missing, unfinished, damaged, or without a token part.
    """

    def __init__(self, directory: Path | str, timeout: float = TIMEOUT) -> None:
        super().__init__(directory, TokenSection, timeout)
        self.values, self.provenance = self.arrays[VALUES], self.arrays[PROVENANCE]
        self.source_index = SourceIndex(self.folder, self.section.source_index)

    def rows_of_sources(self, hashes: Collection[int]) -> dict[int, np.ndarray]:
        """Find the entries of the sentences with these sources: int64, ascending, by hash, as far as any."""
        index = self.source_index
        return {one: index.entries(sentences) for one, sentences in index.find(hashes).items()}

    def open_projection(self) -> KeyProjection | None:
        """Load the projection from the decoder's states to keys, on the CPU; None: the states are the keys."""
        described = self.section.projection
        if described is None:
            return None
        projection = KeyProjection.load(self.folder / PROJECTION_FILE)
        found = projection.hidden.in_features, projection.dimension
        if found != (described.query_dimension, self.section.dimension):
            raise DatastoreError(
                f"{self.folder / PROJECTION_FILE} goes from width {found[0]} to {found[1]}, but the "
                f"manifest says {described.query_dimension} to {self.section.dimension}: build the "
                "datastore again"
            )
        return projection

    def check_fingerprint(self, kind: str, found: str, option: str) -> None:
        """Refuse to work with a model or dictionary other than the one the datastore was built with."""
        expected = self.section.fingerprints[kind]
        if found != expected:
            raise DatastoreError(
                f"the datastore {self.directory} was built with another {kind.replace('_', ' ')}: it needs "
                f"{short(expected)}, {option} gives {short(found)}; build a datastore for this one"
            )

    def find_nonsense(self) -> Iterator[str]:
        """Check also that the values are tokens, and that projection and source index can be read."""
        yield from super().find_nonsense()
        vocabulary = len(self.read_symbols())
        for rows, said in self.blocks():
            if self.values[rows].min() < 0 or self.values[rows].max() >= vocabulary:
                yield f"values: tokens outside the dictionary in {said}"
        self.open_projection()
        yield from self.source_index.find_damage(self.section.size)

    def count_unknown(self) -> int:
        """Count the entries of the unknown token, which are useless: it is never proposed."""
        unknown = [number for number, symbol in enumerate(self.read_symbols()) if symbol == UNKNOWN_SYMBOL]
        return int(np.count_nonzero(np.isin(self.values, unknown)))

    def read_symbols(self) -> list[str]:
        with (self.folder / SYMBOLS).open(encoding="utf-8", newline="\n") as stream:
            return stream.read().split("\n")[:-1]


def hash_targets(values: np.ndarray, provenance: np.ndarray) -> np.ndarray:
    """Hash the target of each of S sentences, uint64 [S] by number: the same where the tokens are.

    It is 0 where a number has no entries; S is one more than the last number. Memory holds the hashes, and a
    block of rows.

    >>> provenance = np.array([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])
    >>> hashes = hash_targets(np.array([5, 6, 2, 6, 5, 2, 5, 6, 2]), provenance)
    >>> (hashes == hashes[0]).tolist(), hash_targets(np.empty(0), np.empty((0, 2))).tolist()
    ([True, False, True], [])

    Args:
        values, provenance: int32 [N] and [N, 2], as in a datastore, where sentences ascend.
    """
    hashes = np.zeros(provenance[-1, 0] + 1 if len(provenance) else 0, np.uint64)
    for start in range(0, len(values), HASHED_ROWS):
        sentences, positions = provenance[start : start + HASHED_ROWS].T
        tokens = values[start : start + HASHED_ROWS].astype(np.uint64)
        begins = np.flatnonzero(np.diff(sentences, prepend=-1))
        hashes[sentences[begins]] += np.add.reduceat(_mix(_mix(positions.astype(np.uint64)) + tokens), begins)
    return hashes


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Scatter uint64 numbers over all of uint64, one to one: the finaliser of SplitMix64."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
