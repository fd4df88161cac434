"""Rewriting datastores: merged with others, without a corpus, or (`compact.py`) with the pairs learned alongside.

All are one algorithm: copy the rows of sentences that stay and append those that come, renumber the
sentences, index the keys, publish. What differs is which sentences stay (`Rows.renumber`), and what stands
alongside the rows of each kind. Nothing is encoded again. A merge appears under its name when it is complete.

Letters: S sentences, n texts (corpora), d width of keys.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fairseq_ccpr.building.corpus import join_domains, sample_domain
from fairseq_ccpr.building.options import refuse
from fairseq_ccpr.building.part import Part
from fairseq_ccpr.building.text_build import merge_text_parts
from fairseq_ccpr.datastore.domain import Domain
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.manifest import (
    REVERSE_MODEL,
    Manifest,
    PhraseSection,
    Section,
    Source,
    TokenSection,
)
from fairseq_ccpr.datastore.parts import (
    DOMAIN,
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
from fairseq_ccpr.datastore.preprocessing import remember, remembered
from fairseq_ccpr.datastore.source_index import Sources, write_source_index
from fairseq_ccpr.datastore.text import GENERAL, LANGUAGE, TextDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.base import Progress
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray, check_space, open_array
from fairseq_ccpr.storage.equal_strings import first_of_equals
from fairseq_ccpr.storage.files import atomic_directory, partial_path, write_json
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


# The algorithm


class Rows(NamedTuple):
    """Rows of one kind of part: of a datastore, or of learned pairs."""

    arrays: dict[str, np.ndarray]  # by name, see `Section.ROWS`
    renumber: Renumber  # of their sentences
    sources: Sources | None = None  # of tokens, by their old numbers; None: they are not known


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
    index = store.source_index
    return Rows(store.arrays, renumber, index.sources() if index is not None else None)


def write_tokens(
    base: TokenDatastore,
    parts: list[Rows],
    sources: list[Source],
    folder: Path,
    progress: Progress,
    grown: bool = False,
) -> TokenSection:
    """Write a token part without its index; statistics that no sample of keys gives are there already.

    Args:
        grown: whether it is `base` with what was learned, by which the likeness of its sentences must not
            change.
    """
    size = copy_rows(base.section, parts, folder, progress)
    for name in {SYMBOLS, PROJECTION_FILE}.intersection(base.section.names):
        copyfile(base.folder / name, folder / name)
    section = replace(_describe(base.section, sources), size=size, source_index=None)
    provenance = section.open_arrays(folder, PROVENANCE)[PROVENANCE]
    if (described := base.section.source_index) is not None and all(
        part.sources is not None for part in parts
    ):
        found, vocabulary, unknown = _renumbered(parts), described.vocabulary, described.unknown
        mean = described.mean_length if grown and described.known else None
        section.source_index = write_source_index(
            folder, found, provenance, vocabulary, unknown, mean_length=mean
        )
    else:
        logger.warning(
            "not all source sentences are known, as some were built before these were kept: the result has "
            "none; build it again to have them"
        )
    if section.projection is None and size:
        sample_domain(section.open_keys(folder), provenance).save(folder / DOMAIN)
    section.domain = (folder / DOMAIN).exists()
    return section


def _renumbered(parts: list[Rows]) -> Iterator[tuple[int, np.ndarray]]:
    for part in parts:
        sources = iter(part.sources or ())
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


# Merging, and removing a corpus


@dataclass(frozen=True)
class MergeSettings:
    """The options of `fairseq-ccpr merge`, and the datastores that it is given by name."""

    output: Path = option(help="the new datastore: a folder that does not exist", metavar="DIR")
    remove: list[str] = option([], "texts to remove", nargs="+", metavar="NAME")
    index: str = option(
        "auto",
        "as of fairseq-ccpr build; disk, or disk:FACTORY, keeps inverted lists on disk",
        metavar="exact|FACTORY",
    )
    index_parameters: str = option("", "FAISS search parameters", metavar="P=V,...")
    cpu: bool = False  # it chooses the index
    quiet: bool = False
    datastores: dict[str, Path] = field(default_factory=dict)  # by the name of their corpus

    def check(self) -> None:
        paths = list(self.datastores.values())
        output = self.output.resolve()
        written = {output, partial_path(output), *output.parents}
        refuse(
            *(
                (
                    path.resolve() in written,
                    f"--output {self.output} is, or is in, {path}, which is read: give another folder",
                )
                for path in paths
            ),
            (
                self.remove and len(paths) > 1,
                f"--remove takes from one datastore, but {len(paths)} are given: merge them first",
            ),
            (
                not self.remove and len(paths) == 1,
                f"{', '.join(map(str, paths))} alone cannot be merged: give several datastores, or --remove "
                "NAME",
            ),
        )


Input = tuple[Any, list[Source]]  # a TokenDatastore or PhraseDatastore that is merged


def merge_datastores(settings: MergeSettings) -> Manifest:
    """Write a new datastore from others, which stay unchanged, or from one without some of its corpora.

    The output appears when it is complete; after a kill the command starts over.
    """
    settings.check()
    directories = settings.datastores
    manifests = {name: Manifest.read(path) for name, path in directories.items()}
    tokens = {name: TokenDatastore(directories[name]) for name, one in manifests.items() if one.token}
    phrases = {name: _open_phrases(directories[name]) for name, one in manifests.items() if one.phrase}
    superseded = {store.directory: _superseded(store) for store in tokens.values()}
    opened: list[Datastore] = [*tokens.values(), *phrases.values()]
    for store in opened:
        _ = store.keys  # refused now, and not after hours, where a database has them
    texts = [TextDatastore(directories[name]) for name, one in manifests.items() if one.text]
    if texts and (reason := _why_not_merged(texts, settings.remove)):
        if not tokens and not phrases:
            raise ConfigurationError(reason)
        logger.warning("%s", reason)
        texts = []
    token_inputs, phrase_inputs = (
        _in_order([(store, sources_of(name, store)) for name, store in stores.items()])
        for stores in (tokens, phrases)
    )
    token_inputs = [
        (store, _without(sources, superseded[store.directory])) for store, sources in token_inputs
    ]
    plans: list[tuple[type[Section], Callable[..., Section], list[Input], list[Source]]] = [
        (TokenSection, partial(_merge_tokens, superseded), token_inputs, _sources_together(token_inputs)),
        (PhraseSection, _merge_phrases, phrase_inputs, _sources_together(phrase_inputs)),
    ]
    _refuse_unknown(settings, [source.name for *_, sources in plans for source in sources])
    sections = [section for one in manifests.values() for section in one.parts]
    files = [file for section in sections for file in section.files.items()]
    check_space(settings.output, sum(file["bytes"] for name, file in files if "/index-" not in name))
    with atomic_directory(settings.output) as folder:
        for kind, merge, inputs, sources in plans:
            if kept := [source for source in sources if source.name not in settings.remove]:
                size, write = sum(store.section.size for store, _ in inputs), partial(merge, inputs, kept)
                of_index = settings.index, settings.index_parameters
                write_part(kind, folder, size, write, settings.quiet, settings.cpu, *of_index)
        if texts:
            merge_text_parts(texts, folder, settings.quiet)
        known = [found for path in directories.values() if (found := remembered(path)) is not None]
        if known:  # all are of one model
            remember(known[0], folder)
    return Manifest.read(settings.output)


def _superseded(store: TokenDatastore) -> np.ndarray:
    """List the rows that corrections supersede, themselves a datastore's own; refuse those that are not."""
    learned = LearnedStore(store)
    if learned.entries or learned.gone or learned.phrases or learned.gone_sentences:
        raise ConfigurationError(
            f"{store.directory} has learned pairs ({len(learned.pairs):,}), and only a datastore's own "
            f"entries are merged: fairseq-ccpr compact {store.directory} makes them its own"
        )
    return learned.superseded


