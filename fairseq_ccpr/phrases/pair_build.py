"""Builds phrase pairs from sentence pairs: reads, aligns, extracts, filters (CCPR, appendix A.1), writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.phrases.alignment import (
    ALIGNERS,
    ENCODER,
    MAX_ALIGNED_WORDS,
    SYMMETRIZATIONS,
    AlignerOptions,
    ReadyAlignments,
    SentencePair,
    Spans,
    parse_links,
)
from fairseq_ccpr.phrases.pair_store import PairWriter, PhraseManifest
from fairseq_ccpr.settings import check, count_option, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import atomic_directory
from fairseq_ccpr.text.pairs import TextPairs, tell_skipped
from fairseq_ccpr.text.words import space_spans, word_spans
from fairseq_ccpr.timing import progress_bar

_NONE = np.iinfo(np.int32).max  # the first link of a run of words without any
TRAIN, VALID = "train", "valid"
PAIRS_PER_BATCH = 1000  # sentence pairs


def edge_rule(settings: Mapping[str, Any]) -> str:
    """Name the rule that barred words from the edges of phrases: too frequent ones in their own text.

    >>> edge_rule({"max_edge_share": 0.003})
    'own>0.003'
    """
    return f"own>{settings['max_edge_share']:g}"


@dataclass
class FilterCounts:
    """Counts of the consistent pairs, by outcome."""

    consistent: int = 0
    edges: int = 0  # dropped: a very frequent word, or punctuation, at an edge
    wordless: int = 0  # dropped: digits and punctuation only
    kept: int = 0


class WordFilter:
    """Judges the words of one language, each kind once.

    A word, in lower case, that makes up more than `max_share` of all words of the text is too frequent for an
    edge.
    """

    def __init__(self, frequencies: Counter[str], max_share: float, punctuation_edges: bool) -> None:
        limit = max_share * sum(frequencies.values())
        self.frequent = {word for word, count in frequencies.items() if count > limit}
        self.punctuation_edges = punctuation_edges
        self._judged = cache(self._judge)

    def judge(self, words: list[str]) -> np.ndarray:
        """Judge words, bool [W, 2]: whether one may stand at a phrase's edge, and whether it has a letter."""
        return np.array([self._judged(word) for word in words], bool).reshape(-1, 2)

    def _judge(self, word: str) -> tuple[bool, bool]:
        letter = any(character.isalpha() for character in word)
        wordlike = self.punctuation_edges or letter or any(c.isnumeric() for c in word)
        return wordlike and word not in self.frequent, letter


class PairFilter:
    """Drops phrase pairs if either side is not worth keeping."""

    def __init__(self, source: WordFilter, target: WordFilter) -> None:
        self.sides = source, target
        self.counts = FilterCounts()

    def __call__(self, sentences: list[SentencePair], pairs: np.ndarray) -> np.ndarray:
        """Return those of `pairs` [P, 5] (word spans, see `consistent_pairs`) that pass."""
        edges, lettered = np.ones(len(pairs), bool), np.ones(len(pairs), bool)
        words = [pair.words() for pair in sentences]
        for side, word_filter in enumerate(self.sides):
            texts = [both[side] for both in words]
            first = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
            judged = word_filter.judge([word for text in texts for word in text])
            letters = np.concatenate([[0], np.cumsum(judged[:, 1])])  # [W + 1]
            start = first[pairs[:, 0]] + pairs[:, 1 + 2 * side]
            end = first[pairs[:, 0]] + pairs[:, 2 + 2 * side]
            edges &= judged[start, 0] & judged[end - 1, 0]
            lettered &= letters[end] > letters[start]
        kept = pairs[edges & lettered]
        self.counts.consistent += len(pairs)
        self.counts.edges += int((~edges).sum())
        self.counts.wordless += int((edges & ~lettered).sum())
        self.counts.kept += len(kept)
        return kept


