"""Datastores, or shards of one, become one; or a corpus is taken out of one. Nothing is encoded again."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from fairseq_ccpr.building.compatible import (
    Opened,
    check_alike,
    in_order,
    sources_of,
)
from fairseq_ccpr.building.merge_phrases import merge_phrases
from fairseq_ccpr.building.merge_tokens import merge_tokens
from fairseq_ccpr.datastore import phrase, token
from fairseq_ccpr.datastore.manifest import (
    Manifest,
    PhraseSection,
    Source,
    TokenSection,
)
from fairseq_ccpr.datastore.phrase import PHRASE, TOTALS, PhraseDatastore
from fairseq_ccpr.datastore.token import TOKEN, TokenDatastore
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import build_index, open_index
from fairseq_ccpr.search.index_plan import (
    PHRASE_DEPTH,
    PHRASE_EFFORT,
    TOKEN_EFFORT,
    Effort,
    index_bytes,
    plan_index,
)
from fairseq_ccpr.search.recall import recall_of_sample
from fairseq_ccpr.storage.arrays import check_space, open_array
from fairseq_ccpr.storage.atomic import atomic_directory, partial_path
from fairseq_ccpr.storage.files import describe_files

MOST_SENTENCES = 2**31 - 1  # what an int32 counts
Store = TypeVar("Store", TokenDatastore, PhraseDatastore)


@dataclass
class MergeSettings:
    """What `merge_datastores.py` is told. The command's options have these names and defaults."""

    datastores: dict[str, Path]  # by the name of their corpus
    output: Path
    remove: list[str] = field(default_factory=list)
    index: str = "auto"
    index_parameters: str = ""
    cpu: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Raise a ConfigurationError where the options do not go together."""
        paths = list(self.datastores.values())
        output = self.output.resolve()
        written = {output, partial_path(output), *output.parents}
        for path in paths:
            if path.resolve() in written:
                raise ConfigurationError(
                    f"--output {self.output} is, or is in, {path}, which is read: give another folder"
                )
        if self.remove and len(paths) > 1:
            raise ConfigurationError(f"--remove takes from one datastore, but {len(paths)} are given: merge them first")
        if not self.remove and len(paths) == 1:
            raise ConfigurationError(f"{paths[0]} alone cannot be merged: give several datastores, or --remove NAME")


def merge_datastores(settings: MergeSettings) -> Manifest:
    """Write a new datastore out of others, which stay as they are.

    1. Open all, and see that they go together.
    2. Copy what stays, block by block: neither memory nor what was encoded depends on how much it is.
    3. Index, publish: the output appears when all of it is there; after a kill the command begins anew.

    Raises:
        ConfigurationError, DatastoreError: one sentence for the user.
    """
    settings.check()
    manifests = {name: Manifest.read(path) for name, path in settings.datastores.items()}
    tokens = [Opened(n, TokenDatastore(settings.datastores[n])) for n, m in manifests.items() if m.token]
    phrases = [_open_phrases(n, settings.datastores[n]) for n, m in manifests.items() if m.phrase]
    token_plan, phrase_plan = _plan(tokens, settings), _plan(phrases, settings)
    _check_removed([*tokens, *phrases], settings)
    check_space(settings.output, sum(_bytes(manifest) for manifest in manifests.values()))
    merged = Manifest()
    with atomic_directory(settings.output) as folder:
        if token_plan is not None:
            with _bar("tokens", token_plan[0], settings) as bar:
                merged.token = merge_tokens(*token_plan, folder, bar.update)
            _index(merged.token, folder / TOKEN, TOKEN_EFFORT, 0, settings)
            merged.token.files = describe_files(folder, [f"{TOKEN}/{name}" for name in token.part_files(merged.token)])
        if phrase_plan is not None:
            with _bar("phrases", phrase_plan[0], settings) as bar:
                merged.phrase = merge_phrases(*phrase_plan, folder, bar.update)
            shutil.rmtree(folder / PHRASE / "scratch")
            _index(merged.phrase, folder / PHRASE, PHRASE_EFFORT, PHRASE_DEPTH, settings)
            names = phrase.part_files(merged.phrase)
            merged.phrase.files = describe_files(folder, [f"{PHRASE}/{name}" for name in names])
        merged.write(folder)
    return merged


def _open_phrases(name: str, directory: Path) -> Opened[PhraseDatastore]:
    store = PhraseDatastore(directory)
    if store.section.store is not None:
        raise ConfigurationError(
            f"the keys of {directory} are in {store.section.store}, and only those in a folder can be merged: build it "
            "without --store"
        )
    if store.section.pooled:
        raise ConfigurationError(
            f"the phrases of {directory} are one entry a string, the mean over the places of one text (XPR): build them anew "
            "from all texts together"
        )
    totals = json.loads((directory / PHRASE / TOTALS).read_text(encoding="utf-8"))
    return Opened(name, store, totals["too_long"])


def _plan(opened: list[Opened[Store]], settings: MergeSettings) -> tuple[list[Opened[Store]], list[Source]] | None:
    """What is copied in which order, and which corpora stay; None where none does."""
    if not opened:
        return None
    check_alike(opened)
    ordered = in_order(opened)
    sources = sources_of(ordered)
    if sum(source.sentences for source in sources) > MOST_SENTENCES:
        raise ConfigurationError(f"the datastores have more than {MOST_SENTENCES:,} sentences together: merge fewer")
    kept = [source for source in sources if source.name not in settings.remove]
    return (ordered, kept) if kept else None


def _check_removed(opened: list[Opened[TokenDatastore] | Opened[PhraseDatastore]], settings: MergeSettings) -> None:
    """See that what is to go is there, and something else too."""
    names = list(dict.fromkeys(source.name for one in opened for source in one.sources))
    for name in settings.remove:
        if name not in names:
            raise ConfigurationError(f"--remove {name}: the texts of {opened[0].directory} are {', '.join(names)}")
    if not set(names) - set(settings.remove):
        raise ConfigurationError(f"--remove names all texts of {opened[0].directory}: nothing would be left")


def _bytes(manifest: Manifest) -> int:
    """Of a datastore, all but its indexes."""
    sections = [section for section in (manifest.token, manifest.phrase) if section is not None]
    return sum(file["bytes"] for section in sections for name, file in section.files.items() if "/index-" not in name)


def _bar(what: str, ordered: list[Opened[Store]], settings: MergeSettings) -> tqdm:
    total = sum(one.store.section.size for one in ordered)
    return tqdm(desc=what, total=total, unit="entry", unit_scale=True, disable=settings.quiet)


def _index(
    section: TokenSection | PhraseSection, part: Path, effort: Effort, asked: int, settings: MergeSettings
) -> None:
    """Index the keys of a part, of which a search asks for at least so many."""
    gpu = torch.cuda.is_available() and not settings.cpu
    metric, section.index_recall = section.index.metric, None
    section.index = plan_index(
        settings.index, metric, settings.index_parameters, section.size, section.dimension, gpu, effort
    )
    if not section.index.file:
        return
    check_space(part, index_bytes(section.index, section.size, section.dimension))
    keys = open_array(part / f"{phrase.KEYS}.npy", (section.size, section.dimension), "float16")
    with tqdm(desc="index", total=len(keys), unit="key", unit_scale=True, disable=settings.quiet) as bar:
        build_index(keys, section.index, part / section.index.file, bar.update)
    section.index_recall = recall_of_sample(open_index(section.index, keys, part), keys, asked)
