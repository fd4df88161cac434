"""Merging phrase datastores: sentences shared by several texts are stored once and keep all their sources."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from fairseq_ccpr.building.compatible import Opened, describe_corpora
from fairseq_ccpr.building.string_hashes import write_string_hashes
from fairseq_ccpr.datastore.manifest import PhraseSection, Source
from fairseq_ccpr.datastore.phrase import KEYS, OFFSETS, SENTENCES, SOURCES, SPANS, TOTALS, PhraseDatastore
from fairseq_ccpr.storage.arrays import GrowingArray
from fairseq_ccpr.storage.equal_strings import first_of_equals
from fairseq_ccpr.storage.files import write_json
from fairseq_ccpr.storage.text_lines import write_lines

BLOCK_ROWS = 1 << 16


def merge_phrases(
    ordered: list[Opened[PhraseDatastore]], kept: list[Source], part: Path, progress: Callable[[int], object]
) -> PhraseSection:
    """Write the phrase part of a datastore, without its index.

    1. Find repeated sentences, and the texts of each.
    2. Number the sentences of kept texts in the order in which they first come.
    3. Copy their phrases in the order in which they stood.

    Args:
        ordered: from `compatible.in_order`.
        kept: the texts that stay.
        part: folder to write to.
        progress: told how many entries were read.

    Returns:
        Its section of the manifest, without index and files.
    """
    scratch = part / "scratch"
    scratch.mkdir()
    members = _members(ordered, kept, scratch)
    numbers = _numbers(members, scratch)
    write_lines(part / SENTENCES, part / f"{OFFSETS}.npy", _kept_sentences(ordered, numbers))
    counts = _write_phrases(ordered, numbers, members, part, progress)
    sentence_counts = np.zeros(len(kept), np.int64)
    several = GrowingArray(part / f"{SOURCES}.npy", (len(kept),), "bool") if len(kept) > 1 else None
    for start in range(0, len(numbers), BLOCK_ROWS):
        block = members[start : start + BLOCK_ROWS][numbers[start : start + BLOCK_ROWS] >= 0]
        sentence_counts += block.sum(axis=0)
        if several is not None:
            several.append(block)
    if several is not None:
        several.close()
    kept = [
        replace(source, size=int(size), sentences=int(sentences))
        for source, size, sentences in zip(kept, counts[1:], sentence_counts)
    ]
    size, sentences = int(counts[0]), int(numbers.max(initial=-1)) + 1
    shutil.rmtree(scratch)
    totals = {"phrases": size, "sentences": sentences, "too_long": sum(source.too_long for source in kept)}
    write_json(part / TOTALS, totals)
    write_string_hashes(part, sentences)
    section = describe_corpora(ordered[0].store.section, kept)
    return replace(section, size=size, sentences=sentences, ancestors=[], hashes=True)


def _members(ordered: list[Opened[PhraseDatastore]], kept: list[Source], scratch: Path) -> np.ndarray:
    """Mark the kept texts of each sentence of all datastores, bool [T, n]; a repeated one is marked where it first comes."""
    first = first_of_equals(
        (one.store.sentence(i) for one in ordered for i in range(one.store.section.sentences)), scratch
    )
    columns = {source.corpus: column for column, source in enumerate(kept)}
    members = np.lib.format.open_memmap(scratch / "members.npy", "w+", np.bool_, (len(first), len(kept)))
    at = 0
    for one in ordered:
        mine = [columns.get(source.corpus) for source in one.sources]
        own_sources = one.store.open_sources()  # bool [S, n] of its own texts
        for start in range(0, one.store.section.sentences, BLOCK_ROWS):
            block = own_sources[start : start + BLOCK_ROWS]
            places = first[at : at + len(block)]  # those of equal sentences are one
            for column, own in zip(mine, block.T):
                if column is not None:
                    members[places[own], column] = True
            at += len(block)
    return members


def _numbers(members: np.ndarray, scratch: Path) -> np.ndarray:
    """Number the sentences that stay, int64 [T], -1 for the others."""
    numbers = GrowingArray(scratch / "numbers.npy", (), "int64")
    count = 0
    for start in range(0, len(members), BLOCK_ROWS):
        stays = members[start : start + BLOCK_ROWS].any(axis=1)
        numbers.append(np.where(stays, np.cumsum(stays) - 1 + count, -1))
        count += int(stays.sum())
    numbers.close()
    return np.load(scratch / "numbers.npy", mmap_mode="r", allow_pickle=False)


def _kept_sentences(ordered: list[Opened[PhraseDatastore]], numbers: np.ndarray) -> Iterator[str]:
    at = 0
    for one in ordered:
        for i in range(one.store.section.sentences):
            if numbers[at + i] >= 0:
                yield one.store.sentence(i)
        at += one.store.section.sentences


def _write_phrases(
    ordered: list[Opened[PhraseDatastore]],
    numbers: np.ndarray,
    members: np.ndarray,
    part: Path,
    progress: Callable[[int], object],
) -> np.ndarray:
    """Copy keys and spans of the sentences that stay; count them, and those of each text, int64 [1 + n]."""
    keys = GrowingArray(part / f"{KEYS}.npy", (ordered[0].store.section.dimension,), "float16")
    spans = GrowingArray(part / f"{SPANS}.npy", (3,), "int32")
    counts, at = np.zeros(1 + members.shape[1], np.int64), 0
    for one in ordered:
        assert one.store.keys is not None  # they are in the folder
        for start in range(0, one.store.section.size, BLOCK_ROWS):
            block = np.array(one.store.spans[start : start + BLOCK_ROWS])
            sentences = block[:, 0].astype(np.int64) + at
            block[:, 0] = numbers[sentences]
            stay = block[:, 0] >= 0
            keys.append(one.store.keys[start : start + BLOCK_ROWS][stay])
            spans.append(block[stay])
            counts[0] += stay.sum()
            counts[1:] += members[sentences[stay]].sum(axis=0)
            progress(len(block))
        at += one.store.section.sentences
    keys.close()
    spans.close()
    return counts