def consistent_pairs(
    source_sizes: np.ndarray, target_sizes: np.ndarray, links: np.ndarray, max_words: int
) -> np.ndarray:
    """List all pairs of word spans with at least one link between them and none from inside to outside.

    Spans may overlap, and may begin and end with words that have no link.

    >>> consistent_pairs(np.array([2]), np.array([3]), np.array([[0, 0, 0], [0, 1, 2]]), 2).tolist()
    [[0, 0, 1, 0, 1], [0, 0, 1, 0, 2], [0, 1, 2, 1, 3], [0, 1, 2, 2, 3]]

    Args:
        source_sizes, target_sizes: int [S], words of each sentence.
        links: int [A, 3], (sentence, source word, target word).
        max_words: the most words a phrase may have on either side.

    Returns:
        int32 [P, 5], (sentence, source start, source end, target start, target end) in words of the sentence,
        ends exclusive, in ascending order.
    """
    # Words are numbered through all sentences. No span of source words crosses a sentence border, so neither
    # do its links.
    sizes = source_sizes, target_sizes
    first = [np.concatenate([[0], np.cumsum(side)]) for side in sizes]  # [S + 1] each
    source_links, target_links = (links[:, 1 + side] + first[side][links[:, 0]] for side in range(2))
    source_range = _Ranges(source_links, target_links, first[0][-1], max_words)
    target_range = _Ranges(target_links, source_links, first[1][-1], max_words)
    sentences = np.repeat(np.arange(len(source_sizes)), source_sizes)
    linked = np.bincount(target_links, minlength=first[1][-1]) > 0
    boxes: list[np.ndarray] = []
    for length in range(1, max_words + 1):
        tight = _tight_boxes(length, source_range, target_range, sentences)
        sentence = sentences[tight[0]]
        boxes += _extend(tight, first[1][sentence], first[1][sentence + 1], linked, max_words)
    joined = np.concatenate(boxes, axis=1)  # [4, P]
    sentence = sentences[joined[0]]
    offsets = np.repeat([first[0][sentence], first[1][sentence]], 2, axis=0)
    pairs = np.stack([sentence, *(joined - offsets)], axis=1).astype(np.int32)
    return pairs[np.lexsort(pairs.T[::-1])]


def _tight_boxes(length: int, source: _Ranges, target: _Ranges, sentence: np.ndarray) -> np.ndarray:
    """List the pairs of spans of `length` source words whose target words begin and end with a link.

    Rows of int [4, n] are source start, source end, target start, target end, in words numbered through all
    sentences.
    """
    start = np.arange(len(sentence) - length + 1)
    start = start[sentence[start] == sentence[start + length - 1]]
    low, high = source.low[length - 1, start], source.high[length - 1, start]
    fits = (low != _NONE) & (high - low < len(target.low))
    start, low, high = start[fits], low[fits], high[fits]
    # The other way: the links of the target words must come from inside the source words.
    inside = (target.low[high - low, low] >= start) & (target.high[high - low, low] < start + length)
    start, low, high = start[inside], low[inside], high[inside]
    return np.stack([start, start + length, low, high + 1])


def _extend(
    boxes: np.ndarray, begin: np.ndarray, stop: np.ndarray, linked: np.ndarray, max_words: int
) -> Iterator[np.ndarray]:
    """Yield the boxes [4, n], and each extended by unlinked words before and after its target words.

    Args:
        begin, stop: the target words of each box's sentence, [n].
        linked: which target words have a link, bool [T].
    """
    _, _, first, end = boxes
    links = np.concatenate([[0], np.cumsum(linked)])  # before each word, [T + 1]
    for before in range(max_words):
        for after in range(max_words - before):
            low, high = np.maximum(first - before, begin), np.minimum(end + after, stop)
            may = (low == first - before) & (high == end + after) & (high - low <= max_words)
            may &= (links[low] == links[first]) & (links[high] == links[end])
            yield boxes[:, may] + np.array([[0], [0], [-before], [after]])


