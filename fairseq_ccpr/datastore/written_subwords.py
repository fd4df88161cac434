"""The phrases of a datastore in the subwords of a translation model: made once, and mapped from disk.

A folder `subwords-XXXXXXXX` alongside the parts, named by a digest of what it was made from, has

    tokens.npy       uint16 or int32 [T]   the ids of all sentences' subwords, sentence after sentence
    first.npy        int64 [N]             of each phrase its first subword
    counts.npy       uint8 [N]             how many subwords it has; 0 where the decoder cannot write it
    subwords.json                          what it was made from, size and checksum of each file

It can be deleted at any time: it is made again when it is missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq_ccpr.datastore.parts import LINES as TEXT
from fairseq_ccpr.datastore.parts import SPANS
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.schema import token_type
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.storage.arrays import GrowingArray, check_space, open_array
from fairseq_ccpr.storage.files import (
    check_sizes,
    describe_files,
    read_checked_json,
    scratch_directory,
    unfollowed,
    write_checked_json,
)
from fairseq_ccpr.storage.fingerprint import of_strings
from fairseq_ccpr.text.decoder_subwords import Cuts, DecoderSubwords, SplitSentences, as_rows, cut_phrases
from fairseq_ccpr.timing import progress_bar

SUBWORDS_VERSION = 2  # 1 more whenever phrases are cut otherwise
SUBWORD_IDS, FIRST, COUNTS = "tokens", "first", "counts"
DESCRIPTION = "subwords.json"
SUBWORDS_LOCK = "subwords.lock"  # held by who is making them
ROWS_PER_BLOCK = 1 << 12  # sentences, or phrases of about as many, at a time
MOST_COUNTED = 255  # most subwords that are counted; decoders do not follow longer phrases

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenSubwords:
    """The phrases of a datastore as subwords, memory-mapped."""

    tokens: np.ndarray  # uint16 or int32 [T]
    first: np.ndarray  # int64 [N]
    counts: np.ndarray  # uint8 [N]

    def cuts(self, entries: np.ndarray) -> Cuts:
        """Locate the phrases of entries, int64 [R], among `tokens`."""
        return Cuts(self.first[entries], self.counts[entries].astype(np.int64))


def open_or_write(
    datastore: PhraseDatastore, subwords: DecoderSubwords, model: str
) -> WrittenSubwords | None:
    """Map a datastore's phrases in the subwords of a model, by its digest, made first; None if impossible."""
    made_from = of_strings([of_store(datastore), model, of_strings(subwords.dictionary.symbols)])
    folder = datastore.directory / f"subwords-{made_from[:8]}"
    try:
        if (written := _open(folder, made_from, datastore, subwords)) is None:
            with open(datastore.directory / SUBWORDS_LOCK, "wb", opener=unfollowed) as lock:
                with contextlib.suppress(OSError):  # a file system without locks: the last to finish wins
                    fcntl.flock(lock, fcntl.LOCK_EX)
                written = _open(folder, made_from, datastore, subwords)  # another process may have made it
                if written is None:
                    _write(folder, made_from, datastore, subwords)
                    written = _open(folder, made_from, datastore, subwords)
        return written
    except (OSError, DatastoreError) as error:
        logger.info(
            "phrases are made subwords as they are retrieved, since %s cannot be written: %s", folder, error
        )
        return None


def of_store(datastore: PhraseDatastore) -> str:
    """Digest what the phrases of a datastore are, and how they are cut."""
    section = datastore.section
    names = (f"{SPANS}.npy", TEXT)
    digests = [section.files[path]["sha256"] for path in sorted(section.files) if Path(path).name in names]
    return of_strings([str(SUBWORDS_VERSION), str(section.size), *digests])


def _open(
    folder: Path, made_from: str, datastore: PhraseDatastore, subwords: DecoderSubwords
) -> WrittenSubwords | None:
    if not (folder / DESCRIPTION).exists():
        return None
    try:
        described = read_checked_json(folder / DESCRIPTION)
        if described["made_from"] != made_from:
            return None
        check_sizes(folder, described["files"])
        size = datastore.section.size
        return WrittenSubwords(
            open_array(
                folder / f"{SUBWORD_IDS}.npy", (described["tokens"],), token_type(len(subwords.dictionary))
            ),
            open_array(folder / f"{FIRST}.npy", (size,), "int64"),
            open_array(folder / f"{COUNTS}.npy", (size,), "uint8"),
        )
    except (DatastoreError, ValueError, KeyError) as error:
        logger.warning("%s is damaged and is made again: %s", folder, error)
        return None


