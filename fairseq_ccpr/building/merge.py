"""Merging datastores, and removing a corpus: which rows `rewrite.py` copies, and what may go together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.building.options import refuse
from fairseq_ccpr.building.rewrite import (
    LEAVES,
    MOST_SENTENCES,
    Datastore,
    rows_of,
    sources_of,
    text_of,
    write_part,
    write_phrases,
    write_tokens,
)
from fairseq_ccpr.building.text_build import merge_text_parts
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.manifest import (
    REVERSE_MODEL,
    Manifest,
    PhraseSection,
    Section,
    Source,
    TokenSection,
)
from fairseq_ccpr.datastore.parts import PROJECTION_FILE
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.preprocessing import remember, remembered
from fairseq_ccpr.datastore.text import GENERAL, LANGUAGE, TextDatastore
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search.base import Progress
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import check_space
from fairseq_ccpr.storage.files import atomic_directory, partial_path

logger = logging.getLogger(__name__)


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
    """Append tokens.

    Args:
        superseded: rows that leave, of each datastore: corrections of their sources are among its own rows,
            too.
    """
    starts = dict(
        zip((source.corpus for source in kept), np.cumsum([0, *(one.sentences for one in kept)]).tolist())
    )
    parts, base = [], inputs[0][0]
    for store, sources in inputs:
        ends = np.cumsum([source.sentences for source in sources])
        shifts = np.array([starts.get(source.corpus, LEAVES) + source.sentences for source in sources]) - ends
        left = np.unique(store.provenance[superseded[store.directory], 0])
        parts.append(rows_of(store, partial(_shift, ends, shifts, left)))
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
