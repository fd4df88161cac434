"""Compacting: what was learnt moves into the datastore's own entries, and what was forgotten leaves every file.

1. A new token part is written beside the old one, complete with its index, and a new journal that knows the pairs by their
   text and by the place of their entries.
2. The manifest that names them replaces the old one: until then readers see all as it was, and from then on all as it is.
3. The old part and the old journal are removed. The next run completes one that was killed, or starts over.

Letters: N entries, n of what was learnt, d width of keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile, rmtree

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.building.compatible import Opened, describe_corpora
from fairseq_ccpr.building.domain_sample import sample_domain
from fairseq_ccpr.building.part import TOKENS, FolderKeys, Part, open_keys
from fairseq_ccpr.common_options import cpu_option, quiet_option
from fairseq_ccpr.datastore import learnt_records as records
from fairseq_ccpr.datastore.learnt import LEARNT, LOCK, LearntStore, header_of, journal_path
from fairseq_ccpr.datastore.manifest import TOKEN, Manifest, Source, TokenSection
from fairseq_ccpr.datastore.token import (
    DOMAIN,
    KEYS,
    PROJECTION,
    PROVENANCE,
    SYMBOLS,
    VALUES,
    TokenDatastore,
    array_shapes,
)
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search import DISK, IndexDescription
from fairseq_ccpr.search.base import EXACT_UP_TO
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray, check_space, open_array
from fairseq_ccpr.storage.atomic import scratch_directory, sync_directory
from fairseq_ccpr.storage.journal import create_journal

BLOCK_ROWS = 1 << 16
SCRATCH = "compacted"  # the name, less its ending, of the folder that the new part is written in


@dataclass(frozen=True)
class CompactSettings:
    """The options of `fairseq-ccpr compact`."""

    datastore: Path = option(help="the datastore", positional=True, metavar="DIR")
    index: str = option("", "as of fairseq-ccpr build tokens (of the kind there is)", metavar="exact|torch-ivf|FACTORY")
    index_parameters: str = option("", "search parameters (those there are)", metavar="P=V,...")
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True)
class Compacted:
    """What became of a datastore."""

    section: TokenSection
    moved: int  # pairs that are its own entries now, and were not before
    removed: int  # pairs that were forgotten, and have left it


def compact_datastore(settings: CompactSettings) -> Compacted:
    """Compact a datastore; where nothing was learnt or forgotten since the last time, it stays as it is.

    Raises:
        ConfigurationError, DatastoreError: one sentence for the user.
    """
    datastore = TokenDatastore(settings.datastore)
    with closing(LearntStore(datastore)) as store:
        store.lock()
        remove_older(datastore.directory, datastore.section)
        moved, removed = len(store.entries), store.forgotten
        if moved or removed:
            with _told(datastore.directory):
                _compact(datastore, store, settings)
        remove_put_aside(store.folder)
    return Compacted(TokenDatastore(settings.datastore).section, moved, removed)


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Tell of a full disk in a sentence; until the manifest is replaced, which is last, all is as it was."""
    try:
        yield
    except OSError as error:
        raise DatastoreError(
            f"{directory} cannot be compacted ({error.strerror or error}): it is as it was; free some space, or see to the "
            "disk"
        ) from None


def _compact(datastore: TokenDatastore, store: LearntStore, settings: CompactSettings) -> None:
    directory, section = datastore.directory, datastore.section
    check_space(directory, sum(file["bytes"] for file in section.files.values()) + store.path.stat().st_size)
    with scratch_directory(directory / SCRATCH) as scratch:
        part = Part(scratch, TOKENS, FolderKeys(not settings.quiet))
        part.partial.mkdir()
        with tqdm(desc="entries", total=section.size, unit_scale=True, disable=settings.quiet) as bar:
            places = _write_arrays(datastore, store, part.partial, bar)
        grown = _describe(datastore, store, places)
        _write_others(datastore, grown, part.partial)
        grown.index = _plan(section, grown, settings)
        part.publish(grown)
        generation = section.generation + 1
        grown.ancestors = [*section.ancestors, datastore.keys_fingerprint]
        grown.files = {f"{grown.folder}/{Path(name).name}": file for name, file in grown.files.items()}
        rmtree(directory / grown.folder, ignore_errors=True)  # left by a run that was killed
        (scratch / TOKEN).rename(directory / grown.folder)
    pairs = [replace(pair, first_entry=places[pair.id]) for pair in store.pairs.values()]
    create_journal(
        journal_path(directory, generation), [header_of(grown, store.next_id), *(records.moved(one) for one in pairs)]
    )
    manifest = Manifest.read(directory)
    manifest.token = grown
    manifest.write(directory)
    sync_directory(directory)
    remove_older(directory, grown)