def _write(folder: Path, made_from: str, datastore: PhraseDatastore, subwords: DecoderSubwords) -> None:
    section, store = datastore.section, of_store(datastore)
    logger.info(
        "writing the phrases of %s in the subwords of the model, once: %s", datastore.directory, folder
    )
    with scratch_directory(folder) as partial:
        count, unknown = _split_sentences(partial, datastore, subwords)
        subwords.check_known(count, unknown)
        check_space(partial, section.size * 9)
        _cut_entries(partial, datastore, subwords)
        names = [f"{name}.npy" for name in (SUBWORD_IDS, FIRST, COUNTS)]
        for path in partial.iterdir():
            if path.name not in names:
                path.unlink()
        described = {"made_from": made_from, "store": store, "tokens": count, "unknown": unknown}
        write_checked_json(partial / DESCRIPTION, {**described, "files": describe_files(partial, names)})
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        partial.rename(folder)
    remove_stale(datastore)


def remove_stale(datastore: PhraseDatastore) -> None:
    """Remove what was made of phrases that are gone, and what was never completed."""
    store = of_store(datastore)
    for folder in datastore.directory.glob("subwords-*"):
        if folder.is_dir() and _store_of(folder) != store:
            shutil.rmtree(folder, ignore_errors=True)


def _store_of(folder: Path) -> object:
    try:
        return read_checked_json(folder / DESCRIPTION).get("store")
    except (OSError, ValueError):
        return None


def _split_sentences(partial: Path, datastore: PhraseDatastore, subwords: DecoderSubwords) -> tuple[int, int]:
    count = datastore.section.sentences
    arrays = {name: GrowingArray(partial / f"{name}.npy", (), "int32") for name in ("starts", "ends")}
    arrays["ids"] = GrowingArray(partial / f"{SUBWORD_IDS}.npy", (), token_type(len(subwords.dictionary)))
    bounds = GrowingArray(partial / "bounds.npy", (), "int64")
    bounds.append(np.zeros(1))
    total = unknown = 0
    with progress_bar("subwords", "sentence", total=count) as bar:
        for start in range(0, count, ROWS_PER_BLOCK):
            numbers = range(start, min(start + ROWS_PER_BLOCK, count))
            split = SplitSentences.of(
                [as_rows(subwords.split_unchecked(datastore.sentence(i))) for i in numbers]
            )
            for name, array in arrays.items():
                array.append(getattr(split, name))
            bounds.append(split.bounds[1:] + total)
            total += len(split.ids)
            unknown += int((split.ids == subwords.dictionary.unk()).sum())
            bar.update(len(numbers))
    for array in (*arrays.values(), bounds):
        array.close()
    return total, unknown


def _cut_entries(partial: Path, datastore: PhraseDatastore, subwords: DecoderSubwords) -> None:
    bounds, *parts = (
        np.load(partial / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("bounds", SUBWORD_IDS, "starts", "ends")
    )
    first = GrowingArray(partial / f"{FIRST}.npy", (), "int64")
    counts = GrowingArray(partial / f"{COUNTS}.npy", (), "uint8")
    for start in range(0, datastore.section.size, ROWS_PER_BLOCK):
        spans = datastore.spans[start : start + ROWS_PER_BLOCK].astype(np.int64)
        numbers, spans[:, 0] = np.unique(spans[:, 0], return_inverse=True)
        extents = bounds[numbers + 1] - bounds[numbers]
        local = np.concatenate([[0], np.cumsum(extents)])  # bounds among the rows of this block
        rows = np.repeat(bounds[numbers] - local[:-1], extents) + np.arange(local[-1])
        ids, starts, ends = (part[rows] for part in parts)
        cuts = cut_phrases(spans, SplitSentences(ids, starts, ends, local), subwords.dictionary.unk())
        kept = np.where(cuts.lengths <= MOST_COUNTED, cuts.lengths, 0)
        first.append(
            np.where(kept > 0, rows[np.minimum(cuts.first, len(rows) - 1)], 0) if len(rows) else kept
        )
        counts.append(kept)
    first.close()
    counts.close()