def _refuse_unknown(settings: MergeSettings, names: list[str]) -> None:
    """Refuse to remove a corpus that is not there, or all."""
    directory = next(iter(settings.datastores.values()))  # the only one where corpora are removed
    for name in settings.remove:
        if name not in names:
            known = ", ".join(dict.fromkeys(names))
            raise ConfigurationError(f"--remove {name}: the texts of {directory} are {known}")
    if names and not set(names) - set(settings.remove):
        raise ConfigurationError(f"--remove names all texts of {directory}: nothing would be left")


def _why_not_merged(texts: list[TextDatastore], removed: list[str]) -> str:
    """Say why text parts do not become one; empty where they do."""
    names = " and ".join(str(store.directory) for store in texts)
    if removed:
        return f"the text of {names} does not know its corpora, and is left out: fairseq-ccpr build text counts what stays"
    compared = [dict(store.section.fingerprints, order=store.section.order) for store in texts]
    for name in ("target_dictionary", LANGUAGE, "order", GENERAL):
        if len({one.get(name) for one in compared}) > 1:
            what = (
                "against different general text"
                if name == GENERAL
                else f"with another {name.replace('_', ' ')}"
            )
            return f"the texts of {names} were counted {what}, and are not merged: count them with fairseq-ccpr build text"
    return ""


