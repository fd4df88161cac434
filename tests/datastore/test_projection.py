"""The projection of keys: folded, fitted, stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.decomposition import PCA

from fairseq_ccpr.datastore.token import KeyProjection, Pca, fit_pca
from fairseq_ccpr.models.token_adapter import TokenAdapter


def test_folded_projection_equals_the_unfolded() -> None:
    adapter = TokenAdapter(12, 30, 10)
    rows = adapter(4 * torch.randn(500, 12)).detach()
    pca = fit_pca(rows, 6)
    states = 4 * torch.randn(50, 12)
    found = KeyProjection.fold(adapter.hidden, adapter.output, pca)(states.half())
    z = adapter.double()(states.half().double())
    wanted = torch.nn.functional.normalize((z - pca.mean) @ pca.components.T, dim=1)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)


def test_pca_equals_scikit_learn() -> None:
    rows = torch.randn(800, 9) @ torch.randn(9, 9) + 5
    found, wanted = fit_pca(rows, 5), PCA(5).fit(rows.double().numpy())
    np.testing.assert_allclose(found.mean, wanted.mean_, atol=1e-8)
    cosines = (found.components.numpy() * wanted.components_).sum(axis=1)
    np.testing.assert_allclose(np.abs(cosines), 1, atol=1e-8)


def test_projection_survives_the_disk(tmp_path: Path) -> None:
    adapter = TokenAdapter(5, 8, 6)
    pca = Pca(torch.zeros(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)[:3])
    projection = KeyProjection.fold(adapter.hidden, adapter.output, pca)
    projection.save(tmp_path / "p.safetensors")
    states = torch.randn(4, 5)
    assert torch.equal(KeyProjection.load(tmp_path / "p.safetensors")(states), projection(states))


def test_its_file_may_be_read_by_whom_new_files_may(tmp_path: Path) -> None:
    KeyProjection.scaling(4).save(tmp_path / "p.safetensors")
    (tmp_path / "new").touch()
    assert (tmp_path / "p.safetensors").stat().st_mode == (tmp_path / "new").stat().st_mode
