"""The token memory's part of a step in few operations, and what these compute against plain loops in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fairseq_ccpr.decoding.ensemble import RetrievalEnsemble
from fairseq_ccpr.decoding.mixture import ModelEvidence, neighbour_log_probabilities, neighbour_shares
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.token_features import RANKS, TYPICAL_RANK, Course, TokenEvidence, observed
from fairseq_ccpr.decoding.token_memory import TokenBatch, TokenMemory, confidence_weight
from fairseq_ccpr.decoding.token_retriever import Neighbours, TokenRetriever, best_neighbours
from fairseq_ccpr.decoding.trust import LearnedTrust
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.search.exact import largest
from tests.helpers import TOKENS
from tests.small_models import World

# Operations at most, besides those of the model; the search is one.
MOST = {"cpu": 91, "gpu": 84, "gpu that may find the unknown token": 115}
NONE = float("-inf")


class Counted(TorchDispatchMode):
    """Counts operations that make or change a tensor, and apart from them those whose result is a view.

    A view by the operation's own schema: `view`, `transpose`, `slice`, `expand`, `as_strided`, `select`,
    `unsqueeze`, `squeeze`, `detach`, `alias`, `split`, `unbind`, and what else makes no numbers.
    """

    made = views = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made, self.views = self.made + (not func.is_view), self.views + func.is_view
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def third_step(ensemble: RetrievalEnsemble, sample: dict, beam: int = 5) -> tuple[Counted, Tensor]:
    """Count in a step that nothing is computed for the first time in, up to the peaks that beam search asks for.

    Returns:
        The count, and log p, fp32 [H, V].
    """
    counted, search = Counted(), TokenRetriever.search

    def uncounted(retriever: TokenRetriever, queries: Tensor, k: int) -> Neighbours:
        counted.made += 1
        with _disable_current_modes():
            return search(retriever, queries, k)

    net_input = {name: part for name, part in sample["net_input"].items() if name != "prev_output_tokens"}
    order, states = torch.arange(len(sample["id"])).repeat_interleave(beam), [{}]
    tokens = torch.full((len(order), 1), 2)
    with patch.object(TokenRetriever, "search", uncounted):
        encoded = ensemble.reorder_encoder_out(ensemble.forward_encoder(net_input), order)
        for _ in range(3):
            counted.made = counted.views = 0
            with counted:
                distribution, _ = ensemble.step(tokens, encoded, states)
                assert distribution.peaks is not None  # of the vocabulary, which beam search asks for
                encoded = ensemble.reorder_encoder_out(encoded, torch.arange(len(order)))
            written = distribution.log_probs.view(-1, beam, distribution.log_probs.size(1))[:, 0].topk(beam)
            tokens = torch.cat([tokens, written.indices.view(-1, 1)], dim=1)
    return counted, distribution.log_probs


def guarding(world: World, likeness: int, known: bool) -> tuple[RetrievalEnsemble, dict, dict[str, float]]:
    """Tokens with a guard and trust, eight sentences, and what the datastore suits; `known` names no unknown token."""
    cfg = parse_generation(
        world.options("--tokens-lambda", 0.6, "--tokens-likeness", likeness, "--tokens-k", 8)
    )
    task, models = load(cfg)
    ensemble = task.build_generator(models, cfg.generation).model
    memory = ensemble.find(TokenMemory)
    assert memory.settings.k == 8
    trust = LearnedTrust(TOKENS)
    torch.manual_seed(7)
    for parameter in trust.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    guarding, tokens = memory.changed(guard=True), memory.retriever.datastore.values
    if known:
        guarding = replace(guarding, unknown=task.target_dictionary.pad())
        assert guarding.unknown not in tokens and memory.unknown in tokens
    sample = next(
        task.get_batch_iterator(task.dataset("test"), max_sentences=8).next_epoch_itr(shuffle=False)
    )
    suits = memory.retriever.datastore.section.suits
    return ensemble.with_memories([guarding], trust.requires_grad_(False)), sample, suits


@pytest.mark.parametrize("likeness", [0, 4])
@pytest.mark.parametrize("kind", MOST)
def test_guard_trust_and_interpolation_take_few_operations(
    world: World, likeness: int, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind != "cpu":
        request.getfixturevalue("as_on_a_gpu")
    ensemble, sample, suits = guarding(world, likeness, kind == "gpu")
    with patch.dict(suits, {"familiar": 1e-3}):
        full, _ = third_step(ensemble, sample)
    alone, _ = third_step(ensemble.with_memories([], None), sample)
    made, views = full.made - alone.made, full.views - alone.views
    print(
        f"{kind}, likeness {likeness}: {made} operations and {views} views besides the model's "
        f"{alone.made} and {alone.views}"
    )
    assert MOST[kind] - 3 < made - 6 * (likeness > 0) <= MOST[kind]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("likeness", [0, 4])
@pytest.mark.parametrize("familiar", [1e-3, 0.8, 1e3])
def test_a_gpu_that_knows_that_none_is_missing_says_the_same(
    world: World, likeness: int, familiar: float
) -> None:
    """Where no source is strange to the guard, some are, or all."""
    ensemble, sample, suits = guarding(world, likeness, True)
    begun = []

    def begin(memory: TokenMemory, *given: Any) -> TokenBatch:
        begun.append(batch := real(memory, *given))
        return batch

    real = TokenMemory.begin
    with patch.dict(suits, {"familiar": familiar}), patch.object(TokenMemory, "begin", begin):
        _, certain = third_step(ensemble, sample)
        with patch.object(TokenRetriever, "always_finds", lambda *_: False):
            _, unsure = third_step(ensemble, sample)
    assert [batch.certain for batch in begun] == [True, False]
    strange = begun[0].likeness.strange
    assert begun[0].complete == (strange is None) == (familiar < 0.1)
    assert strange is None or strange[0] == (familiar > 1)
    torch.testing.assert_close(certain, unsure, rtol=1e-5, atol=1e-5)


def similarity(score: float) -> float:
    return -math.log1p(-score) if score < 0 else score


def plain_features(evidence: TokenEvidence, model: ModelEvidence) -> list[list[float]]:
    """The token memory's features, row by row and neighbour by neighbour, without those of course and source."""
    rows = []
    for row in range(len(evidence.scores)):
        scores, values, log_probs, model_probs = (
            part[row].tolist()
            for part in (evidence.scores, evidence.values, evidence.log_probs, evidence.model)
        )
        k = len(scores)
        there = [place for place in range(k) if scores[place] > NONE]
        likeness = evidence.likeness[row].tolist() if evidence.likeness is not None else [0.0] * k
        first = [i for i in there if values[i] not in [values[j] for j in there if j < i]]
        ordered, least = sorted((scores[i] for i in there), reverse=True), max(1, len(there))
        ranks = [min(rank, least) for rank in RANKS]
        p = {i: math.exp(log_probs[i]) for i in first}
        favourite = max(p, key=lambda i: (p[i], -i)) if p else None
        found = [similarity(ordered[rank - 1]) if there else 0.0 for rank in ranks]
        found += [len(there) / k, *(sum(i < rank for i in first) / rank for rank in ranks[1:])]
        found += [p[favourite] if p else 0.0, -sum(x * math.log(x) for x in p.values() if x)]
        found += [sum(values[i] == values[favourite] for i in there) / least if p else 0.0]
        found += [float(model.best[row]) - max(model_probs[favourite], -80.0) if p else 0.0]
        found += [float(bool(p) and values[favourite] == int(model.favourite[row]))]
        found += [sum(x * math.exp(model_probs[i]) for i, x in p.items())]
        alike = [likeness[i] if i in there else 0.0 for i in range(k)]
        rows.append([*found, alike[0], max(alike), sum(alike) / least])
    return rows


