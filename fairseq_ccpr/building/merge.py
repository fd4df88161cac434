"""Merging datastores, or the shards of one, and taking a corpus out of one. Nothing is encoded again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fairseq_ccpr.building.compact_phrases import needs_compacting
from fairseq_ccpr.building.compatible import Opened, Store, check_alike, in_order, sources_of
from fairseq_ccpr.building.merge_phrases import merge_phrases
from fairseq_ccpr.building.merge_tokens import merge_tokens
from fairseq_ccpr.building.part import PHRASES, TOKENS, FolderKeys, Part, Section
from fairseq_ccpr.common_options import quiet_option
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.manifest import Manifest, Source
from fairseq_ccpr.datastore.phrase import TOTALS, PhraseDatastore
from fairseq_ccpr.datastore.preprocessing import remember, remembered
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.device import choose_device
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.progress import progress_bar
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage.arrays import check_space
from fairseq_ccpr.storage.atomic import atomic_directory, partial_path

MOST_SENTENCES = 2**31 - 1  # what an int32 counts


@dataclass(frozen=True)
class MergeSettings:
    """The options of `fairseq-ccpr merge`, and the datastores that it is given by name."""

    output: Path = option(help="the new datastore: a folder that does not exist", metavar="DIR")
    remove: list[str] = option([], "texts to remove", nargs="+", metavar="NAME")
    index: str = option(
        "auto", "as of fairseq-ccpr build; disk, or disk:FACTORY, keeps inverted lists on disk", metavar="exact|FACTORY"
    )
    index_parameters: str = option("", "FAISS search parameters", metavar="P=V,...")
    cpu: bool = option(False, "choose the index for a CPU even where there is a GPU")
    quiet: bool = quiet_option()
    datastores: dict[str, Path] = field(default_factory=dict)  # by the name of their corpus

    def check(self) -> None:
        """Check that the options go together.

        Raises:
            ConfigurationError: names the option.
        """
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
    """Write a new datastore from others, which stay unchanged.

    1. Open all of them, and check that they go together.
    2. Copy what stays, block by block, so that memory does not depend on its size.
    3. Index and publish. The output appears when it is complete; after a kill the command starts over.

    Raises:
        ConfigurationError, DatastoreError: one sentence for the user.
    """
    settings.check()
    manifests = {name: Manifest.read(path) for name, path in settings.datastores.items()}
    tokens = [Opened(n, TokenDatastore(settings.datastores[n])) for n, m in manifests.items() if m.token]
    phrases = [_open_phrases(n, settings.datastores[n]) for n, m in manifests.items() if m.phrase]
    _check_learnt(tokens)
    token_plan, phrase_plan = _plan(tokens, settings), _plan(phrases, settings)
    _check_removed([*tokens, *phrases], settings)
    check_space(settings.output, sum(_bytes(manifest) for manifest in manifests.values()))
    with atomic_directory(settings.output) as folder:
        if token_plan is not None:
            _write(Part(folder, TOKENS, FolderKeys(not settings.quiet)), merge_tokens, token_plan, settings)
        if phrase_plan is not None:
            _write(Part(folder, PHRASES, FolderKeys(not settings.quiet)), merge_phrases, phrase_plan, settings)
        known = [found for path in settings.datastores.values() if (found := remembered(path)) is not None]
        if known:  # all are of one model
            remember(known[0], folder)
    return Manifest.read(settings.output)


def _check_learnt(opened: list[Opened[TokenDatastore]]) -> None:
    """Refuse datastores with learnt or forgotten pairs that were not compacted into their own entries."""
    for one in opened:
        learnt = LearnedStore(one.store)
        if learnt.entries or learnt.gone or needs_compacting(learnt):
            raise ConfigurationError(
                f"{one.directory} has learnt pairs ({len(learnt.pairs):,}), and only a datastore's own entries are merged: "
                f"fairseq-ccpr compact {one.directory} makes them its own"
            )


def _open_phrases(name: str, directory: Path) -> Opened[PhraseDatastore]:
    store = PhraseDatastore(directory)
    if store.keys is None:
        raise ConfigurationError(
            f"the keys of {directory} are in {store.section.store}, and only those in a folder can be merged: build it "
            "without --store"
        )
    if store.section.pooled:
        raise ConfigurationError(
            f"the phrases of {directory} are one entry a string, the mean over the places of one text (XPR): build them "
            "again from all texts together"
        )
    totals = json.loads((store.folder / TOTALS).read_text(encoding="utf-8"))
    return Opened(name, store, totals["too_long"])


def _plan(opened: list[Opened[Store]], settings: MergeSettings) -> tuple[list[Opened[Store]], list[Source]] | None:
    """Order what is copied, and choose the corpora that stay; None if none does."""
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
    """Check that the corpora to remove exist, and that others stay."""
    names = list(dict.fromkeys(source.name for one in opened for source in one.sources))
    for name in settings.remove:
        if name not in names:
            raise ConfigurationError(f"--remove {name}: the texts of {opened[0].directory} are {', '.join(names)}")
    if not set(names) - set(settings.remove):
        raise ConfigurationError(f"--remove names all texts of {opened[0].directory}: nothing would be left")


def _bytes(manifest: Manifest) -> int:
    """Bytes of a datastore's files but its indexes."""
    sections = [section for section in (manifest.token, manifest.phrase) if section is not None]
    return sum(file["bytes"] for section in sections for name, file in section.files.items() if "/index-" not in name)


def _write(
    part: Part[Section],
    merge: Callable[[list[Opened[Store]], list[Source], Path, Callable[[int], object]], Section],
    plan: tuple[list[Opened[Store]], list[Source]],
    settings: MergeSettings,
) -> None:
    """Write one part of the output: merge what `plan` names, then index and publish it."""
    ordered, kept = plan
    part.partial.mkdir()
    total = sum(opened.store.section.size for opened in ordered)
    with progress_bar(f"{part.kind.name}s", "entry", total=total, quiet=settings.quiet) as bar:
        section = merge(ordered, kept, part.partial, bar.update)
    gpu = choose_device(settings.cpu).type == "cuda"
    section.index = plan_index(
        settings.index, section.index.metric, settings.index_parameters, section.size, section.dimension, gpu,
        part.kind.effort,
    )  # fmt: skip
    part.publish(section)
