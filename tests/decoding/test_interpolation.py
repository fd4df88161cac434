"""The merge against a dense reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_ccpr.decoding import mixture
from fairseq_ccpr.decoding.mixture import (
    Distribution,
    Mixture,
    Vote,
    neighbour_log_probabilities,
    target_log_probabilities,
)
from fairseq_ccpr.decoding.options import TokenRetrievalSettings
from fairseq_ccpr.decoding.token_retriever import Neighbours
from fairseq_ccpr.settings import signed
from tests.helpers import weight_of


def dense_reference(log_probs, scores, ids, values, share, temperature):
    """Equations 2 and 4 of the CLKNN paper as they stand, over the whole vocabulary, in float64."""
    p = np.exp(log_probs.double().numpy())
    result = np.empty_like(p)
    for row in range(len(p)):
        found = ids[row].numpy() >= 0
        weights = np.zeros(p.shape[1])
        if found.any():
            s = scores[row].double().numpy()[found] / temperature
            np.add.at(weights, values[row].numpy()[found], np.exp(s - s.max()))
            weights /= weights.sum()
        lam = share[row].item() if found.any() else 0.0
        result[row] = (1 - lam) * p[row] + lam * weights
    return result


def mixed_by(votes, log_probs):
    """Mix as decoding does, and check that the highest of each run of tokens is known still."""
    mixed = Mixture().mix(Distribution(log_probs.clone()), votes)
    assert torch.equal(mixed.peaks, mixture.run_peaks(mixed.log_probs))
    return mixed.log_probs


def mix(log_probs, scores, ids, values, share, temperature):
    retrieved = neighbour_log_probabilities(scores.masked_fill(ids < 0, float("-inf")), values, temperature)
    share = share.masked_fill((ids < 0).all(dim=1), 0.0)
    return mixed_by([Vote(values, retrieved, share)], log_probs.float())


@given(
    rows=st.integers(1, 6),
    k=st.sampled_from([1, 2, 8, 17, mixture.FEW, mixture.FEW + 1, 70]),
    vocabulary=st.integers(2, 40),
    temperature=st.floats(0.05, 100),
    share=st.sampled_from([0.0, 1.0, 0.3, 0.999]),
    half=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_merge_equals_dense_reference(rows, k, vocabulary, temperature, share, half, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(rows, vocabulary, generator=generator)).log_softmax(1)
    if half:
        log_probs = log_probs.half()
    scores = -200 * torch.rand(rows, k, generator=generator)
    ids = torch.randint(-1, 5, (rows, k), generator=generator)
    values = torch.randint(0, vocabulary, (rows, k), generator=generator)  # many duplicates
    shares = torch.full((rows,), share)
    found = mix(log_probs, scores, ids, values, shares, temperature)
    wanted = dense_reference(log_probs, scores, ids, values, shares, temperature)
    np.testing.assert_allclose(found.double().exp().numpy(), wanted, rtol=2e-5, atol=1e-7)
    if not half:
        np.testing.assert_allclose(found.double().exp().sum(1).numpy(), 1, rtol=1e-5)


@given(k=st.integers(1, 40), temperature=st.sampled_from([0.05, 10.0]), seed=st.integers(0, 2**31))
def test_one_token_has_what_the_distribution_gives_it(k, temperature, seed) -> None:
    """Some neighbours are missing, of some rows all."""
    generator = torch.Generator().manual_seed(seed)
    # no probability of T 0.05 is below fp32's least
    scores = torch.randn(6, k, generator=generator).clamp(-2, 2)
    scores[torch.rand(6, k, generator=generator) < torch.rand(6, 1, generator=generator)] = float("-inf")
    scores[0] = float("-inf")
    values = torch.randint(0, 5, (6, k), generator=generator)
    found = scores > float("-inf")
    matches = (values == 3) & found
    of_each = neighbour_log_probabilities(scores, values, temperature)
    wanted = of_each.masked_fill(~matches, float("-inf")).amax(dim=1)
    torch.testing.assert_close(target_log_probabilities(scores, matches, temperature), wanted)
    assert torch.equal(
        Vote(values, of_each, scores[:, 0]).log_prob(torch.full((6,), 3)),
        of_each.masked_fill(values != 3, float("-inf")).amax(dim=1),
    )


@pytest.mark.parametrize("confidence", [False, True])
def test_weight_of_tokens_is_lambda_or_lambda_star(confidence: bool) -> None:
    """Some neighbours are missing, of one row all."""
    scores = (
        torch.randn(6, 9)
        .masked_fill(torch.rand(6, 9) < 0.3, float("-inf"))
        .sort(dim=1, descending=True)
        .values
    )
    scores[0] = float("-inf")
    found = scores > float("-inf")
    s0 = 0.25 if confidence else 0.0
    options = TokenRetrievalSettings(9, 0.5, 0.1, confidence, min_similarity=s0)
    values = torch.randint(0, 5, (6, 9))
    model = Distribution(torch.randn(6, 5).log_softmax(dim=1)).view(values)
    weight = weight_of(Neighbours(found.long() - 1, scores, values), model, options)
    mean = ((scores - s0) / (1 - s0)).clamp(0, 1).sum(dim=1) / found.sum(dim=1).clamp_min(1)
    torch.testing.assert_close(weight, 0.5 * (mean if confidence else found.any(dim=1).float()))


@pytest.mark.parametrize("lambda_max", [1.0, 0.3])
@pytest.mark.parametrize("k", [4, 8, 16, 64])
def test_published_lambda_star_is_equation_8_of_clknn(k: int, lambda_max: float) -> None:
    """The sum over all k, negative similarities and all, divided by k: a missing neighbour adds nothing to it."""
    scores = (torch.rand(40, k) * 2 - 0.7).clamp(-1, 1).masked_fill(torch.rand(40, k) < 0.2, float("-inf"))
    scores = scores.sort(dim=1, descending=True).values
    scores[0], scores[1] = float("-inf"), -0.5
    settings = TokenRetrievalSettings(
        k, 0.9, 0.1, confidence=True, lambda_max=lambda_max, lambda_star="published"
    )
    values = torch.randint(0, 5, (40, k))
    model = Distribution(torch.randn(40, 5).log_softmax(dim=1)).view(values)
    weight = weight_of(Neighbours(values, scores, values), model, settings)
    similar = scores.double().numpy()
    wanted = 0.9 * np.where(np.isinf(similar), 0, similar).sum(axis=1) / k
    np.testing.assert_allclose(weight, wanted.clip(0, lambda_max), atol=1e-6)
    assert weight[0] == weight[1] == 0 and signed(settings)["mean"] == "published"


def test_share_of_zero_changes_no_bit() -> None:
    log_probs = torch.randn(4, 30).log_softmax(1)
    values = torch.randint(0, 30, (4, 8))
    mixed = mix(
        log_probs, -torch.rand(4, 8), torch.zeros(4, 8, dtype=torch.long), values, torch.zeros(4), 10.0
    )
    assert torch.equal(mixed, log_probs)


def test_no_neighbour_at_all_leaves_the_model_alone() -> None:
    log_probs = torch.randn(2, 30).log_softmax(1)
    missing = torch.full((2, 8), -1)
    scores = torch.full((2, 8), float("-inf"))
    mixed = mix(log_probs, scores, missing, torch.zeros(2, 8, dtype=torch.long), torch.full((2,), 0.7), 10.0)
    assert torch.equal(mixed, log_probs)


def test_forbidden_tokens_stay_forbidden_unless_retrieved() -> None:
    log_probs = torch.randn(1, 10).log_softmax(1)
    log_probs[0, [0, 1]] = float("-inf")
    values = torch.tensor([[5, 6]])
    mixed = mix(
        log_probs, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long), values, torch.tensor([0.5]), 1.0
    )
    assert torch.isinf(mixed[0, :2]).all() and torch.isfinite(mixed[0, 2:]).all()


def test_references_are_mixed_as_their_tokens_are_in_the_whole_distribution() -> None:
    log_probs, targets, rows = torch.randn(6, 20).log_softmax(dim=1), torch.arange(6), torch.arange(6)
    votes = []
    for weight in ([0.0, 0.2, 0.5, 1.0, 0.3, 0.0], [0.0, 0.3, 0.5, 0.0, 0.0, 1.0]):
        values = torch.randint(0, 20, (6, 4))
        values[::2, 1] = targets[::2]
        votes.append(
            Vote(values, neighbour_log_probabilities(torch.randn(6, 4), values, 1.0), torch.tensor(weight))
        )
    given = [(vote.log_prob(targets), vote.weight) for vote in votes]
    found = Mixture().of_targets(log_probs[rows, targets], given)
    torch.testing.assert_close(found, mixed_by(votes, log_probs)[rows, targets])
    assert torch.equal(Mixture().of_targets(log_probs[0], []), log_probs[0])


def test_where_nothing_votes_nothing_is_bounded() -> None:
    """As at the language tag that a multilingual model is made to begin with."""
    assert mixture.Mixture(bounded=(False, True)).limited([]) == []


def test_a_weight_of_1_rules_nothing_out() -> None:
    """And no vote changes nothing. Some of the hypotheses are mixed as they are among all."""
    log_probs = torch.randn(3, 20).log_softmax(dim=1)
    vote = Vote(torch.tensor([[5], [6], [7]]), torch.zeros(3, 1), torch.ones(3))
    mixed = mixed_by([vote], log_probs)
    assert mixed.isfinite().all() and (mixed.argmax(dim=1) == torch.tensor([5, 6, 7])).all()
    assert torch.equal(mixed_by([vote.select(slice(1, None))], log_probs[1:]), mixed[1:])
    assert torch.equal(mixed_by([], log_probs), log_probs)


def test_shares_are_what_each_gives_to_the_mixture() -> None:
    log_p = torch.tensor([0.3, 0.5, 0.0, 0.0]).log()
    said = [
        (torch.tensor([0.9, 0.0, 0.5, 0.0]).log(), torch.tensor([0.4, 0.2, 0.3, 0.3])),
        (torch.tensor([0.1, 0.6, 0.0, 0.0]).log(), torch.tensor([0.1, 0.3, 0.1, 0.1])),
    ]
    shares, mixed = Mixture().shares(log_p, said), Mixture().of_targets(log_p, said).exp()
    given = torch.stack([(1 - said[0][1] - said[1][1]) * log_p.exp(), *(w * p.exp() for p, w in said)], dim=1)
    torch.testing.assert_close(shares[:3] * mixed[:3, None], given[:3])
    assert not shares[3].any() and not mixed[3]  # which nobody says
    assert torch.equal(Mixture().shares(log_p[:2], []), torch.ones(2, 1))