def character_spans(
    words: list[list[tuple[int, int]]], sentence: np.ndarray, spans: np.ndarray
) -> np.ndarray:
    """Convert spans [P, 2] in words of their `sentence` [P] to spans in characters, ends exclusive.

    >>> character_spans([[(0, 3), (4, 9)]], np.array([0]), np.array([[0, 2]])).tolist()
    [[0, 9]]
    """
    first = np.cumsum([0, *map(len, words)])[sentence]
    characters = np.array([span for spans_of_words in words for span in spans_of_words])  # [W, 2]
    return np.column_stack([characters[first + spans[:, 0], 0], characters[first + spans[:, 1] - 1, 1]])


class _Ranges:
    """The words that runs are linked to: `low` and `high` [max_words, W], by length − 1 and first word.

    A run without links has low = _NONE and high = −1; one that would reach beyond the last word stops there.
    """

    def __init__(self, words: np.ndarray, linked: np.ndarray, size: int, max_words: int) -> None:
        self.low = np.full((max_words, size), _NONE, np.int64)
        self.high = np.full((max_words, size), -1, np.int64)
        np.minimum.at(self.low[0], words, linked)
        np.maximum.at(self.high[0], words, linked)
        for length in range(1, max_words):  # [W] words from each start: one more than before
            for extreme, bounds in ((np.minimum, self.low), (np.maximum, self.high)):
                bounds[length] = bounds[length - 1]
                reaching = bounds[length, : max(size - length, 0)]
                extreme(reaching, bounds[0, length:], out=reaching)