def _open_phrases(directory: Path) -> PhraseDatastore:
    store = PhraseDatastore(directory)
    if store.section.pooled:
        raise ConfigurationError(
            f"the phrases of {directory} are one entry a string, the mean over the places of one text "
            "(XPR): build them again from all texts together"
        )
    return store


def _without(sources: list[Source], rows: np.ndarray) -> list[Source]:
    """Return the corpora of a datastore without some of its rows, int64, ascending."""
    counts = np.diff(np.searchsorted(rows, np.cumsum([0, *(source.size for source in sources)])))
    return [replace(source, size=source.size - int(count)) for source, count in zip(sources, counts)]


def _merge_tokens(
    superseded: dict[Path, np.ndarray],
    inputs: list[Input],
    kept: list[Source],
    folder: Path,
    progress: Progress,
) -> TokenSection:
    """Append tokens. Of states that were projected into keys, the samples are joined, if all have one.

    Args:
        superseded: rows that leave, of each datastore: corrections of their sources are among its own rows,
            too.
    """
    starts = dict(
        zip((source.corpus for source in kept), np.cumsum([0, *(one.sentences for one in kept)]).tolist())
    )
    parts, base = [], inputs[0][0]
    samples: list[tuple[Domain, int]] | None = [] if base.section.projection is not None else None
    for store, sources in inputs:
        ends = np.cumsum([source.sentences for source in sources])
        shifts = np.array([starts.get(source.corpus, LEAVES) + source.sentences for source in sources]) - ends
        left = np.unique(store.provenance[superseded[store.directory], 0])
        parts.append(rows_of(store, partial(_shift, ends, shifts, left)))
        if samples is not None and (domain := store.open_domain()) is None:
            logger.warning(
                "%s lacks statistics of its own text, so the merged datastore has none: build it again",
                store.directory,
            )
            samples = None
        if samples is not None:
            numbers = torch.from_numpy(_shift(ends, shifts, left, domain.numbers.numpy()))
            for source in (source for source in sources if source.corpus in starts):
                inside = (numbers >= starts[source.corpus]) & (
                    numbers < starts[source.corpus] + source.sentences
                )
                if inside.any():
                    samples.append((replace(domain, numbers=numbers).select(inside), source.size))
    if samples:
        join_domains(*map(list, zip(*samples))).save(folder / DOMAIN)
    merged = write_tokens(base, parts, kept, folder, progress)
    # Only the model knows lambda; the temperature is measured again, as all have nearer neighbours.
    return replace(
        merged, suits={name: value for name, value in merged.suits.items() if name != "temperature"}
    )


def _shift(ends: np.ndarray, shifts: np.ndarray, left: np.ndarray, sentences: np.ndarray) -> np.ndarray:
    """Renumber sentences by the shift of the corpus that each is of; `ends` and `shifts` are of the corpora.

    Those that are `left` out are -1.
    """
    numbers = np.maximum(sentences + shifts[np.searchsorted(ends, sentences, "right")], -1)
    return np.where(np.isin(sentences, left), -1, numbers)


