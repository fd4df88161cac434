"""Building a phrase datastore: segment and encode text, join the chunks, index, publish. Each stage survives a kill."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from fairseq_ccpr.building.corpus import (
    SEED,
    check_shard,
    chunks_of_shard,
    fraction_option,
    num_shards_option,
    shard_id_option,
)
from fairseq_ccpr.building.key_store import KeyStore, collection_option, store_option, store_timeout_option
from fairseq_ccpr.building.part import PHRASES, Part, Processes
from fairseq_ccpr.building.type_merge import merge_types
from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.phrase import HASHES, KEYS, OFFSETS, SENTENCES, SPANS, TOTALS, write_string_hashes
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.phrase_finder import (
    SEGMENTATIONS,
    FoundPhrases,
    PhraseFinder,
    Segmentation,
    choose_segmentation,
)
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.settings import check, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray, check_space, save_array
from fairseq_ccpr.storage.equal_strings import DIGESTED, first_of_equals
from fairseq_ccpr.storage.files import write_json
from fairseq_ccpr.storage.text_lines import write_lines
from fairseq_ccpr.text.pairs import read_lines
from fairseq_ccpr.timing import progress_bar

CHUNKS = "shards"  # folder in the unfinished part: keys, spans and counts of each chunk, the counts last


@dataclass(frozen=True)
class PhraseBuildSettings:
    """The options of `fairseq-ccpr build phrases`."""

    text: list[Path] = option(
        help="files of one sentence per line", positional=True, nargs="+", metavar="TEXT"
    )
    encoder: Path = option(
        help="checkpoint of fairseq-train --task phrase_contrast or phrase_lexicon", metavar="CKPT"
    )
    output: Path = option(help="the datastore: a new folder, or one to add to", metavar="DIR")
    fraction: float = fraction_option("sentences")
    num_shards: int = num_shards_option()
    shard_id: int = shard_id_option()
    segmentation: Optional[str] = option(
        None,
        "which spans of words are phrases: what the encoder takes for one, all, those of N words, or those that a file "
        "names (learned; all with XPR)",
        metavar=SEGMENTATIONS,
    )
    threshold: float = option(
        Segmentation.threshold,
        "probability above which the encoder takes words for a phrase",
        within="[0, 1)",
        needs="a probability in [0, 1)",
        metavar="P",
    )
    max_words: int = option(7, "words of a phrase, at most", metavar="N")
    index: str = option(
        "auto",
        "exact search, or a FAISS factory string; disk, or disk:FACTORY, for one whose inverted lists "
        "stay on disk; auto takes exact on a GPU and for small stores",
        metavar="exact|FACTORY",
    )
    index_parameters: str = option("", "search parameters", metavar="P=V,...")
    store: Optional[str] = store_option()
    collection: Optional[str] = collection_option("the name of the output folder")
    store_timeout: float = store_timeout_option()
    chunk_sentences: int = option(
        4096, "checkpoint interval in sentences", within="[1, inf)", needs="at least 1 sentence", metavar="N"
    )
    bf16: bool = False
    cpu: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Check that all values are in range and go together."""
        check(self)
        check_shard(self.num_shards, self.shard_id, self.index)
        KeyStore.of(self)
        for path in self.text:
            if not path.is_file():
                raise ConfigurationError(f"there is no text {path}: give files of one sentence per line")


@dataclass
class PhraseBuildReport:
    """The outcome of a build, or what is known of a datastore that was already finished."""

    section: PhraseSection
    too_long: int  # sentences longer than the encoder reads, read in windows
    lines: TextCounts  # of this run; zeros if the datastore was finished
    encoded: int = 0  # sentences whose phrases this run has found, not an earlier one
    seconds: float = 0.0  # of encoding


