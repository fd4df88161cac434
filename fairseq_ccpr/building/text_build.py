"""Building a text part: encode and count the text chunk by chunk, merge the counts. A killed build resumes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    CONTEXTS,
    COUNTS,
    FOLLOWING,
    GENERAL,
    GRAMS,
    INDEX,
    LANGUAGE,
    OFFSETS,
    ORDER,
    TOKENS,
    Grams,
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


@contextmanager
def many_files() -> Iterator[None]:
    """Let as many files be open as the system allows: each chunk is a few mapped ones."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@many_files()
def build_text_part(
    texts: list[Path], against: list[Path], output: Path, vocabulary: Vocabulary, quiet: bool = False
) -> tuple[TextSection, TextCounts, float]:
    """Build, or resume building, the text part of a datastore.

    1. Count the n-grams of each chunk of the text, equal sentences once, and keep them sorted; number their
       contexts.
    2. The same of general text, of which only what follows the contexts of the text is kept.
    3. Merge the counts of all chunks, range by range of contexts, so that memory does not grow with the text.

    Returns:
        The section of the manifest, how many lines were read in this run, and the share of unknown subwords.

    Raises:
        ConfigurationError: a text is missing or of another language; DatastoreError: the output holds
        something else.
    """
    for path in [*texts, *against]:
        if not path.is_file():
            raise ConfigurationError(f"there is no text {path}: give files of one sentence per line")
    digests = {"target_dictionary": vocabulary.digest, "corpus": fingerprint.of_files(texts)}
    digests |= {GENERAL: fingerprint.of_files(against)} if against else {}
    digests |= {LANGUAGE: vocabulary.language} if vocabulary.language else {}
    identity = {"words": vocabulary.words, "order": ORDER, "fingerprints": digests}
    part = Part(output, TEXTS, not quiet, identity)
    if isinstance(part.published, TextSection):
        part.publish(part.published)
        return part.published, TextCounts(), 0.0
    part.prepare({}, lambda: None)
    try:
        own = _Chunks(_lines(texts), part.partial / CHUNKS, vocabulary)
        own.count("text", _names(texts), None, quiet)
        contexts = _number_contexts(own, part.partial)
        others = [_Chunks(_lines(against), part.partial / GENERAL, vocabulary)] if against else []
        for other in others:
            other.count("general text", _names(against), contexts, quiet)
    except ConfigurationError:  # other text is another build
        part.discard()
        raise
    size = _write_tokens(own, part.partial, vocabulary.words)
    runs = [*own.numbered(contexts), *(run for other in others for run in other.runs(GRAMS))]
    tables = _merge_counts(runs, contexts, part.partial, vocabulary.words)
    section = TextSection(
        size=size,
        sentences=own.total(2),
        words=vocabulary.words,
        order=ORDER,
        tables=tables,
        general=sum(other.total(0) for other in others),
        fingerprints=digests,
    )
    unknown = own.total(1) / own.total(0)
    part.publish(section)
    return section, own.lines, unknown


@many_files()
def merge_text_parts(stores: list[TextDatastore], output: Path, quiet: bool = False) -> TextSection:
    """Write to a new datastore the text part that one build of all texts gives, byte for byte.

    Sentences are counted again. General text was counted after all their contexts already, by one of the
    parts or several.

    Args:
        stores: of one vocabulary, against the same general text.
    """
    sections = [store.section for store in stores]
    first, dtype = sections[0], token_type(sections[0].words)
    part = Part(output, TEXTS, not quiet)
    part.partial.mkdir()
    vocabulary = Vocabulary(
        lambda line: torch.from_numpy(np.frombuffer(line.encode("latin-1"), dtype).astype(np.int64)),
        first.words,
        int(stores[0].tokens[-1]),
        NO_TOKEN,
        first.fingerprints["target_dictionary"],
    )

    def read() -> Iterator[str]:
        return (
            store.sentence(number).tobytes().decode("latin-1")
            for store in stores
            for number in range(store.section.sentences)
        )

    own = _Chunks(read, part.partial / CHUNKS, vocabulary)
    own.count("text", _names([store.directory for store in stores]), None, quiet)
    contexts = _number_contexts(own, part.partial)
    size = _write_tokens(own, part.partial, first.words)
    runs = [*own.numbered(contexts), *_general_runs(stores, contexts, part.partial)]
    tables = _merge_counts(runs, contexts, part.partial, first.words)
    corpus = fingerprint.of_strings(section.fingerprints["corpus"] for section in sections)
    section = replace(
        first,
        size=size,
        sentences=own.total(2),
        tables=tables,
        fingerprints=first.fingerprints | {"corpus": corpus},
        files={},
    )
    part.publish(section)
    return section


