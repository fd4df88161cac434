"""Builds a lexicon from phrase pairs and monolingual text: filters, finds example sentences, splits, writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.lab.xpr.lexicon_split import Pair, is_near_copy, split_pairs
from fairseq_ccpr.lab.xpr.lexicon_store import LexiconManifest, Place, write_lexicon
from fairseq_ccpr.phrases.pair_store import sample_occurrences
from fairseq_ccpr.settings import check, count_option, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.equal_strings import digest
from fairseq_ccpr.storage.files import atomic_directory
from fairseq_ccpr.text.pairs import read_pairs, reasons, tell_skipped
from fairseq_ccpr.text.words import has_letters

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
