"""The maths of mining: fragments, neighbours, answers and their F1, against plain references; ties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from fairseq_ccpr.lab.mining import neighbours
from fairseq_ccpr.lab.mining.encoded_text import fragment_text, fragments
from fairseq_ccpr.lab.mining.f1 import (
    Answers,
    Outcome,
    compare,
    decide,
    f1_by_threshold,
    holm,
    mcnemar,
    score,
)
from fairseq_ccpr.lab.mining.neighbours import IndexedKeys
from fairseq_ccpr.lab.mining.rfr import answer, distributions, entropy_ranks
from tests.helpers import with_threads

pytestmark = pytest.mark.full


def test_fragments_of_several_scripts() -> None:
    assert fragments("One, two; three - four (five) six SEVEN!") == [
        "one two three four five six", "two three four five six seven",
    ]  # fmt: skip
    assert fragments("Eins zwei.") == ["eins zwei"] and fragments("¿Qué?") == ["qué"]
    for nothing in ("", "   ", "...", "— !?", "→ ★", "\u200b"):
        assert fragments(nothing) == []
    assert fragments("東京タワーへ行く。", 3) == ["東京タワーへ", "タワーへ行く"]  # two characters are a word
    assert fragments("東京、タワー to 京", 2) == ["東京 タワ", "タワー", "ー to", "to 京"]
    assert fragments("สวัสดีครับ ไป", 2) == ["สวัสดีครับ", "ครับ ไป"]  # four, with the marks on them
    assert fragments("ПРИВЕТ, мир") == ["привет мир"]
    assert fragments("هذا هو البيت", 2) == ["هذا هو", "هو البيت"]
    assert fragments("don't e-mail 3.5 %", 9) == ["don't e-mail 3.5"]
    assert len(fragments(" ".join(["word"] * 10_000))) == 9_995
    text = fragment_text(["...", "a b c", "", "d"], 2)
    assert (
        text.fragments == ["a b", "b c", "d"]
        and text.owners.tolist() == [1, 1, 3]
        and len(text.sentences) == 4
    )
    assert fragment_text([]).owners.tolist() == []


def plain_answers(
    cosines: np.ndarray,
    classes: np.ndarray,
    owners: np.ndarray,
    sentences: int,
    beta: float,
    keep: float,
    entropy_over: str,
) -> tuple[list[int], list[float], list[float]]:
    """RFR by the book, one number at a time: partners, scores, entropies."""
    of_fragment: list[dict[int, float]] = []
    entropies = []
    for row, ids in zip(cosines.tolist(), classes.tolist()):
        kernels = [math.exp(-((1 - c) ** 2) / 2) / math.sqrt(2 * math.pi) for c in row if c != -math.inf]
        powers = [math.exp(beta * (kernel - max(kernels))) for kernel in kernels]
        weights = [power / sum(powers) for power in powers]
        sums: dict[int, float] = {}
        for weight, sentence in zip(weights, ids):
            sums[sentence] = sums.get(sentence, 0.0) + weight
        of_fragment.append(sums)
        terms = weights if entropy_over == "neighbours" else list(sums.values())
        entropies.append(-sum(p * math.log(p) for p in terms if p > 0) if terms else math.inf)
    partners, scores = [], []
    for sentence in range(sentences):
        own = [f for f in range(len(owners)) if owners[f] == sentence]
        own.sort(key=lambda f: (round(entropies[f], 9), f))
        kept = own[: math.ceil(round(keep * len(own), 9))]
        total: dict[int, float] = {}
        for fragment in kept:
            for other, p in of_fragment[fragment].items():
                total[other] = total.get(other, 0.0) + p / len(kept)
        best = min(total, key=lambda other: (-round(total[other], 9), other), default=-1)
        partners.append(best)
        scores.append(total.get(best, 0.0))
    return partners, scores, entropies


def random_neighbours(
    rng: np.random.Generator, fragments: int, k: int, sentences: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cosines with ties and missing neighbours, classes, owners of which some sentences have none."""
    cosines = -np.sort(-rng.uniform(-0.2, 1, (fragments, k)).round(1), axis=1)
    classes = rng.integers(0, 6, (fragments, k))
    missing = np.arange(k) >= rng.integers(0, k + 1, fragments)[:, None]
    cosines[missing], classes[missing] = -np.inf, -1
    return cosines, classes, np.sort(rng.integers(0, sentences, fragments))


