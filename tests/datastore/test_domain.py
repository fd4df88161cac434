"""What a token datastore knows of its own text: against plain loops in float64, far text told from near, damage refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairseq_ccpr.datastore.domain import SHRINKAGE, Domain
from fairseq_ccpr.errors import DatastoreError
from tests.torch_operations import NoRoundTrip
from tests.vectors import DEVICE

WIDTH = 12


class Text:
    """Random text: states around a mean of their own, correlated among themselves and along a sentence."""

    def __init__(self, width: int = WIDTH, offset: float = 2.0) -> None:
        self.mixing = torch.randn(width, width)
        self.mean = offset * torch.randn(width)

    def sentences(self, count: int) -> tuple[Tensor, Tensor]:
        """States fp16 [M, d] of whole sentences, and int64 lengths."""
        lengths = torch.randint(1, 15, (count,))
        topics = torch.randn(count, len(self.mean)).repeat_interleave(lengths, dim=0)
        noise = torch.randn(int(lengths.sum()), len(self.mean))
        return ((0.4 * topics + noise) @ self.mixing + self.mean).half(), lengths

    def domain(self, count: int) -> Domain:
        return Domain.of(*self.sentences(count), torch.arange(count))


def plain_statistics(states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and inverse of the shrunk covariance, float64."""
    mean = sum(states) / len(states)
    covariance = sum(np.outer(state - mean, state - mean) for state in states) / (len(states) - 1)
    shrunk = covariance + SHRINKAGE * np.trace(covariance) / len(mean) * np.eye(len(mean))
    return mean, np.linalg.inv(shrunk)


def plain_distance(state: np.ndarray, mean: np.ndarray, precision: np.ndarray) -> float:
    """Logarithm of the squared Mahalanobis distance per dimension."""
    return float(np.log((state - mean) @ precision @ (state - mean) / len(mean)))


def test_distances_and_cosines_equal_plain_loops() -> None:
    text = Text()
    states, lengths = text.sentences(50)
    domain = Domain.of(states, lengths, torch.arange(50))
    exact = states.double().numpy()
    mean, precision = plain_statistics(exact)
    queries = torch.cat([states[:20].float(), 5 * torch.randn(20, WIDTH)])
    with NoRoundTrip():
        distances, cosines = domain.distance(queries), domain.cosine(queries, queries.norm(dim=1))
    assert distances.dtype == cosines.dtype == domain.mean.dtype == domain.whitening.dtype == torch.float32
    wanted = [plain_distance(query, mean, precision) for query in queries.double().numpy()]
    np.testing.assert_allclose(distances, wanted, atol=1e-4)
    lengths_of = np.linalg.norm(queries.double().numpy(), axis=1) * np.linalg.norm(mean)
    np.testing.assert_allclose(cosines, queries.double().numpy() @ mean / lengths_of, atol=1e-5)


@pytest.mark.parametrize("states, sentences", [(1, 1), (9, 1), (2, 2), (6, 3), (300, 30)])
def test_few_states_of_many_dimensions_are_not_singular(states: int, sentences: int) -> None:
    lengths = torch.full((sentences,), states // sentences)
    domain = Domain.of(torch.randn(states, 200).half(), lengths, torch.arange(sentences))
    same = Domain.of(torch.ones(states, 200).half(), lengths, torch.arange(sentences))
    for value in (domain.whitening, domain.distance(torch.randn(5, 200)), same.distance(torch.ones(1, 200))):
        assert torch.isfinite(value).all()


def test_own_text_is_nearer_than_other_text() -> None:
    text = Text()
    domain = text.domain(400)
    own, (other, _) = domain.distance(text.sentences(300)[0].float()), Text().sentences(300)
    assert own.quantile(0.9) < domain.distance(other.float()).median()


def test_on_a_device_distances_are_the_same() -> None:
    domain, queries = Text().domain(60), torch.randn(9, WIDTH)
    moved = domain.to(DEVICE)
    assert moved.distance(queries.to(DEVICE)).device.type == DEVICE.type
    torch.testing.assert_close(
        moved.distance(queries.to(DEVICE)).cpu(), domain.distance(queries), rtol=1e-4, atol=1e-4
    )
    norms = queries.norm(dim=1)
    cosines = moved.cosine(queries.to(DEVICE), norms.to(DEVICE)).cpu()
    torch.testing.assert_close(cosines, domain.cosine(queries, norms), rtol=1e-4, atol=1e-4)


def test_selecting_keeps_whole_sentences() -> None:
    domain = Text().domain(30)
    chosen = torch.rand(30) < 0.4
    chosen[3] = True
    kept = domain.select(chosen)
    parts = domain.states.split(domain.lengths.tolist())
    assert torch.equal(kept.states, torch.cat([part for part, wanted in zip(parts, chosen) if wanted]))
    assert kept.numbers.tolist() == [i for i in range(30) if chosen[i]] and kept.lengths.sum() == len(
        kept.states
    )


def test_the_sample_is_enough_to_compute_all_again(tmp_path: Path) -> None:
    domain = Text().domain(50)
    domain.save(tmp_path / "one")
    read = Domain.load(tmp_path / "one")
    read.save(tmp_path / "two")
    Domain.of(read.states, read.lengths, read.numbers).save(tmp_path / "three")
    for name in ("two", "three"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "one").read_bytes()


def test_damage_is_one_sentence(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "domain.safetensors"
    Text().domain(20).save(path)
    good, tensors = path.read_bytes(), load_file(path)
    header = 8 + int.from_bytes(good[:8], "little")
    for bit in rng.choice(8 * header, 400, replace=False).tolist():
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(
            DatastoreError, match=r"domain\.safetensors is damaged \(.*: build the datastore again"
        ):
            Domain.load(path)
    for length in (0, 7, header, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(DatastoreError, match="is damaged"):
            Domain.load(path)
    for name, wrong in {
        "mean": tensors["mean"][1:],
        "whitening": tensors["whitening"][1:],
        "states": tensors["states"].float(),
        "lengths": tensors["lengths"] + 1,
        "numbers": tensors["numbers"][1:],
    }.items():
        save_file(tensors | {name: wrong.contiguous()}, path)
        with pytest.raises(DatastoreError, match=r"is damaged \(its \w+ is .*, not .*\)"):
            Domain.load(path)
    save_file(tensors | {"near": torch.tensor(1.0), "far": torch.tensor(2.0)}, path)
    assert torch.equal(Domain.load(path).mean, tensors["mean"])  # as earlier versions wrote it
    save_file({name: tensor for name, tensor in tensors.items() if name != "mean"}, path)
    with pytest.raises(DatastoreError, match="is damaged"):
        Domain.load(path)
    path.unlink()
    with pytest.raises(DatastoreError, match="is damaged"):
        Domain.load(path)
