"""What a datastore holds: `fairseq-ccpr learn`, `forget`, `memory`, `compact`, `merge` and `inspect`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Optional

import numpy as np

from fairseq_ccpr.building.compact import CompactSettings, compact_datastore
from fairseq_ccpr.building.merge import MergeSettings, merge_datastores
from fairseq_ccpr.cli.command import DEVICE, MODEL, check_folders, command, counted, markdown_table, named
from fairseq_ccpr.cli.planning import describe_room, measure_speeds, needs, parse_speeds
from fairseq_ccpr.cli.retrieve import marked
from fairseq_ccpr.datastore.learned import LearnedStore
from fairseq_ccpr.datastore.manifest import (
    PHRASE,
    REVERSE_MODEL,
    TEXT,
    TOKEN,
    Manifest,
    PhraseSection,
    Source,
    TokenSection,
)
from fairseq_ccpr.datastore.parts import CONTEXTS, GRAMS, KEYS
from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.datastore.preprocessing import remembered
from fairseq_ccpr.datastore.text import TextDatastore
from fairseq_ccpr.datastore.token import FAMILIAR, UNKNOWN_SYMBOL, TokenDatastore
from fairseq_ccpr.datastore.tuned import tuned_signatures
from fairseq_ccpr.decoding.phrase_retriever import RetrievedPhrase
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.inference.learning import Learner, as_tmx, count_learned
from fairseq_ccpr.inference.system import System
from fairseq_ccpr.search.base import EXACT_UP_TO
from fairseq_ccpr.search.recall import DEPTH, SAMPLE
from fairseq_ccpr.settings import count_option, option, source_language_option, target_language_option
from fairseq_ccpr.storage.files import write_text
from fairseq_ccpr.text.translation_memory import Pair, read_memory
from fairseq_ccpr.timing import progress_bar

DAMAGED = "damaged"
WINDOW = 256  # pairs that are learned together
EXAMPLES = 10  # of the most frequent tokens, and of the phrases, that are shown
SEARCHED = {
    "disk": "from disk, mapped",
    "host": "in memory, on the CPU",
    "device": "on one GPU",
    "devices": "on GPUs",
}

Rows = Iterable[tuple[str, object]]  # names and values that `inspect` prints, those that are empty left out


@command(
    """\
Learn sentence pairs into a datastore: corrections, or a translation memory. What was learned counts from the next translation
on, and is on disk before the command says so.

  fairseq-ccpr learn --datastore datastores/mine --source "Guten Morgen." --target "Good morning."
  fairseq-ccpr learn --datastore datastores/mine memory.tmx project.xlf pairs.tsv

Files are TMX, XLIFF (1.2 or 2, as Trados, memoQ and Phrase write it too) or TSV, plain, .gz, .xz or .bz2. A pair that is
already there is counted, not stored twice. A pair replaces the one learned before with the same source. What a tool says is
not confirmed, copies of the source, pairs with an empty or too long side, and lines of a TSV that are no pair or not UTF-8,
are left out and counted by reason. An interrupted run may be run again.

memory shows what was learned, and exports it; forget removes pairs.
""",
    shown=MODEL | {"--datastore", "--phrases-encoder", "--batch-size", "--max-tokens"} | DEVICE,
)
def learn(
    rest: list[str],
    files: list[Path] = option([], "translation memories", positional=True, nargs="*", metavar="FILE"),
    source: Optional[str] = option(None, "a sentence", metavar="TEXT"),
    target: Optional[str] = option(None, "its translation", metavar="TEXT"),
    unconfirmed: bool = option(False, "learn also what the files say is not confirmed, or rejected"),
    data: Optional[Path] = None,
    quiet: bool = False,
) -> int:
    if (source is None) != (target is None):
        raise ConfigurationError("--source and --target go together: give a sentence and its translation")
    if not files and source is None:
        raise ConfigurationError("there is nothing to learn: give files, or --source and --target")
    system = System.of(rest, data)
    # ids of new pairs
    learner, ids, counts, skipped = Learner(system), list[int](), Counter[str](), Counter[str]()

    def learn_pairs(pairs: Iterable[Pair]) -> None:
        waiting = iter(pairs)
        while some := list(islice(waiting, WINDOW)):
            ids.extend(count_learned(learner.learn(some), counts, skipped))
            bar.update(len(some))

    def report() -> None:
        again, replaced = counts["again"], counts["replaced"]
        which = f" (id {ids[0]})" if len(ids) == 1 else f" (ids {ids[0]} to {ids[-1]})" if ids else ""
        known = f"; {again:,} were there already, and are counted" if again else ""
        others = (
            "an earlier translation of its source"
            if replaced == 1
            else "earlier translations of their sources"
        )
        earlier = f"; {replaced:,} replaced {others}" if replaced else ""
        print(f"learned {counted(len(ids), 'pair')}{which}{known}{earlier}")
        for reason, count in skipped.most_common():
            print(f"left out {count:,}: {reason}")

    languages = system.task.cfg.source_lang, system.task.cfg.target_lang
    with closing(learner.memory.store), progress_bar("learned", "pair", quiet=quiet or not files) as bar:
        if source is not None and target is not None:
            learn_pairs([(source, target)])
        for path in files:
            try:
                learn_pairs(read_memory(path, *languages, skipped, unconfirmed))
            # the file is damaged from somewhere on; what came before counts already
            except ConfigurationError:
                if ids or counts["again"]:
                    report()
                raise
    report()
    size = learner.memory.entries.index.size
    if size > EXACT_UP_TO:
        print(
            f"{size:,} learned entries are searched beside the index at each step: fairseq-ccpr compact "
            "moves them into it"
        )
    return 0 if ids or counts["again"] else 1


@command("""\
Forget learned sentence pairs by their ids, which fairseq-ccpr learn and memory print. From the next translation on, they
are no longer retrieved.

  fairseq-ccpr forget datastores/mine 17 18

