"""What was learned is searched with the datastore's own entries as if it were among them, or the forgotten ones were not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.learned import LearnedPair, NewPair
from fairseq_ccpr.datastore.token import FAMILIAR, TokenDatastore
from fairseq_ccpr.decoding import learned_memory
from fairseq_ccpr.decoding.correction_memory import CorrectionMemory
from fairseq_ccpr.decoding.learned_memory import LearnedEntries, LearnedMemory
from fairseq_ccpr.decoding.memory import MemoryBatch, Snapshot
from fairseq_ccpr.decoding.mixture import Distribution, Mixture
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.text_memory import TextMemory
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import LearningRetriever, Neighbours, TokenRetriever
from fairseq_ccpr.lab.speed.decoding_speed import Operations
from fairseq_ccpr.search import ExactIndex, live
from fairseq_ccpr.search.exact import half_norms
from fairseq_ccpr.search.live import Segment
from tests.decoding.test_beam_step import CPU, make_ensemble, two_steps, watching
from tests.helpers import equal as same
from tests.helpers import neighbours_of
from tests.killing import new_pair
from tests.small_models import World, build
from tests.torch_operations import NoRoundTrip

NOTHING_GONE = torch.empty(0, dtype=torch.long)


def retriever_over(keys: Tensor, values: Tensor, metric: str) -> TokenRetriever:
    datastore: Any = SimpleNamespace(
        section=SimpleNamespace(projection=None), open_index=lambda device: ExactIndex(keys, metric).to(device),
        open_projection=lambda: None, values=values.numpy(),
    )  # fmt: skip
    return TokenRetriever(datastore, CPU)


def entries(
    keys: Tensor, values: Tensor, metric: str, gone: Tensor = NOTHING_GONE, first: int = 0
) -> LearnedEntries:
    pair = LearnedPair(1, "eins", "one", 1, len(keys))
    segment = Segment(keys, half_norms(keys), metric)
    own = np.empty(0, np.int32)
    return LearnedEntries(
        segment,
        values,
        (pair,),
        (),
        gone,
        first,
        np.zeros(1, np.int64),
        own,
        torch.from_numpy(own),
        cast(Any, None),
    )


def equal(one: Neighbours, two: Neighbours, ids: bool = True) -> bool:
    there = one.scores > float("-inf")
    same = torch.equal(one.scores, two.scores) and torch.equal(one.values[there], two.values[there])
    return same and (not ids or torch.equal(one.ids, two.ids))


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("own", [0, 3, 300])
def test_both_together_are_one_search_over_all_entries(
    metric: str, own: int, rng: np.random.Generator
) -> None:
    for learned in (1, 5, 70):
        keys = torch.nn.functional.normalize(torch.randn(own + learned, 16), dim=1).half()
        keys[-1] = keys[0]  # of equal scores the datastore's own entry comes first
        values = torch.randint(4, 40, (own + learned,), dtype=torch.int32)
        queries = torch.cat([keys[:1].float(), torch.randn(7, 16)])
        retriever = retriever_over(keys[:own], values[:own], metric)
        both = retriever.with_learned(entries(keys[own:], values[own:], metric))
        for k in (1, 4, 90, 400):
            assert equal(both.search(queries, k), retriever_over(keys, values, metric).search(queries, k)), (
                learned,
                k,
            )


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("forgotten", [40, 170])
def test_forgotten_entries_of_the_datastore_are_as_if_they_were_not_there(
    metric: str, forgotten: int, rng: np.random.Generator
) -> None:
    """Also where more of the nearest were forgotten than are looked for at first."""
    keys = torch.randn(250, 16).half()
    values = torch.randint(4, 40, (250,), dtype=torch.int32)
    gone = torch.from_numpy(np.sort(rng.permutation(200)[:forgotten]))
    own = torch.from_numpy(np.setdiff1d(np.arange(200), gone.numpy()))
    queries = keys[::5].float()
    learned = keys[200:], values[200:], metric
    retriever = retriever_over(keys[:200], values[:200], metric)
    never = retriever_over(keys[own], values[own], metric).with_learned(entries(*learned))
    for k in (1, 9, 60):
        found = retriever.with_learned(entries(*learned, gone)).search(queries, k)
        assert equal(found, never.search(queries, k), ids=False)
        assert not np.isin(found.ids.numpy(), gone.numpy()).any()


def test_with_nothing_learned_the_retriever_is_what_it_was() -> None:
    retriever = retriever_over(torch.randn(20, 16).half(), torch.arange(4, 24, dtype=torch.int32), "l2")
    nothing = entries(torch.empty(0, 16).half(), torch.empty(0, dtype=torch.int32), "l2")
    other = retriever.with_learned(nothing)
    assert isinstance(other, LearningRetriever) and other.learned is None
    assert (
        equal(
            other.search(torch.randn(3, 16), 4), retriever.search(torch.zeros(3, 16) + torch.randn(3, 16), 4)
        )
        is False
    )
    states = torch.randn(5, 16)
    assert equal(other.search(states, 4), retriever.search(states, 4))


def learning(ensemble: Any, count: int) -> Any:
    """The ensemble of `test_beam_step`, alongside whose datastore something was learned, and forgotten."""
    retriever = ensemble.find(TokenMemory).retriever
    keys = torch.nn.functional.normalize(torch.randn(count, 16), dim=1).half()
    values = torch.randint(4, 7, (count,), dtype=torch.int32)
    made = entries(keys, values, retriever.index.metric, torch.arange(3, 9))
    memory: Any = SimpleNamespace(entries=made)
    tokens = replace(ensemble.find(TokenMemory), retriever=retriever, learned=memory)
    return ensemble.replacing(tokens, trust=ensemble.trust)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_a_step_makes_no_round_trip_and_as_many_operations_whatever_was_learned(metric: str) -> None:
    counts = []
    for count in (2000, 4000):
        with watching(NoRoundTrip):
            for log_probs in two_steps(learning(make_ensemble(metric, CPU), count), CPU):
                torch.testing.assert_close(log_probs.exp().sum(dim=1), torch.ones(6))
        steps, counted = two_steps(learning(make_ensemble(metric, CPU), count), CPU), Operations()
        next(steps)
        with watching(lambda counted=counted: counted, steps=False):
            next(steps)
        counts.append(counted.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_of_what_was_learned_and_forgotten_it_is_not_known_that_none_is_missing(metric: str) -> None:
    ensemble = make_ensemble(metric, CPU)
    other, sources = learning(ensemble, 900), torch.tensor([[5, 6, 2]])
    for one, certain in ((ensemble, True), (other, False)):
        assert one.find(TokenMemory).begin(sources, Snapshot()).certain == certain
    with patch.object(TokenRetriever, "always_finds", lambda *_: False):
        unsure = list(two_steps(other, CPU))
    assert all(map(torch.equal, two_steps(other, CPU), unsure))


def test_a_batch_that_has_begun_does_not_see_what_is_learned_meanwhile() -> None:
    ensemble = make_ensemble("l2", CPU)
    wanted = list(two_steps(ensemble, CPU))
    other = learning(ensemble, 900)
    learned = other.find(TokenMemory).learned.entries
    other.find(TokenMemory).learned.entries = entries(learned.index.keys[:0], learned.values[:0], "l2")
    steps = two_steps(other, CPU)
    assert torch.equal(next(steps), wanted[0])
    other.find(TokenMemory).learned.entries = learned
    assert torch.equal(next(steps), wanted[1])
    assert not torch.equal(next(two_steps(other, CPU)), wanted[0])


def test_the_segment_grows_and_shrinks_with_the_journal(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_memory, "FIRST_ROWS", 8)
    build(world, tmp_path / "store", "--subset", "valid")
    memory = LearnedMemory(TokenDatastore(tmp_path / "store"), CPU)
    pairs = {}
    for number in range(1, 30):
        earlier = memory.entries
        there = earlier.index.keys.clone(), earlier.values.clone(), earlier.index.half_norms.clone()
        pairs[memory.learn([new_pair(number)])[0].id] = new_pair(number)
        if number % 7 == 0:
            memory.forget([number - 3, number - 1])
            del pairs[number - 3], pairs[number - 1]
        assert all(map(torch.equal, there, (earlier.index.keys, earlier.values, earlier.index.half_norms)))
        again = LearnedMemory(TokenDatastore(tmp_path / "store"), CPU)
        for one in (memory.entries, again.entries):
            assert np.array_equal(one.index.keys, np.concatenate([pair.keys for pair in pairs.values()]))
            assert np.array_equal(one.values, np.concatenate([pair.values for pair in pairs.values()]))
            torch.testing.assert_close(one.index.half_norms, one.index.keys.float().square().sum(1) / 2)
            places = [(pair.id, position) for pair, position in map(one.place, range(one.index.size))]
            assert places == [(n, at) for n, pair in pairs.items() for at in range(len(pair.values))]
        assert str(memory.entries) == str(again.entries) and str(memory.entries).startswith(f"{len(pairs)}-")


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_a_large_segment_is_searched_in_lists_as_if_it_were_compared_with_one_by_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    """All lists and all candidates are looked at here; the lists grow, are made again, and lose what is forgotten."""
    pytest.importorskip("faiss")
    monkeypatch.setattr(learned_memory, "EXACT_ROWS", 60)
    monkeypatch.setattr(learned_memory, "LAST_ROWS", 30)
    monkeypatch.setattr(live, "PROBES", 1000)
    monkeypatch.setattr(live, "CANDIDATES", 1000)
    build(world, tmp_path / "store", "--subset", "valid", "--metric", metric)
    memory, made, pinned = LearnedMemory(TokenDatastore(tmp_path / "store"), CPU), set(), []
    rng, there = np.random.default_rng(3), {}
    for number in range(1, 100):
        new = new_pair(number)
        there[memory.learn([new])[0].id] = new
        if number % 5 == 0:
            lost = rng.choice(
                list(there), 2 if number < 70 else min(12, len(there) - 1), replace=False
            ).tolist()
            memory.forget(lost)
            there = {one: pair for one, pair in there.items() if one not in lost}
        lists = memory.entries.index.lists
        made.add((lists is not None and lists.trained, memory.entries.index.gone is None))
        keys, values = (
            torch.from_numpy(np.concatenate(parts))
            for parts in zip(*((p.keys, p.values) for p in there.values()))
        )
        queries = torch.cat([keys[-3:].float(), torch.randn(4, keys.size(1))])
        wanted = ExactIndex(keys, metric).search(queries, 7)
        pinned.append((memory.entries, queries, values[wanted[1].clamp_min(0)], wanted[0]))
    assert len(made) >= 6  # without lists, with lists of several sizes, with rows that are gone and without
    for entries_then, queries, found, scores in reversed(pinned):  # what came later has not changed them
        best, rows = entries_then.index.search(queries, 7)
        torch.testing.assert_close(best, scores)
        assert torch.equal(entries_then.values[rows][scores > -np.inf], found[scores > -np.inf])
    last = memory.entries
    places = [(pair.id, at) for pair, row in zip(last.pairs, last.rows) for at in range(pair.tokens)]
    rows = np.concatenate([np.arange(row, row + pair.tokens) for pair, row in zip(last.pairs, last.rows)])
    assert [(pair.id, at) for pair, at in map(last.place, rows)] == places and [
        one.id for one in last.pairs
    ] == list(there)


def test_an_empty_memory_has_nothing_to_say() -> None:
    retriever = retriever_over(torch.empty(0, 16).half(), torch.empty(0, dtype=torch.int32), "l2")
    capture: Any = None
    memory = TokenMemory(capture, retriever, TokenRetrievalSettings(4, 0.5, 10.0), 3)
    neighbours = neighbours_of(memory, torch.randn(5, 16))
    assert (neighbours.ids == -1).all() and (neighbours.scores == float("-inf")).all()
    said = memory.vote(neighbours, Distribution(torch.randn(5, 9)).view(neighbours.values), None, False)
    assert (said.log_probs == float("-inf")).all() and not said.weight.any()


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_the_guard_is_for_the_datastores_own_entries_alone(metric: str) -> None:
    """Against a plain loop; text that is as far as can be is left what was learned, and text that is not all."""
    keys = torch.nn.functional.normalize(torch.randn(50, 16), dim=1).half()
    values = torch.randint(4, 9, (50,), dtype=torch.int32)
    made = entries(keys[30:], values[30:], metric, first=30)
    settings = TokenRetrievalSettings(6, 0.8, 0.3, confidence=False, guard=True)
    familiarity = torch.tensor([0.0, 0.3, 1.0])
    course: Any = SimpleNamespace(best=0.4 + 0.1 * familiarity, familiar=None)
    retriever, capture = retriever_over(keys[:30], values[:30], metric), cast(Any, None)
    retriever.datastore.section.suits = {FAMILIAR: 0.5}
    memory = TokenMemory(capture, retriever, settings, 3, learned=made)
    queries, log_probs = torch.randn(3, 16), torch.randn(3, 9).log_softmax(dim=1)
    neighbours = neighbours_of(memory, queries)
    given = memory.vote(neighbours, Distribution(log_probs).view(neighbours.values), course, False)
    mixed = Mixture().mix(Distribution(log_probs.clone()), [given]).log_probs.exp()
    shares = (neighbours.scores / 0.3).softmax(dim=1)
    for row in range(3):
        wanted = log_probs[row].exp()
        left = torch.tensor(
            [1.0 if entry >= 30 else float(familiarity[row]) for entry in neighbours.ids[row]]
        )
        wanted *= 1 - 0.8 * float((shares[row] * left).sum())
        wanted.index_add_(0, neighbours.values[row], 0.8 * shares[row] * left)
        torch.testing.assert_close(mixed[row], wanted)
    assert float(given.weight[2]) == pytest.approx(0.8)


def test_scores_of_references_are_those_of_beam_search(
    world: World, decode: Callable[..., Any], check_rescoring: Callable[..., None], tmp_path: Path
) -> None:
    """fairseq-generate finds what was learned as well, step by step and when it scores references."""
    folder = Path(shutil.copytree(world.datastore, tmp_path / "store"))
    own = TokenDatastore(folder)
    memory = LearnedMemory(own, CPU)
    rows = np.random.default_rng(1).integers(own.section.size, size=400)
    noise = np.random.default_rng(2).standard_normal((400, 32)) * 0.05
    memory.learn(
        [NewPair("eins", "one", own.values[rows[::-1]], (own.keys[rows] + noise).astype(np.float16))]
    )
    words = ["--datastore", folder, "--tokens-lambda", 0.7]
    check_rescoring(*words)
    assert not same(decode(*words), decode("--tokens-lambda", 0.7), tolerance=1e-2)


def test_memories_begin_with_one_snapshot(world: World, tmp_path: Path) -> None:
    """What is learned while they begin counts for none of them."""
    shutil.copytree(world.datastore, tmp_path / "store")
    with Translator(datastore=tmp_path / "store", device="cpu") as translator:
        translator.learn("Er ging zum Haus.", "He went home.")
        ensemble = translator.ensemble
        assert ensemble is not None
        seen: list[Any] = []

        def begin(memory: Any, sources: torch.Tensor, snapshot: Snapshot) -> MemoryBatch:
            seen.append(snapshot.learned)
            translator.learn(f"Es war der {len(seen)}. Tag.", "It was another day.")
            return MemoryBatch()

        kinds = {type(memory) for memory in ensemble.memories}
        assert {TokenMemory, CorrectionMemory} <= kinds
        sample = {"src_tokens": torch.tensor([[5, 6, 2]]), "src_lengths": torch.tensor([3])}
        with ExitStack() as patches:
            for kind in kinds:
                patches.enter_context(patch.object(kind, "begin", begin))
            ensemble.forward_encoder(sample)
        assert len(seen) == len(ensemble.memories) > 1 and all(one is seen[0] for one in seen)
        learned = ensemble.snapshot().learned
        assert learned is not None and len(learned.pairs) == 1 + len(seen) and len(seen[0].pairs) == 1
        assert ensemble.find(TextMemory) is None and isinstance(ensemble.find(TokenMemory), TokenMemory)
