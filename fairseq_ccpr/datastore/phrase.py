"""The phrase datastore: phrases of target-language text, each with a key and its place in its sentence."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.opened_part import KeyedPart
from fairseq_ccpr.datastore.parts import KEYS, LINE_OFFSETS, LINES, MEMBERS, SPANS, STRING_HASHES
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import TIMEOUT, IndexDescription
from fairseq_ccpr.storage.equal_strings import HASHED, hash_strings
from fairseq_ccpr.storage.fingerprint import short
from fairseq_ccpr.storage.text_lines import TextLines


class PhraseDatastore(KeyedPart[PhraseSection]):
    """A phrase datastore opened for reading: memory-mapped, checked for size and shape.

    Attributes:
        spans: int32 [N, 3]: sentence, start, end in characters.
        hashes: uint64 [N], of the strings.
        sentences: lines of the text, S of them.

    Raises:
        DatastoreError: missing, unfinished, damaged, or without a phrase part.
    """

    def __init__(self, directory: Path | str, timeout: float = TIMEOUT) -> None:
        super().__init__(directory, PhraseSection, timeout)
        self.spans, self.hashes = self.arrays[SPANS], self.arrays[STRING_HASHES]
        self.sentences = open_sentences(self.folder, self.section.sentences)
        self._numbers: dict[str, int | None] = {}  # of sentences that were looked for

    def sentence(self, number: int) -> str:
        return self.sentences[number]

    def number(self, sentence: str) -> int | None:
        """Find the number of a sentence, once; None where it is not there."""
        if sentence not in self._numbers:
            self._numbers[sentence] = self.sentences.find(sentence)
        return self._numbers[sentence]

    def phrase(self, entry: int) -> tuple[str, str, int, int]:
        """Return an entry's string, its sentence, and the characters where it begins and ends."""
        number, start, end = self.spans[entry].tolist()
        sentence = self.sentence(number)
        return sentence[start:end], sentence, start, end

    def open_sources(self) -> np.ndarray:
        """Map which of n texts have each sentence, bool [S, n], as in `section.sources`; n is 1 without them."""
        return self.arrays.get(MEMBERS, np.broadcast_to(np.True_, (self.section.sentences, 1)))

    def sample(self, size: int) -> PhraseDatastore:
        """Return this datastore reduced to `size` entries, always the same ones, searched exactly.

        Sentences are drawn at random, with all entries of each; of the last sentence they may be the first
        ones only.
        """
        if not 1 <= size <= self.section.size:
            raise ConfigurationError(
                f"--entries is {size:,}, but the datastore {self.directory} has {self.section.size:,}: give "
                "a number from 1 to that"
            )
        places = np.random.default_rng(1).permutation(self.section.sentences)  # [S], of each sentence
        entries = np.sort(places[self.spans[:, 0]].argsort(kind="stable")[:size])
        smaller = copy(self)
        smaller.section = replace(self.section, size=size, index=IndexDescription("exact", "ip"))
        smaller.keys, smaller.spans = self.keys[entries], self.spans[entries]
        smaller.arrays = self.arrays | {KEYS: self.arrays[KEYS][entries], SPANS: smaller.spans}
        smaller.hashes = self.hashes[entries]
        return smaller

    def check_encoder(self, fingerprint: str) -> None:
        """Refuse to work with a phrase encoder other than the one the datastore was built with."""
        expected = self.section.fingerprints["encoder"]
        if fingerprint != expected:
            raise DatastoreError(
                f"the phrases of {self.directory} were built with another encoder: they need "
                f"{short(expected)}, the one given is {short(fingerprint)}; give theirs, or build them with "
                "this one"
            )

    def find_nonsense(self) -> Iterator[str]:
        """Check also that the phrases are in their sentences, and their hashes are theirs."""
        yield from super().find_nonsense()
        # bytes of each sentence, and so no fewer than its characters
        lengths = np.diff(self.sentences.offsets)
        for rows, said in self.blocks():
            sentence, first, end = self.spans[rows].T
            if sentence.min() < 0 or sentence.max() >= self.section.sentences:
                yield f"phrase spans: sentences that are not there in {said}"
            elif (first < 0).any() or (first >= end).any() or (end >= lengths[sentence]).any():
                yield f"phrase spans: places outside their sentences in {said}"
            elif not np.array_equal(hash_strings(self.spans[rows], self.sentences), self.hashes[rows]):
                yield f"phrase hashes: other than those of the strings in {said}"


def open_sentences(folder: Path, count: int) -> TextLines:
    """Map the sentences of a phrase part."""
    return TextLines(folder / LINES, folder / f"{LINE_OFFSETS}.npy", count)


def write_string_hashes(folder: Path, section: PhraseSection) -> None:
    """Write the hash of each phrase's string alongside spans and sentences, so that no search has to."""
    spans, lines = section.open_arrays(folder, SPANS)[SPANS], open_sentences(folder, section.sentences)
    blocks = (hash_strings(spans[start : start + HASHED], lines) for start in range(0, len(spans), HASHED))
    section.write(folder, STRING_HASHES, blocks)
