"""What depends on how a hypothesis went: the guard; and what is force-decoded after beam search."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr.building.token_build import load_task
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.source_index import SentenceMemory
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.token_memory import STRANGE
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from tests.helpers import call, equal, refused, run
from tests.small_models import World


@pytest.fixture
def guarded_store(world: World, tmp_path: Path) -> Callable[..., Path]:
    """Copies the datastore, and says from which likeness on the guard leaves it to translate."""

    def make(**bounds: float) -> Path:
        folder = Path(shutil.copytree(world.datastore, tmp_path / f"store{len([*tmp_path.iterdir()])}"))
        manifest = Manifest.read(folder)
        assert manifest.token is not None
        replace(manifest, token=replace(manifest.token, suits=bounds)).write(folder)
        return folder

    return make


def test_scores_agree_in_batches_of_any_size(
    check_rescoring: Callable, guarded_store: Callable[..., Path]
) -> None:
    """Of what beam search wrote: near ties may be decided otherwise in another batch."""
    for size in (40, 3):
        words = ["--tokens-lambda", 0.6, "--batch-size", size, "--tokens-guard", "--datastore"]
        check_rescoring(*words, guarded_store(familiar=0.5))


def test_the_guard_keeps_sentences_like_none_of_the_datastores_from_it(
    world: World, decode: Callable, guarded_store: Callable[..., Path]
) -> None:
    """The weight falls with likeness, and sentences at its end are translated as without a datastore, unsearched."""
    words = ["--tokens-lambda", 0.6, "--tokens-likeness", 4, "--datastore"]
    without, plain = decode(*words, world.datastore), decode(base=True)
    task = load_task(world.data_bin, "de", "en")
    task.load_dataset("test")
    index, sources = TokenDatastore(world.datastore).source_index, task.dataset("test").src
    assert index is not None
    memory = SentenceMemory(index, [], np.empty(0, np.int64))
    best = memory.likeness([task.source_subwords(sources[i]) for i in range(len(sources))]).best
    middle = float(np.median(best))
    searched: list[int] = []
    search = TokenRetriever.search

    def watched(self: TokenRetriever, queries: torch.Tensor, k: int) -> Any:
        searched.append(len(queries))
        return search(self, queries, k)

    with patch.object(TokenRetriever, "search", watched):
        found = decode(*words, guarded_store(familiar=middle))
        few, searched[:] = sum(searched), []
        assert equal(decode(*words, guarded_store(familiar=2.0)), plain) and not searched
        assert equal(decode(*words, guarded_store(familiar=0.0)), without)
    assert 0 < few < 0.9 * sum(searched)
    between = 0
    for number, one in enumerate(best.tolist()):
        either = (
            equal({0: found[number]}, {0: plain[number]}),
            equal({0: found[number]}, {0: without[number]}, 2e-3),
        )
        assert either[0] or one > STRANGE * middle
        assert either[1] or one < middle
        between += not any(either)
    assert between


def test_the_guard_wants_a_datastore_that_knows_its_text(
    world: World, guarded_store: Callable[..., Path]
) -> None:
    words = world.options("--tokens-guard", "--datastore", guarded_store())
    refused(
        call("fairseq-generate", *words, check=False),
        "--tokens-guard needs to know how much",
        "build it again",
    )


def test_temperature_is_the_same_after_beam_search(world: World, decode: Callable, tmp_path: Path) -> None:
    words = ["--tokens-lambda", 0.6, "--temperature", 0.5, "--beam", 2]
    found = decode(*words, "--tokens-log", tmp_path / "log")
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


@pytest.mark.parametrize("memory", ["tokens", "text"])
def test_constraints_are_kept(world: World, only_text: Path, tmp_path: Path, memory: str) -> None:
    """fairseq-interactive takes them after a tab."""
    source = (world.data_bin / "text" / "test.de").read_text(encoding="utf-8").splitlines()[0]
    wanted = (world.data_bin / "text" / "test.en").read_text(encoding="utf-8").split()[2]
    (tmp_path / "in.txt").write_text(f"{source}\t{wanted}\n", encoding="utf-8")
    weight = ["--tokens-lambda"] if memory == "tokens" else ["--datastore", only_text, "--text-alpha"]
    options = world.options("--constraints", "--input", tmp_path / "in.txt", *weight)
    if memory == "text":
        del options[(at := options.index("--tokens-temperature")) : at + 2]
    scores = []
    for words in ([*options, "0.7"], [*options, "0"]):
        shown = run("fairseq-interactive", *words).stdout
        written = re.findall(r"^H-0\t(\S+)\t(.*)$", shown, flags=re.MULTILINE)
        assert written and wanted in written[0][1].split(), shown
        scores.append(written[0])
    assert scores[0] != scores[1]
