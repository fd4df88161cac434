"""Lexicons: phrase pairs of a dictionary with example sentences of either side, built, on disk, and as batches.

manifest.json                       its contents, its inputs and settings, size and checksum of each file
pairs.npy                           int32 [P, 2], (source phrase, target phrase), in ascending order
SIDE/phrases.txt                    UTF-8, each phrase once, one per line
SIDE/phrase-offsets.npy             int64 [n + 1], the byte at which each line of phrases.txt begins; the last
is its size SIDE/sentences.txt                  UTF-8, each sentence once, one per line
SIDE/sentence-offsets.npy           int64 [S + 1]
SIDE/examples.npy                   int32 [E, 3], (sentence, start, end), in characters, by phrase, in their
drawn order SIDE/example-offsets.npy            int64 [n + 1], the first example of each phrase; the last is E

SIDE is `source` and `target`. The first m examples of a phrase are the sample of m.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.samples import sample_occurrences
from fairseq_ccpr.settings import check, count_option, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import open_array, save_array
from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.storage.files import (
    MANIFEST,
    atomic_directory,
    check_sizes,
    describe_files,
    write_checked_json,
)
from fairseq_ccpr.storage.text_lines import (
    TextFormat,
    TextLines,
    check_every_byte,
    read_text_manifest,
    write_lines,
)
from fairseq_ccpr.text.pairs import read_pairs, reasons, tell_skipped
from fairseq_ccpr.text.subwords import (
    Subwords,
    SubwordTokenizer,
    batches_of_like_length,
    collate,
    subword_bounds,
)
from fairseq_ccpr.text.words import has_letters, word_spans
from fairseq_ccpr.version import __version__

KIND = "phrase-lexicon"
FORMAT_VERSION = 2  # introduced the checksum of the manifest
SIDES = "source", "target"
PAIRS, PHRASES, SENTENCES, EXAMPLES = "pairs", "phrase", "sentence", "example"
FILES = [
    f"{PAIRS}.npy",
    *(
        f"{side}/{name}"
        for side in SIDES
        for name in (
            f"{PHRASES}s.txt", f"{PHRASES}-offsets.npy", f"{SENTENCES}s.txt", f"{SENTENCES}-offsets.npy",
            f"{EXAMPLES}s.npy", f"{EXAMPLES}-offsets.npy",
        )
    ),
]  # fmt: skip
FORMAT = TextFormat(KIND, FORMAT_VERSION, "lexicon phrases", tuple(FILES), "build the lexicon again")
Place = tuple[str, int, int]  # sentence, start and end in characters
SHARES = {"train": 3, "valid": 1, "test": 1}
LONGER_BY = 10  # characters by which an example sentence is longer than its phrase


@dataclass
class LexiconManifest:
    """All of `manifest.json`."""

    source_lang: str
    target_lang: str
    settings: dict[str, Any]  # of the build
    fingerprints: dict[str, str]  # pairs, source_text, target_text: SHA-256 of the input files
    pairs: int = 0
    phrases: list[int] = field(default_factory=list)  # of source and target
    sentences: list[int] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # path -> bytes, sha256
    kind: str = KIND
    format_version: int = FORMAT_VERSION
    created_with: str = f"fairseq-ccpr {__version__}"

    @property
    def language_pair(self) -> str:
        """Such as de-en."""
        return f"{self.source_lang}-{self.target_lang}"


class PhraseTypes:
    """The n phrases of one side, each with its example sentences, of which there are `counts`, int64 [n]."""

    def __init__(self, folder: Path, phrases: int, sentences: int, examples: int) -> None:
        self.phrases = TextLines(folder / f"{PHRASES}s.txt", folder / f"{PHRASES}-offsets.npy", phrases)
        self._sentences = TextLines(
            folder / f"{SENTENCES}s.txt", folder / f"{SENTENCES}-offsets.npy", sentences
        )
        self._examples = open_array(folder / f"{EXAMPLES}s.npy", (examples, 3), "int32")
        self._offsets = open_array(folder / f"{EXAMPLES}-offsets.npy", (phrases + 1,), "int64")
        self.counts = np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self.phrases)

    def example(self, phrase: int, number: int) -> Place:
        """Read an example of a phrase, `number` counted from 0."""
        sentence, start, end = self._examples[self._offsets[phrase] + number].tolist()
        return self._sentences[sentence], start, end


class Lexicon:
    """Phrase pairs, int32 [P, 2], and their examples on the sides, source and target; memory-mapped."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.manifest = read_text_manifest(self.directory, LexiconManifest, FORMAT)
        check_sizes(self.directory, self.manifest.files)
        self.pairs = open_array(self.directory / f"{PAIRS}.npy", (self.manifest.pairs, 2), "int32")
        counts = zip(SIDES, self.manifest.phrases, self.manifest.sentences, self.manifest.examples)
        self.sides = [PhraseTypes(self.directory / side, *sizes) for side, *sizes in counts]

    def check(self) -> None:
        """Check every byte against the manifest."""
        check_every_byte(self.directory, self.manifest.files, FORMAT)


