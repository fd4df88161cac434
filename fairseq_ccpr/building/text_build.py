"""Building a text part: encode and count the text chunk by chunk, merge the counts. A killed build resumes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.building.part import TEXTS, Part
from fairseq_ccpr.building.phrase_build import TextCounts
from fairseq_ccpr.datastore.manifest import TextSection
from fairseq_ccpr.datastore.text import (
    GENERAL,
    INDEX,
    LANGUAGE,
    OFFSETS,
    ORDER,
    TABLES,
    TOKENS,
    Grams,
    Table,
    TextDatastore,
    place_type,
    prefix_begins,
    prefix_bits,
    token_type,
)
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray, save_array
from fairseq_ccpr.storage.equal_strings import first_of_equals
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.timing import progress_bar

CHUNK = 1 << 15  # sentences that are encoded and counted together
BLOCK = 1 << 22  # rows of counts that are merged together
CHUNKS = "chunks"
NO_TOKEN = -1
FOREIGN = 0.2  # share of unknown subwords that is refused: in another script, spaces and signs are known


@dataclass(frozen=True)
class Vocabulary:
    """How text becomes the target subwords of a model.

    Args:
        encode: from a sentence to its tokens with their end, int64 [L].
        words: tokens that have a probability; end, unknown: ids of two of them.
        digest: of the dictionary.
    """

    encode: Callable[[str], Tensor]
    words: int
    end: int
    unknown: int
    digest: str
    language: str | None = None  # of the text, where the model is multilingual


def build_text_part(
    texts: list[Path], against: list[Path], output: Path, vocabulary: Vocabulary, quiet: bool = False
) -> tuple[TextSection, TextCounts, float]:
    """Build, or resume building, the text part of a datastore.

    1. Count the n-grams of each chunk of the text, equal sentences once, and keep them sorted by hash.
    2. The same of general text, of which only what follows the contexts of the text is kept.
    3. Merge the counts of all chunks, range by range of hashes, so that memory does not grow with the text.

    Returns:
        The section of the manifest, how many lines were read in this run, and the share of unknown subwords.

    Raises:
        ConfigurationError: a text is missing or of another language; DatastoreError: the output holds something else.
    """
    for path in [*texts, *against]:
        if not path.is_file():
            raise ConfigurationError(f"there is no text {path}: give files of one sentence per line")
    digests = {"target_dictionary": vocabulary.digest, "corpus": fingerprint.of_files(texts)}
    digests |= {GENERAL: fingerprint.of_files(against)} if against else {}
    digests |= {LANGUAGE: vocabulary.language} if vocabulary.language else {}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each chunk is a few mapped files
    identity = {"words": vocabulary.words, "order": ORDER, "fingerprints": digests}
    part = Part(output, TEXTS, not quiet, identity)
    if isinstance(part.published, TextSection):
        part.publish(part.published)
        return part.published, TextCounts(), 0.0
    part.prepare({}, lambda: None)
    try:
        own = _Chunks(_lines(texts), part.partial / CHUNKS, vocabulary)
        own.count("text", _names(texts), None, quiet)
        contexts = part.partial / f"{CHUNKS}.npy"
        _write(contexts, (block[0] for block in merge(own.runs("contexts"))), (), "int64")
        others = [_Chunks(_lines(against), part.partial / GENERAL, vocabulary)] if against else []
        for other in others:
            other.count("general text", _names(against), np.load(contexts, mmap_mode="r"), quiet)
    except ConfigurationError:  # other text is another build
        part.discard()
        raise
    size = _write_tokens(own, part.partial, vocabulary.words)
    tables = _merge_counts([run for text in (own, *others) for run in text.runs("grams")], part.partial)
    section = TextSection(
        size=size, sentences=own.total(2), words=vocabulary.words, order=ORDER, tables=tables,
        general=sum(other.total(0) for other in others), fingerprints=digests,
    )  # fmt: skip
    unknown = own.total(1) / own.total(0)
    part.publish(section)
    return section, own.lines, unknown


def merge_text_parts(stores: list[TextDatastore], output: Path, quiet: bool = False) -> TextSection:
    """Write to a new datastore the text part that one build of all texts gives, byte for byte.

    Sentences are counted again. General text was counted after all their contexts already, by one of the parts or several.

    Args:
        stores: of one vocabulary, against the same general text.
    """
    sections = [store.section for store in stores]
    first, dtype = sections[0], token_type(sections[0].words)
    part = Part(output, TEXTS, not quiet)
    part.partial.mkdir()
    vocabulary = Vocabulary(
        lambda line: torch.from_numpy(np.frombuffer(line.encode("latin-1"), dtype).astype(np.int64)),
        first.words, int(stores[0].tokens[-1]), NO_TOKEN, first.fingerprints["target_dictionary"],
    )  # fmt: skip

    def read() -> Iterator[str]:
        return (
            store.sentence(number).tobytes().decode("latin-1")
            for store in stores
            for number in range(store.section.sentences)
        )

    own = _Chunks(read, part.partial / CHUNKS, vocabulary)
    own.count("text", _names([store.directory for store in stores]), None, quiet)
    folder, general = part.partial / GENERAL, {}
    folder.mkdir()
    for name in TABLES:
        general[name] = list(_general_runs(stores, name, folder))
    size = _write_tokens(own, part.partial, first.words)
    tables = _merge_counts([*own.runs("grams"), *general["grams"]], part.partial, general["contexts"])
    corpus = fingerprint.of_strings(section.fingerprints["corpus"] for section in sections)
    section = replace(
        first, size=size, sentences=own.total(2), tables=tables, fingerprints=first.fingerprints | {"corpus": corpus},
        files={},
    )  # fmt: skip
    part.publish(section)
    return section


def _general_runs(stores: list[TextDatastore], name: str, folder: Path) -> Iterator[np.ndarray]:
    """Write what the parts' tables know of general text, each row of the first part that has it, in runs."""
    earlier: list[Table] = []
    for number, store in enumerate(stores):
        table: Table = getattr(store.open_counts(), name)
        for start in range(0, len(table.hashes), BLOCK):
            hashes, rows = (column[start : start + BLOCK] for column in (table.hashes, table.rows))
            rows = rows.long()
            general = rows.size(1) // 2
            new = rows[:, general] > 0
            for other in earlier:
                new &= other[hashes][:, general] == 0
            rows[:, :general] = 0
            path = folder / f"{name}.{number}.{start}.npy"
            unknown = (
                [np.zeros((1, int(new.sum())), np.int64)] if name == "grams" else []
            )  # which context an n-gram has
            save_array(path, np.concatenate([hashes[new][None].numpy(), rows[new].T.numpy(), *unknown]))
            yield np.load(path, mmap_mode="r")
        earlier.append(table)


