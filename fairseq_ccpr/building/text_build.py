"""Building a text part: encode and count the text chunk by chunk, merge the counts. A killed build resumes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.building.options import check_texts
from fairseq_ccpr.building.part import Part
from fairseq_ccpr.building.text_files import Lines
from fairseq_ccpr.datastore.manifest import TextSection
from fairseq_ccpr.datastore.parts import (
    CONTEXTS,
    COUNTS,
    FOLLOWING,
    GRAMS,
    PREFIXES,
    TEXT_OFFSETS,
    TEXT_TOKENS,
)
from fairseq_ccpr.datastore.schema import token_type
from fairseq_ccpr.datastore.text import (
    GENERAL,
    LANGUAGE,
    ORDER,
    Grams,
    TextDatastore,
    prefix_begins,
    prefix_bits,
)
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import save_array
from fairseq_ccpr.storage.equal_strings import first_of_equals
from fairseq_ccpr.timing import progress_bar

CHUNK_SENTENCES = 1 << 15  # sentences that are encoded and counted together
MERGED_ROWS = 1 << 22  # rows of counts that are merged together
CHUNKS = "chunks"
NO_TOKEN = -1
NO_TABLES: dict[str, list[int]] = {CONTEXTS: [0, 0, 0], GRAMS: [0]}
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
) -> tuple[TextSection, Lines, float]:
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
    check_texts([*texts, *against])
    digests = {"target_dictionary": vocabulary.digest, "corpus": fingerprint.of_files(texts)}
    digests |= {GENERAL: fingerprint.of_files(against)} if against else {}
    digests |= {LANGUAGE: vocabulary.language} if vocabulary.language else {}
    section = TextSection(
        size=0, sentences=0, words=vocabulary.words, order=ORDER, tables=dict(NO_TABLES), fingerprints=digests
    )
    part = Part(output, TextSection, not quiet, section.entries(section.IDENTITY))
    lines = Lines.of_files(texts)
    if part.published is not None:
        part.publish(part.published)
        return part.published, lines, 0.0
    part.prepare({}, lambda: None)
    try:
        own = _Chunks(lines, part.partial / CHUNKS, vocabulary)
        own.count("text", None, quiet)
        contexts = _number_contexts(own, part.partial, section)
        others = [_Chunks(Lines.of_files(against), part.partial / GENERAL, vocabulary)] if against else []
        for other in others:
            other.count("general text", contexts, quiet)
    except ConfigurationError:  # other text is another build
        part.discard()
        raise
    section.general = sum(other.total(0) for other in others)
    _write_text(own, part.partial, section, (run for other in others for run in other.runs(GRAMS)), contexts)
    unknown = own.total(1) / own.total(0)
    part.publish(section)
    return section, lines, unknown


@many_files()
def merge_text_parts(stores: list[TextDatastore], output: Path, quiet: bool = False) -> TextSection:
    """Write to a new datastore the text part that one build of all texts gives, byte for byte.

    Sentences are counted again. General text was counted after all their contexts already, by one of the
    parts or several.

    Args:
        stores: of one vocabulary, against the same general text.
    """
    first, dtype = stores[0].section, stores[0].tokens.dtype
    part = Part(output, TextSection, not quiet)
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

    lines = Lines(read, ", ".join(str(store.directory) for store in stores))
    own = _Chunks(lines, part.partial / CHUNKS, vocabulary)
    own.count("text", None, quiet)
    corpus = fingerprint.of_strings(store.section.fingerprints["corpus"] for store in stores)
    prints = first.fingerprints | {"corpus": corpus}
    section = replace(first, tables=dict(NO_TABLES), fingerprints=prints, files={})
    contexts = _number_contexts(own, part.partial, section)
    _write_text(own, part.partial, section, _general_runs(stores, contexts, part.partial), contexts)
    part.publish(section)
    return section


def _general_runs(stores: list[TextDatastore], contexts: np.ndarray, folder: Path) -> Iterator[np.ndarray]:
    """Renumber the general counts of the parts, in runs; each context counts in the first part that has it."""
    opened = [store.open_counts() for store in stores]
    for number, store in enumerate(opened):
        hashes, grams, counts = store.contexts.hashes.numpy(), store.grams.numpy(), store.counts.numpy()
        for start in range(0, len(grams), MERGED_ROWS):
            places, tokens = np.divmod(grams[start : start + MERGED_ROWS], store.words)
            general, found = counts[start : start + MERGED_ROWS, 1].astype(np.int64), hashes[places]
            new = general > 0
            for earlier in opened[:number]:
                new &= earlier.contexts.find(torch.from_numpy(found)).numpy() < 0
            numbered = np.searchsorted(contexts, found[new]) * store.words + tokens[new]
            order, path = np.argsort(numbered), folder / f"{GENERAL}.{number}.{start}.npy"
            save_array(path, np.stack([numbered[order], np.zeros_like(order), general[new][order]]))
            yield np.load(path, mmap_mode="r")


class _Chunks:
    """A text in chunks of sentences, each with its tokens and its sorted counts in files of its own."""

    def __init__(self, lines: Lines, folder: Path, vocabulary: Vocabulary) -> None:
        self.folder, self.vocabulary, self.lines, self.number = folder, vocabulary, lines, 0
        folder.mkdir(exist_ok=True)

    def count(self, what: str, contexts: np.ndarray | None, quiet: bool) -> None:
        """Count the chunks that were not counted before; of general text, what follows `contexts` alone."""
        first = first_of_equals(self.lines, self.folder)
        sentences = (line for place, line in enumerate(self.lines) if first[place] == place)
        with progress_bar(what, "sentence", total=len(first), quiet=quiet) as bar:
            while lines := list(islice(sentences, CHUNK_SENTENCES)):
                if not self._path(self.number, "sizes").exists():
                    self._count(self.number, lines, contexts)
                self.number += 1
                self.lines.sentences += len(lines)
                bar.update(len(lines))
        self.lines.repeated = len(first) - self.lines.sentences
        self.lines.refuse_none()
        if (unknown := self.total(1) / self.total(0)) > FOREIGN:
            raise ConfigurationError(
                f"{self.lines.name}: {100 * unknown:.0f}% of the subwords are not in the model's target "
                "dictionary: give text of its target language, in its script"
            )

    def _count(self, number: int, lines: list[str], contexts: np.ndarray | None) -> None:
        encoded = [self.vocabulary.encode(line).numpy() for line in lines]
        tokens, offsets = np.concatenate(encoded), np.cumsum([0, *map(len, encoded)])
        grams = Grams.of(tokens, offsets, self.vocabulary.end, ORDER)
        if contexts is None:
            save_array(self._path(number, CONTEXTS), np.unique(grams.contexts)[None])
            save_array(self._path(number, TEXT_TOKENS), tokens.astype(token_type(self.vocabulary.words)))
            save_array(self._path(number, TEXT_OFFSETS), offsets)
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
        return [np.load(self._path(number, name), mmap_mode="r") for number in range(self.number)]

    def numbered(self, contexts: np.ndarray) -> Iterator[np.ndarray]:
        """Number the n-grams of chunks by their contexts: runs int64 [3, n] of numbers, counts, and zeros."""
        for number, (hashes, tokens, counts) in enumerate(self.runs(GRAMS)):
            path, numbers = (
                self._path(number, "numbered"),
                np.searchsorted(contexts, hashes) * self.vocabulary.words,
            )
            save_array(path, np.stack([numbers + tokens, counts, np.zeros_like(numbers)]))
            yield np.load(path, mmap_mode="r")

    def total(self, column: int) -> int:
        return sum(int(sizes[column]) for sizes in self.runs("sizes"))


def merge(runs: list[np.ndarray], unit: int = 1) -> Iterator[np.ndarray]:
    """Merge runs int64 [c, n], ascending in their first row, into blocks of distinct keys, other rows added.

    Args:
        unit: no block begins inside a multiple of it.
    """
    parts = max(1, -(-sum(run.shape[1] for run in runs) // MERGED_ROWS))
    keys = max(runs, key=lambda run: run.shape[1])[0]
    bounds = np.unique(keys[np.arange(1, parts) * len(keys) // parts] // unit * unit)
    begins = [[0, *np.searchsorted(run[0], bounds), run.shape[1]] for run in runs]
    for part in range(len(bounds) + 1):
        block = np.concatenate(
            [run[:, begin[part] : begin[part + 1]] for run, begin in zip(runs, begins)], axis=1
        )
        keys, inverse = np.unique(block[0], return_inverse=True)
        yield np.stack([keys, *(np.bincount(inverse, row, len(keys)).astype(np.int64) for row in block[1:])])


def _number_contexts(own: _Chunks, folder: Path, section: TextSection) -> np.ndarray:
    """Write the hashes of all contexts; the number of each is its place."""
    size = section.write(folder, CONTEXTS, (block[0] for block in merge(own.runs(CONTEXTS))))
    section.tables[CONTEXTS] = [size, 0, 0]
    return section.open_arrays(folder, CONTEXTS)[CONTEXTS]


def _write_text(
    own: _Chunks, folder: Path, section: TextSection, general: Iterable[np.ndarray], contexts: np.ndarray
) -> None:
    """Write the text itself, its counts and those of general text, in runs, and complete the section."""
    _write_tokens(own, folder, section)
    _merge_counts([*own.numbered(contexts), *general], folder, section)
    _index_contexts(contexts, folder, section)


def _write_tokens(own: _Chunks, folder: Path, section: TextSection) -> None:
    section.size = section.write(folder, TEXT_TOKENS, own.runs(TEXT_TOKENS))
    lengths = [int(offsets[-1]) for offsets in own.runs(TEXT_OFFSETS)]
    begins = np.cumsum([0, *lengths])
    offsets = (run[:-1] + begin for run, begin in zip(own.runs(TEXT_OFFSETS), begins))
    section.sentences = section.write(folder, TEXT_OFFSETS, chain(offsets, [begins[-1:]])) - 1


def _merge_counts(runs: list[np.ndarray], folder: Path, section: TextSection) -> None:
    """Write n-grams, their counts, and what follows each context, from the counts of chunks."""
    written = [section.grow(folder, name) for name in (GRAMS, COUNTS, FOLLOWING)]
    for grams, own, general in merge(runs, unit=section.words):
        _, numbers = np.unique(grams // section.words, return_inverse=True)  # each has n-grams of the text
        follows = [np.bincount(numbers, row) for row in (own, own > 0, general, general > 0)]
        for array, rows in zip(written, (grams, np.stack([own, general], 1), np.stack(follows, 1))):
            array.append(rows)
    for array in written:
        array.close()
    section.tables[GRAMS] = [written[0].rows]


def _index_contexts(contexts: np.ndarray, folder: Path, section: TextSection) -> None:
    """Write where hashes with each prefix begin; record how many prefixes, and the most hashes with one."""
    prefixes, bucket = 1 << prefix_bits(len(contexts)), 1

    def begins() -> Iterator[np.ndarray]:
        nonlocal bucket
        last = 0
        for start in range(0, prefixes + 1, MERGED_ROWS):
            numbers = np.arange(start, min(start + MERGED_ROWS, prefixes + 1))
            places = prefix_begins(contexts, numbers, prefixes)
            bucket, last = max(bucket, int(np.diff(places, prepend=last).max())), int(places[-1])
            yield places

    section.write(folder, PREFIXES, begins())
    section.tables[CONTEXTS] = [len(contexts), prefixes, bucket]
