"""A benchmark of mining: F1 of all methods on sentences many of which have no translation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.common_options import count_option
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.mining.f1 import decide, mcnemar, score
from fairseq_ccpr.mining.fragments import fragment_text
from fairseq_ccpr.mining.grid import Grid
from fairseq_ccpr.mining.labelled import LabelledText, distinct_pairs, remove_partners
from fairseq_ccpr.mining.logistic import LogisticMethod
from fairseq_ccpr.mining.margin import MarginMethod, MaxMethod
from fairseq_ccpr.mining.method import MiningMethod
from fairseq_ccpr.mining.rfr import RfrMethod
from fairseq_ccpr.mining.threshold import estimate
from fairseq_ccpr.mining.trial import Trial
from fairseq_ccpr.mining.two_way import TwoWayMethod
from fairseq_ccpr.models.pretrained.sentence_encoders import SentenceEncoder
from fairseq_ccpr.settings import check, option

BASELINE, RFR, NO_SENTENCE, NO_FILTER = MaxMethod.name, "RFR", "RFR, fragment alone", "RFR, no entropy filter"
QUESTIONS = "questions"
SYSTEMS: dict[str, tuple[MiningMethod, Grid]] = {
    BASELINE: (MaxMethod(), Grid()),
    MarginMethod.name: (MarginMethod(), Grid()),
    TwoWayMethod.name: (TwoWayMethod(), Grid()),
    LogisticMethod.name: (LogisticMethod(), Grid()),
    RFR: (RfrMethod(), Grid()),
}
ABLATIONS: dict[str, tuple[MiningMethod, Grid]] = {
    NO_SENTENCE: (RfrMethod(sentence_half=False), Grid()),
    NO_FILTER: (RfrMethod(), Grid(keep=(1.0,))),
}
HALF = 0.5

share_option = partial(
    option, within="[0, 1)", needs="a share of sentences, at least 0 and less than 1,", metavar="SHARE"
)


@dataclass(frozen=True)
class MiningBenchmarkSettings:
    """Sizes of the tests; options of `fairseq-ccpr evaluate mining`.

    Raises:
        ConfigurationError: a number out of its range.
    """

    size: int = count_option(1000, "sentences on either side of a test")
    non_pairing: float = share_option(HALF, "of them without a partner")
    shares: list[float] = share_option([], "a curve: tests with these shares as well", nargs="+")  # noqa: RUF009
    tuning_size: int = count_option(100, "sentences that settings are tuned on")
    tuning_sets: int = count_option(1, "how many times, on others each time")
    draws: int = count_option(1, "tests, each of other sentences")
    systems: list[str] = option(list(SYSTEMS), f"what is compared with {BASELINE}", nargs="+", choices=tuple(SYSTEMS))
    ablations: bool = option(False, "RFR without the sentence half, and without the entropy filter, too")
    seed: int = option(1, "of the draw of sentences", metavar="N")

    def __post_init__(self) -> None:
        check(self)

    @property
    def compared(self) -> dict[str, tuple[MiningMethod, Grid]]:
        """List the systems that are compared, the baseline first."""
        named = {name: system for name, system in SYSTEMS.items() if name in (BASELINE, *self.systems)}
        return {**named, **(ABLATIONS if self.ablations else {})}

    @property
    def stride(self) -> int:
        """Tell how far apart the fragments are that all systems can take theirs from."""
        return min((method.stride for method, _ in self.compared.values() if method.window), default=1)


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
    unlabelled_f1: float  # where scores alone set the threshold


@dataclass
class PairSample:
    """Pairs in random order: those of the test, then spares whose targets replace some of its, then those for tuning."""

    pairs: list[tuple[str, str]]
    settings: MiningBenchmarkSettings

    @classmethod
    def draw(cls, path: Path, settings: MiningBenchmarkSettings) -> PairSample:
        """Draw from a TSV, one of pairs with the same words.

        Raises:
            ConfigurationError: it is missing, is no such TSV, or has too few pairs.
        """
        pairs = distinct_pairs(path)
        sample = cls([], settings)
        needed = sample._tuning_start(settings.tuning_sets)
        if len(pairs) < needed:
            raise ConfigurationError(
                f"{path} has {len(pairs):,} pairs of different words, and the test needs {needed:,}: give more, or a "
                "smaller --size, --tuning-size or --tuning-sets"
            )
        order = np.random.default_rng(settings.seed).permutation(len(pairs))[:needed]
        sample.pairs = [pairs[row] for row in order]
        return sample

    def _spares(self, size: int) -> int:
        return round(max(self.settings.non_pairing, *self.settings.shares, 0) * size)

    def _tuning_start(self, number: int) -> int:
        first, size = self.settings.size, self.settings.tuning_size
        return first + self._spares(first) + number * (size + self._spares(size))

    def test(self, encoded: tuple[EncodedText, EncodedText], share: float) -> Trial:
        """Make the test with a share of non-pairing sentences; a larger share replaces more of the same targets."""
        return self._make(encoded, 0, self.settings.size, share)

    def tuning(self, encoded: tuple[EncodedText, EncodedText], number: int, share: float) -> Trial:
        """Make the n-th of the tuning sets, from 0, with a share of non-pairing sentences."""
        return self._make(encoded, self._tuning_start(number), self.settings.tuning_size, share)

    def _make(self, encoded: tuple[EncodedText, EncodedText], start: int, size: int, share: float) -> Trial:
        source_rows, target_rows, partners = remove_partners(size, share)
        order = np.random.default_rng([self.settings.seed, start]).permutation(size)  # so that an index gives no hint
        gold = np.where(partners >= 0, order.argsort()[partners], -1)
        return Trial(encoded[0].select(start + source_rows), encoded[1].select(start + target_rows[order]), gold)

    def encode(self, encoder: SentenceEncoder, label: str, quiet: bool) -> tuple[EncodedText, EncodedText]:
        """Encode both sides, without the sources of spares, which nothing uses."""
        rows = range(len(self.pairs))
        spare = range(self.settings.size, self.settings.size + self._spares(self.settings.size))
        sides = ([source if row not in spare else "" for row, (source, _) in zip(rows, self.pairs)],
                 [target for _, target in self.pairs])  # fmt: skip
        stride = self.settings.stride
        source, target = (encode(fragment_text(side, stride=stride), encoder, label, quiet) for side in sides)
        return source, target


Tuned = dict[str, tuple[MiningMethod, float]]  # by system: the tuned method, and its F1 on the tuning set


def tune_all(trial: Trial, settings: MiningBenchmarkSettings, test: Trial) -> Tuned:
    """Tune each system, the labelled sentences tried among those of a test, as `fairseq-ccpr mine` does."""
    return {name: trial.tune(method, grid, test) for name, (method, grid) in settings.compared.items()}


def evaluate_pairs(
    name: str, sample: PairSample, draw: int, encoder_name: str, encoder: SentenceEncoder, quiet: bool
) -> Iterator[MiningResult]:
    """Test a set with an encoder: once for each tuning set, then the curve, each share tuned with that share."""
    settings = sample.settings
    encoded = sample.encode(encoder, f"{name}, {encoder_name}", quiet)
    tests = [(settings.non_pairing, number) for number in range(settings.tuning_sets)]
    if draw == 0:
        tests += [(share, 0) for share in sorted({*settings.shares} - {settings.non_pairing})]
    for share, number in tests:
        test = sample.test(encoded, share)
        tuned = tune_all(sample.tuning(encoded, number, share), settings, test)
        yield from _compare(test, tuned, (name, encoder_name, share, draw, number))


def evaluate_questions(
    questions: LabelledText, sample: PairSample, encoder_name: str, encoder: SentenceEncoder, quiet: bool
) -> Iterator[MiningResult]:
    """Test on questions, with the settings of the first tuning set of a sample of pairs."""
    encoded = sample.encode(encoder, f"tuning, {encoder_name}", quiet)
    tuning = sample.tuning(encoded, 0, sample.settings.non_pairing)
    trial = Trial.encode(questions, encoder, f"{QUESTIONS}, {encoder_name}", quiet)
    tuned = tune_all(tuning, sample.settings, trial)
    yield from _compare(trial, tuned, (QUESTIONS, encoder_name, 0.0, 0, 0))


def _compare(test: Trial, tuned: Tuned, about: tuple[str, str, float, int, int]) -> Iterator[MiningResult]:
    name, encoder, share, draw, number = about
    baseline: np.ndarray | None = None
    rows = np.arange(len(test.gold))
    for system, (method, tuning_f1) in tuned.items():
        match = test.matcher(method)
        answers = match(rows, np.full(len(rows), -1))
        decided = decide(answers, method.threshold)
        right = decided == test.gold
        p = None if baseline is None else mcnemar(baseline, right)
        baseline = right if baseline is None else baseline
        scored = asdict(score(decided, test.gold))
        unlabelled = score(decide(answers, estimate(match, len(rows)).threshold), test.gold).f1
        yield MiningResult(
            name, encoder, system, share, draw, number, **scored, p=p, settings=asdict(method), tuning_f1=tuning_f1,
            unlabelled_f1=unlabelled,
        )  # fmt: skip