def write_lexicon(
    directory: Path,
    manifest: LexiconManifest,
    pairs: Sequence[tuple[str, str]],
    examples: tuple[Mapping[str, list[Place]], Mapping[str, list[Place]]],
) -> None:
    """Write a lexicon; the manifest, written last, makes it complete."""
    numbers = []
    for side, name in enumerate(SIDES):
        strings = sorted({pair[side] for pair in pairs})
        places = [examples[side][string] for string in strings]
        _write_side(directory / name, strings, places, manifest)
        numbers.append({string: number for number, string in enumerate(strings)})
    rows = sorted((numbers[0][source], numbers[1][target]) for source, target in pairs)
    save_array(directory / f"{PAIRS}.npy", np.array(rows, np.int32).reshape(-1, 2))
    manifest.pairs = len(rows)
    manifest.files = describe_files(directory, FILES)
    write_checked_json(directory / MANIFEST, asdict(manifest))


def _write_side(
    folder: Path, strings: list[str], places: list[list[Place]], manifest: LexiconManifest
) -> None:
    folder.mkdir(parents=True)
    texts = sorted({text for examples in places for text, _, _ in examples})
    numbers = {text: number for number, text in enumerate(texts)}
    rows = [(numbers[text], start, end) for examples in places for text, start, end in examples]
    write_lines(folder / f"{PHRASES}s.txt", folder / f"{PHRASES}-offsets.npy", strings)
    write_lines(folder / f"{SENTENCES}s.txt", folder / f"{SENTENCES}-offsets.npy", texts)
    save_array(folder / f"{EXAMPLES}s.npy", np.array(rows, np.int32).reshape(-1, 3))
    save_array(folder / f"{EXAMPLES}-offsets.npy", np.cumsum([0, *map(len, places)]).astype(np.int64))
    manifest.phrases.append(len(strings))
    manifest.sentences.append(len(texts))
    manifest.examples.append(len(rows))


@dataclass(frozen=True)
class TypeExample:
    """A phrase in a sentence."""

    phrase: int  # its number among those of a batch
    place: int  # of the sentence among the phrase's examples, from 0
    subwords: Subwords
    first: int  # subwords of the phrase, both inclusive
    last: int


def usable_examples(
    tokenizer: SubwordTokenizer,
    phrase: int,
    string: str,
    places: Iterable[Place],
    most: int,
    max_subwords: int,
) -> list[TypeExample]:
    """Return the first `most` examples that the encoder can handle.

    Sentences are cut to `max_subwords` around the phrase; one whose phrase is longer than that, or does not
    consist of whole subwords, is skipped. If no sentence is left, the phrase itself serves as one.
    """
    found: list[TypeExample] = []
    for text, start, end in places:
        if len(found) == most:
            break
        whole = tokenizer.encode(text)
        bounds = subword_bounds(whole, start, end)
        if bounds is None or bounds[1] + 1 - bounds[0] > max_subwords:
            continue
        subwords, before = whole.around(*bounds, max_subwords)
        first, last = (bound - before for bound in bounds)
        found.append(TypeExample(phrase, len(found), subwords, first, last))
    if found:
        return found
    subwords = tokenizer.encode(string).cut(max_subwords)
    return [TypeExample(phrase, 0, subwords, 1, max(1, len(subwords.ids) - 2))]


