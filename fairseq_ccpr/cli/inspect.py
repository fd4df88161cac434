"""`fairseq-ccpr inspect`: show what a datastore holds, and whether it is undamaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from fairseq_ccpr.cli.command import command, counted, markdown_table
from fairseq_ccpr.cli.phrase_prompt import marked
from fairseq_ccpr.common_options import count_option
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.manifest import REVERSE_MODEL, Manifest, PhraseSection, TokenSection
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.preprocessing import remembered
from fairseq_ccpr.datastore.token import KEYS, UNKNOWN, TokenDatastore
from fairseq_ccpr.datastore.tuned import tuned_signatures
from fairseq_ccpr.decoding.phrase_retriever import RetrievedPhrase
from fairseq_ccpr.evaluation.machine import Limits
from fairseq_ccpr.evaluation.planning import describe_room, measure_speeds, needs, parse_speeds
from fairseq_ccpr.search.recall import DEPTH, SAMPLE
from fairseq_ccpr.settings import option

SEARCHED = {"disk": "from disk, mapped", "host": "in memory, on the CPU", "device": "on one GPU", "devices": "on GPUs"}

HELP = """\
Show what a datastore holds and what it was built from, and verify every byte of its tokens and phrases. The exit code is 0
if it is whole, 1 if it is damaged.

  fairseq-ccpr inspect datastores/mine

--plan prints instead what each index needs, at this size or another: bytes on disk, in memory and on GPUs, and a lower bound
on the time of a step, from the bytes it reads and the bandwidth, which is measured here unless --speeds gives it.

  fairseq-ccpr inspect datastores/mine --plan --size 1000000000 --speeds device=3350 disk=3
"""


@dataclass
class Options:
    """The command's options."""

    datastore: Path = option(help="the datastore", positional=True, metavar="DIR")
    top: int = option(10, "how many of the most frequent tokens, and of the phrases, to show", metavar="N")
    plan: bool = option(False, "print what it needs; reads up to 0.3 GB of its keys to measure the disk")
    size: Optional[int] = count_option(None, "entries to plan for (those it has)")
    queries: int = option(
        160, "looked up together: hypotheses of a batch, or phrases",
        within="[1, inf)", needs="at least 1", metavar="H",
    )  # fmt: skip
    speeds: list[str] = option(
        [], "of host, device or disk, in place of measured ones", nargs="+", metavar="PLACE=GB/S"
    )
    index: list[str] = option([], "further indexes to plan for: FACTORY or disk:FACTORY", nargs="+", metavar="FACTORY")


def inspect_or_plan(options: Options) -> int:
    """Show what the datastore holds, or what it needs."""
    return plan(options) if options.plan else inspect(options.datastore, options.top)


def plan(options: Options) -> int:
    """Print what each way to search needs."""
    directory, speeds = options.datastore, parse_speeds(options.speeds)
    manifest = Manifest.read(directory)
    sections = {"token": manifest.token, "phrase": manifest.phrase}
    for part, section in sections.items():
        if section is None:
            continue
        folder = directory / section.folder
        known = measure_speeds(folder / f"{KEYS}.npy", speeds)
        entries = options.size or section.size
        print(
            f"{part} entries: {entries:,} of width {section.dimension}; {options.queries:,} queries per step; "
            f"speeds: {_as_text(known)}"
        )
        rows: list[list[Any]] = [
            ["index", "searched", "on disk", "in memory", "on GPUs", "read per step", "per step, at least"]
        ]
        for need in needs(section, entries, options.queries, known, tuple(options.index)):
            counts = [_gigabytes(n) for n in (need.disk, need.host, need.device, need.read)]
            rows.append([need.index, SEARCHED[need.place], *counts, _seconds(need.seconds)])
        print(markdown_table(rows))
    print(f"this machine: {describe_room(directory)}")
    return 0


def _as_text(speeds: dict[str, Limits]) -> str:
    return ", ".join(f"{place} {limits.bytes_per_second / 1e9:,.3g} GB/s" for place, limits in speeds.items())


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.4g} GB"


def _seconds(seconds: float | None) -> str:
    return "speed not known" if seconds is None else f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"


def inspect(directory: Path, top: int) -> int:
    """Print what there is, then what is wrong."""
    manifest = Manifest.read(directory)
    print(f"datastore      {directory}")
    _print_remembered(directory)
    healthy = True
    if manifest.phrase is None or manifest.token is not None:
        healthy = _inspect_tokens(TokenDatastore(directory), top)
    if manifest.phrase is not None:
        healthy = _inspect_phrases(PhraseDatastore(directory), top) and healthy
    return 0 if healthy else 1


