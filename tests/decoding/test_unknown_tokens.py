"""Entries of the unknown token: their neighbours would say "write <unk>", so they count as neighbours that are missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.breakdown import break_down
from fairseq_ccpr.decoding.mixture import Distribution, Mixture
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.evaluation.explanation import CorpusText, Explainer
from fairseq_ccpr.evaluation.test_set import batches, load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.storage.files import describe_files
from tests.helpers import call, equal, held_out_text, neighbours_of, token_grid, vote
from tests.small_models import World, build

UNKNOWN = 3


def with_unknown(world: World, folder: Path, every: int) -> Path:
    """A copy of the datastore in which every so many entries' tokens are unknown."""
    shutil.copytree(world.datastore, folder)
    values = np.load(folder / "token/values.npy", mmap_mode="r+")
    values[::every] = UNKNOWN
    values.flush()
    manifest = Manifest.read(folder)
    assert manifest.token is not None
    manifest.token.files = describe_files(folder, list(manifest.token.files))
    manifest.write(folder)
    return folder


@pytest.fixture(scope="module")
def store(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_unknown(world, tmp_path_factory.mktemp("unknown") / "store", 3)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("k", [1, 6, 40])
@torch.no_grad()
def test_the_vote_is_that_of_the_other_neighbours(metric: str, k: int) -> None:
    """A plain loop; some queries have unknown tokens alone near them, and more are asked for than there are."""
    keys = torch.nn.functional.normalize(torch.randn(37, 24), dim=1)
    values = torch.randint(2, 7, (37,), dtype=torch.int32)
    values[:6] = UNKNOWN
    states = torch.nn.functional.normalize(torch.cat([keys[:2] + keys[0], torch.randn(7, 24)]), dim=1)
    values[(states[:1] @ keys.T).topk(6).indices[0]] = UNKNOWN
    datastore: Any = SimpleNamespace(
        section=SimpleNamespace(projection=None), open_index=lambda device: ExactIndex(keys, metric).to(device),
        open_projection=lambda: None, values=values.numpy(),
    )  # fmt: skip
    settings = TokenRetrievalSettings(k, 0.7, 0.3, confidence=metric == "ip")
    capture: Any = None
    memory = TokenMemory(capture, TokenRetriever(datastore, torch.device("cpu")), settings, UNKNOWN)
    log_probs = torch.randn(9, 7).log_softmax(dim=1)
    wanted = log_probs.exp()
    for row, state in enumerate(states):
        of_all = keys @ state if metric == "ip" else -(keys - state).square().sum(dim=1)
        nearest = of_all.argsort(descending=True)[:k].tolist()
        kept = [i for i in nearest if values[i] != UNKNOWN]
        if not kept:
            continue
        scores = of_all[kept]
        similar = of_all[[i for i in nearest[:8] if values[i] != UNKNOWN]].clamp(0, 1)
        confidence = float(similar.mean()) if len(similar) else 0.0
        weight = 0.7 * confidence if metric == "ip" else 0.7
        wanted[row] *= 1 - weight
        wanted[row].index_add_(0, values[kept].long(), weight * (scores / 0.3).softmax(dim=0))
    mixed = Mixture().mix(Distribution(log_probs.clone()), [vote(memory, states, log_probs)]).log_probs
    torch.testing.assert_close(mixed.exp(), wanted, rtol=1e-4, atol=1e-6)
    assert (mixed[:, UNKNOWN] <= log_probs[:, UNKNOWN]).all()
    if k <= 6:
        assert torch.equal(mixed[0], log_probs[0])  # nothing else is near


def test_a_store_of_unknown_tokens_alone_is_plain_fairseq_to_the_bit(
    world: World, decode: Callable, tmp_path: Path
) -> None:
    folder = with_unknown(world, tmp_path / "store", 1)
    assert equal(decode("--datastore", folder, "--tokens-lambda", 1), decode(base=True))


def test_tuner_log_and_explanation_agree_with_decoding(
    world: World, store: Path, decode: Callable, tmp_path: Path
) -> None:
    k, lambda_ = 8, 0.9
    words = [
        "--datastore",
        store,
        "--tokens-k",
        k,
        "--tokens-lambda",
        lambda_,
        "--tokens-likeness",
        0,
        "--no-tokens-guard",
    ]
    scored = decode(*words, "--score-reference")
    wanted = torch.cat([hypotheses[0]["positional_scores"] for hypotheses in scored.values()]).mean()
    cfg = parse_generation(world.options(*words, "--no-progress-bar"))
    task, models = load(cfg)
    ensemble = task.build_ensemble(models)
    text = held_out_text(ensemble, list(batches(cfg, task, models)))
    grid = token_grid(ensemble.find(TokenMemory), text, (k,), (5.0,), (False,))
    assert grid[TokenRetrievalSettings(k, lambda_, 5.0)] == pytest.approx(wanted.item(), abs=1e-4)

    found = decode(*words, "--tokens-log", tmp_path / "log")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    counts = [len(line["neighbours"]) for line in lines]
    assert min(counts) < max(counts) <= k and sum(counts) < 0.9 * k * len(counts)
    values, symbols = TokenDatastore(store).values, TokenDatastore(store).read_symbols()
    for line in lines:
        for neighbour in line["neighbours"]:
            assert neighbour["token"] == symbols[values[neighbour["entry"]]] != "<unk>"
    mixed = [p for number in sorted(found) for p in found[number][0]["positional_scores"].tolist()]
    lines.sort(key=lambda line: (line["sentence"], line["position"]))
    np.testing.assert_allclose([line["mixed"] for line in lines], mixed, atol=2e-4)

    places = {(line["sentence"], line["position"]): line for line in lines}
    dictionary, ensemble = task.target_dictionary, task.build_ensemble(models)
    corpus = CorpusText(TokenDatastore(store), dictionary.string)
    explainer = Explainer(dictionary, dictionary.string, dictionary.string, corpus, {}, k)
    for sample in batches(cfg, task, models):
        numbers = sample["id"].tolist()
        hypotheses = [found[number][0]["tokens"] for number in numbers]
        breakdown = break_down(ensemble, sample, hypotheses, dictionary)
        for row, number in enumerate(numbers):
            explained = explainer.sentence(breakdown, row, number, "", None, "", dictionary.string)
            for position, token in enumerate(explained.tokens):
                line = places[number, position]
                assert [n.symbol for n in token.neighbours] == [n["token"] for n in line["neighbours"]]
                assert {one.symbol for one in token.says[0]} <= {n["token"] for n in line["neighbours"]}


@pytest.mark.parametrize("k", [1, 8, 40])
def test_where_there_are_none_no_bit_changes(world: World, k: int) -> None:
    retriever = TokenRetriever(TokenDatastore(world.datastore), torch.device("cpu"))
    capture: Any = None
    memory = TokenMemory(capture, retriever, TokenRetrievalSettings(k, 0.5, 10.0), -7)
    states = torch.randn(30, retriever.index.dimension)
    nearest = retriever.search(states, k)
    assert all(map(torch.equal, neighbours_of(memory, states)[:3], nearest[:3]))


def test_they_are_counted_when_a_store_is_built_and_inspected(world: World, store: Path) -> None:
    values = np.array(TokenDatastore(world.datastore).values)
    before = int((values == UNKNOWN).sum())  # the text itself has some
    assert (
        before > 0
        and f"{before:,} entries are of unknown tokens (<unk>)" in build(world, world.datastore).stdout
    )
    values[::3] = UNKNOWN
    count = int((values == UNKNOWN).sum())
    assert TokenDatastore(store).count_unknown() == count
    assert f"{count:,} of unknown tokens (<unk>)" in call("inspect", store).stdout
