"""Compacting: moving what was learned into a datastore's own entries, and erasing what was forgotten.

1. A new token part is written next to the old one, complete with its index, and a new phrase part, where
   phrases were learned or forgotten; then a new journal that knows the pairs by their text and by the places
   of their entries.
2. The manifest that names them replaces the old one: readers see the old state until then, and the new one
   from then on.
3. The old parts and the old journal are removed. The next run completes one that was killed, or starts over.

`rewrite.py` has the rows that are copied, `live_compact.py` does all this while a translator learns.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from shutil import rmtree

import numpy as np

from fairseq_ccpr.building.part import Part, only_builder
from fairseq_ccpr.building.rewrite import (
    Datastore,
    Rows,
    Text,
    rows_of,
    sources_of,
    text_of,
    write_part,
    write_phrases,
    write_tokens,
)
from fairseq_ccpr.datastore.learned import (
    LEARNED,
    OWN_SENTENCE,
    LearnedPair,
    LearnedStore,
    journal_path,
    remove_superseded,
)
from fairseq_ccpr.datastore.manifest import Manifest, PhraseSection, Section, Source, TokenSection
from fairseq_ccpr.datastore.parts import KEYS, MEMBERS, PROVENANCE, SPANS, VALUES
from fairseq_ccpr.datastore.phrase import PhraseDatastore, open_sentences
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.datastore.written_subwords import remove_stale
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import FULL, ConfigurationError, DatastoreError
from fairseq_ccpr.search import DISK
from fairseq_ccpr.search.base import EXACT_UP_TO, Progress
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import check_space
from fairseq_ccpr.storage.files import MANIFEST, only_writer, partial_path, scratch_directory
from fairseq_ccpr.storage.journal import create_journal

SCRATCH = "compacted"  # the name, less its ending, of the folder that the new parts are written in


@dataclass(frozen=True)
class CompactSettings:
    """The options of `fairseq-ccpr compact`."""

    datastore: Path = option(help="the datastore", positional=True, metavar="DIR")
    index: str = option(
        "",
        "of tokens, as of fairseq-ccpr build tokens; auto: of phrases, too (of the kind there is)",
        metavar="exact|FACTORY",
    )
    index_parameters: str = option("", "search parameters (those there are)", metavar="P=V,...")
    cpu: bool = False
    quiet: bool = False


def compact_datastore(settings: CompactSettings) -> tuple[Section, int, int]:
    """Move learned pairs into a datastore's own entries, and erase forgotten ones.

    Where there are none, another index that the settings ask for replaces that of the keys there are.

    Returns:
        The token section, that of phrases where there are no tokens; how many pairs were moved, and how many
        erased.
    """
    manifest = Manifest.read(settings.datastore)
    if manifest.token is None and manifest.phrase is not None and settings.index:
        _index_again(settings)
        return PhraseDatastore(settings.datastore).section, 0, 0
    datastore = TokenDatastore(settings.datastore)
    directory = datastore.directory
    with closing(LearnedStore(datastore)) as learned:
        learned.lock()
        refuse_elsewhere(directory)
        remove_others(directory)
        moved, removed = len(learned.entries.keys() | learned.phrases.keys()), learned.forgotten
        if moved or removed:
            _ = datastore.keys  # refused where a database has them
            with disk_faults_named(directory):
                _compact(datastore, learned, settings)
            remove_others(directory)
        elif settings.index or settings.index_parameters:
            _index_again(settings)
    return TokenDatastore(directory).section, moved, removed


def _index_again(settings: CompactSettings) -> None:
    """Replace the index alone: of tokens, or where there are none of phrases; `auto` replaces both."""
    directory = settings.datastore
    with only_builder(directory), disk_faults_named(directory):
        manifest = Manifest.read(directory)
        stores: list[Datastore] = [TokenDatastore(directory)] if manifest.token else []
        if manifest.phrase and (settings.index == "auto" or not stores):
            stores.append(PhraseDatastore(directory))
        for store in stores:
            _ = store.keys  # refused where a database has them
            section: Section = store.section
            part = Part(directory, type(section), not settings.quiet)
            choice, parameters = settings.index or _existing_kind(section), settings.index_parameters
            gpu, size, width = choose_device(settings.cpu).type == "cuda", section.size, section.dimension
            index = part.plan_index(choice, section.index.metric, parameters, size, width, gpu)
            part.publish(replace(section, index=index))


@contextmanager
def disk_faults_named(directory: Path) -> Iterator[None]:
    """Report a full disk in one sentence; nothing has changed, as the manifest is replaced last."""
    try:
        yield
    except OSError as error:
        advice = "free some space" if error.errno in FULL else f"see to {error.filename or 'the disk'}"
        raise DatastoreError(
            f"{directory} cannot be compacted ({error.strerror or error}): it is as it was; {advice}"
        ) from None


def _compact(datastore: TokenDatastore, learned: LearnedStore, settings: CompactSettings) -> None:
    directory = datastore.directory
    stores: list[Datastore] = [datastore]
    if learned.phrases or learned.gone_sentences:  # the phrase part lacks some, or has forgotten ones
        stores.append(PhraseDatastore(directory))
    sizes = [file["bytes"] for store in stores for file in store.section.files.values()]
    check_space(directory, sum(sizes) + learned.path.stat().st_size)
    with scratch_directory(directory / SCRATCH) as scratch:
        grown = [_grow(store, learned, settings, scratch) for store in stores]
    token, phrase = grown[0], grown[1] if len(grown) > 1 else learned.phrase_section
    assert isinstance(token, TokenSection) and (phrase is None or isinstance(phrase, PhraseSection))
    firsts = _first_entries(learned)
    sentences = _sentences(directory, phrase, learned) if phrase is not None and len(grown) > 1 else {}
    moved = [
        replace(
            pair,
            first_entry=firsts[pair.id],
            sentence=sentences.get(pair.id, pair.sentence),
            entries=None,
            phrases=None,
        )
        for pair in learned.pairs.values()
    ]
    records = learned.records_after_compaction(token, phrase, moved)
    create_journal(journal_path(directory, token.generation), records)
    Manifest.update(directory, [(store.section, after) for store, after in zip(stores, grown)])


def _grow(store: Datastore, learned: LearnedStore, settings: CompactSettings, scratch: Path) -> Section:
    """Write the next generation of a part to where it stays, though no manifest names it yet."""
    before: Section = store.section
    choice = parameters = ""
    write: Callable[[Path, Progress], Section]
    if isinstance(store, TokenDatastore):
        choice, parameters = settings.index, settings.index_parameters
        write = partial(_write_tokens, store, learned)
    else:
        write = partial(_write_phrases, store, learned)
    kept = "" if choice or parameters else before.index.parameters
    choice = choice or _existing_kind(before)
    grown = write_part(
        type(before), scratch, before.size, write, settings.quiet, settings.cpu, choice, parameters, kept
    )
    grown.ancestors = [*before.ancestors, store.keys_fingerprint]
    grown.files = {f"{grown.folder}/{Path(name).name}": file for name, file in grown.files.items()}
    folder = store.directory / grown.folder
    rmtree(folder, ignore_errors=True)  # left by a run that was killed
    (scratch / before.PART).rename(folder)
    return grown


def _first_entries(learned: LearnedStore) -> dict[int, int]:
    """Say where the pairs that count begin once what is gone has left and the new ones have come."""
    starts, gone_before = [first for first, _ in learned.gone], [0, *accumulate(n for _, n in learned.gone)]
    firsts, end = dict[int, int](), learned.datastore.section.size - gone_before[-1]
    for number, pair in learned.pairs.items():
        if pair.first_entry is not None:
            firsts[number] = pair.first_entry - gone_before[bisect(starts, pair.first_entry)]
        else:
            firsts[number], end = end, end + pair.tokens
    return firsts


def _own_sources(store: Datastore) -> tuple[list[Source], str]:
    """List the corpora of a datastore but for what was learned, the last one, and what that is called."""
    name = store.directory.resolve().name
    sources = sources_of(name, store)
    return (sources[:-1], sources[-1].name) if store.section.ancestors else (sources, f"{name}-{LEARNED}")


def _joined(section: Section, blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    shapes = replace(section, size=0).shapes(*section.ROWS)
    return {
        name: np.concatenate([np.empty(*shapes[name]), *(block[name] for block in blocks)]) for name in shapes
    }


def _write_tokens(
    datastore: TokenDatastore, learned: LearnedStore, folder: Path, progress: Progress
) -> TokenSection:
    """Write the tokens, each learned pair a sentence."""
    section, pairs = datastore.section, learned.pairs
    gone_sentences = datastore.provenance[[first for first, _ in learned.gone], 0]
    blocks = [
        {
            KEYS: keys,
            VALUES: values,
            PROVENANCE: np.stack([np.full(len(values), n), np.arange(len(values))], axis=1),
        }
        for n, (values, keys) in enumerate(learned.entries.values())
    ]
    first_sentence = sum(section.subsets.values())
    read = (pairs[number].read_as for number in learned.entries)
    sources_read = [(n, np.array(one.ids if one is not None else (), np.int32)) for n, one in enumerate(read)]
    arrays = _joined(section, blocks)
    parts = [
        rows_of(datastore, lambda numbers: np.where(np.isin(numbers, gone_sentences), -1, numbers)),
        Rows(arrays, lambda numbers: numbers + first_sentence, sources_read),
    ]
    sources, name = _own_sources(datastore)
    sources = [source for source in sources if source.size]
    corpus = fingerprint.of_strings(text for pair in pairs.values() for text in (pair.source, pair.target))
    sentences = first_sentence + len(blocks) - sum(source.sentences for source in sources)
    left, new = section.size - sum(n for _, n in learned.gone), sum(len(block[VALUES]) for block in blocks)
    size = left + new - sum(source.size for source in sources)  # also of pairs that a damaged journal lost
    sources.append(Source(name, corpus, size, sentences, 1.0, {LEARNED: sentences}))
    return write_tokens(datastore, parts, sources, folder, progress, grown=True)


def _write_phrases(
    datastore: PhraseDatastore, learned: LearnedStore, folder: Path, progress: Progress
) -> PhraseSection:
    """Write the phrases as if all text had been built together."""
    sources, name = _own_sources(datastore)
    having, column = _with_phrases(learned), len(sources)
    blocks = [
        {KEYS: pair.phrases.keys, SPANS: np.insert(pair.phrases.spans, 0, n, axis=1)}
        for n, pair in enumerate(having)
        if pair.phrases is not None
    ]
    arrays = _joined(datastore.section, blocks)
    texts = [
        text_of(datastore, [*range(column), None]),  # None: of what was learned before, which `having` has
        Text([pair.target for pair in having], np.ones((len(having), 1), bool), [column], arrays),
    ]
    return write_phrases(datastore, texts, [*sources, Source(name, "", 0, 0, 1.0)], folder, progress)


def _with_phrases(learned: LearnedStore) -> list[LearnedPair]:
    return [pair for pair in learned.pairs.values() if pair.sentence is not None or pair.phrases is not None]


def _sentences(directory: Path, section: PhraseSection, learned: LearnedStore) -> dict[int, int]:
    """Say where the targets of pairs with phrases are in a phrase part that was written with them."""
    folder, column = directory / section.folder, len(section.sources) - 1
    members = section.open_arrays(folder, MEMBERS)[MEMBERS]
    lines = open_sentences(folder, section.sentences)
    places = {
        lines[n]: OWN_SENTENCE if members[n, :column].any() else n
        for n in np.flatnonzero(members[:, column]).tolist()
    }
    return {pair.id: places[pair.target] for pair in _with_phrases(learned)}


def _existing_kind(section: Section) -> str:
    """Name the kind of an index as `--index` does; `auto` if it is exact because there was little."""
    index = section.index
    if section.size <= EXACT_UP_TO and not index.factory:
        return "auto"
    return f"{DISK}:{index.factory}" if index.backend == DISK else index.factory or index.backend


def refuse_elsewhere(directory: Path) -> None:
    """Refuse to compact parts that are not in the folder itself: the old ones would stay."""
    manifest = Manifest.read(directory)
    for section in filter(None, (manifest.token, manifest.phrase)):
        folder = directory / section.folder
        new = directory / replace(section, ancestors=[*section.ancestors, ""]).folder
        if new.is_symlink() or (new.exists() and not new.is_dir()):
            raise ConfigurationError(
                f"{new} is no folder, and compacting makes one of that name: move it away"
            )
        if folder.is_symlink() or folder.stat().st_dev != directory.stat().st_dev:
            what = "a symbolic link" if folder.is_symlink() else "on another disk"
            raise DatastoreError(
                f"{folder} is {what}, and compacting replaces it: move it into {directory} first"
            )


def remove_others(directory: Path) -> None:
    """Remove parts and journals that compaction has superseded, and what a killed run left.

    Phrases written in a model's subwords are removed too: they hold the tokens of forgotten sentences.
    """
    try:
        with only_writer(directory / MANIFEST):  # so that nothing is published meanwhile
            manifest = Manifest.read(directory)
            rmtree(partial_path(directory / SCRATCH), ignore_errors=True)
            for section in filter(None, (manifest.token, manifest.phrase)):
                for path in directory.glob(f"{section.PART}*"):
                    found = re.fullmatch(rf"{section.PART}(?:-(\d+))?", path.name)
                    if (
                        found
                        and int(found[1] or 0) != section.generation
                        and path.is_dir()
                        and not path.is_symlink()
                    ):
                        rmtree(path)
            if manifest.phrase is not None:
                remove_stale(PhraseDatastore(directory))
            if manifest.token is not None:
                remove_superseded(directory, manifest.token.generation)
    except OSError as error:
        raise DatastoreError(
            f"{error.filename or directory} holds what was forgotten, and cannot be removed "
            f"({error.strerror}), though all else is done: remove it"
        ) from None