def stored_examples(
    tokenizer: SubwordTokenizer, types: PhraseTypes, most: int, max_subwords: int
) -> Iterator[list[TypeExample]]:
    """Yield the examples of all phrases of a side, phrase by phrase, in the order in which they are stored."""
    for number in range(len(types)):
        places = (types.example(number, place) for place in range(int(types.counts[number])))
        yield usable_examples(tokenizer, number, types.phrases[number], places, most, max_subwords)


def as_tables(examples: list[TypeExample], pad: int) -> list[dict[str, Tensor]]:
    """Batch sentences of similar length, each with one phrase.

    Tables have tokens int64 [S, L], spans int64 [S, 3] (sentence, first and last subword), phrases and places
    int64 [S].
    """
    tables = []
    for batch in batches_of_like_length(
        list(range(len(examples))), [example.subwords for example in examples]
    ):
        rows = [examples[number] for number in batch]
        spans = [(number, row.first, row.last) for number, row in enumerate(rows)]
        tables.append(
            {
                "tokens": collate([row.subwords for row in rows], pad),
                "spans": torch.tensor(spans),
                "phrases": torch.tensor([row.phrase for row in rows]),
                "places": torch.tensor([row.place for row in rows]),
            }
        )
    return tables


Pair = tuple[str, str]


def is_near_copy(source: str, target: str, most: float = 0.5) -> bool:
    """Check whether ROUGE-L exceeds `most` both ways: a common subsequence of more than that fraction of either side's words.

    >>> is_near_copy("Windows Server", "windows server"), is_near_copy("der Server", "the server")
    (True, False)
    """
    one, two = ([text[start:end].casefold() for start, end in word_spans(text)] for text in (source, target))
    common = _common_subsequence(one, two) if set(one) & set(two) else 0
    return common > most * max(len(one), len(two))


def _common_subsequence(one: list[str], two: list[str]) -> int:
    lengths = [0] * (len(two) + 1)  # too simple to need rapidfuzz
    for word in one:
        before = 0
        for i, other in enumerate(two, 1):
            before, lengths[i] = lengths[i], before + 1 if word == other else max(lengths[i], lengths[i - 1])
    return lengths[-1]


