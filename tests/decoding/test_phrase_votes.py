"""What phrases say of the next token, against plain references: prefixes, states, votes, the distribution."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairseq_ccpr.decoding import phrase_votes
from fairseq_ccpr.decoding.mixture import ALMOST_ALL, Distribution, Mixture, Vote
from fairseq_ccpr.decoding.options import MixtureSettings
from fairseq_ccpr.decoding.phrase_votes import (
    BARRED,
    BEGUN_AFTER,
    LEAST_RATIO,
    MAX_SUBWORDS,
    STATES,
    Continuation,
    PhraseState,
    PhraseTable,
    PhraseVotes,
)
from tests.decoding.phrase_tables import MARK, NOWHERE, Found, begun_after, judge, make_table, weigh

VOCABULARY = 8  # so few that phrases repeat tokens, begin alike and overlap
QUERIES, SOURCE = 3, 5  # source phrases, and subwords of the source
SPECIAL = 0  # a token that no phrase has, and that none may ask for
tokens_of = st.integers(MARK, VOCABULARY - 1)
sentences = st.lists(
    st.builds(
        Found, st.lists(tokens_of, min_size=1, max_size=8), st.integers(0, 2), st.floats(-1, 1, width=32)
    ),
    min_size=0, max_size=6,
)  # fmt: skip


def test_a_table_moves_in_one_copy() -> None:
    table = make_table([[Found([3, 4, 5], 0, 0.5)], [Found([6], 1, 0.25), Found([3, 7, 4], 0, 0.125)]])
    moved = table.to(torch.device("meta"))
    tensors = [part for part in vars(moved).values() if isinstance(part, Tensor)]
    assert len(tensors) > 5 and len({part.untyped_storage()._cdata for part in tensors}) == 1
    for name, part in vars(table).items():
        if isinstance(part, Tensor):
            assert (getattr(moved, name).dtype, getattr(moved, name).shape) == (part.dtype, part.shape)
    assert all(part is getattr(table, name) for name, part in vars(table.to(torch.device("cpu"))).items())


def may_begin(tokens: list[int], before: list[int], borders: np.ndarray = NOWHERE) -> bool:
    """Whether a word may begin with the first of tokens, after others."""
    return not (before and borders[0, before[-1]] and borders[1, tokens[0]])


def longest_prefix(found: Found, written: list[int], borders: np.ndarray = NOWHERE) -> int:
    """Subwords of the phrase that the hypothesis ends with, so that there is a next one."""
    tokens = found.phrase
    lengths = [
        n
        for n in range(1, len(tokens))
        if len(written) >= n and written[-n:] == tokens[:n] and may_begin(tokens, written[:-n], borders)
    ]
    return max(lengths, default=0)


def contains(written: list[int], phrase: list[int], borders: np.ndarray = NOWHERE) -> bool:
    return any(
        written[i : i + len(phrase)] == phrase and may_begin(phrase, written[:i], borders)
        for i in range(len(written))
    )


def state_of(found: Found, length: int) -> int:
    return sum(length >= least for least in BEGUN_AFTER) if length >= begun_after(found.phrase) else 0


def reference_votes(
    sentence: list[Found],
    written: list[int],
    log_probs: list[float],
    votes: PhraseVotes,
    borders: np.ndarray,
    bound: float,
    attention: list[float],
    covering: list[list[bool]],
) -> list[tuple[int, float]]:
    """The token that each phrase proposes, and P, the plain way."""
    words, *phrases = [sum(x for x, one in zip(attention, row) if one) for row in covering]
    weights = {name: value.double().tolist() for name, value in votes.state_dict().items()}
    best = max(log_probs)
    proposed = []
    for found in sentence:
        length = longest_prefix(found, written, borders)
        token, state = found.phrase[length], state_of(found, length)
        of_query = [other for other in sentence if other.query == found.query]
        covered = any(contains(written, other.phrase, borders) for other in of_query)
        score = weights["similarity"][0] * found.score
        score += weights["similarity"][1] * (found.score - max(other.score for other in of_query))
        ratio = max(log_probs[token] - best, LEAST_RATIO)
        score += weights["state"][state] + weights["consent"][state] * ratio
        score += weights["attention"][state] * math.log((phrases[found.query] / words + 0.02) / 1.02)
        score += weights["covered"][0] * (covered and state == 0)
        barred = (not length and not may_begin(found.phrase, written, borders)) or ratio < -bound
        proposed.append((token, 0.0 if barred else math.exp(score)))
    whole = math.exp(weights["model"][0] + weights["model"][1] * math.exp(best)) + sum(
        part for _, part in proposed
    )
    return [(token, part / whole) for token, part in proposed]


@given(
    batch=st.lists(sentences, min_size=1, max_size=3), free=st.booleans(), bound=st.sampled_from([12.0, 2.0]),
    data=st.data(),
)  # fmt: skip
def test_all_steps_against_the_plain_formula(
    batch: list[list[Found]], free: bool, bound: float, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))  # so that the example Hypothesis shows has it all
    borders = (torch.rand(2, VOCABULARY) < 0.5).numpy()
    covering = torch.rand(len(batch), 1 + QUERIES, SOURCE) < 0.4
    covering[:, 0] |= covering.any(dim=1)
    covering[:, 0, 0] = True  # a word that no phrase may have
    table = make_table(batch, borders, [one.numpy() for one in covering])
    votes = PhraseVotes().requires_grad_(False)
    for weights in votes.parameters():
        weights.add_(torch.randn_like(weights))
    state = PhraseState(table, torch.arange(len(batch)).repeat_interleave(2))
    written: list[tuple[int, list[int]]] = [(row, []) for row in range(len(batch)) for _ in range(2)]
    for step in range(8):
        if step:
            # Hypotheses change places, some twice, some not at all, and the first sentence ends after a
            # while.
            order = data.draw(st.lists(st.integers(0, len(written) - 1), min_size=1, max_size=len(written)))
            tokens = data.draw(
                st.lists(st.integers(0, VOCABULARY - 1), min_size=len(order), max_size=len(order))
            )
            state = state.reorder(torch.tensor(order))
            with patch.object(phrase_votes, "sync_is_free", lambda device: free):
                state.advance(torch.tensor(tokens))
            written = [(written[i][0], [*written[i][1], token]) for i, token in zip(order, tokens)]
        lengths = prefixes_of(state)
        log_probs = torch.randn(len(written), VOCABULARY).mul(3).log_softmax(dim=1)
        attention = torch.randn(len(written), SOURCE).mul(2).softmax(dim=1)
        looked = state.looked(attention)
        proposals, each = state.proposals(), judge(votes, table, state, log_probs, bound, looked)
        merged = proposals.continuation(each, table.most_distinct)
        if free:
            check_merged(votes, table, state, log_probs, bound, looked)
            check_merged(votes, table, state, log_probs, bound, None)
        for row, (number, tokens_so_far) in enumerate(written):
            sentence = batch[number]
            prefixes = [longest_prefix(found, tokens_so_far, borders) for found in sentence]
            assert lengths[row, : len(sentence)].tolist() == prefixes
            wanted = reference_votes(
                sentence, tokens_so_far, log_probs[row].tolist(), votes, borders, bound, attention[row].tolist(),
                covering[number].tolist(),
            )  # fmt: skip
            states = [
                state_of(found, length)
                if length or may_begin(found.phrase, tokens_so_far, borders)
                else BARRED
                for found, length in zip(sentence, prefixes)
            ]
            assert proposals.states[row, : len(sentence)].tolist() == states
            assert proposals.values[row, : len(sentence)].tolist() == [token for token, _ in wanted]
            assert each[row, : len(sentence)].tolist() == pytest.approx(
                [vote for _, vote in wanted], abs=1e-5
            )
            assert not each[row, len(sentence) :].any()
            begun = sum(vote for (_, vote), one in zip(wanted, states) if one)
            assert float(merged.going[row] * merged.mass[row]) == pytest.approx(begun, abs=1e-5)
            check_row(merged.values[row], merged.log_probs[row].exp(), float(merged.mass[row]), wanted)


def prefixes_of(state: PhraseState) -> Tensor:
    """The longest prefix of each phrase that its hypothesis ends with and something follows."""
    matched = (state.matched & state.table.phrases[state.rows, :, 2]).tolist()
    return torch.tensor([[bits.bit_length() for bits in row] for row in matched])


def check_merged(
    votes: PhraseVotes,
    table: PhraseTable,
    state: PhraseState,
    log_probs: Tensor,
    bound: float,
    looked: Tensor | None,
) -> None:
    """What phrases propose together is what each proposes, added up."""
    judged = judge(votes, table, state, log_probs, bound, looked)
    each = state.proposals().continuation(judged, table.most_distinct)
    prior = votes.prior(table)
    for scored in (2 * prior, prior, prior):  # what is kept of one is for that one alone
        proposals, scores = state.merged(scored, votes, looked)
    together = proposals.continuation(weigh(votes, proposals, log_probs, scores, bound), table.most_distinct)
    for one, other in zip(
        (each.mass, each.going, spread(each)), (together.mass, together.going, spread(together))
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert (each.mass == 0).equal(together.mass == 0)


def spread(found: Continuation) -> Tensor:
    """The distribution over the vocabulary, fp32 [H, V]."""
    assert not found.log_probs.isnan().any()
    return found.log_probs.new_zeros(len(found.values), VOCABULARY).scatter(
        1, found.values, found.log_probs.exp()
    )


def check_row(values: Tensor, probs: Tensor, mass: float, wanted: list[tuple[int, float]]) -> None:
    """All lanes of a token have its whole part of the mass."""
    assert mass == pytest.approx(sum(vote for _, vote in wanted), abs=1e-5)
    expected: dict[int, float] = {}
    for token, vote in wanted:
        expected[token] = expected.get(token, 0.0) + vote
    for value, prob in zip(values.tolist(), probs.tolist()):
        if value != SPECIAL:
            assert prob * mass == pytest.approx(expected[value], abs=1e-5)
        else:
            assert prob == 0


@pytest.mark.parametrize("free", [True, False])
def test_votes_without_weights_of_attention_are_as_without_attention_to_the_bit(free: bool) -> None:
    found = [Found([2, 3, 4], 0, 0.7), Found([2, 5], 1, 0.6), Found([3, 4], 1, 0.9)]
    table = make_table([found], covering=[np.array([[1, 1, 1], [1, 0, 0], [0, 1, 0]], bool)])
    state = PhraseState(table, torch.tensor([0, 0]))
    state.advance(torch.tensor([2, 6]))
    log_probs = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1)).log_softmax(dim=1)
    looked = state.looked(torch.tensor([[0.7, 0.1, 0.2], [0.1, 0.1, 0.8]]))
    assert looked is not None and state.looked(None) is None

    def merged(votes: PhraseVotes, looked: Tensor | None) -> Tensor:
        with patch.object(phrase_votes, "sync_is_free", lambda device: free):
            proposals, prior = state.merged(votes.prior(table), votes, looked)
        return weigh(votes, proposals, log_probs, prior)

    votes, plain = PhraseVotes().requires_grad_(False), PhraseVotes().requires_grad_(False)
    assert torch.equal(merged(votes, looked), merged(votes, None)) and not votes.attentive
    votes.attention += 0.5
    assert votes.attentive and votes.digest() != plain.digest()
    assert torch.equal(merged(votes, None), merged(plain, None))
    assert not torch.allclose(merged(votes, looked), merged(plain, looked))


def test_every_number_of_subwords_has_a_state() -> None:
    phrase = Found([2] * 8, 0, 0.5)
    assert {state_of(phrase, length) for length in range(8)} == {*range(len(STATES))}


def test_the_longest_phrase_is_continued_to_its_end() -> None:
    found = Found([1, 2] * (MAX_SUBWORDS // 2), 0, 0.9)
    table = make_table([[found]])
    state = PhraseState(table, torch.tensor([0]))
    for length, token in enumerate(found.phrase):
        state.advance(torch.tensor([token]))
        assert prefixes_of(state).item() == longest_prefix(found, found.phrase[: length + 1])
        assert state.ended().tolist() == [length + 1 == len(found.phrase)]
    assert state.covered[0, 0] == 1


def test_a_phrase_proposes_nothing_beyond_its_end() -> None:
    """The phrase 2 3 is written, and may only begin again; 3 5 has begun."""
    many = 2**16  # tokens before those of another sentence
    other = Found([many + 2, many + 3], 0, 0.9)
    table = make_table(
        [[other], [Found([2, 3], 0, 0.9), Found([3, 5], 1, 0.8)]], np.zeros((2, many + 4), bool)
    )
    state = PhraseState(table, torch.tensor([1]))
    proposed = []
    for token in (2, 3, 4):
        state.advance(torch.tensor([token]))
        proposed.append(state.proposals().values[0].tolist())
    assert proposed == [[3, 3], [2, 5], [2, 3]]
    assert state.covered[0].tolist() == [1, 0]


@given(
    token=st.floats(0, ALMOST_ALL, width=32),
    phrase=st.floats(0, 1, width=32),
    most=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_shares_are_limited_and_sum_to_one(token: float, phrase: float, most: float) -> None:
    shares = Mixture(MixtureSettings(most), (False, True)).limit(
        [torch.tensor([token]), torch.tensor([phrase])]
    )
    assert float(sum(shares)) <= max(most, token) + 1e-6
    if not phrase:
        assert shares[0].item() == torch.tensor(token).item()  # to the bit
    elif token + phrase <= most:
        assert [share.item() for share in shares] == pytest.approx([token, phrase])
    else:
        # in their proportion
        assert shares[0].item() * phrase == pytest.approx(shares[1].item() * token, abs=1e-6)
    log_probs = torch.linspace(-2, 1, VOCABULARY).log_softmax(dim=0)[None]
    one, other = torch.tensor([[3, 3, 5]]), torch.tensor([[5, 1]])
    votes = [
        Vote(one, torch.tensor([[0.4, 0.4, 0.6]]).log(), shares[0]),
        Vote(other, torch.tensor([[0.0, 1.0]]).log(), shares[1]),
    ]
    mixed = Mixture().mix(Distribution(log_probs.clone()), votes).log_probs.exp()
    expected = (1 - sum(shares)) * log_probs.exp()
    expected[0, 3] += 0.4 * shares[0].item()
    expected[0, 5] += 0.6 * shares[0].item()
    expected[0, 1] += shares[1].item()
    assert torch.allclose(mixed, expected, atol=1e-5)
    assert mixed.sum().item() == pytest.approx(1, abs=1e-5)


def test_lanes_that_are_empty_say_nothing() -> None:
    table = make_table([[], [Found([1, 2], 0, 0.5)]])
    votes = PhraseVotes().requires_grad_(False)
    state = PhraseState(table, torch.tensor([0, 1]))
    each = judge(votes, table, state, torch.zeros(2, VOCABULARY).log_softmax(dim=1))
    found = state.proposals().continuation(each, table.most_distinct)
    assert found.mass[0] == 0 and 0 < found.mass[1] < 1
    assert found.log_probs[0].tolist() == [-math.inf]
    far = Found([2, 3], 0, -0.9)
    prior = votes.prior(make_table([[far], [far, far]]))
    assert prior[0].tolist() == [prior[1, 0].item(), -math.inf]
    state = PhraseState(make_table([[far]]), torch.tensor([0, 0]))
    state.advance(torch.tensor([2, 5]))
    assert state.merged(prior[:1, :1], votes)[0].values.tolist() == [[2, 3], [2, 0]]


def test_the_model_keeps_what_no_phrase_is_worth() -> None:
    """The null: where the only phrase is unlikely, its vote is small, whatever else is proposed."""
    votes = PhraseVotes().requires_grad_(False)
    masses = []
    for score in (0.9, 0.2):
        table = make_table([[Found([2, 3], 0, score)]])
        state = PhraseState(table, torch.tensor([0]))
        state.advance(torch.tensor([2]))
        log_probs = torch.tensor([[0.1, 0.1, 0.1, 1e-4, 0.6, 0.0499, 0.025, 0.025]]).log()
        masses.append(float(judge(votes, table, state, log_probs).sum()))
    assert masses[1] < 0.2 * masses[0] < 0.2


def test_votes_are_a_softmax_however_large_the_similarities() -> None:
    votes = PhraseVotes()
    table = make_table([[Found([2, 3], 0, 60.0), Found([4, 3], 1, 59.0)]])
    each = judge(
        votes, table, PhraseState(table, torch.tensor([0])), torch.zeros(1, VOCABULARY).log_softmax(dim=1)
    )
    assert each.sum().item() == pytest.approx(1) and each[0, 0] > 10 * each[0, 1]
    each[0, 1].backward()
    assert votes.similarity.grad is not None and votes.similarity.grad.abs().sum() > 0
