"""Compacting: learnt pairs move into the datastore's own entries, and forgotten ones are erased from every file.

1. A new token part is written next to the old one, complete with its index, and a new phrase part, where phrases were learnt
   or forgotten; then a new journal that knows the pairs by their text and by the places of their entries.
2. The manifest that names them replaces the old one: readers see the old state until then, and the new one from then on.
3. The old parts and the old journal are removed. The next run completes one that was killed, or starts over.

Letters: N entries, n of what was learnt, d width of keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile, rmtree

import numpy as np

from fairseq_ccpr.building.compact_phrases import needs_compacting, write_phrases
from fairseq_ccpr.building.compatible import Opened, describe_corpora
from fairseq_ccpr.building.domain_sample import sample_domain
from fairseq_ccpr.building.part import PHRASES, TOKENS, FolderKeys, Part, Section, open_keys
from fairseq_ccpr.common_options import cpu_option, quiet_option
from fairseq_ccpr.datastore.learned import (
    LEARNED,
    LearnedPair,
    LearnedStore,
    first_records,
    journal_path,
    moved_record,
    remove_superseded,
)
from fairseq_ccpr.datastore.manifest import PHRASE, TOKEN, Manifest, PhraseSection, Source, TokenSection
from fairseq_ccpr.datastore.phrase import PhraseDatastore
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
from fairseq_ccpr.datastore.written_subwords import remove_stale
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.search import DISK, IndexDescription
from fairseq_ccpr.search.base import EXACT_UP_TO
from fairseq_ccpr.search.index_plan import PHRASE_EFFORT, TOKEN_EFFORT, Effort, plan_index
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray, check_space, open_array
from fairseq_ccpr.storage.atomic import scratch_directory, sync_directory
from fairseq_ccpr.storage.journal import create_journal

BLOCK_ROWS = 1 << 16
SCRATCH = "compacted"  # the name, less its ending, of the folder that the new parts are written in


@dataclass(frozen=True)
class CompactSettings:
    """The options of `fairseq-ccpr compact`."""

    datastore: Path = option(help="the datastore", positional=True, metavar="DIR")
    index: str = option(
        "", "of tokens, as of fairseq-ccpr build tokens (of the kind there is)", metavar="exact|FACTORY"
    )
    index_parameters: str = option("", "search parameters (those there are)", metavar="P=V,...")
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True)
class Compacted:
    """The outcome of compaction."""

    section: TokenSection
    moved: int  # pairs that are its own entries now, and were not before
    removed: int  # pairs that were forgotten, and have left it


def compact_datastore(settings: CompactSettings) -> Compacted:
    """Compact a datastore; leave it unchanged if nothing was learnt or forgotten since the last time.

    Raises:
        ConfigurationError, DatastoreError: one sentence for the user.
    """
    datastore = TokenDatastore(settings.datastore)
    with closing(LearnedStore(datastore)) as store:
        store.lock()
        remove_others(datastore.directory, Manifest.read(datastore.directory))
        moved, removed = len(store.entries.keys() | store.phrases.keys()), store.forgotten
        if moved or removed:
            with _told(datastore.directory):
                _compact(datastore, store, settings)
    return Compacted(TokenDatastore(settings.datastore).section, moved, removed)


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Report a full disk in one sentence; nothing changes until the manifest is replaced, which comes last."""
    try:
        yield
    except OSError as error:
        raise DatastoreError(
            f"{directory} cannot be compacted ({error.strerror or error}): it is as it was; free some space, or see to the "
            "disk"
        ) from None


def _compact(datastore: TokenDatastore, store: LearnedStore, settings: CompactSettings) -> None:
    directory, manifest = datastore.directory, Manifest.read(datastore.directory)
    pairs = dict(store.pairs)
    check_space(directory, _bytes_needed(manifest, store))
    with scratch_directory(directory / SCRATCH) as scratch:
        manifest.token = _compact_tokens(datastore, store, scratch, settings, pairs)
        if needs_compacting(store):
            manifest.phrase = _compact_phrases(PhraseDatastore(directory), store, scratch, settings, pairs)
    _write_journal(directory, manifest, store, list(pairs.values()))
    manifest.write(directory)
    sync_directory(directory)
    remove_others(directory, manifest)


def _bytes_needed(manifest: Manifest, store: LearnedStore) -> int:
    sections = [manifest.token, manifest.phrase if needs_compacting(store) else None]
    files = [file for section in sections if section is not None for file in section.files.values()]
    return sum(file["bytes"] for file in files) + store.path.stat().st_size


def _compact_tokens(
    datastore: TokenDatastore,
    store: LearnedStore,
    scratch: Path,
    settings: CompactSettings,
    pairs: dict[int, LearnedPair],
) -> TokenSection:
    """Write the next generation of the token part, and record in the pairs where their entries are in it."""
    section = datastore.section
    part: Part[TokenSection] = Part(scratch, TOKENS, FolderKeys(not settings.quiet))
    part.partial.mkdir()
    with progress_bar("entries", "entry", total=section.size, quiet=settings.quiet) as bar:
        places = _write_arrays(datastore, store, part.partial, bar.update)
    grown = _describe(datastore, store, places)
    _write_others(datastore, grown, part.partial)
    grown.index = _plan(section, grown, settings, TOKEN_EFFORT, settings.index)
    for number, pair in pairs.items():
        pairs[number] = replace(pair, first_entry=places[number])
    _complete(part, grown, datastore.directory, [*section.ancestors, datastore.keys_fingerprint])
    return grown