fairseq-ccpr compact erases their text and keys from the journal.
""")
def forget(
    datastore: Path = option(help="the datastore", positional=True, metavar="DIR"),
    ids: list[int] = option([], "ids of the pairs", positional=True, nargs="*", metavar="ID"),
    all: bool = option(False, "forget everything that was learned"),
) -> int:
    if all == bool(ids):
        raise ConfigurationError("say what to forget: give ids, or --all")
    with closing(LearnedStore(TokenDatastore(datastore))) as store:
        store.lock()  # others may have learned since
        known = {pair.id: pair for pair in reversed(store.find(""))}
        chosen = list(known) if all else list(dict.fromkeys(ids))
        restored = store.forget(chosen)
    pairs = [known[number] for number in chosen]
    for pair in pairs:
        print(f"{pair.id}\t{pair.source}\t{pair.target}")
    for pair in restored:
        print(f"{pair.id} counts again\t{pair.source}\t{pair.target}")
    left = len(known) - len(pairs)
    print(f"forgot {counted(len(pairs), 'pair')}; {left:,} {'is' if left == 1 else 'are'} left")
    return 0


@command("""\
Show the sentence pairs that a datastore has learned, newest first: id, how often each was learned, source, target, what has
replaced it, when it was learned, or made according to its file (UTC), and by whom, separated by tabs; the last three may be
empty. Pairs that a later translation of the same source has replaced do not count; they count again once they are learned
again, or the later one is forgotten. Words after the folder restrict the list to
pairs that contain all of them. The exit code is 1 if the journal is damaged: what the damage did not hit is kept and shown.
--repair writes a damaged journal again without the damaged bytes, which it copies to a file of their own, and says what was
saved. Whoever learns next does the same.

  fairseq-ccpr memory datastores/mine
  fairseq-ccpr memory datastores/mine guten morgen
  fairseq-ccpr memory datastores/mine --export memory.tmx
