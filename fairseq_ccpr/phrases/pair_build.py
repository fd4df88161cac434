"""Builds phrase pairs from sentence pairs: reads, aligns, extracts, filters, writes. The text is read twice.

The first pass counts words and trains the aligner; the second aligns, extracts and writes, a batch at a time, so that
memory holds only the trained aligner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Optional

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.phrases.alignment import (
    ALIGNERS,
    ENCODER,
    MAX_WORDS,
    SYMMETRIZATIONS,
    Aligner,
    AlignerOptions,
    SentencePair,
    Spans,
    parse_links,
)
from fairseq_ccpr.phrases.pair_extraction import FilterCounts, PairFilter, WordFilter, character_spans, consistent_pairs
from fairseq_ccpr.phrases.pair_store import PairWriter, PhraseManifest
from fairseq_ccpr.settings import check, count_option, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import atomic_directory
from fairseq_ccpr.text.pairs import TextPairs, tell_skipped
from fairseq_ccpr.text.words import space_spans, word_spans
from fairseq_ccpr.timing import progress_bar

TRAIN, VALID = "train", "valid"
READY = "ready"  # in place of an aligner's name, where alignments are given
BATCH = 1000  # sentence pairs


@dataclass(frozen=True)
class ExtractionSettings:
    """Settings that decide which phrase pairs are extracted from a text; options of `fairseq-ccpr extract`."""

    aligner: str = option(
        "eflomal", "a model trained on the text itself; or encoder, pretrained, which a small text suits as well",
        choices=tuple(ALIGNERS),
    )  # fmt: skip
    symmetrization: str = option(
        AlignerOptions.symmetrization, "how the alignments of both directions become one", choices=SYMMETRIZATIONS
    )
    encoder: Optional[Path] = option(None, "of --aligner encoder, made by fairseq-ccpr convert", metavar="DIR")
    encoder_layer: Optional[int] = option(None, "whose states are compared (the middle layer)", metavar="N")
    max_words: int = option(
        100, "skip longer sentences, and count them",
        within=f"[1, {MAX_WORDS}]", needs=f"up to {MAX_WORDS} words, as aligners take them,", metavar="N",
    )  # fmt: skip
    max_phrase_words: int = count_option(7, "longest phrase, on either side")
    max_edge_share: float = option(
        0.003,
        "no phrase begins or ends with a word that makes up more than this fraction of all words; 1 allows every word",
        within="(0, 1]", needs="a fraction of all words above 0 (1 drops none)", metavar="X",
    )  # fmt: skip
    punctuation_edges: bool = option(False, "phrases may begin and end with punctuation")

    def check(self) -> None:
        """Check that all values are in range and compatible.

        Raises:
            ConfigurationError: names the option.
        """
        check(self)
        for name in ("encoder", "encoder_layer"):
            if self.aligner != ENCODER and getattr(self, name) is not None:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} is for --aligner {ENCODER}: leave it out, or give that"
                )


@dataclass
class Split:
    """A set to write, train or valid: rows of a text."""

    text: TextPairs
    first: int = 0  # usable sentence pairs of the text before it
    count: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def usable_pairs(
    text: TextPairs, find_words: Callable[[str], Spans], max_words: int, skipped: Counter[str]
) -> Iterator[SentencePair]:
    """Yield the sentence pairs of a text that have words on both sides, but not too many.

    Args:
        text: where they are.
        find_words: from a sentence to the character spans of its words.
        max_words: the most words a sentence may have.
        skipped: counts the others by reason.

    Raises:
        ConfigurationError: bad text, or an alignment that does not match it.
    """
    for number, (source, target, alignment) in enumerate(text.read(skipped), 1):
        source_words, target_words = find_words(source), find_words(target)
        links = None
        if alignment is not None:
            where = f"{text.alignments}, line {number}"
            links = parse_links(alignment, len(source_words), len(target_words), where)
        if not source_words or not target_words:
            skipped["empty"] += 1
        elif max(len(source_words), len(target_words)) > max_words:
            skipped["too long"] += 1
        else:
            yield SentencePair(source, target, source_words, target_words, links)


class PairExtraction:
    """One run: the texts, the extraction settings, and the counts.

    Args:
        text: the sentence pairs.
        settings: how.
        valid: how many sentence pairs to hold out: the last of `text`, or the first of `valid_text`; None: all of that.
        valid_text: held-out sentence pairs.
        more_text: further sentence pairs for the aligner to learn from.
        show: whether to draw progress bars.

    Raises:
        ConfigurationError: settings that cannot work, or an aligner that is not installed.
    """

    def __init__(
        self, text: TextPairs, settings: ExtractionSettings, valid: int | None = None, valid_text: TextPairs | None = None,
        more_text: list[TextPairs] | None = None, show: bool = False,
    ) -> None:  # fmt: skip
        settings.check()
        self.more_text, self.show = more_text or [], show
        for path in (p for t in (text, valid_text, *self.more_text) if t for p in t.paths):
            if not path.exists():
                raise ConfigurationError(f"there is no file {path}")
            if not path.is_file():
                raise ConfigurationError(f"{path} is no regular file: the text is read twice, so give files, not pipes")
        self.settings, self.text, self.valid, self.valid_text = settings, text, valid, valid_text
        self.find_words: Callable[[str], Spans] = word_spans
        self.aligner: Aligner | None = None
        if text.alignments is not None:
            self.find_words = space_spans  # the words that the alignments count
        else:
            options = AlignerOptions(settings.symmetrization, settings.encoder, settings.encoder_layer)
            self.aligner = ALIGNERS[settings.aligner](options)
        self.frequencies: tuple[Counter[str], Counter[str]] = Counter(), Counter()  # of either side

    def run(self, output: Path, name: str, languages: tuple[str, str]) -> dict[str, tuple[Split, FilterCounts]]:
        """Extract all and write OUTPUT/train and, if pairs are held out, OUTPUT/valid.

        Returns:
            For each set, what was read and what was filtered.

        Raises:
            ConfigurationError: bad text, nothing usable in it, or filters that keep nothing.
        """
        counts = {}
        with atomic_directory(output) as partial:
            splits = self.learn()
            for split_name, split in splits.items():
                fingerprints = {"text": fingerprint.of_files(split.text.paths)}
                fingerprints |= self.aligner.fingerprints() if self.aligner is not None else {}
                skipped = dict(split.skipped)
                manifest = PhraseManifest(name, *languages, self._described(), fingerprints, skipped)
                with PairWriter(partial / split_name, manifest) as writer:
                    counts[split_name] = self._write(split, writer, split_name)
                    refuse_nothing(split_name, counts[split_name], self.settings)
        return {split_name: (split, counts[split_name]) for split_name, split in splits.items()}

    def learn(self) -> dict[str, Split]:
        """Read the text for the first time: count words, train the aligner, and assign sentence pairs to sets."""
        train = Split(self.text)
        splits = {TRAIN: train}
        if self.valid_text is not None:
            splits[VALID] = Split(self.valid_text)

        def all_pairs() -> Iterator[SentencePair]:
            for split_name, split in splits.items():
                limit = self.valid if split_name == VALID else None
                for pair in islice(self._usable(split.text, split.skipped), limit):
                    split.count += 1
                    for counter, words in zip(self.frequencies, pair.words()):
                        counter.update(words)
                    yield pair
            for text in self.more_text:
                skipped = Counter[str]()
                yield from self._usable(text, skipped)
                tell_skipped(f"--align-with {text.paths[0]}", skipped)

        pairs = progress_bar("reading", "pair", all_pairs(), quiet=not self.show)
        if self.aligner is not None:
            self.aligner.train(pairs, self.show)
        for _ in pairs:  # count the pairs that the aligner, if any, has not read
            pass
        if self.valid_text is None and self.valid:
            splits[VALID] = Split(self.text, train.count - self.valid, self.valid)
            train.count -= self.valid
        for split_name, split in splits.items():
            if split.count < 1:
                reasons = (
                    ", ".join(f"{count:,} {reason}" for reason, count in split.skipped.items()) or "the file is empty"
                )
                raise ConfigurationError(
                    f"{split.text.paths[0]} leaves no sentence pair for '{split_name}' (skipped: {reasons}; held out: "
                    f"{self.valid or 0:,}): give more text, a larger --max-words or a smaller --valid"
                )
        return splits

    def _usable(self, text: TextPairs, skipped: Counter[str]) -> Iterator[SentencePair]:
        return usable_pairs(text, self.find_words, self.settings.max_words, skipped)

    def _write(self, split: Split, writer: PairWriter, name: str) -> FilterCounts:
        """Read one set for the second time and write its phrase pairs."""
        settings = self.settings
        pair_filter = PairFilter(
            *(WordFilter(words, settings.max_edge_share, settings.punctuation_edges) for words in self.frequencies)
        )
        pairs = islice(self._usable(split.text, Counter()), split.first, split.first + split.count)
        with progress_bar(name, "pair", total=split.count, quiet=not self.show) as bar:
            while batch := list(islice(pairs, BATCH)):
                for pair, spans in zip(batch, self._extract(batch, pair_filter)):
                    writer.add(pair.source, pair.target, spans)
                bar.update(len(batch))
        return pair_filter.counts

    def _extract(self, batch: list[SentencePair], pair_filter: PairFilter) -> list[np.ndarray]:
        """Return character spans [p, 4] of the phrase pairs of each sentence pair."""
        if self.aligner is not None:
            links = self.aligner.align(batch)
        else:
            links = [pair.links for pair in batch if pair.links is not None]
        sentence = np.repeat(np.arange(len(batch)), [len(found) for found in links])
        numbered = np.column_stack([sentence, np.concatenate(links)])
        source_sizes = np.array([len(pair.source_words) for pair in batch])
        target_sizes = np.array([len(pair.target_words) for pair in batch])
        pairs = consistent_pairs(source_sizes, target_sizes, numbered, self.settings.max_phrase_words)
        pairs = pair_filter(batch, pairs)
        source = character_spans([pair.source_words for pair in batch], pairs[:, 0], pairs[:, 1:3])
        target = character_spans([pair.target_words for pair in batch], pairs[:, 0], pairs[:, 3:5])
        first = np.searchsorted(pairs[:, 0], np.arange(1, len(batch)))
        return np.split(np.column_stack([source, target]), first)

    def _described(self) -> dict[str, object]:
        """Return the settings in the form that a manifest stores."""
        settings = {
            name: value for name, value in asdict(self.settings).items() if name not in ("encoder", "encoder_layer")
        }
        if self.aligner is None:
            return settings | {"aligner": READY, "symmetrization": READY}
        return settings | self.aligner.describe()


def refuse_nothing(name: str, counts: FilterCounts, settings: ExtractionSettings) -> None:
    """Refuse filters that leave a set empty.

    Raises:
        ConfigurationError: says how many pairs there were and which filter dropped them.
    """
    if not counts.kept:
        raise ConfigurationError(
            f"no phrase pair is left in '{name}': {counts.consistent:,} agree with the alignment, {counts.edges:,} were "
            f"dropped for a frequent word or punctuation at an edge (--max-edge-share {settings.max_edge_share}), "
            f"{counts.wordless:,} for having no letter; give a larger --max-edge-share or more text"
        )
