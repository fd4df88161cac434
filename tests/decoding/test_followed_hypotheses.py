"""What depends on how a hypothesis went: the guard; and what is force-decoded after beam search."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fairseq_ccpr.datastore.domain import Domain
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from tests.helpers import equal, run
from tests.small_models import World


def test_scores_agree_in_batches_of_any_size(check_rescoring: Callable) -> None:
    """Of what beam search wrote: near ties may be decided otherwise in another batch."""
    for size in (40, 3):
        check_rescoring("--knn-lambda", 0.6, "--knn-guard", "--batch-size", size)


def test_the_guard_keeps_far_text_from_the_datastore(decode: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = decode("--knn-lambda", 0.6, "--knn-guard")
    assert not equal(guarded, decode(base=True), tolerance=1e-2)  # text of its own domain is retrieved for
    known = TokenDatastore.open_domain

    def of_elsewhere(self: TokenDatastore) -> Domain | None:
        domain = known(self)
        return replace(domain, near=domain.near - 50, far=domain.far - 50) if domain is not None else None

    monkeypatch.setattr(TokenDatastore, "open_domain", of_elsewhere)
    assert equal(decode("--knn-lambda", 0.6, "--knn-guard"), decode(base=True))


def test_the_guard_wants_a_datastore_that_knows_its_text(world: World) -> None:
    domain = TokenDatastore(world.datastore).open_domain()
    assert domain is not None
    far = domain.far.expand(3) + torch.tensor([-99.0, 0.0, 1.0])
    assert domain.familiarity(far).tolist() == [1, 0, 0]


def test_temperature_is_the_same_after_beam_search(world: World, decode: Callable, tmp_path: Path) -> None:
    words = ["--knn-lambda", 0.6, "--temperature", 0.5, "--beam", 2]
    found = decode(*words, "--knn-log", tmp_path / "log")
    of_sentence: dict[int, float] = {}
    for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines():
        token = json.loads(line)
        of_sentence[token["sentence"]] = of_sentence.get(token["sentence"], 0.0) + token["mixed"]
    for number, hypotheses in found.items():
        assert of_sentence[number] == pytest.approx(float(hypotheses[0]["positional_scores"].sum()), abs=2e-2)


def test_a_model_outlives_the_ensembles_made_of_it(world: World) -> None:
    cfg = parse_generation(world.options())
    task, models = load(cfg)
    module = models[0].decoder.output_projection
    for _ in range(3):
        ensemble = task.build_ensemble(models)
        assert len(module._forward_pre_hooks) == 1
        del ensemble
        gc.collect()
    assert not module._forward_pre_hooks


def test_constraints_are_kept(world: World, tmp_path: Path) -> None:
    """fairseq-interactive takes them after a tab."""
    source = (world.data_bin / "text" / "test.de").read_text(encoding="utf-8").splitlines()[0]
    wanted = (world.data_bin / "text" / "test.en").read_text(encoding="utf-8").split()[2]
    (tmp_path / "in.txt").write_text(f"{source}\t{wanted}\n", encoding="utf-8")
    options = world.options("--constraints", "--input", tmp_path / "in.txt", "--knn-lambda")
    for words in ([*options, "0.7"], [*options, "0"]):
        shown = run("fairseq-interactive", *words).stdout
        written = re.findall(r"^H-0\t\S+\t(.*)$", shown, flags=re.MULTILINE)
        assert written and wanted in written[0].split(), shown
