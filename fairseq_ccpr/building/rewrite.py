"""Rewriting datastores: merged or without a corpus (`merge.py`), or with what was learned alongside (`compact.py`).

All are one algorithm: copy the rows of sentences that stay and append those that come, renumber the
sentences, index the keys, publish. What differs is which sentences stay (`Rows.renumber`), and what stands
alongside the rows of each kind. Nothing is encoded again. A merge appears under its name when it is complete.

Letters: S sentences, n texts (corpora), d width of keys.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import copyfile, rmtree
from typing import NamedTuple, TypeVar

import numpy as np

from fairseq_ccpr.building.part import Part
from fairseq_ccpr.datastore.manifest import REVERSE_MODEL, PhraseSection, Section, Source, TokenSection
from fairseq_ccpr.datastore.parts import (
    LINE_OFFSETS,
    LINES,
    MEMBERS,
    PROJECTION_FILE,
    PROVENANCE,
    SPANS,
    SYMBOLS,
    TOTALS,
)
from fairseq_ccpr.datastore.phrase import PhraseDatastore, open_sentences, write_string_hashes
from fairseq_ccpr.datastore.source_index import Sources, write_source_index
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.search.base import Progress
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray, open_array
from fairseq_ccpr.storage.equal_strings import first_of_equals
from fairseq_ccpr.storage.files import write_json
from fairseq_ccpr.storage.text_lines import TextLines, write_lines
from fairseq_ccpr.timing import progress_bar

COPIED_ROWS = 1 << 16  # memory holds so many rows at a time, whatever the size of a datastore
MOST_SENTENCES = 2**31 - 1  # what an int32 counts
LEAVES = -MOST_SENTENCES - 1  # below zero, whatever number is added

Datastore = TokenDatastore | PhraseDatastore
AnySection = TypeVar("AnySection", bound=Section)
# from old numbers to new ones, int64 [n]; -1 for sentences that leave
Renumber = Callable[[np.ndarray], np.ndarray]

logger = logging.getLogger(__name__)


class Rows(NamedTuple):
    """Rows of one kind of part: of a datastore, or of learned pairs."""

    arrays: dict[str, np.ndarray]  # by name, see `Section.ROWS`
    renumber: Renumber  # of their sentences
    sources: Sources = ()  # of tokens, by their old numbers


def copy_rows(base: Section, parts: Iterable[Rows], folder: Path, progress: Progress) -> int:
    """Write the rows of sentences that stay, part after part and each in its order; return how many."""
    written = {name: base.grow(folder, name) for name in base.ROWS}
    of_place = base.ROWS[-1]
    for arrays, renumber, _ in parts:
        for start in range(0, len(arrays[of_place]), COPIED_ROWS):
            block = {name: arrays[name][start : start + COPIED_ROWS] for name in written}
            places = block[of_place] = np.array(block[of_place])
            places[:, 0] = renumber(places[:, 0].astype(np.int64))
            stay = places[:, 0] >= 0
            for name, array in written.items():
                array.append(block[name][stay])
            progress(len(stay))
    for array in written.values():
        array.close()
    return written[of_place].rows


def rows_of(store: TokenDatastore, renumber: Renumber) -> Rows:
    """Take the rows of a datastore."""
    return Rows(store.arrays, renumber, store.source_index.sources())


def write_tokens(
    base: TokenDatastore,
    parts: list[Rows],
    sources: list[Source],
    folder: Path,
    progress: Progress,
    grown: bool = False,
) -> TokenSection:
    """Write a token part without its index.

    Args:
        grown: whether it is `base` with what was learned, by which the likeness of its sentences must not
            change.
    """
    size = copy_rows(base.section, parts, folder, progress)
    for name in {SYMBOLS, PROJECTION_FILE}.intersection(base.section.names):
        copyfile(base.folder / name, folder / name)
    section, described = replace(_describe(base.section, sources), size=size), base.section.source_index
    provenance = section.open_arrays(folder, PROVENANCE)[PROVENANCE]
    found, vocabulary, unknown = _renumbered(parts), described.vocabulary, described.unknown
    mean = described.mean_length if grown and described.known else None
    section.source_index = write_source_index(
        folder, found, provenance, vocabulary, unknown, mean_length=mean
    )
    return section


def _renumbered(parts: list[Rows]) -> Iterator[tuple[int, np.ndarray]]:
    for part in parts:
        sources = iter(part.sources)
        while block := list(islice(sources, COPIED_ROWS)):
            numbers = part.renumber(np.array([number for number, _ in block])).tolist()
            yield from ((number, source) for number, (_, source) in zip(numbers, block) if number >= 0)


class Text(NamedTuple):
    """Sentences of a datastore, or of learned pairs, with their phrases."""

    sentences: Sequence[str] | TextLines  # S
    members: np.ndarray  # bool [S, n], which of its texts have each
    columns: list[int | None]  # int [n], where these are among the texts of the result; None: they leave
    arrays: dict[str, np.ndarray]


def text_of(store: PhraseDatastore, columns: list[int | None]) -> Text:
    """Take the text of a datastore, whose corpora become these columns."""
    return Text(store.sentences, store.open_sources(), columns, store.arrays)


def write_phrases(
    base: PhraseDatastore, texts: list[Text], sources: list[Source], folder: Path, progress: Progress
) -> PhraseSection:
    """Write a phrase part without its index, like that of `base`; a sentence of several texts is there once.

    1. Find repeated sentences, and the texts of each.
    2. Number the sentences that stay in the order in which they first come.
    3. Copy the phrases of the first of equal sentences in the order in which they stood.

    Args:
        sources: the corpora that stay, counted here; one without a fingerprint gets that of its sentences.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    begins = np.cumsum([0, *(len(text.sentences) for text in texts)]).tolist()
    first = first_of_equals(
        (text.sentences[i] for text in texts for i in range(len(text.sentences))), scratch
    )
    members = _mark_members(texts, begins, first, len(sources), scratch)
    kept_path = (folder if len(sources) > 1 else scratch) / f"{MEMBERS}.npy"
    kept_array = GrowingArray(kept_path, (len(sources),), "bool")
    numbers_array = GrowingArray(scratch / "numbers.npy", (), "int64")
    for start in range(0, len(members), COPIED_ROWS):
        stay = members[start : start + COPIED_ROWS].any(axis=1)
        numbers_array.append(np.where(stay, kept_array.rows + np.cumsum(stay) - 1, -1))
        kept_array.append(members[start : start + COPIED_ROWS][stay])
    numbers_array.close()
    kept_array.close()
    numbers = open_array(scratch / "numbers.npy", (len(first),), "int64")
    places = (
        (text.sentences, i, begin + i)
        for begin, text in zip(begins, texts)
        for i in range(len(text.sentences))
    )
    staying = (sentences[i] for sentences, i, place in places if numbers[place] >= 0)
    write_lines(folder / LINES, folder / f"{LINE_OFFSETS}.npy", staying)
    parts = [Rows(text.arrays, numbers[begin:].__getitem__) for begin, text in zip(begins, texts)]
    size, count = copy_rows(base.section, parts, folder, progress), kept_array.rows
    written = replace(base.section, size=size, sentences=count)
    sources = _count(sources, open_array(kept_path, (count, len(sources)), "bool"), written, folder)
    rmtree(scratch)
    totals = {"phrases": size, "sentences": count, "too_long": sum(source.too_long for source in sources)}
    write_json(folder / TOTALS, totals)
    write_string_hashes(folder, written)
    return _describe(written, sources)