def split_pairs(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Split 3 : 1 : 1, with no string in two splits, on either side and ignoring case.

    Pairs that share a string, directly or through other pairs, stay together. Groups are assigned from the
    largest down, equal ones in pseudo-random order, each to the split that lacks most. The result does not
    depend on the order of pairs.
    """
    from scipy.cluster.hierarchy import DisjointSet  # here, as SciPy takes long to load

    groups: defaultdict[str, list[Pair]] = defaultdict(list)
    connected = DisjointSet(string.casefold() for pair in pairs for string in pair)
    for source, target in pairs:
        connected.merge(source.casefold(), target.casefold())
    for pair in sorted(pairs):
        groups[connected[pair[0].casefold()]].append(pair)
    lacking = {name: len(pairs) * share / sum(SHARES.values()) for name, share in SHARES.items()}
    parts: dict[str, list[Pair]] = {name: [] for name in SHARES}
    for group in sorted(groups.values(), key=lambda group: (-len(group), digest("\t".join(group[0])))):
        name = max(lacking, key=lambda split: lacking[split])
        lacking[name] -= len(group)
        parts[name] += group
    return parts


@dataclass(frozen=True)
class LexiconSettings:
    """How a lexicon is built; options of `fairseq-ccpr lexicon`."""

    examples: int = count_option(32, "example sentences of a phrase, at most")
    keep_phrases_alone: bool = option(
        False,
        "keep phrases that no sentence has; they are encoded without one (they are left out, and counted)",
    )
    limit: Optional[int] = count_option(
        None, "take a fixed sample of N pairs, and all other pairs of their phrases (all)"
    )


@dataclass
class LexiconCounts:
    """Counts of the phrase pairs read, by outcome."""

    read: int = 0
    empty: int = 0  # a side has no letter
    repeated: int = 0
    near_copies: int = 0
    without_examples: int = 0  # on one side at least; left out unless kept by `keep_phrases_alone`
    not_drawn: int = 0  # beyond the limit
    skipped: Counter[str] = field(default_factory=Counter)  # lines that are no pair, by reason


@dataclass
class SplitCoverage:
    """Pairs, phrases and examples of a split."""

    pairs: int
    phrases: list[int]  # of source and target
    examples: list[float]  # of a phrase, on average
    full: list[float]  # fraction of the phrases with as many examples as wanted


def build_lexicon(
    pairs: Path,
    texts: tuple[list[Path], list[Path]],
    output: Path,
    languages: tuple[str, str],
    settings: LexiconSettings,
) -> tuple[LexiconCounts, dict[str, SplitCoverage]]:
    """Build OUTPUT/train, OUTPUT/valid and OUTPUT/test, out of a TSV of phrase pairs and text of either side."""
    check(settings)
    for path in (pairs, *texts[0], *texts[1]):
        if not path.is_file():
            raise ConfigurationError(f"there is no file {path}")
    with atomic_directory(output) as partial:
        counts = LexiconCounts()
        kept = _read_lexicon_pairs(pairs, counts)
        source_examples, target_examples = examples = tuple(
            sample_occurrences(text, {pair[side] for pair in kept}, settings.examples, (), LONGER_BY)
            for side, text in enumerate(texts)
        )
        with_examples = [(p, q) for p, q in kept if source_examples[p] and target_examples[q]]
        counts.without_examples = len(kept) - len(with_examples)
        chosen = draw(kept if settings.keep_phrases_alone else with_examples, settings.limit, counts)
        splits = split_pairs(chosen)
        for name, split in splits.items():
            if not split:
                raise ConfigurationError(_nothing_left(pairs, name, counts, len(chosen)))
        fingerprints = {
            name: fingerprint.of_files(paths)
            for name, paths in (("pairs", [pairs]), ("source_text", texts[0]), ("target_text", texts[1]))
        }
        for name, split in splits.items():
            manifest = LexiconManifest(*languages, asdict(settings), fingerprints)
            write_lexicon(partial / name, manifest, split, (source_examples, target_examples))
    return counts, {name: _coverage(part, examples, settings.examples) for name, part in splits.items()}


def _read_lexicon_pairs(path: Path, counts: LexiconCounts) -> list[Pair]:
    kept: dict[Pair, None] = {}
    for source, target in read_pairs(path, True, counts.skipped):
        pair = source.strip(), target.strip()
        counts.read += 1
        if not all(map(has_letters, pair)):
            counts.empty += 1
        elif pair in kept:
            counts.repeated += 1
        elif is_near_copy(*pair):
            counts.near_copies += 1
        else:
            kept[pair] = None
    tell_skipped(path, counts.skipped)
    return list(kept)


def draw(pairs: list[Pair], limit: int | None, counts: LexiconCounts) -> list[Pair]:
    """Draw about `limit` pairs, always the same ones; those of a smaller limit are among those of a larger one.

    All other pairs between their phrases are added: a translation left out would count as wrong.
    """
    chosen = pairs if limit is None else sorted(pairs, key=lambda pair: digest("\t".join(pair)))[:limit]
    sources, targets = ({pair[side] for pair in chosen} for side in (0, 1))
    closed = [(source, target) for source, target in pairs if source in sources and target in targets]
    counts.not_drawn = len(pairs) - len(closed)
    return closed


def _nothing_left(path: Path, split: str, counts: LexiconCounts, chosen: int) -> str:
    left_out = f", left out {reasons(counts.skipped)}" if counts.skipped else ""
    return (
        f"{path} leaves no phrase pair for '{split}': {counts.read:,} read, {counts.empty:,} without letters, "
        f"{counts.repeated:,} repeated, {counts.near_copies:,} near-copies, {counts.without_examples:,} without an example "
        f"sentence on one side, {chosen:,} left to be split so that no string is in two splits{left_out}; "
        "give more pairs or more text"
    )


def _coverage(pairs: list[Pair], examples: tuple[Mapping[str, list[Place]], ...], most: int) -> SplitCoverage:
    found = [[len(examples[side][string]) for string in {pair[side] for pair in pairs}] for side in (0, 1)]
    return SplitCoverage(
        len(pairs),
        [len(f) for f in found],
        [float(np.mean(f)) for f in found],
        [float(np.mean(np.array(f) == most)) for f in found],
    )
