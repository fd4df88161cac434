"""What phrases say of the next token, against plain references: prefixes, coverage, weights, the distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairseq_ccpr.decoding.interpolation import ALMOST_ALL, Vote, interpolate_, limit_weights
from fairseq_ccpr.decoding.phrase_continuation import MAX_SUBWORDS, PhraseState
from tests.decoding.phrase_tables import MARK, begun_after, make_table

VOCABULARY = 8  # so few that phrases repeat tokens, begin alike and overlap
SPECIAL = 0  # a token that no phrase has, and that none may ask for
phrases = st.lists(st.integers(MARK, VOCABULARY - 1), min_size=1, max_size=5)
sentences = st.lists(
    st.tuples(phrases, st.integers(0, 2), st.floats(-1, 1, width=32)), min_size=0, max_size=6
)  # phrase, source phrase, score


def longest_proper_prefix(phrase: list[int], written: list[int]) -> int:
    lengths = [n for n in range(1, len(phrase)) if len(written) >= n and written[-n:] == phrase[:n]]
    return max(lengths, default=0)


def contains(written: list[int], phrase: list[int]) -> bool:
    return any(written[i : i + len(phrase)] == phrase for i in range(len(written)))


def reference_weights(
    sentence: list[tuple[list[int], int, float]], k: int, temperature: float, s0: float
) -> list[float]:
    weights = [0.0] * len(sentence)
    for query in range(3):
        lanes = [i for i, (_, q, _) in enumerate(sentence) if q == query]
        lanes = [i for i in sorted(lanes, key=lambda i: (-sentence[i][2], i))[:k] if sentence[i][2] > s0]
        if lanes:
            best = sentence[lanes[0]][2]
            terms = {i: math.exp((sentence[i][2] - best) / temperature) for i in lanes}
            for i in lanes:
                weights[i] = max(0.0, (best - s0) / (1 - s0)) * terms[i] / sum(terms.values())
    return weights


def reference_masses(
    sentence: list[tuple[list[int], int, float]], weights: list[float], written: list[int], probs: list[float],
    enter: float, k: int, coverage: bool, attention: dict[int, float] | None,
) -> dict[int, float]:  # fmt: skip
    """M(v) of METHODS, the plain way."""
    masses: dict[int, float] = {}
    for query in {q for _, q, _ in sentence}:
        own = [(phrase, weight) for (phrase, q, _), weight in zip(sentence, weights) if q == query]
        ranked = sorted((-score, i, phrase) for i, (phrase, q, score) in enumerate(sentence) if q == query)
        done = coverage and any(contains(written, phrase) for _, _, phrase in ranked[:k])
        of_query: dict[int, float] = {}
        steps = [(phrase, weight, longest_proper_prefix(phrase, written)) for phrase, weight in own]
        whole = sum(weight for _, weight, _ in steps)
        left = sum(weight for phrase, weight, length in steps if length >= begun_after(phrase))
        for phrase, weight, length in steps:
            token = phrase[length]
            consent = math.sqrt(probs[token] / max(probs))
            if length >= begun_after(phrase):
                share = weight * whole / left * consent if left else 0.0
            else:
                share = 0.0 if done else enter * weight * (consent if attention is None else attention[query])
            of_query[token] = of_query.get(token, 0.0) + share
        for token, mass in of_query.items():
            masses[token] = max(masses.get(token, 0.0), mass)
    return {token: mass for token, mass in masses.items() if mass > 0}


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(sentences, min_size=1, max_size=3), data=st.data())
def test_all_steps_against_the_plain_formula(batch: list[Any], data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))  # so that the example Hypothesis shows has it all
    table = make_table(batch)
    k, temperature, s0 = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0.05, 0.5])), 0.25
    enter, coverage, by_attention = 0.3, data.draw(st.booleans()), data.draw(st.booleans())
    weights = table.weights(k, temperature, s0)
    expected_weights = [reference_weights(sentence, k, temperature, s0) for sentence in batch]
    for row, expected in enumerate(expected_weights):
        assert weights.each[row, : len(expected)].tolist() == pytest.approx(expected, abs=1e-6)
        assert not weights.each[row, len(expected) :].any()
    beam = 2
    state = PhraseState(table, torch.arange(len(batch)).repeat_interleave(beam), coverage)
    written: list[tuple[int, list[int]]] = [(row, []) for row in range(len(batch)) for _ in range(beam)]
    for step in range(8):
        if step:
            # Hypotheses change places, some twice, some not at all, and the first sentence ends after a while.
            order = data.draw(st.lists(st.integers(0, len(written) - 1), min_size=1, max_size=len(written)))
            tokens = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=len(order), max_size=len(order)))
            state = state.reorder(torch.tensor(order))
            state.advance(torch.tensor(tokens))
            written = [(written[i][0], [*written[i][1], token]) for i, token in zip(order, tokens)]
        lengths = state.prefixes(table.phrases[state.rows, :, 2])
        log_probs = torch.randn(len(written), VOCABULARY).mul(3).log_softmax(dim=1)
        attention = torch.rand(len(written), 3).softmax(dim=1)
        proposals = state.proposals(log_probs, attention if by_attention else None)
        found = proposals.continuation(table, state.rows, weights, enter, k)
        for row, (number, tokens_so_far) in enumerate(written):
            sentence = batch[number]
            prefixes = [longest_proper_prefix(phrase, tokens_so_far) for phrase, _, _ in sentence]
            assert lengths[row, : len(sentence)].tolist() == prefixes
            seen = {q: float((table.attended[number, q] * attention[row]).sum()) for q in range(3)}
            masses = reference_masses(
                sentence, expected_weights[number], tokens_so_far, log_probs[row].exp().tolist(), enter, k, coverage,
                seen if by_attention else None,
            )  # fmt: skip
            check_row(found.values[row], found.log_probs[row].exp(), float(found.mass[row]), masses)


def check_row(values: Tensor, probs: Tensor, mass: float, expected: dict[int, float]) -> None:
    assert mass == pytest.approx(sum(expected.values()), abs=1e-6)
    merged: dict[int, set[float]] = {}
    for value, prob in zip(values.tolist(), probs.tolist()):
        if prob > 1e-9:
            merged.setdefault(value, set()).add(round(prob, 5))
    assert all(len(of_value) == 1 for of_value in merged.values())  # all lanes of a token have its whole probability
    assert SPECIAL not in merged
    for token, of_token in expected.items():
        if of_token / sum(expected.values()) > 1e-5:
            assert merged[token].pop() == pytest.approx(of_token / sum(expected.values()), abs=2e-5)
    assert not expected or sum(v for s in merged.values() for v in s) <= 1 + 1e-4


def test_the_longest_phrase_is_followed_to_its_end() -> None:
    phrase = [1, 2] * (MAX_SUBWORDS // 2)
    table = make_table([[(phrase, 0, 0.9)]])
    state = PhraseState(table, torch.tensor([0]))
    for length, token in enumerate(phrase):
        state.advance(torch.tensor([token]))
        written = phrase[: length + 1]
        assert state.prefixes(table.phrases[..., 2]).item() == longest_proper_prefix(phrase, written)
    assert state.covered[0, 0] == 0  # the rank of the phrase


@settings(max_examples=200, deadline=None)
@given(
    token=st.floats(0, ALMOST_ALL, width=32), phrase=st.floats(0, 1, width=32), most=st.sampled_from([0.0, 0.5, 0.9])
)
def test_shares_are_limited_and_sum_to_one(token: float, phrase: float, most: float) -> None:
    shares = limit_weights(torch.tensor([token]), torch.tensor([phrase]), most)
    assert float(sum(shares)) <= max(most, token) + 1e-6
    if not phrase:
        assert shares[0].item() == torch.tensor(token).item()  # to the bit
    elif token + phrase <= most:
        assert [share.item() for share in shares] == pytest.approx([token, phrase])
    else:
        assert shares[0].item() * phrase == pytest.approx(shares[1].item() * token, abs=1e-6)  # in their proportion
    log_probs = torch.linspace(-2, 1, VOCABULARY).log_softmax(dim=0)[None]
    one, other = torch.tensor([[3, 3, 5]]), torch.tensor([[5, 1]])
    votes = [
        Vote(one, torch.tensor([[0.4, 0.4, 0.6]]).log(), shares[0]),
        Vote(other, torch.tensor([[0.0, 1.0]]).log(), shares[1]),
    ]
    mixed = interpolate_(log_probs.clone(), *votes).exp()
    expected = (1 - sum(shares)) * log_probs.exp()
    expected[0, 3] += 0.4 * shares[0].item()
    expected[0, 5] += 0.6 * shares[0].item()
    expected[0, 1] += shares[1].item()
    assert torch.allclose(mixed, expected, atol=1e-5)
    assert mixed.sum().item() == pytest.approx(1, abs=1e-5)


def test_merged_lanes_that_are_empty_say_nothing() -> None:
    table = make_table([[], [([1, 2], 0, 0.5)]])
    state = PhraseState(table, torch.tensor([0, 1]))
    proposals = state.proposals(torch.zeros(2, VOCABULARY).log_softmax(dim=1))
    found = proposals.continuation(table, state.rows, table.weights(4, 0.1, 0.0), 0.2, 4)
    assert found.mass.tolist() == [0.0, pytest.approx(0.1)]
    assert found.log_probs[0].tolist() == [-math.inf]