""")
def memory(
    datastore: Path = option(help="the datastore", positional=True, metavar="DIR"),
    words: list[str] = option([], "of source or target", positional=True, nargs="*", metavar="WORD"),
    most: Optional[int] = count_option(None, "show at most N pairs"),
    export: Optional[Path] = option(
        None, "write those that count to this TMX file instead, oldest first", metavar="FILE"
    ),
    repair: bool = option(False, "repair a damaged journal, rather than show anything"),
    source_lang: Optional[str] = source_language_option(
        None, "source language in the TMX (that of the datastore)"
    ),
    target_lang: Optional[str] = target_language_option(
        None, "target language in the TMX (that of the datastore)"
    ),
) -> int:
    check_folders(export=export)
    store = LearnedStore(TokenDatastore(datastore))
    if repair:
        return _repair(store)
    pairs = store.find(" ".join(words), counting=export is not None)[:most]
    if export is not None:
        known = remembered(datastore)
        source = source_lang or (known.source_lang if known is not None else None)
        target = target_lang or (known.target_lang if known is not None else None)
        if source is None or target is None:
            raise ConfigurationError(f"{datastore} does not remember its languages: give -s and -t")
        write_text(export, as_tmx(reversed(pairs), source, target))
        print(f"{export}: {counted(len(pairs), 'pair')}")
    else:
        for one in pairs:
            earlier = "" if one.replaced_by is None else f"replaced by {one.replaced_by}"
            when = f"{datetime.fromtimestamp(one.time, UTC):%Y-%m-%dT%H:%M:%SZ}" if one.time else ""
            print(one.id, one.count, one.source, one.target, earlier, when, one.author, sep="\t")
        if not store.pairs:
            print(f"nothing was learned alongside {datastore}", file=sys.stderr)
    return 1 if store.damage else 0


def _repair(store: LearnedStore) -> int:
    with closing(store):
        found = store.damage
        store.lock()
        if not found:
            print(f"{store.path} is whole: {counted(len(store.find('')), 'pair')}")
            return 0
        aside = f"; the damaged bytes are in {store.put_aside}" if store.put_aside is not None else ""
        print(f"{found}\nsaved {counted(len(store.find('')), 'pair')}{aside}")
    return 0


@command("""\
Move what a datastore has learned into its own entries, which its index finds, and erase what was forgotten: none of its text
or keys remains in any file of the datastore.

  fairseq-ccpr compact datastores/mine

Do it from time to time: what was learned since is searched in addition to the index, which takes time. Pairs keep their ids,
and can be shown, exported and forgotten as before. Other programs may translate meanwhile. Programs that learn must end
first, or compact by themselves, as serve does. The datastore is replaced at one moment. Run the command again if it was
interrupted. Tuned settings and trust stay valid.
""")
def compact(settings: CompactSettings) -> int:
    section, moved, removed = compact_datastore(settings)
    print(
        f"{settings.datastore}: {section.size:,} entries, index {section.index}; "
        f"{counted(moved, 'pair')} moved into it, {removed:,} that were forgotten left it"
    )
    return 0


@command("""\
Write a new datastore from others, tokens, phrases and text, without encoding anything again: from the shards of one build
(--num-shards), or from datastores of several texts, which are then known by NAME. Or remove texts from one.

  fairseq-ccpr merge mine.0 mine.1 mine.2 --output mine
  fairseq-ccpr merge office=datastores/office koran=datastores/koran --output datastores/both
  fairseq-ccpr merge datastores/both laws=datastores/laws --output datastores/three
  fairseq-ccpr merge datastores/three --remove koran --output datastores/two

All must be built with the same model or encoder, adapter, PCA, key layer, metric and segmentation. A phrase datastore holds
a sentence that several texts share once, until the last of them is removed. Text is counted again, against the same general
text; it does not know which of several texts it is of, and is left out where one is removed. The index is rebuilt. The input
datastores are not changed; the output appears when it is complete.
""")
def merge(
    datastores: list[str] = option(
        help="datastores, or shards; NAME is that of the text, by default the folder's; merged texts keep theirs",
        positional=True,
        nargs="+",
        metavar="[NAME=]DIR",
    ),
    *,
    settings: MergeSettings,
) -> int:
    folders = {name: Path(path) for name, path in named(datastores, "datastores").items()}
    manifest = merge_datastores(replace(settings, datastores=folders))
    for what, section in (("tokens", manifest.token), ("phrases", manifest.phrase)):
        if section is not None:
            texts = (
                f" of {', '.join(f'{s.name} ({s.size:,})' for s in section.sources)}"
                if section.sources
                else ""
            )
            print(
                f"{settings.output}: {section.size:,} {what}{texts}, width {section.dimension}, index "
                f"{section.index}"
            )
    if (text := manifest.text) is not None:
        print(f"{settings.output}: {text.sentences:,} sentences of {text.size:,} tokens of text")
    return 0


@command("""\
Show what a datastore holds and what it was built from, and verify every byte of its tokens, phrases and text. The exit
code is 0 if it is whole, 1 if it is damaged.

  fairseq-ccpr inspect datastores/mine

--plan prints instead what each index needs, at this size or another: bytes on disk, in memory and on GPUs, and a lower bound
on the time of a step, from the bytes it reads and the bandwidth, which is measured here unless --speeds gives it.

  fairseq-ccpr inspect datastores/mine --plan --size 1000000000 --speeds device=3350 disk=3