def _write_arrays(datastore: TokenDatastore, store: LearntStore, part: Path, bar: tqdm[object]) -> dict[int, int]:
    """Write keys, values and provenance: the datastore's own that were not forgotten, then what was learnt.

    Returns:
        The first entry of each pair, by its id.
    """
    section = datastore.section
    arrays = {
        name: GrowingArray(part / f"{name}.npy", shape[1:], dtype)
        for name, (shape, dtype) in array_shapes(0, section.dimension).items()
    }
    stay = np.ones(section.size, bool)
    for first, count in store.gone:
        stay[first : first + count] = False
    for start in range(0, section.size, BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        for name, array in zip((KEYS, VALUES, PROVENANCE), (datastore.keys, datastore.values, datastore.provenance)):
            arrays[name].append(array[rows][stay[rows]])
        bar.update(len(stay[rows]))
    new_rows = np.cumsum(stay) - 1
    places = {pair.id: int(new_rows[pair.first_entry]) for pair in store.pairs.values() if pair.first_entry is not None}
    sentence = sum(section.subsets.values())
    for number, (values, keys) in store.entries.items():
        places[number] = arrays[VALUES].rows
        positions = np.arange(len(values))
        arrays[KEYS].append(keys)
        arrays[VALUES].append(values)
        arrays[PROVENANCE].append(np.stack([np.full_like(positions, sentence), positions], axis=1))
        sentence += 1
    for growing in arrays.values():
        growing.close()
    return places


def _describe(datastore: TokenDatastore, store: LearntStore, places: dict[int, int]) -> TokenSection:
    """Describe the new part as a datastore of several texts, the last of which was learnt."""
    gone = sum(count for _, count in store.gone)
    name = datastore.directory.resolve().name
    sources = list(Opened(name, datastore).sources)
    before = sources.pop() if datastore.section.ancestors else Source(f"{name}-{LEARNT}", "", 0, 0, 1.0)
    sources = [one for one in sources if one.size]
    new = sum(len(values) for values, _ in store.entries.values())
    sentences = before.sentences + len(store.entries)
    texts = (text for number in places for text in (store.pairs[number].source, store.pairs[number].target))
    learnt = Source(
        before.name, fingerprint.of_strings(texts), before.size - gone + new, sentences, 1.0, {LEARNT: sentences}
    )
    section = describe_corpora(datastore.section, [*sources, learnt])
    return replace(section, size=sum(one.size for one in sources) + learnt.size, files={}, index_recall=None)


def _write_others(datastore: TokenDatastore, section: TokenSection, part: Path) -> None:
    """Write what stands beside the arrays. The decoder's own states are sampled again; those of an adapter are not there."""
    for name in (SYMBOLS, *([PROJECTION] if section.projection else []), *([DOMAIN] if section.domain else [])):
        copyfile(datastore.folder / name, part / name)
    if section.projection is None and section.size:
        shapes = array_shapes(section.size, section.dimension)
        provenance = open_array(part / f"{PROVENANCE}.npy", *shapes[PROVENANCE])
        sample_domain(open_keys(section, part), provenance).save(part / DOMAIN)
        section.domain = True


def _plan(before: TokenSection, grown: TokenSection, settings: CompactSettings) -> IndexDescription:
    """Choose the index: another one where it is asked for, else of the kind there is.

    Where search is exact because any datastore of so few entries has it, the index is chosen again.
    """
    index = before.index
    of_kind = f"{DISK}:{index.factory}" if index.backend == DISK else index.factory or index.backend
    if before.size <= EXACT_UP_TO and not index.factory:
        of_kind = "auto"
    parameters = settings.index_parameters or ("" if settings.index else index.parameters)
    gpu = choose_device(settings.cpu).type == "cuda"
    return plan_index(settings.index or of_kind, index.metric, parameters, grown.size, grown.dimension, gpu)


def remove_older(directory: Path, section: TokenSection) -> None:
    """Remove parts and journals that what was learnt has moved out of."""
    for path in directory.glob(f"{TOKEN}*"):
        found = re.fullmatch(rf"{TOKEN}(?:-(\d+))?", path.name)
        if found and int(found[1] or 0) < section.generation:
            rmtree(path)
    for generation in range(section.generation):
        journal_path(directory, generation).unlink(missing_ok=True)


def remove_put_aside(folder: Path) -> None:
    """Remove bytes of a journal that were put aside as damaged: they may hold what was forgotten."""
    for path in folder.glob("*"):
        if path.name != LOCK and not path.name.endswith(".journal"):
            path.unlink()
