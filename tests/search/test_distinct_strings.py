"""The nearest entries of different strings, and how equal strings are told, against reading them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.search import ExactIndex, Index
from fairseq_ccpr.search.distinct_strings import nearest_distinct, unique_mask


def test_entries_of_a_datastore_have_the_hashes_of_their_strings(
    phrase_store: Path, rng: np.random.Generator
) -> None:
    datastore = PhraseDatastore(phrase_store)
    entries = rng.integers(0, len(datastore.spans), 500)
    strings = [datastore.phrase(entry)[0] for entry in entries.tolist()]
    hashes = datastore.hashes[entries]
    assert len({*zip(strings, hashes.tolist())}) == len({*strings}) == len({*hashes.tolist()})


def test_search_has_a_bottom() -> None:
    """Where the nearest thousand have one string, it is not looked for others among all keys."""
    keys = torch.arange(3000, 0, -1).float()[:, None]
    strings, index = ["often"] * 2000 + ["rare"] * 1000, ExactIndex(keys, "ip")
    assert nearest(index, strings, torch.ones(1, 1), 2, 0.0) == [[(0, 3000.0)]]
    with patch("fairseq_ccpr.search.distinct_strings.DEEPEST", 3000):
        assert nearest(index, strings, torch.ones(1, 1), 2, 0.0) == [[(0, 3000.0), (2000, 1000.0)]]


@given(
    rows=st.lists(
        st.lists(
            st.tuples(st.sampled_from([0, 5, 2**63 + 5, 2**64 - 1]), st.booleans()), min_size=4, max_size=4
        )
    )
)
def test_unique_mask_against_a_loop(rows: list[list[tuple[int, bool]]]) -> None:
    table = np.array(rows, object).reshape(-1, 4, 2)
    numbers, there = table[..., 0].astype(np.uint64), table[..., 1].astype(bool)
    wanted = [[known and (n, True) not in row[:i] for i, (n, known) in enumerate(row)] for row in rows]
    assert unique_mask(numbers, there).tolist() == wanted


def nearest(
    index: Index, strings: list[str], queries: torch.Tensor, k: int, min_similarity: float
) -> list[list[tuple[int, float]]]:
    """Entries with their scores, of each query as many as were found."""
    numbers = np.unique(strings, return_inverse=True)[1].astype(np.uint64)
    entries, scores = nearest_distinct(index, numbers.__getitem__, queries, k, min_similarity)
    assert entries.shape == scores.shape == (len(queries), k)
    assert np.array_equal(entries < 0, scores == -np.inf)
    rows = zip(entries.tolist(), scores.tolist())
    of_each = [[(e, score) for e, score in zip(*row) if e >= 0] for row in rows]
    assert all(row[: len(best)] == [e for e, _ in best] for row, best in zip(entries.tolist(), of_each))
    return of_each


@given(
    size=st.integers(1, 60), words=st.integers(1, 9), k=st.integers(1, 7), min_similarity=st.sampled_from([-99, 0, 2.5]),
    first=st.sampled_from([1, 2, 5, 64]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_search_goes_as_deep_as_it_must(
    size: int, words: int, k: int, min_similarity: float, first: int, seed: int
) -> None:
    """Against comparing with every key: few strings, some of them everywhere, and many equal scores."""
    rng = np.random.default_rng(seed)
    strings = [f"w{n}" for n in rng.geometric(0.5, size) % words]
    keys, queries = (torch.from_numpy(rng.integers(-2, 3, (n, 3))).float() for n in (size, 4))
    with patch("fairseq_ccpr.search.distinct_strings.PHRASE_DEPTH", first):
        found = nearest(ExactIndex(keys, "ip"), strings, queries, k, min_similarity)
    for query, of_query in zip(queries, found, strict=True):
        scores, best = (keys @ query).tolist(), {}
        for entry in sorted(range(size), key=lambda entry: (-scores[entry], entry)):
            if scores[entry] >= min_similarity:
                best.setdefault(strings[entry], entry)
        assert of_query == [(entry, scores[entry]) for entry in best.values()][:k]


class MissingIndex(ExactIndex):
    """Overlooks keys, others at each depth, as an approximate index may."""

    def search(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores, ids = super().search(queries, self.size)
        kept = [[i for i, entry in enumerate(row) if (entry * 7 + k) % 5 > 1][:k] for row in ids.tolist()]
        padded = torch.tensor([[*row, *[self.size] * (k - len(row))] for row in kept])
        beyond = (
            torch.nn.functional.pad(scores, (0, 1), value=float("-inf")),
            torch.nn.functional.pad(ids, (0, 1), value=-1),
        )
        return beyond[0].gather(1, padded), beyond[1].gather(1, padded)


@pytest.mark.parametrize("kind", [ExactIndex, MissingIndex])
def test_fewer_strings_are_the_head_of_more(kind: type[ExactIndex]) -> None:
    """Tuning retrieves once for all k."""
    rng = np.random.default_rng(1)
    strings = [f"w{n}" for n in rng.geometric(0.1, 3000) % 60]
    keys, queries = (torch.from_numpy(rng.normal(size=(n, 4))).float() for n in (3000, 20))
    most = nearest(kind(keys, "ip"), strings, queries, 40, 0.0)
    assert max(len(of_query) for of_query in most) == 40
    for k in (1, 2, 4, 8, 39):
        fewer = nearest(kind(keys, "ip"), strings, queries, k, 0.0)
        assert fewer == [of_query[:k] for of_query in most]
    assert all(len({strings[entry] for entry, _ in of_query}) == len(of_query) for of_query in most)


class ShallowIndex(ExactIndex):
    """Gives no more than ten keys, as FAISS on a GPU gives no more than 2,048."""

    deepest = 10

    def search(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert k <= self.deepest
        return super().search(queries, k)


def test_search_ends_where_the_index_does() -> None:
    keys = torch.arange(100, 0, -1).float()[:, None]
    strings, index, query = ["often"] * 8 + ["rare", "x"] * 46, ShallowIndex(keys, "ip"), torch.ones(1, 1)
    with patch("fairseq_ccpr.search.distinct_strings.PHRASE_DEPTH", 3):
        found = nearest(index, strings, query, 3, 0.0)
        assert found == [[(0, 100.0), (8, 92.0), (9, 91.0)]]
        assert nearest(index, strings, query, 4, 0.0) == found