def _compact_phrases(
    datastore: PhraseDatastore,
    store: LearnedStore,
    scratch: Path,
    settings: CompactSettings,
    pairs: dict[int, LearnedPair],
) -> PhraseSection:
    """Write the next generation of the phrase part, and record in the pairs where their sentences are in it."""
    section = datastore.section
    part: Part[PhraseSection] = Part(scratch, PHRASES, FolderKeys(not settings.quiet))
    part.partial.mkdir()
    with progress_bar("phrases", "phrase", total=section.size, quiet=settings.quiet) as bar:
        grown, places = write_phrases(datastore, store, part.partial, bar.update)
    grown.index = _plan(section, grown, settings, PHRASE_EFFORT)
    for number, place in places.items():
        pairs[number] = replace(pairs[number], sentence=place)
    _complete(part, grown, datastore.directory, [*section.ancestors, datastore.keys_fingerprint])
    return grown


def _complete(part: Part[Section], grown: Section, directory: Path, ancestors: list[str]) -> None:
    """Index a part, and move it to the folder of its generation.

    Args:
        ancestors: digests of the keys before.
    """
    grown.ancestors = []
    part.publish(grown)
    grown.ancestors = ancestors
    grown.files = {f"{grown.folder}/{Path(name).name}": file for name, file in grown.files.items()}
    rmtree(directory / grown.folder, ignore_errors=True)  # left by a run that was killed
    part.final.rename(directory / grown.folder)


def _write_journal(directory: Path, manifest: Manifest, store: LearnedStore, pairs: list[LearnedPair]) -> None:
    """Write the journal of the next generation, which knows the pairs by the places of their entries."""
    assert manifest.token is not None
    phrases = manifest.phrase if any(pair.sentence is not None for pair in pairs) else None
    first = first_records(manifest.token, store.next_id, phrases)
    create_journal(journal_path(directory, manifest.token.generation), [*first, *map(moved_record, pairs)])


def _write_arrays(
    datastore: TokenDatastore, store: LearnedStore, part: Path, done: Callable[[int], object]
) -> dict[int, int]:
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
        done(len(stay[rows]))
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


def _describe(datastore: TokenDatastore, store: LearnedStore, places: dict[int, int]) -> TokenSection:
    """Describe the new part as a datastore of several texts, the last of which was learnt."""
    gone = sum(count for _, count in store.gone)
    name = datastore.directory.resolve().name
    sources = list(Opened(name, datastore).sources)
    before = sources.pop() if datastore.section.ancestors else Source(f"{name}-{LEARNED}", "", 0, 0, 1.0)
    sources = [one for one in sources if one.size]
    new = sum(len(values) for values, _ in store.entries.values())
    sentences = before.sentences + len(store.entries)
    texts = (text for number in places for text in (store.pairs[number].source, store.pairs[number].target))
    learnt = Source(
        before.name, fingerprint.of_strings(texts), before.size - gone + new, sentences, 1.0, {LEARNED: sentences}
    )
    section = describe_corpora(datastore.section, [*sources, learnt])
    return replace(section, size=sum(one.size for one in sources) + learnt.size, files={}, index_recall=None)


def _write_others(datastore: TokenDatastore, section: TokenSection, part: Path) -> None:
    """Write the files alongside the arrays. Decoder states are sampled again; with an adapter they are not stored."""
    for name in (SYMBOLS, *([PROJECTION] if section.projection else []), *([DOMAIN] if section.domain else [])):
        copyfile(datastore.folder / name, part / name)
    if section.projection is None and section.size:
        shapes = array_shapes(section.size, section.dimension)
        provenance = open_array(part / f"{PROVENANCE}.npy", *shapes[PROVENANCE])
        sample_domain(open_keys(section, part), provenance).save(part / DOMAIN)
        section.domain = True


def _plan(
    before: Section, grown: Section, settings: CompactSettings, effort: Effort, asked: str = ""
) -> IndexDescription:
    """Choose the index: the one requested, else one of the existing kind.

    If search is exact only because the datastore was small, choose the kind again.
    """
    index = before.index
    of_kind = f"{DISK}:{index.factory}" if index.backend == DISK else index.factory or index.backend
    if before.size <= EXACT_UP_TO and not index.factory:
        of_kind = "auto"
    of_tokens = isinstance(before, TokenSection)
    given = settings.index_parameters if of_tokens else ""
    kept = "" if given or asked else index.parameters
    gpu = choose_device(settings.cpu).type == "cuda"
    planned = plan_index(asked or of_kind, index.metric, given or kept, grown.size, grown.dimension, gpu, effort)
    return replace(planned, parameters=kept) if kept else planned  # as they are: without defaults for those not given


def remove_others(directory: Path, manifest: Manifest) -> None:
    """Remove parts and journals that compaction has superseded, and those that a killed run left.

    Phrases written in a model's subwords are removed too: they hold the tokens of forgotten sentences.
    """
    for name, section in ((TOKEN, manifest.token), (PHRASE, manifest.phrase)):
        for path in directory.glob(f"{name}*") if section is not None else ():
            found = re.fullmatch(rf"{name}(?:-(\d+))?", path.name)
            if section is not None and found and int(found[1] or 0) != section.generation:
                rmtree(path)
    if manifest.phrase is not None:
        remove_stale(PhraseDatastore(directory))
    if manifest.token is not None:
        remove_superseded(directory, manifest.token.generation)