def _mark_members(
    texts: list[Text], begins: list[int], first: np.ndarray, columns: int, scratch: Path
) -> np.ndarray:
    """Mark the texts of each sentence of all, bool [S, n]; a repeated one is marked where it first comes."""
    blank = GrowingArray(scratch / "members.npy", (columns,), "bool")
    # a sparse file would end the process where the disk is full
    for start in range(0, len(first), COPIED_ROWS):
        blank.append(np.zeros((min(COPIED_ROWS, len(first) - start), columns), bool))
    blank.close()
    members: np.ndarray = np.load(scratch / "members.npy", mmap_mode="r+", allow_pickle=False)
    for begin, text in zip(begins, texts):
        for start in range(0, len(text.sentences), COPIED_ROWS):
            block = text.members[start : start + COPIED_ROWS]
            rows = first[begin + start : begin + start + len(block)]
            for column, has in zip(text.columns, block.T):
                if column is not None:
                    members[rows[has], column] = True
    return members


def _count(sources: list[Source], members: np.ndarray, section: PhraseSection, folder: Path) -> list[Source]:
    spans = section.open_arrays(folder, SPANS)[SPANS]
    entries, sentences = np.zeros((2, len(sources)), np.int64)
    for start in range(0, max(section.size, len(members)), COPIED_ROWS):
        entries += members[spans[start : start + COPIED_ROWS, 0]].sum(axis=0)
        sentences += members[start : start + COPIED_ROWS].sum(axis=0)
    lines = open_sentences(folder, len(members))
    prints = (
        source.corpus or fingerprint.of_strings(lines[n] for n in np.flatnonzero(of_source).tolist())
        for source, of_source in zip(sources, members.T)
    )
    return [
        replace(source, size=size, sentences=count, corpus=corpus)
        for source, size, count, corpus in zip(sources, entries.tolist(), sentences.tolist(), prints)
    ]