@dataclass(frozen=True)
class ExtractionSettings:
    """Settings that decide which phrase pairs are extracted; options of `fairseq-ccpr extract`."""

    aligner: str = option(
        "eflomal",
        "a model trained on the text itself; or encoder, pretrained, which a small text suits as well",
        choices=tuple(ALIGNERS),
    )
    symmetrization: str = option(
        AlignerOptions.symmetrization,
        "how the alignments of both directions become one",
        choices=SYMMETRIZATIONS,
    )
    encoder: Optional[Path] = option(
        None, "of --aligner encoder, made by fairseq-ccpr convert", metavar="DIR"
    )
    encoder_layer: Optional[int] = option(None, "whose states are compared (the middle layer)", metavar="N")
    max_words: int = option(
        100,
        "skip longer sentences, and count them",
        within=f"[1, {MAX_ALIGNED_WORDS}]",
        needs=f"up to {MAX_ALIGNED_WORDS} words, as aligners take them,",
        metavar="N",
    )
    max_phrase_words: int = count_option(7, "longest phrase, on either side")
    max_edge_share: float = option(
        0.003,
        "no phrase begins or ends with a word that makes up more than this "
        "fraction of all words; 1 allows every word",
        within="(0, 1]",
        needs="a fraction of all words above 0 (1 drops none)",
        metavar="X",
    )
    punctuation_edges: bool = option(False, "phrases may begin and end with punctuation")

    def check(self) -> None:
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
    """Yield the sentence pairs with words on both sides, not too many; `skipped` counts the others."""
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
        valid: how many sentence pairs to hold out: the last of `text`, or the first of `valid_text`; None:
            all of that.
        valid_text: held-out sentence pairs.
        more_text: further sentence pairs for the aligner to learn from.
    """

    def __init__(
        self,
        text: TextPairs,
        settings: ExtractionSettings,
        valid: int | None = None,
        valid_text: TextPairs | None = None,
        more_text: list[TextPairs] | None = None,
        show: bool = False,
    ) -> None:
        settings.check()
        self.more_text, self.show = more_text or [], show
        for path in (p for t in (text, valid_text, *self.more_text) if t for p in t.paths):
            if not path.exists():
                raise ConfigurationError(f"there is no file {path}")
            if not path.is_file():
                raise ConfigurationError(
                    f"{path} is no regular file: the text is read twice, so give files, not pipes"
                )
        self.settings, self.text, self.valid, self.valid_text = settings, text, valid, valid_text
        options = AlignerOptions(settings.symmetrization, settings.encoder, settings.encoder_layer)
        given = text.alignments is not None
        self.find_words = space_spans if given else word_spans  # the words that the alignments count
        self.aligner = ReadyAlignments() if given else ALIGNERS[settings.aligner](options)
        self.frequencies: tuple[Counter[str], Counter[str]] = Counter(), Counter()  # of either side

    def run(
        self, output: Path, name: str, languages: tuple[str, str]
    ) -> dict[str, tuple[Split, FilterCounts]]:
        """Extract all to OUTPUT/train and, if pairs are held out, OUTPUT/valid; return the counts."""
        counts: dict[str, FilterCounts] = {}
        described = asdict(self.settings)
        del described["encoder"], described["encoder_layer"]  # which the aligner describes
        described |= self.aligner.describe()
        with atomic_directory(output) as partial:
            splits = self.learn()
            for split_name, split in splits.items():
                fingerprints = {"text": fingerprint.of_files(split.text.paths), **self.aligner.fingerprints()}
                manifest = PhraseManifest(name, *languages, described, fingerprints, dict(split.skipped))
                with PairWriter(partial / split_name, manifest) as writer:
                    counts[split_name] = found = self._write(split, writer, split_name)
                if not found.kept:
                    raise ConfigurationError(
                        f"no phrase pair is left in '{split_name}': {found.consistent:,} agree with the "
                        f"alignment, {found.edges:,} were dropped for a frequent word or punctuation at an "
                        f"edge (--max-edge-share {self.settings.max_edge_share}), {found.wordless:,} for "
                        "having no letter; give a larger --max-edge-share or more text"
                    )
        return {split_name: (split, counts[split_name]) for split_name, split in splits.items()}

    def learn(self) -> dict[str, Split]:
        """Read the text once: count words, train the aligner, and assign sentence pairs to sets."""
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
        self.aligner.train(pairs, self.show)
        for _ in pairs:  # count the pairs that the aligner has not read
            pass
        if self.valid_text is None and self.valid:
            splits[VALID] = Split(self.text, train.count - self.valid, self.valid)
            train.count -= self.valid
        for split_name, split in splits.items():
            if split.count < 1:
                skipped = ", ".join(f"{count:,} {reason}" for reason, count in split.skipped.items())
                raise ConfigurationError(
                    f"{split.text.paths[0]} leaves no sentence pair for '{split_name}' (skipped: "
                    f"{skipped or 'the file is empty'}; held out: "
                    f"{self.valid or 0:,}): give more text, a larger --max-words or a smaller --valid"
                )
        return splits

    def _usable(self, text: TextPairs, skipped: Counter[str]) -> Iterator[SentencePair]:
        return usable_pairs(text, self.find_words, self.settings.max_words, skipped)

    def _write(self, split: Split, writer: PairWriter, name: str) -> FilterCounts:
        how = self.settings.max_edge_share, self.settings.punctuation_edges
        pair_filter = PairFilter(*(WordFilter(words, *how) for words in self.frequencies))
        pairs = islice(self._usable(split.text, Counter()), split.first, split.first + split.count)
        with progress_bar(name, "pair", total=split.count, quiet=not self.show) as bar:
            while batch := list(islice(pairs, PAIRS_PER_BATCH)):
                for pair, spans in zip(batch, self._extract(batch, pair_filter)):
                    writer.add(pair.source, pair.target, spans)
                bar.update(len(batch))
        return pair_filter.counts

    def _extract(self, batch: list[SentencePair], pair_filter: PairFilter) -> list[np.ndarray]:
        links = self.aligner.align(batch)
        sentence = np.repeat(np.arange(len(batch)), [len(found) for found in links])
        numbered = np.column_stack([sentence, np.concatenate(links)])
        sides = [pair.source_words for pair in batch], [pair.target_words for pair in batch]
        source_sizes, target_sizes = (np.array([*map(len, words)]) for words in sides)
        pairs = consistent_pairs(source_sizes, target_sizes, numbered, self.settings.max_phrase_words)
        pairs = pair_filter(batch, pairs)
        columns = pairs[:, 1:3], pairs[:, 3:5]
        spans = [character_spans(words, pairs[:, 0], of_words) for words, of_words in zip(sides, columns)]
        first = np.searchsorted(pairs[:, 0], np.arange(1, len(batch)))
        return np.split(np.hstack(spans), first)
