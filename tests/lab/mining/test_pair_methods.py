"""Methods that score candidate pairs, against references written pair by pair; thresholds without labels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fairseq_ccpr.lab.mining.candidates import Candidates, best_first
from fairseq_ccpr.lab.mining.encoded_text import EncodedText, FragmentedText
from fairseq_ccpr.lab.mining.f1 import estimated_threshold
from fairseq_ccpr.lab.mining.methods import RIDGE, Method, PairMatcher, features, fit, logistic
from fairseq_ccpr.lab.mining.neighbours import SearchableText

pytestmark = pytest.mark.full


def random_text(rng: np.random.Generator, count: int) -> EncodedText:
    """Random sentences of 1 to 5 fragments, with vectors of length 1; of the last there is none."""
    counts = [*rng.integers(1, 6, count - 1), 0]
    owners = np.repeat(np.arange(count), counts)
    vectors = [rng.normal(size=(rows, 6)) + 1 for rows in (count, len(owners))]
    sentences, parts = (
        (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16) for rows in vectors
    )
    texts = ["a" * int(length) for length in rng.integers(4, 40, count)]
    return EncodedText(FragmentedText(texts, ["f"] * len(owners), owners), sentences, parts)


@pytest.fixture
def sides(rng: np.random.Generator) -> tuple[EncodedText, EncodedText]:
    return random_text(rng, 14), random_text(rng, 11)


def matcher(method: Method, sides: tuple[EncodedText, EncodedText]) -> PairMatcher:
    return PairMatcher(method, *(SearchableText.in_memory(method.keys(side)) for side in sides))


def cosines_of(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return one.astype(np.float64) @ two.astype(np.float64).T


def plain_pairs(sides: tuple[EncodedText, EncodedText], k: int) -> list[tuple[int, int]]:
    """Pairs of sentences with words of which either is among the k nearest of the other."""
    cosines = cosines_of(sides[0].sentences[:-1], sides[1].sentences[:-1])
    near = {(x, int(y)) for x, row in enumerate(cosines) for y in np.argsort(-row)[:k]}
    return sorted(near | {(int(x), y) for y, column in enumerate(cosines.T) for x in np.argsort(-column)[:k]})


def plain_mean(values: dict[tuple[int, int], float], side: int, sentence: int) -> float:
    highest = sorted((v for pair, v in values.items() if pair[side] == sentence), reverse=True)[:4]
    return sum(highest) / len(highest)


def plain_ratio(values: dict[tuple[int, int], float], pair: tuple[int, int]) -> float:
    return values[pair] / ((plain_mean(values, 0, pair[0]) + plain_mean(values, 1, pair[1])) / 2)


def plain_votes(
    pairs: list[tuple[int, int]], sides: tuple[EncodedText, EncodedText], spread: float
) -> dict[tuple[int, int], float]:
    """P(y | x), one fragment after the other."""
    whole = cosines_of(sides[0].sentences, sides[1].sentences)
    parts = cosines_of(sides[0].fragments, sides[1].fragments)
    found = dict.fromkeys(pairs, 0.0)
    for x in {x for x, _ in pairs}:
        own = np.flatnonzero(sides[0].text.owners == x)
        for f in own:
            near = [
                ((parts[f, g] + whole[x, y]) / 2, y)
                for _, y in (pair for pair in pairs if pair[0] == x)
                for g in np.flatnonzero(sides[1].text.owners == y)
            ]
            near = sorted(near, reverse=True)[:20]
            distances = [(1 - c) / (1.5 * spread) for c, _ in near]
            powers = [math.exp(100 * math.exp(-(d**2) / 2) / math.sqrt(2 * math.pi)) for d in distances]
            for power, (_, y) in zip(powers, near):
                found[x, y] += power / sum(powers) / len(own)
    return found


def plain_alike(pair: tuple[int, int], sides: tuple[EncodedText, EncodedText]) -> float:
    own, other = (side.fragments[side.text.owners == at] for side, at in zip(sides, pair))
    cosines = cosines_of(own, other)
    nearest = (cosines.max(axis=1).mean() + cosines.max(axis=0).mean()) / 2
    return float(cosines_of(sides[0].sentences[[pair[0]]], sides[1].sentences[[pair[1]]])[0, 0] + nearest) / 2


def plain_features(sides: tuple[EncodedText, EncodedText], k: int) -> dict[tuple[int, int], list[float]]:
    pairs = plain_pairs(sides, k)
    whole = cosines_of(sides[0].sentences, sides[1].sentences)
    cosines = {pair: float(whole[pair]) for pair in pairs}
    alike = {pair: plain_alike(pair, sides) for pair in pairs}
    spread = 1 - sum(cosines.values()) / len(pairs)
    forward = plain_votes(pairs, sides, spread)
    back = plain_votes([(y, x) for x, y in pairs], (sides[1], sides[0]), spread)
    lengths = [[math.log(len(sentence)) for sentence in side.text.sentences] for side in sides]
    usual = sum(lengths[0]) / len(lengths[0]) - sum(lengths[1]) / len(lengths[1])
    return {
        (x, y): [
            plain_ratio(cosines, (x, y)), math.sqrt(forward[x, y] * back[y, x]), plain_ratio(alike, (x, y)),
            abs(lengths[0][x] - lengths[1][y] - usual),
        ]
        for x, y in pairs
    }  # fmt: skip


def test_features_equal_a_plain_reference(sides: tuple[EncodedText, EncodedText]) -> None:
    for method, width in ((Method.named("logistic"), 4), (Method.named("max"), 1)):
        found = matcher(method, sides)
        expected = plain_features(sides, method.kind.candidates)
        assert [*zip(found.pairs.rows.tolist(), found.pairs.columns.tolist())] == list(expected)
        plain = np.array(list(expected.values()))
        assert np.allclose(features(found.evidence)[:, :width], plain[:, :width], atol=2e-5)
    weights = Method.named("logistic", margin=2.0, votes=-1.0, alike=0.5, length=0.25, bias=-1.0)
    sums = plain_features(sides, weights.kind.candidates)
    scores = logistic(matcher(weights, sides).evidence, weights.settings)
    assert np.allclose(
        scores, [1 / (1 + math.exp(-(np.dot(f, [2, -1, 0.5, 0.25]) - 1))) for f in sums.values()], atol=2e-5
    )


def test_answers_of_pairs(sides: tuple[EncodedText, EncodedText]) -> None:
    margins = {
        pair: values[0]
        for pair, values in plain_features(sides, Method.named("margin").kind.candidates).items()
    }
    forward = matcher(Method.named("margin"), sides).answers
    for x in range(14):
        own = {y: value for (row, y), value in margins.items() if row == x}
        assert forward.partners[x] == max(own, key=lambda y: own[y], default=-1)
    left, partners = dict(margins), np.full(14, -1)
    while left:
        x, y = max(left, key=lambda pair: left[pair])
        partners[x] = y
        left = {pair: value for pair, value in left.items() if pair[0] != x and pair[1] != y}
    assert matcher(Method.named("max"), sides).answers.partners.tolist() == partners.tolist()
    pairs = Candidates(np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0]), np.zeros(5), np.arange(4))
    tied = best_first(pairs, np.array([0.5, 0.5, 0.5, -np.inf, 0.7]), 2)
    assert tied.partners.tolist() == [1, -1, 0, -1] and tied.scores.tolist() == [0.5, 0, 0.7, 0]


def test_what_is_hidden_leaves_the_other_side_as_it_was(sides: tuple[EncodedText, EncodedText]) -> None:
    found = matcher(Method.named("two-way"), sides)
    rows = np.array([3, 3, 5])
    pairs, evidence = found.hiding(rows, np.array([-1, 2, 4]))
    all_pairs = plain_pairs(sides, Method.named("two-way").kind.candidates)
    cosines = cosines_of(sides[0].sentences, sides[1].sentences)
    spread = 1 - sum(float(cosines[pair]) for pair in all_pairs) / len(all_pairs)
    back = plain_votes([(y, x) for x, y in all_pairs], (sides[1], sides[0]), spread)
    for number, (source, hidden) in enumerate(((3, -1), (3, 2), (5, 4))):
        left = [(x, y) for x, y in all_pairs if x == source and y != hidden]
        forward = plain_votes(left, sides, spread)
        here = pairs.rows == number
        assert pairs.columns[here].tolist() == [y for _, y in left]
        expected = [math.sqrt(forward[pair] * back[pair[::-1]]) for pair in left]
        assert np.allclose(evidence.mutual_votes()[here], expected, atol=2e-5)


def test_logistic_regression(rng: np.random.Generator) -> None:
    values = rng.normal(size=(300, 3)) * [1, 5, 0.1] + [0, 2, 1]
    right = rng.random(300) < 1 / (1 + np.exp(-(values @ [1.0, -0.4, 10.0] - 9)))
    weights = fit(values, right)
    spreads, means = values.std(axis=0), values.mean(axis=0)
    inputs = (values - means) / spreads

    def loss(weights: np.ndarray) -> float:
        scaled = weights[:-1] * spreads
        bias = weights[-1] + weights[:-1] @ means
        logits = inputs @ scaled + bias
        return float(np.logaddexp(0, np.where(right, -logits, logits)).sum() + RIDGE * (scaled @ scaled) / 2)

    best = loss(weights)
    for _ in range(100):
        assert best < loss(weights + rng.normal(size=4) * 0.02) + 1e-3
    assert np.isfinite(fit(np.ones((5, 2)), np.ones(5, bool))).all()  # all the same, all right


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.25, 0.1])
def test_a_threshold_without_labels(share: float, rng: np.random.Generator) -> None:
    size = 4000
    paired = np.arange(size) < share * size
    *_, second_wrong, wrong = np.sort(rng.normal(0.9, 0.06, (30, size)), axis=0)
    right = rng.normal(1.25, 0.1, size)
    correct = paired & (right > wrong)
    first = np.where(paired, np.maximum(right, wrong), wrong)
    second = np.where(paired, np.where(correct, wrong, np.maximum(right, second_wrong)), second_wrong)

    def f1(threshold: float) -> float:
        given = first >= threshold
        return 2 * (given & correct).sum() / (given.sum() + paired.sum())

    found = estimated_threshold(first, second)
    assert abs(found.share - share) < 0.08
    assert f1(found.threshold) > max(map(f1, np.linspace(0.8, 1.6, 400))) - (0.02 if share > 0.1 else 0.2)
    assert share <= 0.1 or abs(found.f1 - f1(found.threshold)) < 0.08


def test_a_threshold_of_nothing() -> None:
    none = np.full(3, -np.inf)
    assert estimated_threshold(none, none).share == 0 == estimated_threshold(none[:0], none[:0]).f1
    same = estimated_threshold(np.full(3, 0.5), np.full(3, 0.5))
    assert math.isfinite(same.threshold) and math.isfinite(same.f1)
    one = estimated_threshold(np.array([-np.inf, 0.5, -np.inf]), none)
    assert one.threshold == 0.5 and 0 <= one.share <= 1
