"""Exact search in Triton, and what it shares with torch, against brute force: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_ccpr.search import ExactIndex, exact
from fairseq_ccpr.search.selection import FINE, best_rows, largest
from tests.vectors import DEVICE, all_scores


def ranked(scores, k):
    """Ids of the k largest scores of each row, of equal ones the lower first."""
    return torch.from_numpy(np.lexsort((np.arange(scores.size(1))[None].repeat(len(scores), 0), -scores.numpy())))[
        :, :k
    ]


def check(keys, queries, k, metric, fused):
    """Search, and hold scores, ids and padding against brute force; gives the ids."""
    scores, ids = ExactIndex(keys.to(DEVICE), metric, fused=fused).search(queries.to(DEVICE), k)
    scores, ids, real = scores.cpu(), ids.cpu(), min(k, len(keys))
    assert scores.dtype == torch.float32 and ids.dtype == torch.int64 and scores.shape == ids.shape == (len(queries), k)
    assert (ids[:, real:] == -1).all() and (scores[:, real:] == float("-inf")).all()
    wanted = all_scores(keys, queries, metric)
    best = wanted.sort(dim=1, descending=True).values[:, :real]
    torch.testing.assert_close(scores[:, :real].double(), best, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[:, :real].double(), wanted.gather(1, ids[:, :real]), rtol=1e-4, atol=1e-4)
    assert all(len(set(row)) == real for row in ids[:, :real].tolist())  # no key twice
    return ids


SIZES = [1, 15, 127, 128, 129, 700]


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("k", [1, 8, 64])
@pytest.mark.parametrize("size", SIZES)
def test_finds_what_brute_force_finds(size, k, metric, fused) -> None:
    """Stores smaller than a run of keys, of some whole runs, and a little more."""
    keys, queries = torch.randn(size, 24).half(), torch.randn(5, 24)
    check(keys, queries, k, metric, fused)


@pytest.mark.parametrize("dimension", [1, 16, 100, 128, 130, 300])
def test_any_width(dimension, fused) -> None:
    check(torch.randn(300, dimension).half(), torch.randn(3, dimension), 8, "l2", fused)


@pytest.mark.parametrize("count", [0, 1, 17, 129, 300])
def test_any_number_of_queries(count, fused) -> None:
    check(torch.randn(260, 16).half(), torch.randn(count, 16), 4, "ip", fused)


@pytest.mark.parametrize(("dimension", "count"), [(128, 65), (128, 240), (128, 800), (256, 5), (512, 5), (1024, 5)])
def test_loads_that_a_decoder_makes(dimension, count, fused) -> None:
    """Fewer keys than a decoder's, but the tiles are the same."""
    keys = torch.nn.functional.normalize(torch.randn(600, dimension), dim=1).half()
    check(keys, torch.randn(count, dimension), 8, "l2", fused)


@pytest.mark.parametrize("keys_in", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries_in", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_precision(keys_in, queries_in, fused) -> None:
    check(torch.randn(300, 20).to(keys_in), torch.randn(4, 20).to(queries_in), 8, "l2", fused)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_queries_out_of_the_range_of_half_precision(scale, fused) -> None:
    """Fresh numbers, whose order is the same at any scale."""
    keys, queries = torch.randn(900, 16).half(), torch.randn(6, 16)
    scores = ExactIndex(keys.to(DEVICE), "ip", fused=fused).search((queries * scale).to(DEVICE), 8)[0]
    wanted = all_scores(keys, queries, "ip").sort(dim=1, descending=True).values[:, :8]
    torch.testing.assert_close(scores.cpu().double() / scale, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("size", [50, 700])
def test_of_equal_keys_the_lower_id_comes_first(size, metric, fused) -> None:
    """Whole numbers, so that products are exact in any order; half of the keys stand twice or more."""
    keys = torch.randint(-2, 3, (size, 4)).half()
    queries = torch.randint(-2, 3, (9, 4)).float()
    ids = check(keys, queries, 32, metric, fused)
    assert torch.equal(ids, ranked(all_scores(keys, queries, metric), 32))


def test_queries_are_searched_block_by_block(fused, monkeypatch) -> None:
    monkeypatch.setattr(exact, "MAXIMA_NUMBERS", 50)
    check(torch.randn(500, 8).half(), torch.randn(40, 8), 8, "l2", fused)


def test_what_is_no_number_finds_entries_of_the_store(fused) -> None:
    """A model that has diverged must not make the device read beyond its memory."""
    queries = torch.tensor([[float("nan")] * 8, [float("inf")] * 8, [1.0] * 8], device=DEVICE)
    ids = ExactIndex(torch.randn(140, 8).half().to(DEVICE), "ip", fused=fused).search(queries, 8)[1]
    assert ((ids >= 0) & (ids < 140)).all()


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9000), columns=st.integers(1, 3), k=st.sampled_from([1, 3, 64]), kinds=st.integers(1, 10**6),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_best_rows_are_those_of_a_stable_sort(size, columns, k, kinds, seed) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).integers(-kinds, kinds, (size, columns))).float()
    wanted = ranked(values.T.double(), k)
    assert torch.equal(best_rows(values, k), wanted)
    assert torch.equal(best_rows(values, k, group=FINE, direct=FINE * FINE), wanted)


def test_largest_keeps_the_order_of_floats() -> None:
    numbers = [0.0, -0.0, 1e-40, -1e-40, 3.5, -3.5, float("inf"), float("-inf"), float("nan"), 1e38]
    scores, ids = largest(torch.tensor([numbers]), torch.arange(10), 10)
    assert ids.tolist() == [[6, 9, 4, 2, 0, 1, 3, 5, 7, 8]]
    assert scores.tolist()[0][:8] == torch.tensor([float("inf"), 1e38, 3.5, 1e-40, 0, 0, -1e-40, -3.5]).tolist()
