"""Labelled sentences with vectors, sampled from pairs: methods are tuned and tested on them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.benchmark_settings import MiningBenchmarkSettings
from fairseq_ccpr.lab.mining.centring import centred
from fairseq_ccpr.lab.mining.encoded_text import EncodedText, encode, fragment_text
from fairseq_ccpr.lab.mining.f1 import decide, score
from fairseq_ccpr.lab.mining.labelled import LabelledText, Labels, distinct_pairs, remove_partners, with_negatives
from fairseq_ccpr.lab.mining.method import Grid, Matcher, MiningMethod
from fairseq_ccpr.lab.mining.neighbours import SearchableText
from fairseq_ccpr.lab.mining.pair_methods import PairMatcher, PairMethod, View
from fairseq_ccpr.lab.mining.pknn import Answers
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder


@dataclass
class Trial:
    """Sources to be paired with targets, and the truth.

    Attributes:
        gold: int64 [L], the target of each of the first L sources, or -1.
    """

    sources: EncodedText
    targets: EncodedText
    gold: np.ndarray
    _seen: dict[View, PairMatcher] = field(default_factory=dict, repr=False)

    @classmethod
    def encode(cls, labelled: LabelledText, encoder: SentenceEncoder, label: str, quiet: bool) -> Trial:
        """Encode labelled sentences."""
        sides = (fragment_text(side) for side in (labelled.sources, labelled.targets))
        sources, targets = (encode(side, encoder, label, quiet) for side in sides)
        return cls(sources, targets, labelled.gold)

    def matcher(self, method: MiningMethod) -> Matcher:
        """Prepare to match the sources with the targets; methods that look at the same pairs look at them once."""
        if isinstance(method, PairMethod):
            return self._pair_matcher(method)
        return method.matcher(*self.searchable(method))

    def answers(self, method: MiningMethod) -> Answers:
        """Match each source."""
        return self.matcher(method)(np.arange(len(self.gold)), np.full(len(self.gold), -1))

    def f1(self, method: MiningMethod) -> float:
        """Compute the F1 of a method with its settings as they are, on what `labels` has."""
        labels = self.labels()
        return score(decide(self.matcher(method)(labels.rows, labels.hidden), method.threshold), labels.gold).f1

    def tune(self, method: MiningMethod, grid: Grid) -> tuple[MiningMethod, float]:
        """Choose the settings that do best here; the method with these, and its F1.

        Args:
            method: with the settings that are not tuned.
            grid: what to try.
        """
        if isinstance(method, PairMethod):
            return method.tune_by(self._pair_matcher(method), self.labels())
        return method.tune(*self.searchable(method), self.labels(), grid)

    def among(self, other: Trial) -> Trial:
        """Put the text of another trial alongside this one's: the more there is to choose from, the less a score says."""
        return Trial(self.sources.join(other.sources), self.targets.join(other.targets), self.gold)

    def labels(self) -> Labels:
        """List what is known of the sources; each pair serves twice, see `with_negatives`."""
        return with_negatives(np.arange(len(self.gold)), self.gold)

    def searchable(self, method: MiningMethod) -> tuple[SearchableText, SearchableText]:
        """Make both sides searchable, in memory."""
        sides = (side.every(method.stride) if method.window else side for side in (self.sources, self.targets))
        keys = (method.keys(side) for side in sides)
        source, target = (SearchableText.of(centred(each) if method.centred else each) for each in keys)
        return source, target

    def _pair_matcher(self, method: PairMethod) -> PairMatcher:
        if method.view not in self._seen:
            self._seen[method.view] = method.matcher(*self.searchable(method))
        return self._seen[method.view].scored_by(method)


@dataclass
class PairSample:
    """Pairs in random order: those of the test, then spares whose targets replace some of its, then those for tuning.

    Attributes:
        pairs: source and target.
        numbers: int64, of each pair in its file.
        settings: of the tests, with the seed of this draw.
    """

    pairs: list[tuple[str, str]]
    numbers: np.ndarray
    settings: MiningBenchmarkSettings

    @property
    def sources(self) -> np.ndarray:
        """Name the sources of the test, int64 [size]: their numbers in the file."""
        return self.numbers[: self.settings.size]

    def test(self, encoded: tuple[EncodedText, EncodedText], fraction: float) -> Trial:
        """Make the test with a fraction of non-pairing sentences; a larger fraction replaces more of the same targets."""
        return self._make(encoded, 0, self.settings.size, fraction)

    def tuning(self, encoded: tuple[EncodedText, EncodedText], number: int, fraction: float) -> Trial:
        """Make the n-th of the tuning sets, from 0, with a fraction of non-pairing sentences."""
        return self._make(encoded, _tuning_start(self.settings, number), self.settings.tuning_size, fraction)

    def _make(self, encoded: tuple[EncodedText, EncodedText], start: int, size: int, fraction: float) -> Trial:
        source_rows, target_rows, partners = remove_partners(size, fraction)
        order = np.random.default_rng([self.settings.seed, start]).permutation(size)  # so that an index gives no hint
        gold = np.where(partners >= 0, order.argsort()[partners], -1)
        return Trial(encoded[0].select(start + source_rows), encoded[1].select(start + target_rows[order]), gold)

    def encode(self, encoder: SentenceEncoder, label: str, quiet: bool) -> tuple[EncodedText, EncodedText]:
        """Encode both sides, without the sources of spares, which nothing uses."""
        rows = range(len(self.pairs))
        spare = range(self.settings.size, self.settings.size + _spares(self.settings, self.settings.size))
        sides = ([source if row not in spare else "" for row, (source, _) in zip(rows, self.pairs)],
                 [target for _, target in self.pairs])  # fmt: skip
        stride = self.settings.stride
        source, target = (encode(fragment_text(side, stride=stride), encoder, label, quiet) for side in sides)
        return source, target


def draw_samples(path: Path, settings: MiningBenchmarkSettings) -> list[PairSample]:
    """Draw the sample of each test from a TSV, one of pairs with the same words.

    Raises:
        ConfigurationError: it is missing, is no such TSV, or has too few pairs.
    """
    pairs = distinct_pairs(path)
    needed = _tuning_start(settings, settings.tuning_sets)
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


def _spares(settings: MiningBenchmarkSettings, size: int) -> int:
    return round(max(settings.non_pairing, *settings.curve, 0) * size)


def _tuning_start(settings: MiningBenchmarkSettings, number: int) -> int:
    first, size = settings.size, settings.tuning_size
    return first + _spares(settings, first) + number * (size + _spares(settings, size))
