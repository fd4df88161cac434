"""Labelled sentences with vectors, sampled from pairs: methods are tuned and tested on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.encoded_text import EncodedText, encode, fragment_text
from fairseq_ccpr.lab.mining.f1 import Matcher, decide, score
from fairseq_ccpr.lab.mining.labelled import (
    LabelledText,
    Labels,
    distinct_pairs,
    remove_partners,
    with_negatives,
)
from fairseq_ccpr.lab.mining.methods import (
    LOGISTIC,
    MARGIN,
    MAX,
    RFR,
    TWO_WAY,
    Method,
    PairMatcher,
    prepare,
    tune,
)
from fairseq_ccpr.lab.mining.neighbours import SearchableText, centred
from fairseq_ccpr.lab.mining.rfr import Grid
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder
from fairseq_ccpr.settings import check, count_option, option

BASELINE, AT_ONE = MAX, "at-1.0"
Systems = dict[str, tuple[Method, Optional[Grid]]]
# Methods, and what their tuning tries; None where the settings are to stay as they are.
SYSTEMS: Systems = {
    MAX: (Method.named(MAX), Grid()),
    MARGIN: (Method.named(MARGIN), Grid()),
    AT_ONE: (Method.named(MARGIN), None),  # as near as its neighbourhood: hardly anything is rejected
    TWO_WAY: (Method.named(TWO_WAY), Grid()),
    LOGISTIC: (Method.named(LOGISTIC), Grid()),
    "RFR": (Method.named(RFR), Grid()),
}
ABLATIONS: Systems = {
    "RFR, fragment alone": (Method.named(RFR, sentence_half=False), Grid()),
    "RFR, no entropy filter": (Method.named(RFR), Grid(keep=(1.0,))),
}


@dataclass(frozen=True)
class MiningBenchmarkSettings:
    """Sizes of the tests; options of `fairseq-ccpr evaluate mining`."""

    size: int = count_option(1000, "sentences on either side of a test")
    curve: list[float] = option(
        [],
        "tests with these fractions of them without a partner as well",
        nargs="+",
        within="[0, 1)",
        needs="a fraction of sentences, at least 0 and less than 1,",
        metavar="FRACTION",
    )
    tuning_size: int = count_option(100, "sentences that settings are tuned on")
    tuning_sets: int = count_option(1, "how many times, on others each time")
    draws: int = count_option(1, "tests, each of other sentences")
    pool: Optional[int] = option(
        None,
        "pairs of each set that the draws share, so that each is encoded once (all pairs)",
        within="[1, inf)",
        needs="at least 1",
        metavar="N",
    )
    systems: list[str] = option(
        list(SYSTEMS), f"what is compared with {BASELINE}", nargs="+", choices=tuple(SYSTEMS)
    )
    ablations: bool = option(False, "RFR without the sentence half, and without the entropy filter, too")
    non_pairing: float = 0.5  # of the sentences have no partner
    seed: int = 1  # of the draw of sentences

    def __post_init__(self) -> None:
        check(self)

    @property
    def compared(self) -> Systems:
        """List the systems that are compared, the baseline first."""
        named = {name: system for name, system in SYSTEMS.items() if name in (BASELINE, *self.systems)}
        return {**named, **(ABLATIONS if self.ablations else {})}

    @property
    def stride(self) -> int:
        """Tell how far apart the fragments are that all systems can take theirs from."""
        return min((method.stride for method, _ in self.compared.values() if method.window), default=1)

    def spares(self, size: int) -> int:
        """Count the pairs whose targets replace some of the targets of `size` others."""
        return round(max(self.non_pairing, *self.curve, 0) * size)

    def tuning_start(self, number: int) -> int:
        """Locate the n-th tuning set."""
        size = self.tuning_size
        return self.size + self.spares(self.size) + number * (size + self.spares(size))


@dataclass
class Trial:
    """Sources to be paired with targets, and the truth."""

    sources: EncodedText
    targets: EncodedText
    gold: np.ndarray  # int64 [L], the target of each of the first L sources, or -1
    _seen: dict[tuple[int, int | None], PairMatcher] = field(default_factory=dict, repr=False)

    @classmethod
    def encode(cls, labelled: LabelledText, encoder: SentenceEncoder, label: str, quiet: bool) -> Trial:
        """Encode labelled sentences."""
        sides = (fragment_text(side) for side in (labelled.sources, labelled.targets))
        sources, targets = (encode(side, encoder, label, quiet) for side in sides)
        return cls(sources, targets, labelled.gold)

    def matcher(self, method: Method) -> Matcher:
        """Prepare to match the sources with the targets; methods that look at the same pairs look at them once."""
        return self._pair_matcher(method) or prepare(method, *self.searchable(method))

    def f1(self, method: Method) -> float:
        """Compute the F1 of a method with its settings as they are, on what `labels` has."""
        labels = self.labels()
        return score(
            decide(self.matcher(method)(labels.rows, labels.hidden), method.threshold), labels.gold
        ).f1

    def tune(self, method: Method, grid: Grid) -> tuple[Method, float]:
        """Choose the settings that do best here; the method with these, and its F1."""
        if pairs := self._pair_matcher(method):
            return pairs.tune(self.labels())
        return tune(method, *self.searchable(method), self.labels(), grid)

    def among(self, other: Trial) -> Trial:
        """Put the text of another trial alongside this one's: the more there is to choose from, the less a score says."""
        return Trial(self.sources.join(other.sources), self.targets.join(other.targets), self.gold)

    def labels(self) -> Labels:
        """List what is known of the sources; each pair serves twice, see `with_negatives`."""
        return with_negatives(np.arange(len(self.gold)), self.gold)

    def searchable(self, method: Method) -> tuple[SearchableText, SearchableText]:
        """Make both sides searchable, in memory."""
        sides = (
            side.every(method.stride) if method.window else side for side in (self.sources, self.targets)
        )
        keys = (method.keys(side) for side in sides)
        source, target = (
            SearchableText.in_memory(centred(each) if method.centred else each) for each in keys
        )
        return source, target

    def _pair_matcher(self, method: Method) -> PairMatcher | None:
        if method.kind.score is None:
            return None
        view = method.kind.candidates, method.window
        if view not in self._seen:
            self._seen[view] = PairMatcher(method, *self.searchable(method))
        return self._seen[view].scored_by(method)