""")
def inspect(
    datastore: Path = option(help="the datastore", positional=True, metavar="DIR"),
    plan: bool = option(False, "print what it needs; reads up to 0.3 GB of its keys to measure the disk"),
    size: Optional[int] = count_option(None, "entries to plan for (those it has)"),
    queries: int = count_option(160, "looked up together: hypotheses of a batch, or phrases", metavar="H"),
    speeds: list[str] = option(
        [], "of host, device or disk, in place of measured ones", nargs="+", metavar="PLACE=GB/S"
    ),
    index: list[str] = option(
        [], "further indexes to plan for: FACTORY or disk:FACTORY", nargs="+", metavar="FACTORY"
    ),
) -> int:
    if plan:
        return _plan(datastore, size, queries, speeds, index)
    manifest = Manifest.read(datastore)
    print(f"datastore      {datastore}")
    known = remembered(datastore)
    if known is not None:  # what decoding need not be given
        model = known.model or "a model that is not known"
        print(f"translates     {known.source_lang} to {known.target_lang}, by {model}")
        print(f"subwords       {known.options.get('bpe', 'not known: give --bpe')}")
    for parts, signature in tuned_signatures(datastore).items():
        print(f"{f'tuned, {parts}':14} {signature}")
    inspected = [_inspect(datastore, section.PART) for section in manifest.parts]
    return 0 if all(inspected) else 1


def _inspect(directory: Path, part: str) -> bool:
    """Print what a part is and verify it; returns whether it is whole."""
    # its class, what to say first, what to say where it is whole, and what is then good
    kinds: dict[str, tuple[Any, ...]] = {
        TOKEN: (TokenDatastore, _of_tokens, _more_of_tokens, "checksums, numbers, tokens and index"),
        PHRASE: (
            PhraseDatastore,
            _of_phrases,
            _more_of_phrases,
            "checksums, numbers, places and index of the phrases",
        ),
        TEXT: (TextDatastore, _of_text, lambda store: (), "checksums of the text"),
    }
    kind, first, more, good = kinds[part]
    store = kind(directory)
    _print_rows(first(store))
    faults = store.find_damage()
    whole = _print_rows((DAMAGED, fault) for fault in faults) and _print_rows(more(store))
    if whole:
        print(f"health         good: {good}")
    return whole


def _print_rows(rows: Rows) -> bool:
    """Print rows that have a value; returns False if one of them reports damage."""
    names = set()
    for name, value in rows:
        if value:
            print(f"{name:14} {value}")
            names.add(name)
    return DAMAGED not in names


def _plan(directory: Path, size: int | None, queries: int, speeds: list[str], index: list[str]) -> int:
    manifest, given = Manifest.read(directory), parse_speeds(speeds)
    for part, section in (("token", manifest.token), ("phrase", manifest.phrase)):
        if section is None:
            continue
        known = measure_speeds(directory / section.folder / f"{KEYS}.npy", given)
        entries, width = size or section.size, section.dimension
        rates = ", ".join(
            f"{place} {limits.bytes_per_second / 1e9:,.3g} GB/s" for place, limits in known.items()
        )
        print(f"{part} entries: {entries:,} of width {width}; {queries:,} queries per step; speeds: {rates}")
        head = ["index", "searched", "on disk", "in memory", "on GPUs", "read per step", "per step, at least"]
        rows: list[list[Any]] = [head]
        for need in needs(section, entries, queries, known, tuple(index)):
            counts = [f"{count / 1e9:,.4g} GB" for count in (need.disk, need.host, need.device, need.read)]
            took = need.seconds
            time = (
                "speed not known"
                if took is None
                else f"{took:,.3g} s"
                if took >= 1
                else f"{took * 1e3:,.3g} ms"
            )
            rows.append([need.index, SEARCHED[need.place], *counts, time])
        print(markdown_table(rows))
    if (text := manifest.text) is not None:
        tokens, counted = size or text.size, TextDatastore(directory).counted_bytes / max(1, text.size)
        print(
            f"text of {tokens:,} tokens: at most {tokens * counted / 1e9:,.4g} GB in memory, mapped, "
            "or on one GPU, which has to have room for it"
        )
    print(f"this machine: {describe_room(directory)}")
    return 0


def _of_tokens(store: TokenDatastore) -> Rows:
    section, projection = store.section, store.section.projection
    keys = f"keys {section.KEY_FORM.name}, {section.dimension} wide, {section.key_layer}"
    back = REVERSE_MODEL in section.fingerprints
    return [
        ("entries", f"{section.size:,} ({keys})"),
        ("adapter", projection and f"{projection}, from states {projection.query_dimension} wide"),
        ("sentences", ", ".join(f"{name} {count:,}" for name, count in section.subsets.items())),
        ("pairs", back and "back-translations by the reverse model"),
        *_origin(section),
    ]


def _more_of_tokens(store: TokenDatastore) -> Rows:
    section, unknown, learned = store.section, store.count_unknown(), LearnedStore(store)
    names = {"temperature": "T", "lambda_": "lambda", "likeness": "gamma", FAMILIAR: "guard"}
    suits = ", ".join(f"{name} {section.suits[one]:g}" for one, name in names.items() if one in section.suits)
    measured = "measured on its own tokens, where an option is left out and nothing is tuned"
    symbols, counts = store.read_symbols(), np.bincount(store.values)
    often = np.argsort(-counts, kind="stable")[:EXAMPLES] if not learned.damage else ()
    return [
        (
            "unused",
            unknown and f"{unknown:,} of unknown tokens ({UNKNOWN_SYMBOL}), which decoding passes over",
        ),
        ("sources", _source_sentences(section)),
        ("defaults", suits and f"{suits}: {measured}"),
        ("learned", _learned(learned)),
        (DAMAGED, learned.damage),
        *(
            ("top token", f"{symbols[one]:20} {counts[one]:>12,}  {counts[one] / section.size:.1%}")
            for one in often
        ),
    ]


def _source_sentences(section: TokenSection) -> str:
    index = section.source_index
    size = sum(section.files[f"{section.folder}/{one.file}"]["bytes"] for one in index.FILES)
    each = size / max(index.subwords, 1)
    return f"{index.known:,} sentences of {index.subwords:,} subwords, {each:.1f} bytes for each"


def _learned(learned: LearnedStore) -> str:
    if not learned.pairs:
        return ""
    phrases = ""
    if learned.phrase_section is not None:
        moved = sum(pair.sentence is not None for pair in learned.pairs.values())
        count = sum(len(found.spans) for found in learned.phrases.values())
        with_phrases = moved + len(learned.phrases)
        phrases = f", {with_phrases:,} of them with phrases ({count:,} not yet the phrase part's own)"
    replaced = f"; {len(learned.replaced):,} replaced by them" if learned.replaced else ""
    return f"{counted(len(learned.pairs), 'pair')}, in addition to them{phrases}{replaced}"


def _of_phrases(store: PhraseDatastore) -> Rows:
    section = store.section
    keys = f"(keys {section.KEY_FORM.name}, {section.dimension} wide)"
    return [
        ("phrases", f"{section.size:,} {keys} of {section.sentences:,} sentences"),
        ("segmentation", ", ".join(f"{name} {value}" for name, value in section.segmentation.items())),
        *_origin(section),
    ]


def _more_of_phrases(store: PhraseDatastore) -> Rows:
    size = store.section.size
    entries = np.linspace(0, size, min(EXAMPLES, size), endpoint=False, dtype=int).tolist()
    return [("phrase", marked(RetrievedPhrase(one, *store.phrase(one), score=0.0))) for one in entries]


def _of_text(store: TextDatastore) -> Rows:
    section = store.section
    contexts, grams = (section.tables[name][0] for name in (CONTEXTS, GRAMS))
    return [
        ("text", f"{section.sentences:,} sentences of {section.size:,} tokens"),
        ("counts", f"{grams:,} n-grams up to {section.order}, after {contexts:,} contexts"),
        ("general text", f"{section.general:,} tokens" if section.general else "none: --text-beta is 0"),
    ]


def _origin(section: TokenSection | PhraseSection) -> Rows:
    shard, files, recall = section.shard, section.files, section.index_recall
    total = sum(file["bytes"] for file in files.values())
    each = f", {total / section.size:,.0f} per entry" if section.size else ""
    found = f"of the {DEPTH} nearest keys, for {SAMPLE} of its own drawn at random"
    return [
        ("fraction", section.share < 1 and f"{section.share:g} of them, drawn at random"),
        ("shard", shard and f"{shard[0]} of {shard[1]}, counted from 0"),
        *(("text", _merged(source)) for source in section.sources),
        ("index", f"{section.index} ({section.index.metric})"),
        ("keys in", section.store and str(section.store)),
        ("recall", f"{recall:.1%} {found}" if recall is not None else ""),
        *section.fingerprints.items(),
        *((f"{name:32}", f"{file['bytes']:>16,} bytes") for name, file in files.items()),
        (f"{'total':32}", f"{total:>16,} bytes{each}"),
    ]


def _merged(source: Source) -> str:
    back = f", sources translated back by {source.reverse_model}" if source.reverse_model else ""
    return f"{source.name}: {source.size:,} entries, {source.sentences:,} sentences{back}"
