"""Every index against brute force."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.lab.speed.decoding_speed import Operations
from fairseq_ccpr.lab.speed.search_speed import recall
from fairseq_ccpr.search import (
    ExactIndex,
    FaissIndex,
    RescoredIndex,
    build_index,
    exact,
    faiss_index,
    open_index,
)
from fairseq_ccpr.search.faiss_index import automatic_factory, inverted_lists
from fairseq_ccpr.search.index_plan import Effort, plan_index
from tests.helpers import own_bytes
from tests.vectors import all_scores, brute_force, clustered, multiplied


@given(
    size=st.integers(0, 300),
    dimension=st.integers(1, 20),
    rows=st.integers(1, 9),
    k=st.sampled_from([1, 2, 8, 64]),
    metric=st.sampled_from(["l2", "ip"]),
    tile=st.sampled_from([1, 50, 1 << 24]),
    copies=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_exact_equals_brute_force(size, dimension, rows, k, metric, tile, copies, seed) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(size, dimension)).astype(np.float16)
    if copies and size > 2:
        keys[size // 2 :] = keys[0]  # ties
    queries = torch.from_numpy(rng.normal(size=(rows, dimension))).float()
    with patch.multiple(exact, CACHE_NUMBERS=tile, TILE_NUMBERS=tile):
        scores, ids = ExactIndex(keys, metric).search(queries, k)
    real = min(k, size)
    assert scores.shape == ids.shape == (rows, k)
    assert (ids[:, real:] == -1).all() and torch.isinf(scores[:, real:]).all()
    np.testing.assert_allclose(scores[:, :real], brute_force(keys, queries, k, metric), rtol=1e-4, atol=1e-4)
    for row in ids[:, :real].tolist():
        assert len(set(row)) == real  # no key twice


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("keys_in", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries_in", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_exact_takes_any_precision(metric, keys_in, queries_in) -> None:
    keys = torch.from_numpy(clustered(200, 16)).to(keys_in)
    queries = torch.from_numpy(clustered(5, 16, seed=1)).to(queries_in)
    scores, _ = ExactIndex(keys, metric).search(queries, 4)
    wanted = brute_force(keys.double().numpy(), queries, 4, metric)
    np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_exact_finds_of_equal_keys_the_lower_id_first(metric) -> None:
    """Whole numbers, so that products are exact in any order; each key stands twice."""
    keys = torch.randint(-50, 50, (300, 4)).repeat(2, 1).half()
    ids = ExactIndex(keys, metric).search(torch.randint(-9, 9, (9, 4)).float(), 8)[1]
    first = {tuple(key): row for row, key in reversed(list(enumerate(keys.tolist())))}
    assert all(first[tuple(keys[row].tolist())] == row for row in ids[:, 0].tolist())


def test_exact_finds_entries_of_the_store_for_what_is_no_number() -> None:
    """A model that has diverged must not make the device read beyond its memory."""
    queries = torch.tensor([[float("nan")] * 8, [float("inf")] * 8, [1.0] * 8])
    ids = ExactIndex(torch.randn(140, 8).half(), "ip").search(queries, 8)[1]
    assert ((ids >= 0) & (ids < 140)).all()


def as_a_gpu_selects(keys: Tensor, metric: str) -> ExactIndex:
    """Exact search in a GPU's form, on a CPU."""
    index = ExactIndex(keys, metric)
    index.by_runs = True
    return index


