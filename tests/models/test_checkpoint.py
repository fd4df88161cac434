"""Loading a checkpoint: its weights as they are, none drawn before, and what it says of its task."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq import tasks

from fairseq_ccpr.inference.resources import configure_system
from fairseq_ccpr.models.checkpoint import load_models, read_task
from tests.small_models import World


def _load(path: Path, world: World) -> Any:
    cfg = configure_system(["--path", str(path)], world.data_bin)
    (model,) = load_models([str(path)], tasks.setup_task(cfg.task))
    return model


def test_a_model_has_the_weights_of_its_checkpoint_and_draws_none(world: World) -> None:
    saved, before = torch.load(world.model, map_location="cpu")["model"], torch.get_rng_state()
    model = _load(world.model, world)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weights, saved[name]) for name, weights in model.named_parameters())
    assert torch.nn.Linear(3, 3).weight.any()  # and others do again


def test_large_weights_are_numbers(world: World, tmp_path: Path) -> None:
    state = torch.load(world.model, map_location="cpu")
    largest = torch.finfo(torch.float32).max
    state["model"]["decoder.layers.0.fc1.bias"][:2] = largest  # whose sum is infinite
    torch.save(state, tmp_path / "large.pt")
    loaded = _load(tmp_path / "large.pt", world)
    assert loaded.decoder.layers[0].fc1.bias[:2].tolist() == [largest] * 2


def test_the_task_of_a_checkpoint_that_was_replaced_is_read_again(world: World, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    shutil.copy(world.model, path)
    before = read_task(path)
    assert before["source_lang"] != "nl" and read_task(path) is before
    state = torch.load(path, map_location="cpu")
    state["cfg"]["task"]["source_lang"] = "nl"
    torch.save(state, tmp_path / "other.pt")
    (tmp_path / "other.pt").replace(path)
    assert read_task(path)["source_lang"] == "nl"
