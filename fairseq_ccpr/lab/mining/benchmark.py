"""A benchmark of mining: F1 of all methods on sentences many of which have no translation; its tables and curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from fairseq_ccpr.lab.mining.f1 import Outcome, compare, decide, estimate, holm, mcnemar, score
from fairseq_ccpr.lab.mining.labelled import LabelledText
from fairseq_ccpr.lab.mining.methods import Method
from fairseq_ccpr.lab.mining.rfr import Grid
from fairseq_ccpr.lab.mining.trial import (
    ABLATIONS,
    BASELINE,
    SYSTEMS,
    MiningBenchmarkSettings,
    PairSample,
    Trial,
)
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


Tuned = dict[str, tuple[Method, float]]  # by system: the tuned method, and its F1 on the tuning set


def _tune_all(trial: Trial, settings: MiningBenchmarkSettings, test: Trial) -> Tuned:
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
            tuned = _tune_all(sample.tuning(encoded, number, fraction), settings, test)
            about = {"set": name, "non_pairing": fraction, "draw": draw, "tuning_set": number}
            yield from _compare(test, tuned, {**about, "encoder": encoder_name}, sample.sources)


def evaluate_questions(
    questions: LabelledText, sample: PairSample, encoder_name: str, encoder: SentenceEncoder, quiet: bool
) -> Iterator[MiningResult]:
    """Test on questions, with the settings of the first tuning set of a sample of pairs."""
    encoded = sample.encode(encoder, f"tuning, {encoder_name}", quiet)
    tuning = sample.tuning(encoded, 0, sample.settings.non_pairing)
    trial = Trial.encode(questions, encoder, f"{QUESTIONS}, {encoder_name}", quiet)
    tuned = _tune_all(tuning, sample.settings, trial)
    about = {"set": QUESTIONS, "encoder": encoder_name, "non_pairing": 0.0, "draw": 0, "tuning_set": 0}
    yield from _compare(trial, tuned, about, np.arange(len(questions.sources)))


def _compare(test: Trial, tuned: Tuned, about: dict[str, Any], sources: np.ndarray) -> Iterator[MiningResult]:
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
            **about,
            system=system,
            **asdict(score(decided, test.gold)),
            p=p,
            settings=method.settings,
            tuning_f1=tuning_f1,
            unlabelled_f1=score(unlabelled, test.gold).f1,
            outcome=Outcome(sources, decided, test.gold),
            unlabelled=Outcome(sources, unlabelled, test.gold),
        )


Rows = list[list[Any]]


def tables(
    results: Sequence[MiningResult], compared: Sequence[Comparison], settings: MiningBenchmarkSettings
) -> dict[str, Rows]:
    """Tabulate results of pairs, by title."""
    fraction = settings.non_pairing
    main = f"{settings.size:,} sentences on either side, {fraction:.0%} of them non-pairing; per cent"
    made = {main: main_table(results, fraction)}
    if settings.ablations:
        made["F1 of what RFR is made of"] = _by_system(
            _main_test(results, fraction), lambda found: _percent(found[0].f1)
        )
    if compared:
        times = f"{settings.draws} tests and {settings.tuning_sets} tuning sets of each, mean and standard deviation"
        chosen = [r for r in results if r.non_pairing == fraction and r.system not in ABLATIONS]
        for labels, word in ((True, "F1"), (False, "F1 without labels")):

            def spread(found: Sequence[MiningResult], labels: bool = labels) -> str:
                values = [r.f1 if labels else r.unlabelled_f1 for r in found]
                return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"

            made[f"{word} over {times}"] = _by_system(chosen, spread)  # table 8 of the paper
            made[
                f"{word} against {BASELINE}, all tests together, with 95% intervals; p by paired bootstrap over sources"
            ] = _comparison_table([one for one in compared if one.labels == labels])
    if settings.curve:
        made["F1 by the fraction of non-pairing sentences"] = _curve_table(results)
    return made


def _by_system(results: Sequence[MiningResult], cell: Callable[[Sequence[MiningResult]], str]) -> Rows:
    """Tabulate a row for each set and encoder."""
    systems = list(dict.fromkeys(result.system for result in results))
    rows: Rows = [["set", "encoder", *systems]]
    for key in dict.fromkeys((result.set, result.encoder) for result in results):
        found = [r for r in results if (r.set, r.encoder) == key]
        rows.append([*key, *(cell([r for r in found if r.system == system]) for system in systems)])
    return rows


def main_table(results: Sequence[MiningResult], non_pairing: float) -> Rows:
    """Tabulate F1, precision and recall of each system, of the first draw and tuning set; and F1 without labels."""
    rows: Rows = [["set", "encoder", "system", "F1", "precision", "recall", "p", "F1 without labels"]]
    for result in _main_test(results, non_pairing):
        if result.system not in ABLATIONS:
            numbers = [_percent(value) for value in (result.f1, result.precision, result.recall)]
            last = _percent(result.unlabelled_f1)
            rows.append([result.set, result.encoder, result.system, *numbers, p_value(result.p), last])
    return rows


def _curve_table(results: Sequence[MiningResult]) -> Rows:
    chosen = _first_draw(results)  # figure 2 of the paper
    shares = sorted({result.non_pairing for result in chosen})
    rows: Rows = [["set", "encoder", "system", *(f"{fraction:.0%}" for fraction in shares)]]
    for key in dict.fromkeys((result.set, result.encoder, result.system) for result in chosen):
        by_fraction = {r.non_pairing: r.f1 for r in chosen if (r.set, r.encoder, r.system) == key}
        rows.append(
            [
                *key,
                *(_percent(by_fraction[fraction]) if fraction in by_fraction else "" for fraction in shares),
            ]
        )
    return rows


@dataclass(frozen=True)
class Comparison:
    """How far a system is from the baseline over all tests and tuning sets of a set and an encoder, and how surely."""

    set: str
    encoder: str
    system: str
    labels: bool  # whether thresholds are tuned; otherwise scores alone set them
    difference: float
    interval: tuple[float, float]
    p: float
    holm: float  # p, corrected for all systems, sets and encoders


def comparisons(results: Sequence[MiningResult], non_pairing: float, labels: bool) -> list[Comparison]:
    """Compare each system with the baseline."""
    outcomes = defaultdict(list)
    for r in results:
        if r.non_pairing == non_pairing and r.system not in ABLATIONS:
            outcomes[r.set, r.encoder, r.system].append(r.outcome if labels else r.unlabelled)
    keys = [key for key in outcomes if key[2] != BASELINE]
    found = [compare(outcomes[(*key[:2], BASELINE)], outcomes[key]) for key in keys]
    corrected = holm([each.p for each in found])
    return [
        Comparison(*key, labels, each.f1, (each.low, each.high), each.p, p)
        for key, each, p in zip(keys, found, corrected)
    ]


def _comparison_table(compared: Sequence[Comparison]) -> Rows:
    rows: Rows = [["set", "encoder", "system", "difference", "interval", "p", "p, Holm"]]
    for one in compared:
        low, high = (f"{100 * end:+.1f}" for end in one.interval)
        numbers = f"{100 * one.difference:+.1f}", f"{low} to {high}", p_value(one.p), p_value(one.holm)
        rows.append([one.set, one.encoder, one.system, *numbers])
    return rows


def curves(results: Sequence[MiningResult]) -> dict[str, dict[float, float]]:
    """Collect F1 in per cent by fraction of non-pairing sentences, for each set, encoder and system."""
    by_name: dict[str, dict[float, float]] = {}
    for result in _first_draw(results):
        name = f"{result.set}, {result.encoder}, {result.system}"
        by_name.setdefault(name, {})[result.non_pairing] = 100 * result.f1
    return {name: dict(sorted(points.items())) for name, points in by_name.items()}


def _first_draw(results: Sequence[MiningResult]) -> list[MiningResult]:
    return [r for r in results if r.draw == r.tuning_set == 0 and r.system not in ABLATIONS]


def p_value(p: float | None) -> str:
    """Format a probability for a table."""
    if p is None:
        return ""
    return "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def _main_test(results: Sequence[MiningResult], non_pairing: float) -> list[MiningResult]:
    return [r for r in results if r.draw == r.tuning_set == 0 and r.non_pairing == non_pairing]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