def _general_runs(stores: list[TextDatastore], contexts: np.ndarray, folder: Path) -> Iterator[np.ndarray]:
    """Renumber the general counts of the parts, in runs. Those after a context are taken from the first part that has it."""
    opened = [store.open_counts() for store in stores]
    for number, store in enumerate(opened):
        hashes, grams, counts = store.contexts.hashes.numpy(), store.grams.numpy(), store.counts.numpy()
        for start in range(0, len(grams), BLOCK):
            places, tokens = np.divmod(grams[start : start + BLOCK], store.words)
            general, found = counts[start : start + BLOCK, 1].astype(np.int64), hashes[places]
            new = general > 0
            for earlier in opened[:number]:
                new &= earlier.contexts.find(torch.from_numpy(found)).numpy() < 0
            numbered = np.searchsorted(contexts, found[new]) * store.words + tokens[new]
            order, path = np.argsort(numbered), folder / f"{GENERAL}.{number}.{start}.npy"
            save_array(path, np.stack([numbered[order], np.zeros_like(order), general[new][order]]))
            yield np.load(path, mmap_mode="r")


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
            save_array(self._path(number, CONTEXTS), np.unique(grams.contexts)[None])
            save_array(self._path(number, TOKENS), tokens.astype(token_type(self.vocabulary.words)))
            save_array(self._path(number, OFFSETS), offsets)
            save_array(self._path(number, GRAMS), np.stack(grams))
        else:
            places = np.searchsorted(contexts, grams.contexts).clip(max=len(contexts) - 1)
            had = contexts[places] == grams.contexts
            numbers = places[had] * self.vocabulary.words + grams.tokens[had]
            save_array(
                self._path(number, GRAMS), np.stack([numbers, np.zeros_like(numbers), grams.counts[had]])
            )
        unknown = int((tokens == self.vocabulary.unknown).sum())
        save_array(self._path(number, "sizes"), np.array([len(tokens), unknown, len(lines)]))

    def _path(self, number: int, name: str) -> Path:
        return self.folder / f"{number:06}.{name}.npy"

    def runs(self, name: str) -> list[np.ndarray]:
        """Map what was kept of each chunk."""
        return [np.load(self._path(number, name), mmap_mode="r") for number in range(self.number)]

    def numbered(self, contexts: np.ndarray) -> Iterator[np.ndarray]:
        """Number the n-grams of the text's chunks by their contexts: runs int64 [3, n] of numbers, counts, and zeros."""
        for number, (hashes, tokens, counts) in enumerate(self.runs(GRAMS)):
            path, numbers = (
                self._path(number, "numbered"),
                np.searchsorted(contexts, hashes) * self.vocabulary.words,
            )
            save_array(path, np.stack([numbers + tokens, counts, np.zeros_like(numbers)]))
            yield np.load(path, mmap_mode="r")

    def total(self, column: int) -> int:
        """Sum up the tokens, unknown tokens, or sentences of all chunks."""
        return sum(int(sizes[column]) for sizes in self.runs("sizes"))


def merge(runs: list[np.ndarray], unit: int = 1) -> Iterator[np.ndarray]:
    """Merge runs int64 [c, n], each ascending in its first row, into blocks of distinct keys, ascending, other rows added.

    Args:
        unit: no block begins inside a multiple of it.
    """
    parts = max(1, -(-sum(run.shape[1] for run in runs) // BLOCK))
    keys = max(runs, key=lambda run: run.shape[1])[0]
    bounds = np.unique(keys[np.arange(1, parts) * len(keys) // parts] // unit * unit)
    begins = [[0, *np.searchsorted(run[0], bounds), run.shape[1]] for run in runs]
    for part in range(len(bounds) + 1):
        block = np.concatenate(
            [run[:, begin[part] : begin[part + 1]] for run, begin in zip(runs, begins)], axis=1
        )
        keys, inverse = np.unique(block[0], return_inverse=True)
        yield np.stack([keys, *(np.bincount(inverse, row, len(keys)).astype(np.int64) for row in block[1:])])


def _number_contexts(own: _Chunks, folder: Path) -> np.ndarray:
    """Write the hashes of all contexts; the number of each is its place."""
    path = folder / f"{CONTEXTS}.npy"
    _write(path, (block[0] for block in merge(own.runs(CONTEXTS))), (), "int64")
    found: np.ndarray = np.load(path, mmap_mode="r")
    return found


def _merge_counts(
    runs: list[np.ndarray], contexts: np.ndarray, folder: Path, words: int
) -> dict[str, list[int]]:
    """Write n-grams, their counts, and what follows each context, from the counts of chunks; index the contexts."""
    shapes = {GRAMS: ((), "int64"), COUNTS: ((2,), "uint32"), FOLLOWING: ((4,), "uint32")}
    written = {name: GrowingArray(folder / f"{name}.npy", *shape) for name, shape in shapes.items()}
    for grams, own, general in merge(runs, unit=words):
        _, numbers = np.unique(grams // words, return_inverse=True)  # each has n-grams of the text
        written[GRAMS].append(grams)
        written[COUNTS].append(np.stack([own, general], 1))
        written[FOLLOWING].append(
            np.stack([np.bincount(numbers, row) for row in (own, own > 0, general, general > 0)], 1)
        )
    for array in written.values():
        array.close()
    prefixes, bucket, last = 1 << prefix_bits(len(contexts)), 1, 0
    index = GrowingArray(folder / f"{CONTEXTS}{INDEX}.npy", (), place_type(len(contexts)))
    for start in range(0, prefixes + 1, BLOCK):
        numbers = np.arange(start, min(start + BLOCK, prefixes + 1))
        places = prefix_begins(contexts, numbers, prefixes)
        bucket, last = max(bucket, int(np.diff(places, prepend=last).max())), int(places[-1])
        index.append(places)
    index.close()
    return {CONTEXTS: [len(contexts), prefixes, bucket], GRAMS: [written[GRAMS].rows]}


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


def _write(
    path: Path, blocks: Iterator[np.ndarray] | list[np.ndarray], shape: tuple[int, ...], dtype: str
) -> None:
    array = GrowingArray(path, shape, dtype)
    for block in blocks:
        array.append(block)
    array.close()
