"""The settings that a datastore measures for itself, where nobody tuned it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.building import defaults, token_build
from fairseq_ccpr.building.defaults import FACTORS, LAMBDAS, measure_defaults
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.tuned import write_tuned
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.search.exact import ExactIndex
from tests.helpers import call
from tests.small_models import World, build


@pytest.fixture
def of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small datastores as well."""
    monkeypatch.setattr(defaults, "LEAST", 1)


@pytest.mark.usefixtures("of_few")
@pytest.mark.parametrize("known", [False, True], ids=["without the model", "with it"])
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_it_is_the_likeliest_of_a_plain_search(metric: str, known: bool, rng: np.random.Generator) -> None:
    """200 tokens of 40 sentences, some twice; keys of a sentence lie together, those of a token a little further apart."""
    values = rng.integers(4, 9, 200).astype(np.int32)
    values[100:140] = values[:40]
    texts = values.reshape(40, 5)
    same = (texts[:, None] == texts).all(axis=2).repeat(5, axis=0).repeat(5, axis=1)
    provenance = np.stack([np.arange(200) // 5, np.arange(200) % 5], axis=1).astype(np.int32)
    keys = rng.normal(size=(9, 12))[values] + 0.7 * rng.normal(size=(40, 12))[provenance[:, 0]]
    keys = keys + 0.5 * rng.normal(size=keys.shape)
    keys = (keys / np.linalg.norm(keys, axis=1, keepdims=True) if metric == "ip" else keys).astype(np.float16)
    said = torch.from_numpy(rng.uniform(-3, -0.1, 200).astype(np.float32))
    found = measure_defaults(
        ExactIndex(keys, metric), keys, values, provenance, (lambda rows, *_: said[rows]) if known else None
    )
    exact = keys.astype(np.float64)
    scores = exact @ exact.T if metric == "ip" else -np.square(exact[:, None] - exact).sum(axis=2)
    scores[same] = -np.inf
    nearest = np.argsort(-scores, axis=1)[:, :8]
    kept = np.take_along_axis(scores, nearest, axis=1)
    spread, best = np.median(kept[:, 0] - kept[:, -1]), (-math.inf, 0.0, 0.0)
    for temperature in (factor * spread for factor in FACTORS):
        weights = np.exp((kept - kept[:, :1]) / temperature)
        p = (weights * (values[nearest] == values[:, None])).sum(axis=1) / weights.sum(axis=1)
        for one in LAMBDAS if known else (0.5,):
            mixed = one * p + (1 - one) * (said.exp().numpy() if known else 0.01)
            best = max(best, (np.log(mixed).mean(), temperature, one))
    assert found["temperature"] == pytest.approx(best[1], rel=0.06)
    assert found.get("lambda_") == (best[2] if known else None)


@pytest.mark.usefixtures("of_few")
def test_of_too_few_tokens_nothing_is_measured(rng: np.random.Generator) -> None:
    keys, values = rng.normal(size=(50, 4)).astype(np.float16), np.full(50, 5, np.int32)
    for sentences in (np.arange(50), np.zeros(50, int)):
        provenance = np.stack([sentences, np.zeros(50, int)], axis=1).astype(np.int32)
        assert measure_defaults(ExactIndex(keys, "l2"), keys, values, provenance) == {}
    same, provenance = np.ones((300, 4), np.float16), np.stack([np.arange(300), np.zeros(300, int)], axis=1)
    assert measure_defaults(ExactIndex(same, "l2"), same, np.full(300, 5), provenance) == {}


def test_what_is_neither_given_nor_tuned_is_as_measured(world: World, tmp_path: Path) -> None:
    store = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    suits = TokenDatastore(store).section.suits

    def used(**given: object) -> tuple[float, float]:
        settings = Translator(datastore=store, device="cpu", **given).ensemble.find(TokenMemory).settings  # type: ignore[union-attr]
        return settings.temperature, settings.lambda_

    assert used() == (suits["temperature"], suits["lambda_"]) and 0 < suits["lambda_"] < 1
    assert used(tokens_temperature=7) == (7, suits["lambda_"])
    signature = Translator(datastore=store, device="cpu").signature
    assert f"|lambda:{suits['lambda_']}|T:{suits['temperature']}|" in str(signature)
    assert f"T {suits['temperature']:g}, lambda {suits['lambda_']:g}" in call("inspect", store).stdout
    write_tuned({"token": TokenDatastore(store)}, {"tokens": {"temperature": 3.0}}, "tuned")
    assert used() == (3, suits["lambda_"]) and used(untuned=True) == (suits["temperature"], suits["lambda_"])


def test_an_older_datastore_measures_when_its_build_is_run_again(world: World, tmp_path: Path) -> None:
    store = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    manifest = Manifest.read(store)
    assert manifest.token is not None
    known, manifest.token.suits = manifest.token.suits, {}
    manifest.write(store)
    settings = Translator(datastore=store, device="cpu").ensemble.find(TokenMemory).settings  # type: ignore[union-attr]
    assert (settings.temperature, settings.lambda_) == (10, 0.5)
    with patch.object(token_build, "cross_entropy", wraps=token_build.cross_entropy) as asked:
        build(world, store)
    assert TokenDatastore(store).section.suits == known
    assert {len(one.args[0]) for one in asked.call_args_list} == {64}


def test_it_survives_merging_and_compacting(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "LEAST", 300)
    stores = {name: tmp_path / name for name in ("valid", "test")}
    for name, store in stores.items():
        build(world, store, "--subset", name)
    before = {name: TokenDatastore(store).section.suits for name, store in stores.items()}
    call("merge", *stores.values(), "--output", tmp_path / "both", "--quiet", "--cpu")
    both = TokenDatastore(tmp_path / "both").section.suits
    assert both["lambda_"] == before["valid"]["lambda_"] and both.keys() == before["valid"].keys()
    with Translator(datastore=tmp_path / "both", device="cpu") as translator:
        translator.learn("Es werde Licht!", "Let there be light!")
    call("compact", tmp_path / "both", "--quiet", "--cpu")
    assert TokenDatastore(tmp_path / "both").section.suits == both