def build_phrase_datastore(settings: PhraseBuildSettings, processes: Processes) -> PhraseBuildReport | None:
    """Build, or resume building, the phrase part of a datastore; returns None in all processes but the first.

    1. Plan: load the encoder, fingerprint everything, check that the output is free, or ours, and that the
       text can be read.
    2. Find the phrases of each chunk of sentences, repeated sentences once; the processes share the chunks.
    3. Join the chunks. XPR's phrases have no context of their own: equal strings become one entry, the first
       place standing for all.
    4. Index the keys, or bring them into Milvus; publish.
    """
    encoder = load_phrase_encoder(settings.encoder, bf16=settings.bf16)
    kind = choose_segmentation(settings.segmentation, encoder)
    segmentation = Segmentation(kind, settings.threshold, settings.max_words)
    device, pooled = processes.device(settings.cpu), isinstance(encoder, XprEncoder)
    if pooled and settings.num_shards > 1:
        raise ConfigurationError(
            f"--num-shards is {settings.num_shards}, but an XPR encoder makes one entry of all places of a string: "
            "share the work with torchrun instead"
        )
    identity = _identity(settings, encoder, segmentation)
    store = KeyStore.of(settings)
    part = Part(settings.output, PHRASES, not settings.quiet, identity, store)

    def describe_index(size: int) -> IndexDescription:
        choice, gpu = "exact" if settings.num_shards > 1 else settings.index, device.type == "cuda"
        parameters = settings.index_parameters
        address = store.address if store is not None else None
        return plan_index(choice, "ip", parameters, size, encoder.dimension, gpu, PHRASES.effort, address)

    planned = describe_index(10**6)  # a typing error shows now
    chunks = PhraseChunks(settings, part.partial, processes)
    if processes.first:
        part.check_store(planned)
    if part.published is None:
        finder = PhraseFinder(encoder.to(device), segmentation, pooled=pooled)
        processes.barrier()  # all have seen the same
        if processes.first:
            plan = {"shard_sentences": settings.chunk_sentences, "bf16": settings.bf16}
            part.prepare(plan, lambda: (part.partial / CHUNKS).mkdir(exist_ok=True))
        try:
            chunks.read()
            chunks.find(finder)
            processes.barrier()
            if processes.first:
                key_width = encoder.context.hidden if pooled else encoder.dimension
                totals = chunks.join(key_width, segmentation.explain_nothing())
                if isinstance(encoder, XprEncoder):
                    totals["phrases"] = merge_types(part.partial, totals["sentences"], encoder)
                write_json(part.partial / TOTALS, totals)
        except ConfigurationError:  # other text, or another threshold, is another build
            if processes.first:
                part.discard()
            raise
    report = None
    if processes.first:
        totals = json.loads((part.folder / TOTALS).read_text(encoding="utf-8"))
        if not (part.folder / f"{HASHES}.npy").exists():  # older datastores have none
            write_string_hashes(part.folder, totals["sentences"])
        section = PhraseSection(
            size=totals["phrases"],
            dimension=encoder.dimension,
            sentences=totals["sentences"],
            segmentation=identity["segmentation"],
            encoder=str(settings.encoder.resolve()),
            fingerprints=identity["fingerprints"],
            index=describe_index(totals["phrases"]),
            share=identity["share"],
            pooled=pooled,
            shard=identity["shard"],
            hashes=True,
        )
        part.publish(section)
        report = PhraseBuildReport(section, totals["too_long"], chunks.lines, chunks.encoded, chunks.seconds)
    processes.barrier()  # torchrun ends soon after a process does
    return report


def _identity(
    settings: PhraseBuildSettings, encoder: SpanEncoder, segmentation: Segmentation
) -> dict[str, Any]:
    digests = {"encoder": encoder.fingerprint(), "corpus": fingerprint.of_files(settings.text)}
    lexicon = segmentation.lexicon
    if lexicon and lexicon.is_file():  # its reader reports a missing one
        digests["lexicon"] = fingerprint.of_file(lexicon)
    shard = (
        [settings.shard_id, settings.num_shards, settings.chunk_sentences]
        if settings.num_shards > 1
        else None
    )
    return {
        "dimension": encoder.dimension,
        "segmentation": asdict(segmentation),
        "share": settings.fraction,
        "shard": shard,
        "fingerprints": digests,
    }


@dataclass
class TextCounts:
    """How many lines of a text were read."""

    sentences: int = 0  # different ones
    empty: int = 0
    repeated: int = 0