@given(
    size=st.integers(0, 300),
    dimension=st.integers(1, 20),
    rows=st.integers(1, 9),
    k=st.sampled_from([1, 2, 8, 64]),
    metric=st.sampled_from(["l2", "ip"]),
    run=st.sampled_from([2, 8, 64]),
    tile=st.sampled_from([1, 1 << 9, 1 << 24]),
    peaks=st.sampled_from([1, 99, 1 << 24]),
    selected=st.sampled_from([1, 999, 1 << 24]),
    kinds=st.sampled_from([1, 2, 5, 60]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_a_gpu_finds_what_brute_force_finds(
    size, dimension, rows, k, metric, run, tile, peaks, selected, kinds, dtype, seed
) -> None:
    """Of whole numbers, so that many keys are exactly as near, and the first of them are wanted."""
    chance = torch.Generator().manual_seed(seed)
    keys, queries = (
        torch.randint(-kinds, kinds, (count, dimension), generator=chance) for count in (size, rows)
    )
    queries[0] = 0
    wanted = all_scores(keys, queries, metric).sort(dim=1, descending=True, stable=True)
    real = min(k, size)
    sizes = {"RUN": run, "GPU_NUMBERS": tile, "PEAKS": peaks, "SELECTED": selected}
    with patch.multiple(exact, **sizes, products=multiplied, sync_is_free=lambda device: False):
        scores, ids = as_a_gpu_selects(keys.to(dtype), metric).search(queries.float(), k)
    assert torch.equal(ids[:, :real], wanted.indices[:, :real]) and (ids[:, real:] == -1).all()
    assert torch.equal(scores[:, :real], wanted.values[:, :real].float()) and scores.shape == (rows, k)
    assert torch.isneginf(scores[:, real:]).all()


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("tile", [1 << 14, 1 << 24])
def test_a_gpu_finds_near_duplicates_and_large_numbers(metric, tile, monkeypatch) -> None:
    monkeypatch.setattr(exact, "GPU_NUMBERS", tile)
    monkeypatch.setattr(exact, "products", multiplied)
    keys = clustered(5000, 16)
    keys[2500:] = keys[:2500] + (np.random.default_rng(1).normal(size=(2500, 16)) / 500).astype(np.float16)
    queries = torch.from_numpy(clustered(40, 16, seed=1)).float()
    found = as_a_gpu_selects(torch.from_numpy(keys), metric).search(queries, 8)[0]
    np.testing.assert_allclose(found, brute_force(keys, queries, 8, metric), rtol=1e-4, atol=1e-3)
    wide = (torch.arange(300.0).view(-1, 1) * exact.LARGEST_HALF / 300).half().repeat(1, 16)
    found = as_a_gpu_selects(wide, metric).search(wide[-3:].float() * 1e3, 1)
    assert (found[1] == 299).all() and found[0].isfinite().all()


class Counted(NamedTuple):
    """What a search of a GPU does."""

    operations: int
    read: int  # keys that are multiplied with all queries of a block


def counted_search(metric: str, size: int, rows: int, k: int, **sizes: int) -> Counted:
    """Search for queries in random keys of width 8, in tiles and blocks of some sizes."""
    index, counted, read = as_a_gpu_selects(torch.randn(size, 8).half(), metric), Operations(), []

    def one(queries: Tensor, keys: Tensor) -> Tensor:
        counted.count += 1
        read.append(len(keys) * (keys.dim() == 2))
        with _disable_current_modes():
            return multiplied(queries, keys)

    with patch.multiple(exact, **sizes, products=one, sync_is_free=lambda device: False):
        index.search(torch.randn(1, 8), k)  # what is computed once
        queries, counted.count = torch.randn(rows, 8), 0
        read.clear()
        with counted:
            index.search(queries, k)
    return Counted(counted.count, sum(read))


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_a_search_of_a_gpu_in_one_tile_has_few_operations_whatever_its_sizes(metric) -> None:
    most = counted_search(metric, 64_001, 5, 8).operations
    print(f"{metric}: {most} operations")
    assert 20 < most <= 27 + 3 * (metric == "l2")
    for sizes in ((64_003, 50, 8), (64_009, 5, 64), (640_063, 3, 8)):
        assert counted_search(metric, *sizes).operations == most
    assert counted_search(metric, 64_000, 5, 8).operations < most


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_each_further_tile_has_a_product_a_maximum_and_by_distance_a_difference(metric) -> None:
    found = [
        counted_search(metric, 64_001, 8, 8, GPU_NUMBERS=8 * (64_001 // tiles + 64)).operations
        for tiles in range(1, 6)
    ]
    print(f"{metric}: {found} operations of one to five tiles")
    further, distances = np.diff(found), metric == "l2"
    assert further[0] == 4 + 3 * distances and set(further[1:]) == {2 + distances}
    wide = counted_search(metric, 64_001, 8, 8, GPU_KEYS=8 * (64_001 // 2 + 64)).operations
    assert wide == found[1]


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_many_queries_share_a_sweep_of_the_keys(metric) -> None:
    """As 800 do with ten million keys: the best of each are selected in blocks of queries, of few operations each."""
    size, rows = 19_201, 800
    sweep = counted_search(metric, size, rows, 8, GPU_NUMBERS=rows * 6400, SELECTED=1 << 24)
    assert sweep.read == size
    blocks = counted_search(metric, size, rows, 8, GPU_NUMBERS=rows * 6400, SELECTED=rows * 17 * 64 // 4)
    print(f"{metric}: {sweep.operations} operations, {blocks.operations} in four blocks")
    assert blocks.read == size and 0 < blocks.operations - sweep.operations <= 3 * 22
    half = counted_search(metric, size, rows, 8, PEAKS=rows // 2 * 300 + 99)
    assert half.read == 2 * size


class PeakBytes(TorchDispatchMode):
    """Notes the most bytes that tensors have which were made and not freed."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in tree_flatten(made)[0]:
            if isinstance(one, Tensor) and not func.is_view:
                storage = one.untyped_storage()
                self.held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.held = {place: one for place, one in self.held.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.held.values()))
        return made


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("tile", [1 << 18, 1 << 22])
@pytest.mark.parametrize("rows", [1, 300])
def test_a_search_of_a_gpu_takes_no_more_memory_than_is_kept_free(metric, tile, rows) -> None:
    """Keys in fp32, as a CPU multiplies no halves; those that are gathered take twice as much."""
    index, queries = as_a_gpu_selects(torch.randn(12_801, 8), metric), torch.randn(rows, 8)
    sizes = {"GPU_NUMBERS": tile, "PEAKS": rows * 200, "SELECTED": 1 << 14}
    with patch.multiple(exact, **sizes, TILE_NUMBERS=1 << 14):
        index.search(queries, 8)  # what is computed once
        with (peak := PeakBytes()):
            index.search(queries, 8)
    kept = 4 * (tile + rows * 200) + 24 * sizes["SELECTED"]
    assert peak.most <= kept


def test_largest_keeps_the_order_of_floats() -> None:
    numbers = [0.0, -0.0, 1e-40, -1e-40, 3.5, -3.5, float("inf"), float("-inf"), float("nan"), 1e38]
    scores, ids = exact.largest(torch.tensor([numbers]), 10)
    assert ids.tolist() == [[6, 9, 4, 2, 0, 1, 3, 5, 7, 8]]
    assert (
        scores.tolist()[0][:8] == torch.tensor([float("inf"), 1e38, 3.5, 1e-40, 0, 0, -1e-40, -3.5]).tolist()
    )


def test_queries_may_come_from_a_model_that_trains() -> None:
    keys, queries = clustered(200, 16), torch.from_numpy(clustered(5, 16, seed=1)).float()
    scores, ids = ExactIndex(keys, "ip").search(queries.requires_grad_(), 4)
    assert not scores.requires_grad and torch.equal(
        ids, ExactIndex(keys, "ip").search(queries.detach(), 4)[1]
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("numbers", [1 << 12, 1 << 26])
def test_exact_on_a_gpu_equals_exact_on_the_cpu(metric, numbers, monkeypatch) -> None:
    monkeypatch.setattr(exact, "GPU_NUMBERS", numbers)
    keys = clustered(5000, 16)
    queries = torch.from_numpy(clustered(50, 16, seed=1)).float()
    index = ExactIndex(keys, metric)
    scores = index.to(torch.device("cuda")).search(queries.cuda(), 8)[0]
    np.testing.assert_allclose(scores.cpu(), index.search(queries, 8)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_entries_of_the_store_for_what_is_no_number() -> None:
    queries = torch.tensor([[float("nan")] * 8, [float("inf")] * 8, [1e9] * 8, [1.0] * 8]).cuda()
    scores, ids = ExactIndex(torch.randn(3000, 8).half().cuda(), "l2").search(queries, 8)
    assert ((ids >= 0) & (ids < 3000)).all() and scores[3].isfinite().all()


def test_without_faiss_exact_search_is_chosen_and_others_are_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert plan_index("auto", "l2", "", 10**6, 16).backend == "exact"
    with pytest.raises(
        ConfigurationError, match="needs FAISS, which is not installed: pip install faiss-cpu"
    ):
        plan_index("IVF16,Flat", "l2", "", 10**6, 16)


def test_index_that_cannot_be_written_leaves_nothing() -> None:
    with pytest.raises(DatastoreError, match="is the disk full"):
        build_index(
            clustered(10, 8), plan_index("Flat", "l2", "", 10, 8), Path("/nowhere/index"), lambda _: None
        )


FACTORIES = [
    "Flat",
    "IVF32,Flat",
    "IVF32,PQ16x4",
    "HNSW16",
    "IVF32,SQfp16",
    "PCA8,IVF16,Flat",
    "auto",
    "PQ8,Refine(keys)",
]


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_faiss_index_finds_what_brute_force_finds(factory, metric, tmp_path) -> None:
    keys = clustered(25_000 if factory == "auto" else 3000, 16)
    queries = torch.from_numpy(clustered(50, 16)).float() + 0.1
    description = plan_index(factory, metric, "", len(keys), 16)
    added = []
    build_index(keys, description, tmp_path / "index", added.append)
    assert sum(added) == len(keys)
    index = open_index(replace(description, file="index"), keys, tmp_path)
    scores, ids = index.search(queries, 8)
    wanted = brute_force(keys, queries, 8, metric)
    assert index.size == len(keys) and scores.dtype == torch.float32 and ids.dtype == torch.int64
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    exact_ids = ExactIndex(keys, metric).search(queries, 8)[1]
    recall = np.mean([len(set(a) & set(b)) / 8 for a, b in zip(ids.tolist(), exact_ids.tolist())])
    assert recall >= {"IVF32,PQ16x4": 0.4, "PCA8,IVF16,Flat": 0.4}.get(factory, 0.9), recall
    if factory == "Flat":
        np.testing.assert_allclose(scores, wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("factory", ["PQ4x4", "PCA8,PQ4x4", "PQ4x4,RFlat"])
def test_codes_are_ordered_for_polysemous_search_only_where_that_is_asked_for(factory) -> None:
    for parameters, wanted in (("", False), ("ht=12", True)):
        description = replace(plan_index(factory, "l2", "", 500, 16), parameters=parameters)
        index = faiss_index.trained_index(clustered(500, 16), description, seed=1)[0]
        while not hasattr(index, "do_polysemous_training"):
            index = faiss.downcast_index(index.base_index if hasattr(index, "base_index") else index.index)
        assert index.is_trained and index.do_polysemous_training == wanted


def test_faiss_pads_what_it_does_not_find(tmp_path) -> None:
    keys = clustered(10, 8)
    build_index(keys, plan_index("Flat", "l2", "", 10, 8), tmp_path / "index", lambda _: None)
    scores, ids = FaissIndex.read_file(tmp_path / "index", "l2", "").search(torch.zeros(2, 8), 16)
    assert (ids[:, 10:] == -1).all() and torch.isinf(scores[:, 10:]).all() and (ids[:, :10] >= 0).all()


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_keys_that_score_again_need_not_be_in_the_index_twice(metric, tmp_path) -> None:
    """What FAISS's own copy of the keys finds, in a file that is smaller by the keys."""
    keys = clustered(25_000, 32)
    queries = torch.from_numpy(clustered(40, 32, seed=1)).float()
    found, sizes = [], []
    for kept in ("SQfp16", "keys"):
        description = plan_index(f"IVF128,PQ32x4fs,Refine({kept})", metric, "", *keys.shape)
        build_index(keys, description, path := tmp_path / description.file, lambda _: None)
        found.append(open_index(description, keys, tmp_path))
        sizes.append(path.stat().st_size)
    assert isinstance(found[0], FaissIndex) and isinstance(found[1], RescoredIndex)
    assert sizes[0] - sizes[1] >= keys.nbytes and sizes[1] < 30 * len(keys) + 4 * 128 * 32 + 10_000
    gc.collect()  # what FAISS looks at must be kept alive
    for k in (1, 8, 64):
        (scores, ids), (of_keys, others) = (index.search(queries, k) for index in found)
        assert torch.equal(scores, of_keys) and torch.equal(ids, others)
    _, ids = found[1].search(queries, 30_000)
    assert [len({*row} - {-1}) for row in ids.tolist()] == (ids >= 0).sum(dim=1).tolist()


@pytest.mark.parametrize("factory", ["Flat", "IVF32,PQ32x4fs,Refine(SQfp16)", "IVF32,SQ8"])
def test_index_file_is_mapped_and_not_copied(factory, tmp_path) -> None:
    """What a process has for itself grows by far less than the file; processes share the rest."""
    keys = np.random.default_rng(0).normal(size=(60_000, 64)).astype(np.float16)
    description = plan_index(factory, "ip", "", *keys.shape)
    build_index(keys, description, path := tmp_path / "index", lambda _: None)
    before = own_bytes()
    index = FaissIndex.read_file(path, "ip", description.parameters)
    ids = index.search(torch.from_numpy(keys[:20]).float(), 1)[1]
    assert own_bytes() - before < 0.3 * path.stat().st_size > 1 << 20
    assert (ids[:, 0] == torch.arange(20)).float().mean() > 0.8


def test_training_sample_is_drawn_over_the_whole_store(tmp_path, monkeypatch) -> None:
    """The first rows of a store may all be alike; an index trained on them alone would put the rest in a few lists."""
    monkeypatch.setattr(faiss_index, "TRAIN_ROWS", 500)
    monkeypatch.setattr(faiss_index, "TRAIN_ROWS_PER_CENTROID", 1)
    keys = np.concatenate([np.zeros((5000, 8)), clustered(5000, 8)]).astype(np.float16)
    build_index(keys, plan_index("IVF16,Flat", "l2", "", 10000, 8), tmp_path / "index", lambda _: None)
    index = FaissIndex.read_file(tmp_path / "index", "l2", "")
    lists = inverted_lists(index.index).invlists
    sizes = sorted((lists.list_size(i) for i in range(16)), reverse=True)
    assert sizes[0] <= 6000 and sizes[1] > 300


@pytest.mark.parametrize(
    ("choice", "metric", "parameters", "sentence"),
    [
        ("IVF9999,Nonsense", "l2", "", "cannot make an index 'IVF9999,Nonsense'"),
        ("IVF512,Flat", "l2", "", "512 lists, but the datastore will have 100 keys"),
        ("IVF4,Flat", "l2", "nprobes=3", "nprobes=3"),
        ("exact", "l2", "nprobe=3", "exact search has none"),
        ("exact", "cosine", "", "--metric is 'cosine'"),
        ("IVF4,PQ7", "l2", "", "IVF4,PQ7"),
        ("IVF4,PQ16x4fs,Refine(keys)", "l2", "nprobes=3", "nprobes=3"),
    ],
)
def test_impossible_indexes_are_refused(choice, metric, parameters, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        plan_index(choice, metric, parameters, 100, 16)


def test_damaged_index_file_is_refused(tmp_path) -> None:
    (tmp_path / "index").write_bytes(b"not an index")
    with pytest.raises(DatastoreError, match="is damaged"):
        FaissIndex.read_file(tmp_path / "index", "l2", "")


def test_automatic_index_is_exact_where_that_is_fastest() -> None:
    assert plan_index("auto", "l2", "", 1000, 16).backend == "exact"
    assert plan_index("auto", "ip", "", 10**6, 16).parameters == "nprobe=16,k_factor_rf=4,candidates=64"
    assert (
        plan_index("auto", "ip", "", 10**6, 16, effort=Effort(64, 2)).parameters == "nprobe=64,k_factor_rf=2"
    )
    assert plan_index("auto", "l2", "", 10**7, 16, gpu=True).backend == "exact"
    for odd in (7, 129, 200):  # the codes must share the width out evenly
        plan_index("auto", "ip", "", 10**6, odd)
    assert plan_index("auto", "l2", "", 10**6, 16).factory == "IVF1024,PQ16x4fs,Refine(keys)"
    assert plan_index("auto", "ip", "", 10**6, 128).factory == "RR128,IVF1024,PQ64x4fsr,Refine(keys)"


@pytest.mark.parametrize(
    "given, planned",
    [
        ("nprobe=3", "nprobe=3,k_factor_rf=4,candidates=64"),
        ("nprobe=3,k_factor_rf=2", "nprobe=3,k_factor_rf=2"),
        (" nprobe = 3 k_factor_rf=2", "nprobe=3,k_factor_rf=2"),
        ("candidates=100", "nprobe=16,k_factor_rf=4,candidates=100"),
        ("candidates=100,k_factor_rf=1", "nprobe=16,k_factor_rf=1,candidates=100"),
    ],
)
def test_parameters_that_are_not_given_give_good_recall(given: str, planned: str) -> None:
    assert plan_index("auto", "ip", given, 10**6, 16).parameters == planned


def test_effort_gives_the_defaults() -> None:
    assert (
        plan_index("auto", "ip", "nprobe=3", 10**6, 16, effort=Effort(64, 2)).parameters
        == "nprobe=3,k_factor_rf=2"
    )


def test_few_neighbours_have_enough_candidates(tmp_path: Path, rng: np.random.Generator) -> None:
    """At k 4, 64 candidates are 16 for each; at k 40 two for each are more."""
    keys = rng.normal(size=(3000, 32)).astype(np.float16)
    queries = torch.from_numpy(rng.normal(size=(50, 32))).float()
    description = plan_index(
        "IVF16,PQ16x4fs,Refine(keys)", "l2", "nprobe=16,k_factor_rf=2,candidates=64", *keys.shape
    )
    build_index(keys, description, tmp_path / description.file, lambda _: None)
    found = {
        parameters: open_index(replace(description, parameters=parameters), keys, tmp_path)
        for parameters in (description.parameters, "nprobe=16,k_factor_rf=2", "nprobe=16,k_factor_rf=16")
    }
    bounded, two, sixteen = found.values()
    for k, same, other in ((4, sixteen, two), (40, two, sixteen)):
        assert all(
            torch.equal(one, wanted)
            for one, wanted in zip(bounded.search(queries, k), same.search(queries, k))
        )
        assert not torch.equal(bounded.search(queries, k)[1], other.search(queries, k)[1])


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("candidates=many", "candidates is 'many'; give the number of keys to score again"),
        ("nprobe", "'nprobe' is not NAME=VALUE; separate parameters by commas"),
        ("nprobe=3;k_factor_rf=2", "'nprobe=3;k_factor_rf=2' is not NAME=VALUE"),
        ("nprobe=3=4", "'nprobe=3=4' is not NAME=VALUE"),
    ],
)
def test_malformed_parameters_are_refused(given: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        plan_index("IVF4,PQ16x4fs,Refine(keys)", "l2", given, 100, 16)


def test_more_candidates_than_keys_are_all_keys(tmp_path: Path) -> None:
    keys, queries = clustered(500, 16), torch.from_numpy(clustered(9, 16, seed=1)).float()
    description = plan_index("IVF4,PQ16x4fs,Refine(keys)", "l2", f"nprobe=4,candidates={10**20}", *keys.shape)
    build_index(keys, description, tmp_path / description.file, lambda _: None)
    ids = open_index(description, keys, tmp_path).search(queries.requires_grad_(), 3)[1]
    assert torch.equal(ids, ExactIndex(keys, "l2").search(queries, 3)[1])


def test_codes_of_residuals_find_more_by_inner_product(tmp_path) -> None:
    """Of two automatic candidates for keys of length 1 around centres, the one chosen finds more in as many bytes."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(300, 96))
    keys = centres[rng.integers(300, size=25_000)] + 0.5 * rng.normal(size=(25_000, 96))
    keys = (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float16)
    queries = (
        torch.from_numpy(keys[::125]).float() + 0.02 * torch.from_numpy(rng.normal(size=(200, 96))).float()
    )
    exact, recalls, sizes = ExactIndex(keys, "ip"), [], []
    chosen = automatic_factory(len(keys), 96, "ip")
    assert chosen == "RR96,IVF128,PQ48x4fsr,Refine(keys)"
    for factory in (chosen, "IVF128,PQ48x4fs,Refine(keys)"):
        description = plan_index(factory, "ip", "nprobe=16,k_factor_rf=2", *keys.shape)
        build_index(keys, description, path := tmp_path / description.file, lambda _: None)
        recalls.append(recall(open_index(description, keys, tmp_path), exact, queries, 8))
        sizes.append(path.stat().st_size)
    assert sizes[0] < 1.1 * sizes[1] and recalls[0] > recalls[1] + 0.05