def sources_of(name: str, store: Datastore) -> list[Source]:
    """List the corpora of a datastore; one that was built from a single one calls it `name`."""
    section = store.section
    if section.sources:
        return list(section.sources)
    whole = Source(
        name,
        section.fingerprints["corpus"],
        section.size,
        0,
        section.share,
        reverse_model=section.fingerprints.get(REVERSE_MODEL, ""),
    )
    if isinstance(section, TokenSection):
        return [replace(whole, sentences=sum(section.subsets.values()), subsets=dict(section.subsets))]
    totals = json.loads((store.folder / TOTALS).read_text(encoding="utf-8"))
    return [replace(whole, sentences=section.sentences, too_long=totals["too_long"])]


def _describe(section: AnySection, sources: list[Source]) -> AnySection:
    """Record the corpora in a new section: one as if the datastore was built from it, several by name."""
    one = sources[0] if len(sources) == 1 else None
    prints = {name: digest for name, digest in section.fingerprints.items() if name != REVERSE_MODEL}
    prints["corpus"] = one.corpus if one else fingerprint.of_strings(source.corpus for source in sources)
    if one and one.reverse_model:
        prints[REVERSE_MODEL] = one.reverse_model
    described = replace(
        section,
        fingerprints=prints,
        share=one.share if one else 1.0,
        shard=None,
        sources=[] if one else sources,
        files={},
        index_recall=None,
        ancestors=[],
    )
    if isinstance(described, TokenSection):
        named = {f"{source.name}/{subset}": n for source in sources for subset, n in source.subsets.items()}
        described.subsets = dict(one.subsets) if one else named
    return described


def write_part(
    kind: type[AnySection],
    folder: Path,
    size: int,
    write: Callable[[Path, Progress], AnySection],
    quiet: bool,
    cpu: bool,
    choice: str,
    parameters: str,
    kept_parameters: str = "",
) -> AnySection:
    """Write a part to a new folder, from `size` rows, index it as chosen, and publish it."""
    part = Part(folder, kind, not quiet)
    part.partial.mkdir()
    with progress_bar(f"{kind.PART}s", "entry", total=size, quiet=quiet) as bar:
        section = write(part.partial, bar.update)
    gpu, metric = choose_device(cpu).type == "cuda", section.index.metric
    parameters = parameters or kept_parameters
    section.index = part.plan_index(choice, metric, parameters, section.size, section.dimension, gpu)
    if kept_parameters:  # as they are: without defaults for those not given
        section.index = replace(section.index, parameters=kept_parameters)
    part.publish(section)
    return section
