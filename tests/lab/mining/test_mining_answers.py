"""The maths of mining: fragments, neighbours, answers and their F1, against plain references; ties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from fairseq_ccpr.lab.mining import neighbours
from fairseq_ccpr.lab.mining.encoded_text import fragment_text, fragments
from fairseq_ccpr.lab.mining.f1 import decide, f1_by_threshold, mcnemar, score
from fairseq_ccpr.lab.mining.neighbours import IndexedKeys
from fairseq_ccpr.lab.mining.pknn import Answers, answer, distributions, entropy_ranks
from fairseq_ccpr.lab.mining.rfr import RfrMethod
from tests.helpers import with_threads


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
    assert text.fragments == ["a b", "b c", "d"] and text.owners.tolist() == [1, 1, 3] and len(text.sentences) == 4
    assert fragment_text([]).owners.tolist() == []


def plain_answers(
    cosines: np.ndarray, classes: np.ndarray, owners: np.ndarray, sentences: int, settings: RfrMethod
) -> tuple[list[int], list[float], list[float]]:
    """RFR by the book, one number at a time: partners, scores, entropies."""
    of_fragment: list[dict[int, float]] = []
    entropies = []
    for row, ids in zip(cosines.tolist(), classes.tolist()):
        kernels = [math.exp(-((1 - c) ** 2) / 2) / math.sqrt(2 * math.pi) for c in row if c != -math.inf]
        powers = [math.exp(settings.beta * (kernel - max(kernels))) for kernel in kernels]
        weights = [power / sum(powers) for power in powers]
        sums: dict[int, float] = {}
        for weight, sentence in zip(weights, ids):
            sums[sentence] = sums.get(sentence, 0.0) + weight
        of_fragment.append(sums)
        terms = weights if settings.entropy_over == "neighbours" else list(sums.values())
        entropies.append(-sum(p * math.log(p) for p in terms if p > 0))
    partners, scores = [], []
    for sentence in range(sentences):
        own = [f for f in range(len(owners)) if owners[f] == sentence]
        own.sort(key=lambda f: (round(entropies[f], 9), f))
        kept = own[: math.ceil(round(settings.keep * len(own), 9))]
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
    missing = np.arange(k) >= rng.integers(1, k + 1, fragments)[:, None]
    cosines[missing], classes[missing] = -np.inf, -1
    return cosines, classes, np.sort(rng.integers(0, sentences, fragments))


@pytest.mark.parametrize("entropy_over", ["sentences", "neighbours"])
def test_answers_equal_a_plain_reference(entropy_over: str, rng: np.random.Generator) -> None:
    for beta, keep in ((50, 0.1), (75, 0.7), (2000, 1.0), (100, 0.5)):
        cosines, classes, owners = random_neighbours(rng, 60, 7, 12)
        settings = RfrMethod(beta=beta, keep=keep, entropy_over=entropy_over)
        partners, scores, entropies = plain_answers(cosines, classes, owners, 12, settings)
        found = distributions(cosines, classes, beta, entropy_over)
        assert np.allclose(found.entropies, entropies, atol=1e-8)
        assert np.allclose(np.bincount(found.fragments, found.probabilities), 1)
        answers = answer(found, entropy_ranks(found.entropies, owners), owners, 12, keep)
        assert answers.partners.tolist() == partners and np.allclose(answers.scores, scores, atol=1e-8)


def test_of_equal_sentences_the_lower_is_the_answer() -> None:
    cosines, owners = np.array([[0.5, 0.5, 0.2], [0.5, 0.5, 0.2]]), np.array([0, 1])
    for classes, expected in (([[7, 3, 1], [3, 7, 1]], 3), ([[4, 5, 4], [5, 4, 4]], 4)):
        found = distributions(cosines, np.array(classes), 80)
        answers = answer(found, entropy_ranks(found.entropies, owners), owners, 3, 1.0)
        assert answers.partners.tolist() == [expected, expected, -1] and answers.scores[2] == 0
    same = np.zeros(4)
    assert entropy_ranks(same, np.array([0, 0, 0, 2])).tolist() == [0, 1, 2, 0]  # the earlier fragment is kept


def test_neighbours_come_in_one_order(monkeypatch: Any, rng: np.random.Generator) -> None:
    keys, queries = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in rng.normal(size=(2, 90, 8)))
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