def _print_remembered(directory: Path) -> None:
    """Print what decoding need not be told."""
    known = remembered(directory)
    if known is not None:
        print(
            f"translates     {known.source_lang} to {known.target_lang}, by {known.model or 'a model that is not known'}"
        )
        print(f"subwords       {known.options.get('bpe', 'not known: give --bpe')}")
    for parts, signature in tuned_signatures(directory).items():
        print(f"{f'tuned, {parts}':14} {signature}")


def _inspect_tokens(datastore: TokenDatastore, top: int) -> bool:
    """Print the token part; return whether it is undamaged."""
    section = datastore.section
    print(f"entries        {section.size:,} (keys fp16, {section.dimension} wide, {section.key_layer})")
    if section.projection is not None:
        print(f"adapter        {section.projection}, from states {section.projection.query_dimension} wide")
    print(f"sentences      {', '.join(f'{name} {count:,}' for name, count in section.subsets.items())}")
    if REVERSE_MODEL in section.fingerprints:
        print("sources        back-translations by the reverse model")
    _print_origin(section)
    if _print_damage(datastore.find_damage()):
        return False
    if unknown := datastore.count_unknown():
        print(f"unused         {unknown:,} of unknown tokens ({UNKNOWN}), which decoding passes over")
    if (domain := datastore.open_domain()) is not None:
        print(
            f"own text       {len(domain.states):,} states of {len(domain.lengths):,} sentences; their log distance is below "
            f"{domain.near:.2f} at 90% of the positions, {domain.far:.2f} at 99%"
        )
    learnt = LearnedStore(datastore)
    if learnt.pairs:
        print(f"learnt         {counted(len(learnt.pairs), 'pair')}, in addition to them{_count_phrases(learnt)}")
    if _print_damage([learnt.damage] if learnt.damage else []):
        return False
    symbols, counts = datastore.read_symbols(), np.bincount(datastore.values)
    for token in np.argsort(-counts, kind="stable")[:top]:
        print(f"top token      {symbols[token]:20} {counts[token]:>12,}  {counts[token] / section.size:.1%}")
    print("health         good: checksums, numbers, tokens and index")
    return True


def _count_phrases(learnt: LearnedStore) -> str:
    """Tell of how many pairs the phrases were learnt, where there is a phrase part."""
    if learnt.phrase_section is None:
        return ""
    own = sum(pair.sentence is not None for pair in learnt.pairs.values())
    count = sum(len(phrases.spans) for phrases in learnt.phrases.values())
    return f", {own + len(learnt.phrases):,} of them with phrases ({count:,} not yet the phrase part's own)"


def _inspect_phrases(datastore: PhraseDatastore, top: int) -> bool:
    """Print the phrase part; return whether it is undamaged."""
    section = datastore.section
    print(f"phrases        {section.size:,} (keys fp16, {section.dimension} wide) of {section.sentences:,} sentences")
    print(f"segmentation   {', '.join(f'{name} {value}' for name, value in section.segmentation.items())}")
    _print_origin(section)
    if _print_damage(datastore.find_damage()):
        return False
    for entry in np.linspace(0, section.size, min(top, section.size), endpoint=False, dtype=int).tolist():
        print(f"phrase         {marked(RetrievedPhrase(entry, *datastore.phrase(entry), score=0.0))}")
    print("health         good: checksums, numbers, places and index of the phrases")
    return True


def _print_origin(section: TokenSection | PhraseSection) -> None:
    """Print fraction, index, fingerprints and files of a part."""
    if section.share < 1:
        print(f"fraction       {section.share:g} of them, drawn at random")
    if section.shard is not None:
        print(f"shard          {section.shard[0]} of {section.shard[1]}, counted from 0")
    for source in section.sources:
        back = f", sources translated back by {source.reverse_model}" if source.reverse_model else ""
        print(f"text           {source.name}: {source.size:,} entries, {source.sentences:,} sentences{back}")
    print(f"index          {section.index} ({section.index.metric})")
    if isinstance(section, PhraseSection) and section.store is not None:
        print(f"keys in        {section.store}")
    if section.index_recall is not None:
        print(
            f"recall         {section.index_recall:.1%} of the {DEPTH} nearest keys, for {SAMPLE} of its own drawn at random"
        )
    for name, value in section.fingerprints.items():
        print(f"{name:14} {value}")
    for name, file in section.files.items():
        print(f"{name:32} {file['bytes']:>16,} bytes")
    total = sum(file["bytes"] for file in section.files.values())
    print(f"{'total':32} {total:>16,} bytes" + (f", {total / section.size:,.0f} per entry" if section.size else ""))


def _print_damage(faults: list[str]) -> bool:
    for fault in faults:
        print(f"damaged        {fault}")
    return bool(faults)


main = command(HELP, inspect_or_plan, Options)
