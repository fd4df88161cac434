"""Adding a search backend: one class, one line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import BACKENDS, ExactIndex, Index, IndexDescription, build_index, open_index
from fairseq_ccpr.search.base import IndexRequest, RemoteKeys
from fairseq_ccpr.search.index_plan import index_bytes, plan_index
from fairseq_ccpr.search.recall import recall_of_sample
from tests.helpers import ROOT, call, refused
from tests.small_models import PAIRS, World, build
from tests.vectors import clustered


class BruteForce(Index):
    """Compares each query with every key."""

    def __init__(self, keys: np.ndarray, metric: str) -> None:
        self.keys, self.metric = torch.from_numpy(np.array(keys)).float(), metric
        self.size, self.dimension = self.keys.shape

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        return IndexDescription("brute", request.metric)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> Index:
        return cls(keys, description.metric)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores = queries.float() @ self.keys.T
        if self.metric == "l2":
            scores = -torch.cdist(
                queries.float(), self.keys, compute_mode="donot_use_mm_for_euclid_dist"
            ).square()
        best = torch.nn.functional.pad(scores, (0, max(0, k - self.size)), value=-np.inf).topk(k)
        return best.values, best.indices.masked_fill(best.values == -np.inf, -1)


@pytest.fixture
def brute(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(BACKENDS, "brute", BruteForce)
    yield


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_a_new_backend_is_planned_built_opened_and_searched(brute: None, metric: str, tmp_path: Path) -> None:
    keys = clustered(500, 8)
    description = plan_index("brute", metric, "", *keys.shape)
    build_index(keys, description, tmp_path, lambda rows: None)
    index = open_index(description, keys, tmp_path).to(torch.device("cpu"))
    queries = torch.from_numpy(clustered(20, 8, seed=1)).float()
    found, wanted = index.search(queries, 9), ExactIndex(keys, metric).search(queries, 9)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-3, atol=1e-2)
    assert index_bytes(description, *keys.shape) == 0 and str(description) == "brute"
    assert index.deepest == 500 and not index.remote and list(index.read()) == []
    assert recall_of_sample(index, keys) == 1
    index.check()


def test_a_backend_is_chosen_by_the_whole_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exact-gpu", "diskann", "faissy"):
        monkeypatch.setitem(BACKENDS, name, BruteForce)
        for choice in (name, f"{name}:32", f"{name},x=1"):
            assert plan_index(choice, "l2", "", 100, 8).backend == "brute"
    assert plan_index("exact", "l2", "", 100, 8).backend == "exact"


def test_a_new_backend_serves_a_datastore(brute: None, world: World, tmp_path: Path) -> None:
    build(world, store := tmp_path / "store", "--index", "brute")
    shown = call("inspect", store).stdout
    assert "index          brute (l2)" in shown and "recall         100.0%" in shown
    words = world.options("--max-sentences", 8, "--beam", 1)
    generate = call("fairseq-generate", *words, "--datastore", store).stdout
    exact = call("fairseq-generate", *words).stdout
    sentences = [[line for line in text.splitlines() if line.startswith("D-")] for text in (generate, exact)]
    assert len(sentences[0]) == PAIRS["test"]
    assert [line.split("\t")[2] for line in sentences[0]] == [line.split("\t")[2] for line in sentences[1]]
    del BACKENDS["brute"]
    try:
        refused(
            call("fairseq-generate", *world.options("--datastore", store), check=False),
            "backend 'brute', unknown",
        )
    finally:
        BACKENDS["brute"] = BruteForce  # the fixture takes it away


def test_unknown_choices_are_refused() -> None:
    for choice in ("exactly", "diskette", "brute", "milvus", "faiss"):
        with pytest.raises(ConfigurationError, match=f"'{choice}'"):
            plan_index(choice, "l2", "", 10**6, 16)
    with pytest.raises(DatastoreError, match="unknown here: build another with --index auto"):
        open_index(IndexDescription("quantum", "l2"), clustered(9, 4), Path("x"))


def test_only_search_knows_its_backends() -> None:
    """No other room imports the modules of a database, or asks for the class of an index."""
    for path in (ROOT / "fairseq_ccpr").rglob("*.py"):
        if path.parent.name == "search":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += (
                [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            )
            assert not any("milvus" in name.lower() for name in names), path