@dataclass
class PairSample:
    """Pairs in random order: those of the test, then spares whose targets replace some of its, then those for tuning."""

    pairs: list[tuple[str, str]]  # source and target
    numbers: np.ndarray  # int64, of each pair in its file
    settings: MiningBenchmarkSettings  # with the seed of this draw

    @property
    def sources(self) -> np.ndarray:
        """Name the sources of the test, int64 [size]: their numbers in the file."""
        return self.numbers[: self.settings.size]

    def test(self, encoded: tuple[EncodedText, EncodedText], fraction: float) -> Trial:
        """Make the test with a fraction of non-pairing sentences; a larger fraction replaces more of the same targets."""
        return self._make(encoded, 0, self.settings.size, fraction)

    def tuning(self, encoded: tuple[EncodedText, EncodedText], number: int, fraction: float) -> Trial:
        """Make the n-th of the tuning sets, from 0, with a fraction of non-pairing sentences."""
        return self._make(encoded, self.settings.tuning_start(number), self.settings.tuning_size, fraction)

    def _make(
        self, encoded: tuple[EncodedText, EncodedText], start: int, size: int, fraction: float
    ) -> Trial:
        source_rows, target_rows, partners = remove_partners(size, fraction)
        # so that an index gives no hint
        order = np.random.default_rng([self.settings.seed, start]).permutation(size)
        gold = np.where(partners >= 0, order.argsort()[partners], -1)
        return Trial(
            encoded[0].select(start + source_rows), encoded[1].select(start + target_rows[order]), gold
        )

    def encode(self, encoder: SentenceEncoder, label: str, quiet: bool) -> tuple[EncodedText, EncodedText]:
        """Encode both sides, without the sources of spares, which nothing uses."""
        rows = range(len(self.pairs))
        spare = range(self.settings.size, self.settings.size + self.settings.spares(self.settings.size))
        sides = ([source if row not in spare else "" for row, (source, _) in zip(rows, self.pairs)],
                 [target for _, target in self.pairs])  # fmt: skip
        stride = self.settings.stride
        source, target = (encode(fragment_text(side, stride=stride), encoder, label, quiet) for side in sides)
        return source, target


def draw_samples(path: Path, settings: MiningBenchmarkSettings) -> list[PairSample]:
    """Draw the sample of each test from a TSV, one of pairs with the same words."""
    pairs = distinct_pairs(path)
    needed = settings.tuning_start(settings.tuning_sets)
    if len(pairs) < needed:
        raise ConfigurationError(
            f"{path} has {len(pairs):,} pairs of different words, and the test needs {needed:,}: give more, or a "
            "smaller --size, --tuning-size or --tuning-sets"
        )
    if settings.pool is not None and settings.pool < needed:
        raise ConfigurationError(
            f"--pool is {settings.pool:,}, and each test needs {needed:,} pairs: give at least these"
        )
    pool = np.arange(len(pairs))
    if settings.pool is not None:
        pool = np.sort(np.random.default_rng(settings.seed).permutation(len(pairs))[: settings.pool])
    samples = []
    for seed in range(settings.seed, settings.seed + settings.draws):
        numbers = pool[np.random.default_rng(seed).permutation(len(pool))[:needed]]
        samples.append(PairSample([pairs[row] for row in numbers], numbers, replace(settings, seed=seed)))
    return samples
