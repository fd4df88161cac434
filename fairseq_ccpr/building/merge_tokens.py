"""Merging token datastores: entries are appended, and their sentences numbered through."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fairseq_ccpr.building.compatible import Opened, describe_corpora
from fairseq_ccpr.building.domain_sample import join_domains, sample_domain
from fairseq_ccpr.datastore.manifest import Source, TokenSection
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
from fairseq_ccpr.storage.arrays import GrowingArray, open_array

BLOCK_ROWS = 1 << 16

logger = logging.getLogger(__name__)


def merge_tokens(
    ordered: list[Opened[TokenDatastore]], kept: list[Source], part: Path, progress: Callable[[int], object]
) -> TokenSection:
    """Write the token part of a datastore, without its index.

    Args:
        ordered: from `compatible.in_order`.
        kept: the corpora that stay.
        part: folder to write to.
        progress: told how many entries were written.

    Returns:
        Its section of the manifest, without index and files.
    """
    arrays = {
        name: GrowingArray(part / f"{name}.npy", shape[1:], dtype)
        for name, (shape, dtype) in array_shapes(0, ordered[0].store.section.dimension).items()
    }
    starts, sentences = {}, 0  # where the sentences of each corpus begin
    for source in kept:
        starts[source.corpus] = sentences
        sentences += source.sentences
    for one in ordered:
        first = before = 0
        for source in one.sources:
            if source.corpus in starts:
                rows = range(first, first + source.size)
                _append(one.store, rows, starts[source.corpus] - before, arrays, progress)
            first, before = first + source.size, before + source.sentences
    for array in arrays.values():
        array.close()
    for name in (SYMBOLS, *([PROJECTION] if ordered[0].store.section.projection else [])):
        shutil.copyfile(ordered[0].store.folder / name, part / name)
    section = replace(describe_corpora(ordered[0].store.section, kept), size=arrays[VALUES].rows, ancestors=[])
    section.domain = _write_domain(ordered, starts, section, part)
    return section


def _write_domain(
    ordered: list[Opened[TokenDatastore]], starts: dict[str, int], section: TokenSection, part: Path
) -> bool:
    """Write statistics of the merged datastore's own text; return whether there are any.

    Decoder states are sampled again. Keys of an adapter are not decoder states: there the samples are joined, without
    the sentences of corpora that were left out.
    """
    if section.projection is None:
        shapes = array_shapes(section.size, section.dimension)
        keys, provenance = (open_array(part / f"{name}.npy", *shapes[name]) for name in (KEYS, PROVENANCE))
        sample_domain(keys, provenance).save(part / DOMAIN)
        return True
    domains, sizes = [], []
    for one in ordered:
        domain, before = one.store.open_domain(), 0
        if domain is None:
            logger.warning(
                "%s lacks statistics of its own text, so the merged datastore has none: build it again", one.directory
            )
            return False
        for source in one.sources:
            if source.corpus in starts:
                inside = (domain.numbers >= before) & (domain.numbers < before + source.sentences)
                if inside.any():
                    domains.append(domain.select(inside, starts[source.corpus] - before))
                    sizes.append(source.size)
            before += source.sentences
    if domains:
        join_domains(domains, sizes).save(part / DOMAIN)
    return bool(domains)


def _append(
    store: TokenDatastore, rows: range, shift: int, arrays: dict[str, GrowingArray], progress: Callable[[int], object]
) -> None:
    """Append rows of a datastore, adding `shift` to the numbers of their sentences."""
    for start in range(rows.start, rows.stop, BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, rows.stop))
        arrays[KEYS].append(store.keys[block])
        arrays[VALUES].append(store.values[block])
        arrays[PROVENANCE].append(store.provenance[block] + [shift, 0])
        progress(block.stop - block.start)
