"""Differences of F1 over several tests, against resamples one by one."""

from __future__ import annotations

import numpy as np
import pytest

from fairseq_ccpr.lab.mining.f1 import Outcome, compare, holm, score


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
    assert np.isclose(back.f1, -found.f1) and np.isclose(back.low, -found.high) and np.isclose(back.p, found.p)


def test_equal_systems_do_not_differ(rng: np.random.Generator) -> None:
    baseline = random_tests(rng, 0.8)
    assert compare(baseline, baseline) == (0, 0, 0, 1)
    one = [Outcome(np.array([7]), np.array([3]), np.array([3]))]
    assert compare(one, one) == (0, 0, 0, 1)


def test_holm() -> None:
    assert np.allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []
