"""A segment's lists find what comparing with one by one finds, nearly, and to the last entry what was added last."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from fairseq_ccpr.search import ExactIndex, FaissIndex, live
from fairseq_ccpr.search.base import Index
from fairseq_ccpr.search.exact import half_norms
from fairseq_ccpr.search.faiss_index import make_index
from fairseq_ccpr.search.live import GrowingLists, Segment, search_without
from tests.vectors import clustered

pytest.importorskip("faiss")


def keys_and_queries(size: int, metric: str) -> tuple[Tensor, Tensor]:
    """Keys fp16, of length 1 where they are compared by inner product, and queries beside some of them."""
    keys = torch.from_numpy(clustered(size, 64)).float()
    queries = keys[::37] + 0.3 * torch.randn(len(keys[::37]), 64)
    if metric == "ip":
        keys, queries = (torch.nn.functional.normalize(one, dim=1) for one in (keys, queries))
    return keys.half(), queries


def recall(found: Tensor, wanted: Tensor) -> float:
    return float((wanted.unsqueeze(2) == found.unsqueeze(1)).any(dim=2).float().mean())


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_lists_find_nearly_all_of_the_nearest(metric: str) -> None:
    keys, queries = keys_and_queries(6000, metric)
    rows = np.arange(5800)
    segment = Segment(keys, half_norms(keys), metric, GrowingLists.of(keys[:5800], rows, metric), 5800)
    scores, found = segment.search(queries, 8)
    best, wanted = ExactIndex(keys, metric).search(queries, 8)
    assert recall(found, wanted) > 0.98
    same = found == wanted
    torch.testing.assert_close(scores[same], best[same])
    own, places = segment.search(keys.float(), 1)
    if metric == "l2":
        assert not torch.signbit(own[own == 0]).any() and (own == 0).sum() > 5800  # no distance is -0
    assert float((places[:, 0] == torch.arange(6000)).float().mean()) > 0.99
    assert (places[5800:, 0] == torch.arange(5800, 6000)).all()


def test_lists_that_shrank_and_grew_find_what_is_left(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all lists and nearly all codes looked at, nothing is lost or found again."""
    monkeypatch.setattr(live, "PROBES", 64)
    monkeypatch.setattr(live, "FEWEST", 256)
    keys, queries = keys_and_queries(4000, "ip")
    there = np.zeros(len(keys), bool)
    there[:1100] = True
    lists = GrowingLists.of(keys[:1100], np.arange(1100), "ip")
    for size in range(1100, len(keys), 290):
        held = lists
        for begin in rng.permutation(size - 30)[:12].tolist():
            if there[begin : begin + 30].all():
                lists = lists.without([(begin, begin + 30)], keys)
                there[begin : begin + 30] = False
        assert held.size >= lists.size  # the lists of a snapshot do not change
        added = np.arange(size, min(size + 290, len(keys)))
        lists = lists.with_more(keys[added[0] : added[-1] + 1], added)
        there[added] = True
        found = Segment(keys, half_norms(keys), "ip", lists, len(keys)).search(queries, 1)[1]
        left = torch.from_numpy(np.flatnonzero(there))
        wanted = left[ExactIndex(keys[left], "ip").search(queries, 1)[1]]
        assert lists.size == len(left) and recall(found, wanted) > 0.99


def test_a_key_is_looked_for_in_the_list_it_is_in(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single list is searched, where longer keys have the larger products and shorter ones are nearer."""
    monkeypatch.setattr(live, "PROBES", 1)
    keys = keys_and_queries(3000, "ip")[0] * torch.from_numpy(rng.uniform(0.2, 5, (3000, 1))).half()
    lists = GrowingLists.of(keys, np.arange(3000), "l2")
    found = Segment(keys, half_norms(keys), "l2", lists, 3000).search(keys.float(), 1)[1]
    assert recall(found, torch.arange(3000)[:, None]) > 0.95


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_lists_and_the_last_rows_find_what_is_left_as_fp64_does(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all lists and codes looked at, where the first rows and some of the last are gone."""
    monkeypatch.setattr(live, "PROBES", 1000)
    monkeypatch.setattr(live, "FEWEST", 4000)
    keys, queries = torch.randn(4000, 64).half(), torch.randn(50, 64)
    lists = GrowingLists.of(keys[:2000], np.arange(2000), metric).without([(0, 500)], keys)
    lists = lists.with_more(keys[3000:3700], np.arange(3000, 3700))
    gone = torch.arange(100, 200)
    segment = Segment(keys, half_norms(keys), metric, lists, 3700, gone)
    scores, rows = segment.search(queries, 20)
    wanted = queries.double() @ keys.double().T
    if metric == "l2":
        wanted = -(queries.double().unsqueeze(1) - keys.double()).square().sum(dim=2)
    for first, end in ((0, 500), (2000, 3000), (3800, 3900)):
        wanted[:, first:end] = float("-inf")
    best, places = wanted.topk(20, dim=1)
    assert torch.equal(rows, places)
    torch.testing.assert_close(scores.double(), best, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dimension", "codes"), [(131, 131), (134, 67)])
def test_wide_keys_have_a_code_for_two_dimensions_and_lists_are_outgrown(dimension: int, codes: int) -> None:
    keys, size = torch.randn(400, dimension).half(), live.RETRAINED_AT * 50
    lists = GrowingLists.of(keys[:50], np.arange(50), "ip")
    grown = [lists.with_more(keys[50:end], np.arange(50, end)).outgrown for end in (size - 1, size)]
    assert (lists.index.pq.M, lists.outgrown, grown) == (codes, False, [False, True])


def exact_line() -> Index:
    return ExactIndex(torch.arange(400).half()[:, None], "l2")


def line_in_lists() -> Index:
    """All of which are searched."""
    index = make_index(1, "IVF4,Flat", "l2")
    index.train(torch.arange(400).float()[:, None].numpy())
    index.add(torch.arange(400).float()[:, None].numpy())
    index.nprobe = 4
    return FaissIndex(index, "l2", 0)


@pytest.mark.parametrize("deepest", [400, 100])
@pytest.mark.parametrize("make", [exact_line, line_in_lists])
def test_entries_that_are_gone_are_searched_past_as_deep_as_must_and_can_be(
    make: Callable[[], Index], deepest: int
) -> None:
    """On a line of keys, of which those from 1 to 299 are gone: the last query is as far from 0 as from 300.

    Keys in lists are first looked for without any spare, others never.
    """
    asked, index, depth = [], make(), 1 + live.FIRST_SPARE

    def search(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        asked.append((len(queries), k))
        return type(index).search(index, queries, k)

    with patch.object(index, "search", search), patch.object(type(index), "deepest", deepest):
        ids = search_without(index, torch.arange(1, 300), torch.tensor([[0.0], [399.0], [150.0]]), 1)[1]
    assert ids[:, 0].tolist() == [0, 399, 0 if deepest == 400 else -1]
    assert asked == [
        *([(3, depth)] if make is exact_line else [(3, 1), (1, depth)]),
        *([(1, live.DEEPER * depth), (1, 300)] if deepest == 400 else [(1, deepest)]),
    ]
