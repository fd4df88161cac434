"""Phrase pairs of a dictionary with example sentences of either side, on disk.

manifest.json                       its contents, its inputs and settings, size and checksum of each file
pairs.npy                           int32 [P, 2], (source phrase, target phrase), in ascending order
SIDE/phrases.txt                    UTF-8, each phrase once, one per line
SIDE/phrase-offsets.npy             int64 [n + 1], the byte at which each line of phrases.txt begins; the last is its size
SIDE/sentences.txt                  UTF-8, each sentence once, one per line
SIDE/sentence-offsets.npy           int64 [S + 1]
SIDE/examples.npy                   int32 [E, 3], (sentence, start, end), in characters, by phrase, in their drawn order
SIDE/example-offsets.npy            int64 [n + 1], the first example of each phrase; the last is E

SIDE is `source` and `target`. The first m examples of a phrase are the sample of m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.storage.arrays import open_array, save_array
from fairseq_ccpr.storage.files import MANIFEST, check_sizes, describe_files, write_checked_json
from fairseq_ccpr.storage.text_lines import TextFormat, TextLines, check_every_byte, read_text_manifest, write_lines
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
    """The n phrases of one side, each with its example sentences.

    Attributes:
        phrases: their strings, by number.
        counts: int64 [n], examples of each.
    """

    def __init__(self, folder: Path, phrases: int, sentences: int, examples: int) -> None:
        self.phrases = TextLines(folder / f"{PHRASES}s.txt", folder / f"{PHRASES}-offsets.npy", phrases)
        self._sentences = TextLines(folder / f"{SENTENCES}s.txt", folder / f"{SENTENCES}-offsets.npy", sentences)
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
    """Phrase pairs and their examples, opened for reading, memory-mapped.

    Attributes:
        pairs: int32 [P, 2], numbers of phrases in `sides`.
        sides: source and target.
        manifest: their other properties.

    Raises:
        DatastoreError: missing, unfinished, damaged, or of another kind.
    """

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
    """Write a lexicon; the manifest, written last, makes it complete.

    Args:
        directory: a folder that does not exist.
        manifest: everything known beforehand.
        pairs: source and target phrase.
        examples: of source and target, by phrase.
    """
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


def _write_side(folder: Path, strings: list[str], places: list[list[Place]], manifest: LexiconManifest) -> None:
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
