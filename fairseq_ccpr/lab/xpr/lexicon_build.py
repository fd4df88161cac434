"""Builds a lexicon from phrase pairs and monolingual text: filters, finds example sentences, splits, writes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from scipy.cluster.hierarchy import DisjointSet
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.xpr.lexicon_store import LexiconManifest, PhraseTypes, Place, write_lexicon
from fairseq_ccpr.phrases.pair_store import sample_occurrences
from fairseq_ccpr.settings import check, count_option, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.storage.files import atomic_directory
from fairseq_ccpr.text.pairs import read_pairs, reasons, tell_skipped
from fairseq_ccpr.text.subwords import Subwords, SubwordTokenizer, batches_of_like_length, collate, subword_bounds
from fairseq_ccpr.text.words import has_letters, word_spans


@dataclass(frozen=True)
class TypeExample:
    """A phrase in a sentence."""

    phrase: int  # its number among those of a batch
    place: int  # of the sentence among the phrase's examples, from 0
    subwords: Subwords
    first: int  # subwords of the phrase, both inclusive
    last: int


def usable_examples(
    tokenizer: SubwordTokenizer, phrase: int, string: str, places: Iterable[Place], most: int, max_subwords: int
) -> list[TypeExample]:
    """Return the first `most` examples that the encoder can handle.

    Sentences are cut to `max_subwords` around the phrase; one whose phrase is longer than that, or does not consist of whole
    subwords, is skipped. If no sentence is left, the phrase itself serves as one.

    Args:
        tokenizer: the encoder's.
        phrase: the number that the examples get.
        string: the phrase.
        places: its examples, in order of preference.
        most: how many; 0: the phrase itself.
        max_subwords: without the markers.
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

    Returns:
        Tables of tokens int64 [S, L], spans int64 [S, 3] (sentence, first and last subword), phrases int64 [S] and places
        int64 [S].
    """
    tables = []
    for batch in batches_of_like_length(list(range(len(examples))), [example.subwords for example in examples]):
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


SHARES = {"train": 3, "valid": 1, "test": 1}
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
    """Return the length of the longest common subsequence; too simple to need rapidfuzz."""
    lengths = [0] * (len(two) + 1)
    for word in one:
        before = 0
        for at, other in enumerate(two, 1):
            before, lengths[at] = lengths[at], before + 1 if word == other else max(lengths[at], lengths[at - 1])
    return lengths[-1]


def split_pairs(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Split 3 : 1 : 1, with no string in two splits, on either side and ignoring case.

    Pairs that share a string, directly or through other pairs, stay together. Groups are assigned from the largest down,
    equal ones in pseudo-random order, each to the split that lacks most. The result does not depend on the order of pairs.

    >>> {name: len(part) for name, part in split_pairs([(f"a{i}", f"b{i}") for i in range(10)]).items()}
    {'train': 6, 'valid': 2, 'test': 2}
    """
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


LONGER_BY = 10  # characters by which an example sentence is longer than its phrase


@dataclass(frozen=True)
class LexiconSettings:
    """How a lexicon is built; options of `fairseq-ccpr lexicon`."""

    examples: int = count_option(32, "example sentences of a phrase, at most")
    keep_phrases_alone: bool = option(
        False, "keep phrases that no sentence has; they are encoded without one (they are left out, and counted)"
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
    """Build OUTPUT/train, OUTPUT/valid and OUTPUT/test.

    1. Read the pairs, leaving out repeats, near-copies and those without letters.
    2. Find example sentences of each phrase: one pass over the text of either side.
    3. Leave out pairs with a phrase that has none, or keep them, to be encoded alone.
    4. Split 3 : 1 : 1 with no string in two splits; write.

    Args:
        pairs: TSV of source and target phrase.
        texts: unlabelled text of source and target, a sentence per line.
        output: a folder that does not exist.
        languages: of source and target.
        settings: how to build it.

    Raises:
        ConfigurationError: bad files, or nothing left.
    """
    check(settings)
    for path in (pairs, *texts[0], *texts[1]):
        if not path.is_file():
            raise ConfigurationError(f"there is no file {path}")
    with atomic_directory(output) as partial:
        counts = LexiconCounts()
        kept = read_lexicon_pairs(pairs, counts)
        examples = tuple(
            sample_occurrences(text, {pair[side] for pair in kept}, settings.examples, (), LONGER_BY)
            for side, text in enumerate(texts)
        )
        source_examples, target_examples = examples
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


def read_lexicon_pairs(path: Path, counts: LexiconCounts) -> list[Pair]:
    """Read the usable pairs, each once, in the order of the file, and count the others in `counts`."""
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
        len(pairs), [len(f) for f in found], [float(np.mean(f)) for f in found],
        [float(np.mean(np.array(f) == most)) for f in found],
    )  # fmt: skip