def drawn(
    k: int, metric: str, missing: float, seed: int, rows: int = 40
) -> tuple[TokenEvidence, ModelEvidence]:
    """Random evidence; with missing neighbours the last row has none at all."""
    torch.manual_seed(seed)
    scores = torch.rand(rows, k) * 2 - 0.5 if metric == "ip" else -200 * torch.rand(rows, k)
    scores = scores.sort(dim=1, descending=True).values
    if missing:
        scores[torch.rand(rows, k) < missing] = NONE
        scores[-1] = NONE
    values, temperature = torch.randint(0, 9, (rows, k)), 0.1 if metric == "ip" else 20.0
    log_probs = neighbour_log_probabilities(scores, values, temperature)
    model = torch.randn(rows, 12).log_softmax(dim=1)
    model[:, 4] = NONE
    some = torch.ones(rows, 2)
    course = Course(some[:, 0], some, some[:, 0], some[:, :1])
    likeness = torch.rand(rows, k).half()
    evidence = TokenEvidence(
        scores, values, likeness, log_probs, model.gather(1, values), course, not missing
    )
    return evidence, ModelEvidence(*model.max(dim=1))


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("k", [1, 5, 8, 32, 33, 64])
def test_features_equal_plain_loops(k: int, metric: str, missing: float) -> None:
    """Compare both paths: with neighbours that may be missing, and with none missing."""
    seed = int(torch.randint(1 << 31, ()))
    print("seed", seed)
    evidence, model = drawn(k, metric, missing, seed)
    wanted = torch.tensor(plain_features(evidence, model))
    found = evidence.features(model)[:, : wanted.size(1)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    slow = evidence._replace(complete=False).features(model)
    torch.testing.assert_close(evidence.features(model), slow, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_what_is_followed_equals_plain_loops(metric: str, missing: float) -> None:
    seed = int(torch.randint(1 << 31, ()))
    print("seed", seed)
    evidence, model = drawn(12, metric, missing, seed)
    found = observed(evidence.scores, evidence.values, model.favourite, complete=not missing)
    for row, (scores, values) in enumerate(zip(evidence.scores.tolist(), evidence.values.tolist())):
        near = [score for score in scores[:TYPICAL_RANK] if score > NONE]
        some = float(bool(near))
        agrees = float(scores[0] > NONE and values[0] == int(model.favourite[row]))
        wanted = [similarity(min(near)) if near else 0.0, agrees, some, 1]
        assert found[row].tolist() == pytest.approx(wanted, abs=1e-5)


def test_shares_and_weights_are_the_same_where_it_is_known_that_none_is_missing() -> None:
    seed = int(torch.randint(1 << 31, ()))
    print("seed", seed)
    scores = drawn(8, "l2", 0, seed)[0].scores
    wanted = torch.softmax(scores.double() / 0.05, dim=1)
    for complete in (True, False):
        torch.testing.assert_close(
            neighbour_shares(scores, 0.05, complete).double(), wanted, rtol=1e-4, atol=1e-7
        )
    unread: Any = None  # what the model says, which neither asks for
    for confidence in (True, False):
        settings = TokenRetrievalSettings(8, 1.0, 0.1, confidence)
        weight = confidence_weight(scores, scores.long(), unread, settings)
        assert bool(((weight >= 0) & (weight < 1)).all())


def test_the_best_by_likeness_are_the_largest_and_of_equals_the_first() -> None:
    seed = int(torch.randint(1 << 31, ()))
    print("seed", seed)
    torch.manual_seed(seed)
    scores = -torch.randint(0, 6, (50, 64)).float().sort(dim=1).values
    scores[torch.rand(50, 64) < 0.2] = NONE
    scores[0] = NONE
    likeness = torch.randint(0, 3, (50, 64)).half() / 2
    ids = torch.arange(64).expand(50, -1)
    for k in (8, 64, 70):
        settings = TokenRetrievalSettings(k, 0.5, 2.0, likeness=1.0)
        best, places = best_neighbours(Neighbours(ids, scores, ids, likeness), settings)
        wanted, there = largest(scores + 2 * (likeness.float() - 1), min(k, 64))
        assert places is not None and torch.equal(places, there) and torch.equal(best.ids, there)
        assert torch.equal(best.scores, wanted)
