"""Inverted lists in torch against brute force: all lists searched, they find what exact search finds; fewer, most of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import ExactIndex, TorchIvfIndex, build_index, open_index, torch_ivf, torch_ivf_build
from fairseq_ccpr.search.index_plan import index_bytes, plan_index
from fairseq_ccpr.search.list_tiles import tiles_of_pairs
from fairseq_ccpr.search.recall import recall
from tests.helpers import call
from tests.small_models import World, build
from tests.torch_operations import NoRoundTrip, no_synchronisation
from tests.vectors import DEVICE, all_scores, clustered


def make(keys, lists, metric, probes, folder, by_triton=None):
    """Built, written, and opened again."""
    description = plan_index(f"torch-ivf{lists}", metric, f"nprobe={probes}", *keys.shape)
    added = []
    build_index(keys, description, folder / description.file, added.append)
    assert sum(added) == len(keys)
    made = open_index(description, keys, folder)
    return TorchIvfIndex(made.lists, metric, probes, fused=by_triton) if DEVICE.type == "cpu" else made.to(DEVICE)


def check(index, keys, queries, k):
    """All lists are searched: scores, ids and padding against brute force."""
    scores, ids = (part.cpu() for part in index.search(queries.to(DEVICE), k))
    real = min(k, len(keys))
    assert scores.dtype == torch.float32 and ids.dtype == torch.int64 and scores.shape == ids.shape == (len(queries), k)
    assert (ids[:, real:] == -1).all() and (scores[:, real:] == float("-inf")).all()
    wanted = all_scores(torch.from_numpy(keys), queries, index.metric)
    best = wanted.sort(dim=1, descending=True).values[:, :real]
    torch.testing.assert_close(scores[:, :real].double(), best, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[:, :real].double(), wanted.gather(1, ids[:, :real]), rtol=1e-4, atol=1e-4)
    assert all(len(set(row)) == real for row in ids[:, :real].tolist())  # no key twice


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 600), dimension=st.integers(1, 20), lists=st.integers(1, 20), count=st.integers(0, 9),
    k=st.sampled_from([1, 8, 64]), metric=st.sampled_from(["l2", "ip"]), copies=st.sampled_from([0, 0.5, 1]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_all_lists_are_exact_search(size, dimension, lists, count, k, metric, copies, seed, tmp_path_factory) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(size, dimension)).astype(np.float16)
    keys[size - int(copies * size) :] = keys[0]  # lists that cannot be told apart, and clusters without keys
    lists = min(lists, size)
    index = make(keys, lists, metric, 1000, tmp_path_factory.mktemp("index"))
    assert (index.size, index.dimension) == keys.shape
    check(index, keys, torch.from_numpy(rng.normal(size=(count, dimension))).float(), k)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("size", [1, 127, 128, 129, 700])
def test_both_ways_to_score(size, metric, fused, tmp_path) -> None:
    keys = clustered(size, 24)
    check(make(keys, min(size, 5), metric, 5, tmp_path, fused), keys, torch.randn(7, 24), 8)


def test_queries_are_searched_block_by_block(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch_ivf, "MAXIMA_NUMBERS", 3000)
    keys = clustered(500, 8)
    check(make(keys, 6, "l2", 6, tmp_path), keys, torch.randn(40, 8), 8)


def test_more_keys_than_int32_counts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch_ivf_build, "MOST_INT32", 499)
    for size, dtype in ((499, torch.int32), (500, torch.int64)):
        (folder := tmp_path / str(size)).mkdir()
        index = make(keys := clustered(size, 8), 6, "l2", 6, folder)
        assert index.lists.ids.dtype == dtype
        check(index, keys, torch.randn(9, 8), 8)


def test_empty_list_holds_nothing_and_is_passed_over() -> None:
    lists, place_of = torch_ivf_build.lay_out(torch.tensor([2, 0, 2]), torch.eye(4))
    assert lists.sizes.tolist() == [1, 2] and place_of.tolist() == [128, 0, 129]
    assert torch.equal(lists.centroids, torch.eye(4)[[0, 2]]) and lists.ids[[0, 128, 129]].tolist() == [1, 0, 2]
    keys = torch.tensor([[0.0, 0, 3, 0], [2, 0, 0, 0], [0, 0, 1, 0]])
    lists.keys[place_of] = keys.half()
    ids = TorchIvfIndex(lists, "l2", 1).search(torch.eye(4)[2:3], 3)[1]
    assert ids.tolist() == [[2, 0, -1]]  # more was asked for than the nearest list has


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("dimension", [16, 300])
def test_lists_that_are_read_once_for_all_queries_are_exact_search(dimension, metric, triton, tmp_path) -> None:
    keys, queries = clustered(900, dimension), torch.from_numpy(clustered(70, dimension, seed=1)).float()
    index = make(keys, 5, metric, 5, tmp_path, by_triton=True)
    assert len(queries) >= torch_ivf.LIST_MAJOR
    for k in (1, 8, 1000):
        check(index, keys, queries, k)


def test_lists_that_are_read_once_give_what_each_query_finds_in_its_own(triton, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch_ivf, "ROOM", 100)  # else few queries go without some of their lists' ends
    keys, queries = clustered(1500, 16), torch.from_numpy(clustered(90, 16, seed=1)).float().to(DEVICE)
    index = make(keys, 12, "l2", 3, tmp_path, by_triton=True)
    by_list = index.search(queries, 8)
    monkeypatch.setattr(torch_ivf, "LIST_MAJOR", 1000)
    by_query = index.search(queries, 8)
    assert torch.equal(by_list[1], by_query[1]) and torch.allclose(by_list[0], by_query[0])


@settings(deadline=None)
@given(
    count=st.integers(1, 9), lists=st.integers(1, 7), probes=st.integers(1, 7), most=st.sampled_from([1, 2, 16]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_tiles_hold_every_pair_once(count, lists, probes, most, seed) -> None:
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(lists)[:probes] for _ in range(count)])
    sizes = rng.integers(1, 500, lists)
    first_runs = np.cumsum(sizes) // 128 + 7
    of_device = [torch.from_numpy(numbers) for numbers in (chosen, sizes, first_runs)]
    with NoRoundTrip():
        pairs, tiles = tiles_of_pairs(*of_device, 128, most)
    found = []
    for first, held, run, runs, size in tiles.tolist():
        assert held <= most and (held or not runs)
        for pair in pairs[first : first + held].tolist():
            wanted = chosen.flatten()[pair]
            assert (run, runs, size) == (first_runs[wanted], -(-sizes[wanted] // 128), sizes[wanted])
            found.append(pair)
    assert sorted(found) == list(range(chosen.size))


def test_list_that_is_too_long_becomes_several() -> None:
    list_of = torch.tensor([0] * 1000 + list(range(20)))
    lists, place_of = torch_ivf_build.lay_out(list_of, torch.randn(20, 4))
    assert lists.sizes.max() <= 3 * 51 and lists.sizes.sum() == 1020 and len(place_of.unique()) == 1020
    assert torch.equal(lists.ids[place_of].long(), torch.arange(1020))


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_few_lists_find_most(metric, tmp_path) -> None:
    keys = clustered(20_000, 16)
    queries = torch.from_numpy(clustered(100, 16)).float() + 0.1
    exact = ExactIndex(keys, metric)
    found = [recall(make(keys, 200, metric, n, tmp_path), exact.to(DEVICE), queries.to(DEVICE), 8) for n in (2, 20)]
    assert found[0] < found[1] and found[1] > 0.9, found
    index = make(keys, 200, metric, 20, tmp_path)
    assert index.most_runs * index.steps.BUCKET < 0.3 * len(keys)


@torch.no_grad()
def test_search_makes_no_round_trip(tmp_path) -> None:
    index = make(clustered(900, 16), 12, "l2", 4, tmp_path)
    queries = torch.randn(6, 16, device=DEVICE)
    index.search(queries, 8)  # compiles what there is to compile
    with NoRoundTrip() if DEVICE.type == "cpu" else no_synchronisation():
        index.search(queries, 8)


def test_what_is_no_number_finds_nothing_beyond_the_store(tmp_path) -> None:
    index = make(clustered(140, 8), 4, "ip", 2, tmp_path)
    queries = torch.tensor([[float("nan")] * 8, [float("inf")] * 8, [1.0] * 8], device=DEVICE)
    ids = index.search(queries, 8)[1]
    assert ((ids >= -1) & (ids < 140)).all()


def test_datastore_with_lists_is_built_measured_and_searched(world: World, tmp_path: Path) -> None:
    build(world, store := tmp_path / "store", "--index", "torch-ivf", "--index-parameters", "nprobe=2")
    section = Manifest.read(store).token
    assert section is not None and section.index.backend == "torch-ivf" and 0 < section.index_recall <= 1
    assert f"token/{section.index.file}" in section.files and section.index.file.endswith(".safetensors")
    shown = call("inspect", store).stdout
    assert f"index          {section.index.factory};nprobe=2" in shown and "recall" in shown
    build(world, store, "--index", "torch-ivf32", "--index-parameters", "nprobe=32")
    assert Manifest.read(store).token.index_recall == 1 and len(list(store.rglob("index-*.safetensors"))) == 1
    exact = world.datastore
    ours, theirs = (TokenDatastore(folder).open_index() for folder in (store, exact))
    queries = torch.randn(5, ours.dimension)
    assert torch.equal(ours.search(queries, 8)[0], theirs.search(queries, 8)[0])
    found = [
        call("fairseq-generate", *world.options("--datastore", folder, "--beam", 1)).stdout for folder in (store, exact)
    ]
    lines = [[line for line in text.splitlines() if line.startswith("H-")] for text in found]
    assert lines[0] == lines[1] and lines[0]


def test_space_that_is_asked_for_is_what_the_file_takes(tmp_path) -> None:
    keys = clustered(20_000, 32)
    description = plan_index("torch-ivf64", "l2", "", *keys.shape)
    build_index(keys, description, tmp_path / description.file, lambda _: None)
    assert (tmp_path / description.file).stat().st_size == pytest.approx(index_bytes(description, *keys.shape), rel=0.1)


@pytest.mark.parametrize(
    ("choice", "parameters", "sentence"),
    [
        ("torch-ivf512", "", "torch-ivf512 has 512 lists, but the datastore will have 100 keys"),
        ("torch-ivf0", "", "--index is 'torch-ivf0': give torch-ivf"),
        ("torch-ivf4,Flat", "", "--index is 'torch-ivf4,Flat'"),
        ("torch-ivf4", "nprobe=0", "torch-ivf takes nprobe=N"),
        ("torch-ivf4", "efSearch=3", "torch-ivf takes nprobe=N"),
    ],
)
def test_impossible_lists_are_refused(choice, parameters, sentence) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        plan_index(choice, "l2", parameters, 100, 16)


@pytest.mark.parametrize(("size", "lists"), [(1, 1), (200, 1), (20_000, 156), (19_000_000, 16384)])
def test_number_of_lists_follows_from_the_keys(size, lists) -> None:
    assert str(plan_index("torch-ivf", "l2", "", size, 16)) == f"torch-ivf{lists};nprobe={min(64, lists)}"


def test_damaged_or_unwritable_file_is_refused(tmp_path) -> None:
    (tmp_path / "index").write_bytes(b"not an index")
    with pytest.raises(DatastoreError, match="is damaged"):
        TorchIvfIndex.read_file(tmp_path / "index", "l2", "nprobe=2")
    with pytest.raises(DatastoreError, match="is the disk full"):
        build_index(clustered(10, 8), plan_index("torch-ivf2", "l2", "", 10, 8), Path("/nowhere/i"), lambda _: None)
