"""Phrase pairs in their sentences, on disk: text of both sides, character spans, a manifest.

manifest.json         its contents, its inputs and settings, size and checksum of each file
source.txt            UTF-8, one sentence per line
target.txt            the same lines on the other side
source-offsets.npy    int64 [S + 1], the byte at which each line of source.txt begins; the last is the file's
size target-offsets.npy    int64 [S + 1]
pairs.npy             int32 [P, 5], (sentence, source start, source end, target start, target end), in
characters of
                      the sentence, ends exclusive, in ascending order
pair-offsets.npy      int64 [S + 1], the first pair of each sentence; the last is P
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fairseq_ccpr.storage.arrays import GrowingArray, open_array
from fairseq_ccpr.storage.files import MANIFEST, check_sizes, describe_files, write_checked_json
from fairseq_ccpr.storage.text_lines import (
    LineWriter,
    TextFormat,
    TextLines,
    check_every_byte,
    read_text_manifest,
)
from fairseq_ccpr.version import __version__

KIND = "phrase-pairs"
PAIRS_VERSION = 2  # introduced the checksum of the manifest
TEXT_SIDES = "source", "target"
PAIRS, PAIR_OFFSETS = "pairs", "pair-offsets"
PAIR_FILES = [f"{side}{end}" for end in (".txt", "-offsets.npy") for side in TEXT_SIDES]
PAIR_FILES += [f"{PAIRS}.npy", f"{PAIR_OFFSETS}.npy"]
PAIRS_FORMAT = TextFormat(
    KIND, PAIRS_VERSION, "phrase pairs", tuple(PAIR_FILES), "extract the phrase pairs again"
)


@dataclass
class PhraseManifest:
    """All of `manifest.json`."""

    name: str  # of the set, where several are mixed
    source_lang: str
    target_lang: str
    settings: dict[str, Any]  # of the extraction
    fingerprints: dict[str, str]  # text: SHA-256 of the files it was made from
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> sentence pairs that were left out
    sentences: int = 0
    size: int = 0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # path -> bytes, sha256
    kind: str = KIND
    format_version: int = PAIRS_VERSION
    created_with: str = f"fairseq-ccpr {__version__}"


class PhrasePairs:
    """Phrase pairs opened for reading, memory-mapped: `pairs`, int32 [P, 5], as above."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        check_sizes(self.directory, self.manifest.files)
        count, size = self.manifest.sentences, self.manifest.size
        self.pairs = self._open(PAIRS, (size, 5), "int32")
        self._pair_offsets = self._open(PAIR_OFFSETS, (count + 1,), "int64")
        self._texts = [TextLines(*_text_files(self.directory, side), count) for side in TEXT_SIDES]

    @property
    def size(self) -> int:
        """Phrase pairs, P."""
        return self.manifest.size

    @property
    def sentences(self) -> int:
        """Sentence pairs, S; those without a phrase pair count as well."""
        return self.manifest.sentences

    def sentence(self, number: int) -> tuple[str, str]:
        """Return source and target sentence as they appeared in the text."""
        source, target = (text[number] for text in self._texts)
        return source, target

    def pairs_of(self, number: int) -> np.ndarray:
        """Return the pairs of one sentence, int32 [p, 5]."""
        return self.pairs[self.rows_of(number)]

    def rows_of(self, number: int) -> slice:
        """Return the rows in `pairs` of one sentence's pairs."""
        return slice(int(self._pair_offsets[number]), int(self._pair_offsets[number + 1]))

    def check(self) -> None:
        check_every_byte(self.directory, self.manifest.files, PAIRS_FORMAT)

    def _open(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return open_array(self.directory / f"{name}.npy", shape, dtype)


def _text_files(directory: Path, side: str) -> tuple[Path, Path]:
    return directory / f"{side}.txt", directory / f"{side}-offsets.npy"


def read_manifest(directory: Path) -> PhraseManifest:
    """Read and check the manifest of phrase pairs."""
    return read_text_manifest(directory, PhraseManifest, PAIRS_FORMAT)


class PairWriter:
    """Writes phrase pairs one sentence at a time; the manifest, written last, completes them."""

    def __init__(self, directory: Path, manifest: PhraseManifest) -> None:
        self.directory, self.manifest = directory, manifest
        directory.mkdir(parents=True)
        self._texts = [LineWriter(*_text_files(directory, side)) for side in TEXT_SIDES]
        self._pairs = GrowingArray(directory / f"{PAIRS}.npy", (5,), "int32")
        self._pair_offsets = GrowingArray(directory / f"{PAIR_OFFSETS}.npy", (), "int64")

    def __enter__(self) -> PairWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pair_offsets.append(np.array([self.manifest.size]))  # where the next sentence would begin
        for text in self._texts:
            text.close()
        for array in (self._pairs, self._pair_offsets):
            array.close()
        if error is None:
            self.manifest.files = describe_files(self.directory, PAIR_FILES)
            write_checked_json(self.directory / MANIFEST, asdict(self.manifest))

    def add(self, source: str, target: str, spans: np.ndarray) -> None:
        """Append a sentence pair and the character spans [p, 4] of its phrase pairs."""
        for lines, text in zip(self._texts, (source, target)):
            lines.add(text)
        self._pair_offsets.append(np.array([self.manifest.size]))
        self._pairs.append(np.insert(spans, 0, self.manifest.sentences, axis=1))
        self.manifest.sentences += 1
        self.manifest.size += len(spans)