class PhraseChunks:
    """A text in chunks of sentences, of which one shard is built."""

    def __init__(self, settings: PhraseBuildSettings, folder: Path, processes: Processes) -> None:
        self.settings, self.folder, self.processes = settings, folder, processes
        self.length = settings.chunk_sentences
        self.lines = TextCounts()
        # sentences whose phrases this process has found, and how long that took
        self.encoded, self.seconds = 0, 0.0

    def read(self) -> None:
        """Read the whole text once and choose its lines, so that an unreadable line is reported now, not after hours."""
        if self.processes.first:
            self._choose_lines()
        self.processes.barrier()
        self._chosen = np.load(self.folder / "lines.npy", mmap_mode="r", allow_pickle=False)
        total, shards = int(self._chosen.sum()), self.settings.num_shards
        self.chunks = chunks_of_shard(-(-total // self.length), shards, self.settings.shard_id, "sentences")
        self.size = min(total - self.chunks.start * self.length, len(self.chunks) * self.length)

    def _choose_lines(self) -> None:
        counts, draw = self.lines, random.Random(SEED)
        first = first_of_equals(self._read_lines(counts), self.folder)
        chosen = GrowingArray(self.folder / "lines.npy", (), "bool")
        for start in range(0, len(first), DIGESTED):
            numbers = first[start : start + DIGESTED]
            block = numbers == np.arange(start, start + len(numbers))
            counts.repeated += int((~block).sum())
            block[block] = [draw.random() < self.settings.fraction for _ in range(block.sum())]
            counts.sentences += int(block.sum())
            chosen.append(block)
        chosen.close()
        if not counts.sentences:
            names = ", ".join(map(str, self.settings.text))
            raise ConfigurationError(f"{names}: there is no text in it; give files of one sentence per line")

    def _read_lines(self, counts: TextCounts) -> Iterator[str]:
        for path in self.settings.text:
            for line in read_lines(path):
                if line.strip():
                    yield line
                else:
                    counts.empty += 1

    def sentences(self) -> Iterator[str]:
        """Iterate over the sentences of the shard."""
        chosen, start = (
            compress(self._read_lines(TextCounts()), self._chosen),
            self.chunks.start * self.length,
        )
        return islice(chosen, start, start + self.size)

    def find(self, finder: PhraseFinder) -> None:
        """Find the phrases of this process's chunks that are not done yet."""
        sentences, start = self.sentences(), time.monotonic()
        mine = range(self.processes.rank, len(self.chunks), self.processes.world)
        sizes = {number: min(self.length, self.size - number * self.length) for number in mine}
        done = sum(size for number, size in sizes.items() if self._path(number).exists())
        hidden = self.settings.quiet or not self.processes.first
        with progress_bar("sentences", "sentence", total=sum(sizes.values()), done=done, quiet=hidden) as bar:
            for number in range(len(self.chunks)):
                texts = list(islice(sentences, self.length))
                path = self._path(number)
                if number in mine and not path.exists():
                    found = without_repeats(finder.find(texts, done=bar.update), texts)
                    spans = found.spans + np.array([number * self.length, 0, 0], np.int32)
                    save_array(path.with_suffix(f".{KEYS}.npy"), found.vectors.half().cpu().numpy())
                    save_array(path.with_suffix(f".{SPANS}.npy"), spans)
                    write_json(
                        path,
                        {"sentences": len(texts), "too_long": found.too_long, "phrases": len(found.spans)},
                    )
                    self.encoded += len(texts)
        self.seconds = time.monotonic() - start

    def _path(self, number: int) -> Path:
        return self.folder / CHUNKS / f"{number:06}.json"

    def join(self, key_width: int, nothing: str) -> dict[str, int]:
        """Join the arrays of the chunks, write the text alongside them, and count `phrases`, `sentences` and `too_long`."""
        # Asked for by name: on shared storage, what another machine has written may come late to a listing.
        paths = [self._path(number) for number in range(len(self.chunks))]
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        totals = {name: sum(count[name] for count in counts) for name in ("phrases", "sentences", "too_long")}
        if not totals["phrases"]:
            raise ConfigurationError(f"no phrase is left of {totals['sentences']:,} sentences {nothing}")
        check_space(self.folder, totals["phrases"] * (2 * key_width + 12))
        for name, width, dtype in ((KEYS, key_width, "float16"), (SPANS, 3, "int32")):
            array = GrowingArray(self.folder / f"{name}.npy", (width,), dtype)
            for path in paths:
                array.append(np.load(path.with_suffix(f".{name}.npy"), allow_pickle=False))
            array.close()
        write_lines(self.folder / SENTENCES, self.folder / f"{OFFSETS}.npy", self.sentences())
        return totals


def without_repeats(found: FoundPhrases, texts: list[str]) -> FoundPhrases:
    """Keep the first of equal strings in each sentence."""
    first: dict[tuple[int, str], int] = {}
    for row, (number, start, end) in enumerate(found.spans.tolist()):
        first.setdefault((number, texts[number][start:end]), row)
    kept = list(first.values())
    rows = torch.tensor(kept, dtype=torch.int64)
    return FoundPhrases(found.spans[kept], found.probabilities[rows], found.vectors[rows], found.too_long)
