"""Checks that parts of datastores can be merged: built with the same things, from other text, no shard missing or twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from fairseq_ccpr.building.part import Section
from fairseq_ccpr.datastore.manifest import REVERSE_MODEL, PhraseSection, Source, TokenSection
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.token import PROJECTION, TokenDatastore
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.storage import fingerprint

Store = TypeVar("Store", TokenDatastore, PhraseDatastore)


class Opened(Generic[Store]):
    """A datastore that is to be merged, and the corpora that its entries come from.

    Args:
        name: of its corpus, where it has but one.
        store: the token or the phrase part.
        too_long: sentences of that corpus that are longer than the phrase encoder reads.
    """

    def __init__(self, name: str, store: Store, too_long: int = 0) -> None:
        self.store: Store = store
        self.directory = store.directory
        section: TokenSection | PhraseSection = store.section
        subsets: dict[str, int] = section.subsets if isinstance(section, TokenSection) else {}
        sentences = section.sentences if isinstance(section, PhraseSection) else sum(subsets.values())
        whole = Source(
            name, section.fingerprints["corpus"], section.size, sentences, section.share, dict(subsets), too_long,
            section.fingerprints.get(REVERSE_MODEL, ""),
        )  # fmt: skip
        self.sources: list[Source] = section.sources or [whole]


def check_alike(opened: list[Opened[Store]]) -> None:
    """Refuse to merge what was built with different things.

    Raises:
        DatastoreError: names both sides.
    """
    first, *others = opened
    wanted = _built_with(first.store.section)
    for other in others:
        found = _built_with(other.store.section)
        for name in wanted | found:
            if wanted.get(name) != found.get(name):
                raise DatastoreError(
                    f"{first.directory} and {other.directory} cannot be merged: {name} is {_brief(wanted.get(name))} in the "
                    f"first, and {_brief(found.get(name))} in the second; build both with the same"
                )


def _built_with(section: TokenSection | PhraseSection) -> dict[str, Any]:
    """Collect the properties that must be equal in all of them, by name."""
    of_text = ("corpus", REVERSE_MODEL)
    same: dict[str, Any] = {k.replace("_", " "): v for k, v in section.fingerprints.items() if k not in of_text}
    same |= {"the width of keys": section.dimension, "the metric": section.index.metric}
    if isinstance(section, PhraseSection):
        return same | {"the segmentation": section.segmentation}
    return same | {"the key layer": section.key_layer, "the projection": section.digest(PROJECTION)}


def _brief(value: Any) -> str:
    return fingerprint.short(value) if isinstance(value, str) and len(value) == 64 else str(value)


def in_order(opened: list[Opened[Store]]) -> list[Opened[Store]]:
    """Sort datastores so that the shards of a corpus follow one another.

    Raises:
        ConfigurationError: a shard is missing, or a corpus or a shard is given twice, or two corpora have one name.
    """
    by_corpus: dict[str, list[Opened[Store]]] = {}
    for one in opened:
        for source in one.sources:
            by_corpus.setdefault(source.corpus, []).append(one)
    for group in by_corpus.values():
        _check_shards(group)
    ordered: list[Opened[Store]] = []
    for one in opened:
        if one.store.section.shard is None:
            ordered.append(one)
        elif one not in ordered:
            ordered += sorted(by_corpus[one.sources[0].corpus], key=lambda shard: shard.store.section.shard or [])
    return ordered


def _check_shards(group: list[Opened[Store]]) -> None:
    """Check that the datastores of one corpus are a single one, or all of its shards."""
    by_number: dict[int, Path] = {}
    first = group[0].store.section.shard
    fractions = {one.store.section.share for one in group}
    for one in group:
        shard = one.store.section.shard
        if first and shard and first[1:] != shard[1:]:
            raise ConfigurationError(
                f"{group[0].directory} is one of {first[1]} shards in chunks of {first[2]:,}, and {one.directory} one of "
                f"{shard[1]} in chunks of {shard[2]:,}: build all with the same --num-shards and --chunk-sentences or "
                "--chunk-tokens, otherwise they do not line up"
            )
        number = shard[0] if shard else 0
        if number in by_number or (first is None) != (shard is None) or len(fractions) > 1:
            before = by_number.get(number, group[0].directory)
            raise ConfigurationError(
                f"{before} and {one.directory} hold the same text{f' (shard {number})' if shard else ''}: "
                "give each once"
            )
        by_number[number] = one.directory
    wanted = first[1] if first else 1
    if missing := [str(number) for number in range(wanted) if number not in by_number]:
        raise ConfigurationError(
            f"{group[0].directory} is one of {wanted} shards, and these are missing: {', '.join(missing)}; give all of them"
        )


def sources_of(ordered: list[Opened[Store]]) -> list[Source]:
    """List the corpora in their order; the corpus of shards once, with the size of all of them.

    Raises:
        ConfigurationError: two have the same name.
    """
    sources: dict[str, Source] = {}
    for one in ordered:
        for source in one.sources:
            before = sources.get(source.corpus)
            if before is None:
                sources[source.corpus] = replace(source)
            else:
                before.size += source.size
                before.too_long += source.too_long
                before.sentences += 0 if source.subsets else source.sentences  # those of tokens are of the whole corpus
    names: set[str] = set()
    for source in sources.values():
        if source.name in names:
            raise ConfigurationError(
                f"two texts are called '{source.name}': name them, as in {source.name}-2=DATASTORE"
            )
        names.add(source.name)
    return list(sources.values())


def describe_corpora(section: Section, kept: list[Source]) -> Section:
    """Record the corpora in a section: a single one as if the datastore was built from it, several each by its name."""
    one = kept[0] if len(kept) == 1 else None
    of_text = {"corpus": one.corpus if one else fingerprint.of_strings(source.corpus for source in kept)}
    if one and one.reverse_model:
        of_text[REVERSE_MODEL] = one.reverse_model
    changed = replace(
        section,
        fingerprints={name: digest for name, digest in section.fingerprints.items() if name != REVERSE_MODEL} | of_text,
        share=one.share if one else 1.0,
        shard=None,
        sources=[] if one else kept,
    )
    if isinstance(changed, TokenSection):
        named = {f"{source.name}/{subset}": n for source in kept for subset, n in source.subsets.items()}
        changed.subsets = dict(one.subsets) if one else named
    return changed
