"""An index opens where it is searched, wherever it was built.

There need not be a GPU: `meta`, torch's device of tensors without numbers, is one on which FAISS has no
indexes either.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import ExactIndex, FaissIndex, build_index, index_plan
from fairseq_ccpr.search.index_plan import CPU, open_for_device, plan_index
from tests.small_models import World, build
from tests.vectors import DEVICE, clustered

ELSEWHERE = torch.device("meta")
KEYS = clustered(3000, 16)
ROOM = 2 << 30


def opened(choice: str, folder: Path, device: torch.device, free: int, monkeypatch: pytest.MonkeyPatch):
    """An index built as on one device, with `--index auto` that of a GPU, and opened on another with so many free bytes."""
    monkeypatch.setattr(index_plan, "free_bytes", lambda _: free)
    description = plan_index(choice, "l2", "", *KEYS.shape, gpu=choice == "auto")
    build_index(KEYS, description, folder / description.file, lambda _: None)
    return open_for_device(description, KEYS, folder, device, "`fairseq-ccpr build tokens`")


@pytest.fixture
def log(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="fairseq_ccpr")
    return caplog


def test_what_a_gpu_had_built_opens_on_a_cpu(tmp_path, monkeypatch) -> None:
    index = opened("auto", tmp_path, CPU, 0, monkeypatch)
    assert isinstance(index, ExactIndex) and index.on_host and not index.stands_in
    queries = torch.from_numpy(KEYS[:5]).float()
    assert (
        index.search(queries, 3)[1][:, 0].tolist()
        == ExactIndex(KEYS, "l2").search(queries, 3)[1][:, 0].tolist()
    )


@pytest.mark.parametrize(
    "choice", ["IVF32,PQ16x4fs,Refine(keys)", "IVF32,PQ16x4fs,Refine(SQfp16)", "HNSW16", "disk:IVF16,SQ8"]
)
def test_exact_search_stands_in_for_what_faiss_has_for_the_cpu(choice, tmp_path, monkeypatch, log) -> None:
    index = opened(choice, tmp_path, ELSEWHERE, ROOM, monkeypatch)
    assert isinstance(index, ExactIndex) and index.stands_in and index.keys.device == ELSEWHERE
    assert "the GPU compares with all keys" in log.text


def test_keys_that_do_not_fit_are_searched_on_the_cpu_with_a_warning(tmp_path, monkeypatch, log) -> None:
    index = opened("IVF32,PQ16x4fs,Refine(SQfp16)", tmp_path, ELSEWHERE, KEYS.nbytes, monkeypatch)
    assert isinstance(index, FaissIndex) and index.on_host and not index.stands_in
    assert "has no room for 3,000 keys" in log.text and log.records[0].levelname == "WARNING"
    exact = opened("auto", tmp_path, ELSEWHERE, KEYS.nbytes, monkeypatch)
    assert isinstance(exact, ExactIndex) and exact.on_host


def test_datastores_opened_one_after_another_leave_room_for_scores_and_decoding(
    tmp_path, monkeypatch
) -> None:
    free, placed = index_plan.SCRATCH + 4 * KEYS.nbytes, 0
    while opened("auto", tmp_path, ELSEWHERE, free - placed, monkeypatch).keys.device == ELSEWHERE:
        placed += KEYS.nbytes + 4 * len(KEYS)
    assert placed and free - placed > index_plan.SCRATCH


def test_without_faiss_a_gpu_opens_what_a_cpu_had_built(tmp_path, monkeypatch) -> None:
    description = plan_index("IVF16,Flat", "l2", "", *KEYS.shape)
    build_index(KEYS, description, tmp_path / description.file, lambda _: None)
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(index_plan, "free_bytes", lambda _: ROOM)
    assert open_for_device(description, KEYS, tmp_path, ELSEWHERE).stands_in
    monkeypatch.setattr(index_plan, "free_bytes", lambda _: 0)
    for device in (CPU, ELSEWHERE):
        with pytest.raises(ConfigurationError, match="needs FAISS, which is not installed"):
            open_for_device(description, KEYS, tmp_path, device)


def test_a_cpu_that_must_compare_with_many_keys_says_what_to_run(
    world: World, tmp_path, monkeypatch, log
) -> None:
    build(world, store := tmp_path / "store", "--index", "exact")
    TokenDatastore(store).open_index()
    assert not log.messages
    monkeypatch.setattr(index_plan, "MANY", 1000)
    TokenDatastore(store).open_index()
    [message] = log.messages
    assert f"`fairseq-ccpr compact {store} --index auto" in message
    # what it says, with an index that so small a store has
    build(world, store, "--index", "IVF16,Flat", "--cpu")
    log.clear()
    TokenDatastore(store).open_index()
    assert not log.messages


def test_signature_names_what_is_searched(world: World, tmp_path, monkeypatch) -> None:
    build(world, store := tmp_path / "store", "--index", "IVF16,Flat")
    retriever = TokenRetriever(TokenDatastore(store), CPU)
    assert str(retriever.describe()["index"]).startswith("IVF16,Flat")
    monkeypatch.setattr(index_plan, "free_bytes", lambda _: ROOM)
    retriever.index = TokenDatastore(store).open_index(ELSEWHERE)
    assert retriever.describe()["index"] == "exact"


@pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU")
@pytest.mark.parametrize("index", ["exact", "IVF16,Flat", "IVF16,PQ16x4fs,Refine(keys)"])
def test_datastore_of_either_kind_is_searched_on_a_gpu(index, world: World, tmp_path) -> None:
    build(world, store := tmp_path / "store", "--index", index)
    datastore = TokenDatastore(store)
    queries = torch.from_numpy(np.asarray(datastore.keys[:50])).float()
    wanted = ExactIndex(datastore.keys, "l2").search(queries, 1)
    found = TokenRetriever(datastore, DEVICE).index.search(queries.to(DEVICE), 1)
    assert (found[1].cpu() == wanted[1]).float().mean() > 0.9