def _lines(files: list[Path]) -> Callable[[], Iterator[str]]:
    return lambda: (line for path in files for line in read_lines(path))


def _names(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


class _Chunks:
    """A text in chunks of sentences, each with its tokens and its sorted counts in files of its own."""

    def __init__(self, read: Callable[[], Iterator[str]], folder: Path, vocabulary: Vocabulary) -> None:
        self.folder, self.vocabulary, self.side = folder, vocabulary, int(folder.name == GENERAL)
        folder.mkdir(exist_ok=True)
        self.read, self.lines, self.number = read, TextCounts(), 0

    def _read(self) -> Iterator[str]:
        self.lines.empty = 0
        for line in self.read():
            if line.strip():
                yield line
            else:
                self.lines.empty += 1

    def count(self, what: str, names: str, contexts: np.ndarray | None, quiet: bool) -> None:
        """Count the chunks that were not counted before; of general text, what follows `contexts` alone."""
        first = first_of_equals(self._read(), self.folder)
        sentences = (line for place, line in enumerate(self._read()) if first[place] == place)
        with progress_bar(what, "sentence", total=len(first), quiet=quiet) as bar:
            while lines := list(islice(sentences, CHUNK)):
                if not self._path(self.number, "sizes").exists():
                    self._count(self.number, lines, contexts)
                self.number += 1
                self.lines.sentences += len(lines)
                bar.update(len(lines))
        self.lines.repeated = len(first) - self.lines.sentences
        if not self.number:
            raise ConfigurationError(f"{names}: there is no text in it; give files of one sentence per line")
        if (unknown := self.total(1) / self.total(0)) > FOREIGN:
            raise ConfigurationError(
                f"{names}: {100 * unknown:.0f}% of the subwords are not in the model's target dictionary: give text of its "
                "target language, in its script"
            )

    def _count(self, number: int, lines: list[str], contexts: np.ndarray | None) -> None:
        encoded = [self.vocabulary.encode(line).numpy() for line in lines]
        tokens, offsets = np.concatenate(encoded), np.cumsum([0, *map(len, encoded)])
        grams = Grams.of(tokens, offsets, self.vocabulary.end, ORDER)
        if contexts is None:
            save_array(self._path(number, "contexts"), np.unique(grams.contexts)[None])
            save_array(self._path(number, TOKENS), tokens.astype(token_type(self.vocabulary.words)))
            save_array(self._path(number, OFFSETS), offsets)
        else:
            place = np.searchsorted(contexts, grams.contexts).clip(max=len(contexts) - 1)
            grams = grams.select(np.asarray(contexts[place]) == grams.contexts)
        counts = [grams.counts, np.zeros_like(grams.counts)]
        if self.side:
            counts.reverse()
        save_array(self._path(number, "grams"), np.stack([grams.hashes, *counts, grams.contexts]))
        unknown = int((tokens == self.vocabulary.unknown).sum())
        save_array(self._path(number, "sizes"), np.array([len(tokens), unknown, len(lines)]))

    def _path(self, number: int, name: str) -> Path:
        return self.folder / f"{number:06}.{name}.npy"

    def runs(self, name: str) -> list[np.ndarray]:
        """Map what was kept of each chunk."""
        return [np.load(self._path(number, name), mmap_mode="r") for number in range(self.number)]

    def total(self, column: int) -> int:
        """Sum up the tokens, unknown tokens, or sentences of all chunks."""
        return sum(int(sizes[column]) for sizes in self.runs("sizes"))


def merge(runs: list[np.ndarray], kept: int = 0) -> Iterator[np.ndarray]:
    """Merge runs int64 [c, n], each ascending in its first row, into blocks of distinct keys, ascending.

    Columns of equal keys are added, but for the last `kept` rows, which are equal as well.
    """
    parts = max(1, -(-sum(run.shape[1] for run in runs) // BLOCK))
    bounds = np.array([-(2**63) + place * (2**64 // parts) for place in range(1, parts)], np.int64)
    begins = [[0, *np.searchsorted(run[0], bounds), run.shape[1]] for run in runs]
    for part in range(parts):
        block = np.concatenate([run[:, begin[part] : begin[part + 1]] for run, begin in zip(runs, begins)], axis=1)
        keys, first, inverse = np.unique(block[0], return_index=True, return_inverse=True)
        added = [np.bincount(inverse, row, len(keys)).astype(np.int64) for row in block[1 : len(block) - kept]]
        yield np.stack([keys, *added, *block[len(block) - kept :, first]])


def _merge_counts(runs: list[np.ndarray], folder: Path, known: Sequence[np.ndarray] = ()) -> dict[str, list[int]]:
    """Write the tables of contexts and n-grams from the counts of chunks.

    Args:
        known: what follows contexts in general text, where n-grams do not know their contexts there.
    """
    after = folder / "after"
    after.mkdir(exist_ok=True)

    def blocks() -> Iterator[np.ndarray]:
        for number, (hashes, own, general, contexts) in enumerate(merge(runs, kept=1)):
            rows = [own, own > 0, general, general > 0]
            if known:
                rows[2:] = [0 * own, 0 * own]
                contexts, rows = contexts[own > 0], [row[own > 0] for row in rows]
            distinct, inverse = np.unique(contexts, return_inverse=True)
            sums = (np.bincount(inverse, row, len(distinct)) for row in rows)
            np.save(after / f"{number:06}.npy", np.stack([distinct, *(row.astype(np.int64) for row in sums)]))
            yield np.stack([hashes, own, general])

    grams = _write_table("grams", blocks(), folder)
    found = [np.load(path, mmap_mode="r") for path in sorted(after.iterdir())]
    return {"contexts": _write_table("contexts", merge([*found, *known]), folder), "grams": grams}


def _write_table(name: str, blocks: Iterator[np.ndarray], folder: Path) -> list[int]:
    values, width = TABLES[name]
    hashes, rows = (
        GrowingArray(folder / f"{name}.npy", (), "int64"),
        GrowingArray(folder / f"{values}.npy", (width,), "uint32"),
    )
    for block in blocks:
        hashes.append(block[0])
        rows.append(block[1:].T)
    hashes.close()
    rows.close()
    sorted_hashes = np.load(folder / f"{name}.npy", mmap_mode="r" if hashes.rows else None)
    prefixes, bucket, last = 1 << prefix_bits(hashes.rows), 1, 0
    index = GrowingArray(folder / f"{name}{INDEX}.npy", (), place_type(hashes.rows))
    for start in range(0, prefixes + 1, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, prefixes + 1))
        places = prefix_begins(sorted_hashes, numbers, prefixes)
        bucket, last = max(bucket, int(np.diff(places, prepend=last).max())), int(places[-1])
        index.append(places)
    index.close()
    return [hashes.rows, prefixes, bucket]


def _write_tokens(chunks: _Chunks, folder: Path, words: int) -> int:
    _write(folder / f"{TOKENS}.npy", chunks.runs(TOKENS), (), token_type(words))
    size = 0

    def offsets() -> Iterator[np.ndarray]:
        nonlocal size
        for own in chunks.runs(OFFSETS):
            yield own[:-1] + size
            size += int(own[-1])
        yield np.array([size])

    _write(folder / f"{OFFSETS}.npy", offsets(), (), "int64")
    return size


def _write(path: Path, blocks: Iterator[np.ndarray] | list[np.ndarray], shape: tuple[int, ...], dtype: str) -> None:
    array = GrowingArray(path, shape, dtype)
    for block in blocks:
        array.append(block)
    array.close()
