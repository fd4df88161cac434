"""Draws of sentence pairs for the benchmark of mining."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.mining.benchmark_settings import MiningBenchmarkSettings
from fairseq_ccpr.lab.mining.encoded_text import EncodedText, encode
from fairseq_ccpr.lab.mining.fragments import fragment_text
from fairseq_ccpr.lab.mining.labelled import distinct_pairs, remove_partners
from fairseq_ccpr.lab.mining.trial import Trial
from fairseq_ccpr.lab.sentence_encoders import SentenceEncoder


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