def _merge_phrases(
    inputs: list[Input], kept: list[Source], folder: Path, progress: Progress
) -> PhraseSection:
    columns = {source.corpus: column for column, source in enumerate(kept)}
    texts = [text_of(store, [columns.get(source.corpus) for source in sources]) for store, sources in inputs]
    return write_phrases(inputs[0][0], texts, kept, folder, progress)


def _built_with(section: TokenSection | PhraseSection) -> dict[str, Any]:
    same: dict[str, Any] = {
        name.replace("_", " "): digest
        for name, digest in section.fingerprints.items()
        if name not in ("corpus", REVERSE_MODEL)  # of its text
    }
    same |= {"the width of keys": section.dimension, "the metric": section.index.metric}
    if isinstance(section, PhraseSection):
        return same | {"the segmentation": section.segmentation}
    return same | {"the key layer": section.key_layer, "the projection": section.digest(PROJECTION_FILE)}


def _in_order(inputs: list[Input]) -> list[Input]:
    """Check that datastores go together, and sort them so that the shards of a corpus follow one another."""
    for store, _ in inputs[1:]:
        first, second = (_built_with(one.section) for one in (inputs[0][0], store))
        for name in first | second:
            if first.get(name) != second.get(name):
                raise DatastoreError(
                    f"{inputs[0][0].directory} and {store.directory} cannot be merged: {name} is "
                    f"{fingerprint.brief(first.get(name))} in the first, and "
                    f"{fingerprint.brief(second.get(name))} in the second; build both with the same"
                )
    by_corpus: dict[str, list[Any]] = {}
    for store, sources in inputs:
        for source in sources:
            by_corpus.setdefault(source.corpus, []).append(store)
    for group in by_corpus.values():
        _check_shards(group)
    corpora = [sources[0].corpus for _, sources in inputs]
    return sorted(inputs, key=lambda one: (corpora.index(one[1][0].corpus), one[0].section.shard or []))


def _check_shards(group: list[Any]) -> None:
    by_number: dict[int, Path] = {}
    first = group[0].section.shard
    fractions = {store.section.share for store in group}
    for store in group:
        shard = store.section.shard
        if first and shard and first[1:] != shard[1:]:
            raise ConfigurationError(
                f"{group[0].directory} is one of {first[1]} shards in chunks of {first[2]:,}, and "
                f"{store.directory} one of {shard[1]} in chunks of {shard[2]:,}: build all with the same "
                "--num-shards and --chunk-sentences or --chunk-tokens, otherwise they do not line up"
            )
        number = shard[0] if shard else 0
        if number in by_number or (first is None) != (shard is None) or len(fractions) > 1:
            raise ConfigurationError(
                f"{by_number.get(number, group[0].directory)} and {store.directory} hold the same text"
                f"{f' (shard {number})' if shard else ''}: give each once"
            )
        by_number[number] = store.directory
    shards = first[1] if first else 1
    if missing := [str(number) for number in range(shards) if number not in by_number]:
        raise ConfigurationError(
            f"{group[0].directory} is one of {shards} shards, and these are missing: {', '.join(missing)}; "
            "give all of them"
        )


def _sources_together(inputs: list[Input]) -> list[Source]:
    """List the corpora in their order; the corpus of shards once, with the size of all of them."""
    sources: dict[str, Source] = {}
    for source in (source for _, several in inputs for source in several):
        if (before := sources.get(source.corpus)) is None:
            sources[source.corpus] = replace(source)
        else:
            before.size += source.size
            before.too_long += source.too_long
            # those of tokens are of the whole corpus
            before.sentences += 0 if source.subsets else source.sentences
    for name, count in Counter(source.name for source in sources.values()).items():
        if count > 1:
            raise ConfigurationError(f"two texts are called '{name}': name them, as in {name}-2=DATASTORE")
    if sum(source.sentences for source in sources.values()) > MOST_SENTENCES:
        raise ConfigurationError(
            f"the datastores have more than {MOST_SENTENCES:,} sentences together: merge fewer"
        )
    return list(sources.values())
