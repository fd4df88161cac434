"""A benchmark of mining: F1 of all methods on sentences many of which have no translation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from fairseq_ccpr.lab.mining.benchmark_settings import SYSTEMS, MiningBenchmarkSettings
from fairseq_ccpr.lab.mining.f1 import Outcome, decide, mcnemar, score
from fairseq_ccpr.lab.mining.labelled import LabelledText
from fairseq_ccpr.lab.mining.method import Grid, MiningMethod, estimate
from fairseq_ccpr.lab.mining.trial import PairSample, Trial
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder

QUESTIONS = "questions"


@dataclass(frozen=True)
class MiningResult:
    """The scores of one system in one test."""

    set: str
    encoder: str
    system: str
    non_pairing: float
    draw: int
    tuning_set: int
    precision: float
    recall: float
    f1: float
    p: float | None  # McNemar's, against the baseline
    settings: dict[str, Any]
    tuning_f1: float
    unlabelled_f1: float  # where scores alone set the threshold, or nothing does
    outcome: Outcome = field(repr=False)
    unlabelled: Outcome = field(repr=False)

    def record(self) -> dict[str, Any]:
        """List all but what became of each source."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.type != "Outcome"}


class _About(NamedTuple):
    """Which test a result is of."""

    set: str
    encoder: str
    non_pairing: float
    draw: int
    tuning_set: int


Tuned = dict[str, tuple[MiningMethod, float]]  # by system: the tuned method, and its F1 on the tuning set


def tune_all(trial: Trial, settings: MiningBenchmarkSettings, test: Trial) -> Tuned:
    """Tune each system, the labelled sentences tried among those of a test, as `fairseq-ccpr mine` does."""
    among = trial.among(test)
    return {
        name: (method, among.f1(method)) if grid is None else among.tune(method, grid)
        for name, (method, grid) in settings.compared.items()
    }


def evaluate_pairs(
    name: str, sample: PairSample, draw: int, encoder_name: str, encoder: SentenceEncoder, quiet: bool
) -> Iterator[MiningResult]:
    """Test a set with an encoder: once for each tuning set, then the curve, each fraction tuned with that fraction."""
    settings = sample.settings
    encoded = sample.encode(encoder, f"{name}, {encoder_name}", quiet)
    tests = {settings.non_pairing: settings.tuning_sets}
    if draw == 0:
        tests |= dict.fromkeys(sorted({*settings.curve} - {settings.non_pairing}), 1)
    for fraction, tuning_sets in tests.items():
        test = sample.test(encoded, fraction)
        for number in range(tuning_sets):
            tuned = tune_all(sample.tuning(encoded, number, fraction), settings, test)
            yield from _compare(test, tuned, _About(name, encoder_name, fraction, draw, number), sample.sources)


def evaluate_questions(
    questions: LabelledText, sample: PairSample, encoder_name: str, encoder: SentenceEncoder, quiet: bool
) -> Iterator[MiningResult]:
    """Test on questions, with the settings of the first tuning set of a sample of pairs."""
    encoded = sample.encode(encoder, f"tuning, {encoder_name}", quiet)
    tuning = sample.tuning(encoded, 0, sample.settings.non_pairing)
    trial = Trial.encode(questions, encoder, f"{QUESTIONS}, {encoder_name}", quiet)
    tuned = tune_all(tuning, sample.settings, trial)
    yield from _compare(trial, tuned, _About(QUESTIONS, encoder_name, 0.0, 0, 0), np.arange(len(questions.sources)))


def _compare(test: Trial, tuned: Tuned, about: _About, sources: np.ndarray) -> Iterator[MiningResult]:
    baseline: np.ndarray | None = None
    rows = np.arange(len(test.gold))
    for system, (method, tuning_f1) in tuned.items():
        match = test.matcher(method)
        answers = match(rows, np.full(len(rows), -1))
        decided = decide(answers, method.threshold)
        right = decided == test.gold
        p = None if baseline is None else mcnemar(baseline, right)
        baseline = right if baseline is None else baseline
        untuned = SYSTEMS.get(system, (method, Grid()))[1] is None
        unlabelled = decided if untuned else decide(answers, estimate(match, len(rows)).threshold)
        yield MiningResult(
            **about._asdict(), system=system, **asdict(score(decided, test.gold)), p=p, settings=asdict(method),
            tuning_f1=tuning_f1, unlabelled_f1=score(unlabelled, test.gold).f1,
            outcome=Outcome(sources, decided, test.gold), unlabelled=Outcome(sources, unlabelled, test.gold),
        )  # fmt: skip