@pytest.mark.parametrize("entropy_over", ["sentences", "neighbours"])
def test_answers_equal_a_plain_reference(entropy_over: str, rng: np.random.Generator) -> None:
    for beta, keep in ((50, 0.1), (75, 0.7), (2000, 1.0), (100, 0.5)):
        cosines, classes, owners = random_neighbours(rng, 60, 7, 12)
        partners, scores, entropies = plain_answers(cosines, classes, owners, 12, beta, keep, entropy_over)
        found = distributions(cosines, classes, beta, entropy_over)
        assert np.allclose(found.entropies, entropies, atol=1e-8)
        sums = np.bincount(found.fragments, found.probabilities, len(cosines))
        assert np.allclose(sums, (classes >= 0).any(axis=1)) and sums.min() == 0
        answers = answer(found, entropy_ranks(found.entropies, owners), owners, 12, keep)
        assert answers.partners.tolist() == partners and np.allclose(answers.scores, scores, atol=1e-8)


def test_of_equal_sentences_the_lower_is_the_answer() -> None:
    cosines, owners = np.array([[0.5, 0.5, 0.2], [0.5, 0.5, 0.2]]), np.array([0, 1])
    for classes, expected in (([[7, 3, 1], [3, 7, 1]], 3), ([[4, 5, 4], [5, 4, 4]], 4)):
        found = distributions(cosines, np.array(classes), 80)
        answers = answer(found, entropy_ranks(found.entropies, owners), owners, 3, 1.0)
        assert answers.partners.tolist() == [expected, expected, -1] and answers.scores[2] == 0
    same = np.zeros(4)
    # the earlier fragment is kept
    assert entropy_ranks(same, np.array([0, 0, 0, 2])).tolist() == [0, 1, 2, 0]


def test_a_fragment_without_neighbours_is_not_the_surest() -> None:
    cosines, classes, owners = (
        np.array([[-np.inf, -np.inf], [0.9, 0.5]]),
        np.array([[-1, -1], [4, 2]]),
        np.zeros(2, int),
    )
    for entropy_over in ("sentences", "neighbours"):
        found = distributions(cosines, classes, 80, entropy_over)
        answers = answer(found, entropy_ranks(found.entropies, owners), owners, 1, 0.5)
        assert answers.partners.tolist() == [4] and answers.scores[0] > 0.9


def test_neighbours_come_in_one_order(monkeypatch: Any, rng: np.random.Generator) -> None:
    keys, queries = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in rng.normal(size=(2, 90, 8))
    )
    keys, queries = keys.astype(np.float16), queries.astype(np.float16)
    keys[40:60] = keys[7]  # twins, more than are found at first
    queries[0] = keys[7]
    exact = (queries.astype(np.float64) @ keys.astype(np.float64).T).round(neighbours.DECIMALS)
    expected = np.lexsort((np.broadcast_to(np.arange(90), exact.shape), -exact), axis=1)
    scores, ids = IndexedKeys(keys).search(queries, 70)
    assert (ids == expected[:, :70]).all() and (scores == np.take_along_axis(exact, ids, 1)).all()
    monkeypatch.setattr(neighbours, "BLOCK_NUMBERS", 78 * 8 * 7)
    with_threads(2, lambda: np.testing.assert_array_equal(IndexedKeys(keys).search(queries, 70)[1], ids))
    scores, ids = IndexedKeys(keys).search(queries, 120)
    assert (ids[:, :90] == expected).all() and (ids[:, 90:] == -1).all() and np.isneginf(scores[:, 90:]).all()
    assert (IndexedKeys(keys[:0]).search(queries, 2)[1] == -1).all()


def test_scores(rng: np.random.Generator) -> None:
    gold, partners = rng.integers(-1, 5, 200), rng.integers(-1, 5, 200)
    answers = Answers(partners, rng.random(200))
    thresholds = np.array([0.0, 0.3, 0.9, 2.0])
    for threshold, f1 in zip(thresholds, f1_by_threshold(answers, gold, thresholds)):
        decided = decide(answers, threshold)
        right = sum(d == g >= 0 for d, g in zip(decided, gold))
        given, wanted = sum(decided >= 0), sum(gold >= 0)
        found = score(decided, gold)
        assert np.isclose(found.precision, right / max(given, 1)) and np.isclose(found.recall, right / wanted)
        assert np.isclose(f1, found.f1)
        assert np.isclose(f1, 2 * found.precision * found.recall / max(found.precision + found.recall, 1e-9))
    one, two = rng.random(80) < 0.7, rng.random(80) < 0.5
    only = int((one & ~two).sum()), int((two & ~one).sum())
    assert np.isclose(mcnemar(one, two), binomtest(only[0], sum(only)).pvalue)


def random_tests(rng: np.random.Generator, right: float, tests: int = 3) -> list[Outcome]:
    """Tests that share sources; a system is right where a source has a partner, or has none, with a probability."""
    found = []
    for _ in range(tests):
        sources = rng.permutation(150)[:100]
        gold = np.where(np.arange(100) < 60, np.arange(100), -1)
        wrong = np.where(rng.random(100) < 0.5, -1, 500)
        found.append(Outcome(sources, np.where(rng.random(100) < right, gold, wrong), gold))
    return found


def of_other(tests: list[Outcome], rng: np.random.Generator, right: float) -> list[Outcome]:
    wrong = [np.where(rng.random(100) < right, test.gold, -1) for test in tests]
    return [Outcome(test.sources, decided, test.gold) for test, decided in zip(tests, wrong)]


def plain_f1(tests: list[Outcome], drawn: np.ndarray) -> float:
    """F1 of all cases of the drawn sources, each as often as it was drawn."""
    times = np.bincount(drawn, minlength=150)
    decided, gold = (
        np.concatenate([np.repeat(getattr(test, name), times[test.sources]) for test in tests])
        for name in ("decided", "gold")
    )
    return score(decided, gold).f1


@pytest.mark.parametrize(("one", "two"), [(0.7, 0.9), (0.8, 0.82)])
def test_differences_equal_a_plain_bootstrap(one: float, two: float, rng: np.random.Generator) -> None:
    baseline = random_tests(rng, one)
    system = of_other(baseline, rng, two)
    found = compare(baseline, system)
    everything = np.unique(np.concatenate([test.sources for test in baseline]))
    assert np.isclose(found.f1, plain_f1(system, everything) - plain_f1(baseline, everything))
    plain = []
    for _ in range(1500):
        drawn = rng.choice(everything, len(everything))
        plain.append(plain_f1(system, drawn) - plain_f1(baseline, drawn))
    assert np.allclose([found.low, found.high], np.percentile(plain, [2.5, 97.5]), atol=0.01)
    assert abs(found.p - 2 * min(np.mean(np.array(plain) <= 0), np.mean(np.array(plain) >= 0))) < 0.06
    back = compare(system, baseline)
    assert (
        np.isclose(back.f1, -found.f1) and np.isclose(back.low, -found.high) and np.isclose(back.p, found.p)
    )


def test_equal_systems_do_not_differ(rng: np.random.Generator) -> None:
    baseline = random_tests(rng, 0.8)
    assert compare(baseline, baseline) == (0, 0, 0, 1)
    one = [Outcome(np.array([7]), np.array([3]), np.array([3]))]
    assert compare(one, one) == (0, 0, 0, 1)


def test_holm() -> None:
    assert np.allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []
