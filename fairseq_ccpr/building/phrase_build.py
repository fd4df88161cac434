"""Building a phrase datastore: segment and encode text, join the chunks, index, publish; killed or not."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import Optional

import numpy as np
import torch

from fairseq_ccpr.building.corpus import SEED, chunks_of_shard
from fairseq_ccpr.building.options import BuildOptions, check_texts
from fairseq_ccpr.building.part import Part, Processes
from fairseq_ccpr.building.text_files import Lines
from fairseq_ccpr.building.type_merge import merge_types
from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.parts import KEYS, LINE_OFFSETS, LINES, SPANS, STRING_HASHES, TOTALS
from fairseq_ccpr.datastore.phrase import write_string_hashes
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_encoder import load_phrase_encoder
from fairseq_ccpr.models.phrase_finder import (
    SEGMENTATIONS,
    FoundPhrases,
    PhraseFinder,
    Segmentation,
    choose_segmentation,
)
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.settings import option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import GrowingArray, check_space, save_array
from fairseq_ccpr.storage.equal_strings import DIGESTED, first_of_equals
from fairseq_ccpr.storage.files import write_json
from fairseq_ccpr.storage.text_lines import write_lines
from fairseq_ccpr.timing import progress_bar

CHUNKS = "shards"  # folder in the unfinished part: keys, spans and counts of each chunk, the counts last


@dataclass(frozen=True)
class PhraseOptions:
    """The options of `fairseq-ccpr build phrases` alone."""

    text: list[Path] = option(
        help="files of one sentence per line", positional=True, nargs="+", metavar="TEXT"
    )
    encoder: Path = option(
        help="checkpoint of fairseq-train --task phrase_contrast or phrase_lexicon", metavar="CKPT"
    )
    segmentation: Optional[str] = option(
        None,
        "which spans of words are phrases: what the encoder takes for one, all, those of N words, or those "
        "that a file names (learned; all with XPR)",
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
    chunk_sentences: int = option(
        4096, "checkpoint interval in sentences", within="[1, inf)", needs="at least 1 sentence", metavar="N"
    )
    bf16: bool = False


@dataclass(frozen=True)
class PhraseBuildSettings(BuildOptions, PhraseOptions):
    """The options of `fairseq-ccpr build phrases`."""

    def check(self) -> None:
        super().check()
        check_texts(self.text)


def build_phrase_datastore(settings: PhraseBuildSettings, processes: Processes) -> PhraseBuild | None:
    """Build, or resume building, the phrase part of a datastore; returns None in all processes but the first.

    1. Plan: load the encoder, fingerprint everything, check that the output is free, or ours, and that the
       text can be read.
    2. Find the phrases of each chunk of sentences, repeated sentences once; the processes share the chunks.
    3. Join the chunks. XPR's phrases have no context of their own: equal strings become one entry, the first
       place standing for all.
    4. Index the keys, or bring them into Milvus; publish.
    """
    build = PhraseBuild(settings, processes)
    if build.part.published is None:
        build.find_and_join()
    if processes.first:
        build.publish()
    processes.barrier()  # torchrun ends soon after a process does
    return build if processes.first else None


class PhraseBuild:
    """A build of phrases, and then its outcome: a text in chunks of sentences, of which one shard is built.

    Attributes:
        section: what the manifest says of it.
        lines: of the text; zeros if the datastore was finished.
        too_long: sentences longer than the encoder reads, read in windows.
        encoded, seconds: sentences whose phrases this process has found, and how long that took.
    """

    def __init__(self, settings: PhraseBuildSettings, processes: Processes) -> None:
        self.settings, self.processes, self.length = settings, processes, settings.chunk_sentences
        self.encoder = encoder = load_phrase_encoder(settings.encoder, bf16=settings.bf16)
        kind = choose_segmentation(settings.segmentation, encoder)
        self.segmentation = Segmentation(kind, settings.threshold, settings.max_words)
        self.device = processes.device(settings.cpu)
        if isinstance(encoder, XprEncoder) and settings.num_shards > 1:
            raise ConfigurationError(
                f"--num-shards is {settings.num_shards}, but an XPR encoder makes one entry of all places "
                "of a string: share the work with torchrun instead"
            )
        self.section = self._describe()
        identity = self.section.entries(PhraseSection.IDENTITY)
        del identity["sentences"], identity["size"]  # which are counted
        store = settings.key_store()
        self.part = Part(settings.output, PhraseSection, not settings.quiet, identity, store)
        self.folder = self.part.partial
        self.lines, self.too_long = Lines.of_files(settings.text), 0
        self.encoded, self.seconds = 0, 0.0
        planned = self._plan_index(10**6)  # a typing error shows now
        if processes.first:
            self.part.check_store(planned)

    def _describe(self) -> PhraseSection:
        settings = self.settings
        digests = {"encoder": self.encoder.fingerprint(), "corpus": fingerprint.of_files(settings.text)}
        lexicon = self.segmentation.lexicon
        if lexicon and lexicon.is_file():  # its reader reports a missing one
            digests["lexicon"] = fingerprint.of_file(lexicon)
        shard = [settings.shard_id, settings.num_shards, settings.chunk_sentences]
        return PhraseSection(
            size=0,
            sentences=0,
            dimension=self.encoder.dimension,
            segmentation=asdict(self.segmentation),
            encoder=str(settings.encoder.resolve()),
            fingerprints=digests,
            share=settings.fraction,
            pooled=isinstance(self.encoder, XprEncoder),
            shard=shard if settings.num_shards > 1 else None,
        )

    def _plan_index(self, size: int) -> IndexDescription:
        choice = "exact" if self.settings.num_shards > 1 else self.settings.index
        gpu, parameters = self.device.type == "cuda", self.settings.index_parameters
        return self.part.plan_index(choice, "ip", parameters, size, self.section.dimension, gpu)

    def find_and_join(self) -> None:
        finder = PhraseFinder(self.encoder.to(self.device), self.segmentation, pooled=self.section.pooled)
        self.processes.barrier()  # all have seen the same
        if self.processes.first:
            plan = {"shard_sentences": self.length, "bf16": self.settings.bf16}
            self.part.prepare(plan, lambda: (self.folder / CHUNKS).mkdir(exist_ok=True))
        try:
            self._read()
            self._find(finder)
            self.processes.barrier()
            if self.processes.first:
                self._join()
        except ConfigurationError:  # other text, or another threshold, is another build
            if self.processes.first:
                self.part.discard()
            raise

    def publish(self) -> None:
        section, folder = self.section, self.part.folder
        totals = json.loads((folder / TOTALS).read_text(encoding="utf-8"))
        section.size, section.sentences, self.too_long = (
            totals[name] for name in ("phrases", "sentences", "too_long")
        )
        # an XPR build has written those of its distinct strings
        if not (folder / f"{STRING_HASHES}.npy").exists():
            write_string_hashes(folder, section)
        section.index = self._plan_index(section.size)
        self.part.publish(section)

    def _read(self) -> None:
        """Read the whole text and choose its lines, so that an unreadable line is reported now, not after hours."""
        if self.processes.first:
            self._choose_lines()
        self.processes.barrier()
        self._chosen = np.load(self.folder / "lines.npy", mmap_mode="r", allow_pickle=False)
        total, shards = int(self._chosen.sum()), self.settings.num_shards
        self.chunks = chunks_of_shard(-(-total // self.length), shards, self.settings.shard_id, "sentences")
        self.count = min(total - self.chunks.start * self.length, len(self.chunks) * self.length)

    def _choose_lines(self) -> None:
        lines, draw = self.lines, random.Random(SEED)
        first = first_of_equals(lines, self.folder)
        chosen = GrowingArray(self.folder / "lines.npy", (), "bool")
        for start in range(0, len(first), DIGESTED):
            numbers = first[start : start + DIGESTED]
            block = numbers == np.arange(start, start + len(numbers))
            lines.repeated += int((~block).sum())
            block[block] = [draw.random() < self.settings.fraction for _ in range(block.sum())]
            lines.sentences += int(block.sum())
            chosen.append(block)
        chosen.close()
        lines.refuse_none()

    def sentences(self) -> Iterator[str]:
        start = self.chunks.start * self.length
        return islice(compress(self.lines, self._chosen), start, start + self.count)

    def _find(self, finder: PhraseFinder) -> None:
        sentences, start = self.sentences(), time.monotonic()
        mine = range(self.processes.rank, len(self.chunks), self.processes.world)
        sizes = {number: min(self.length, self.count - number * self.length) for number in mine}
        done = sum(size for number, size in sizes.items() if self._path(number).exists())
        hidden = self.settings.quiet or not self.processes.first
        with progress_bar("sentences", "sentence", total=sum(sizes.values()), done=done, quiet=hidden) as bar:
            for number in range(len(self.chunks)):
                texts = list(islice(sentences, self.length))
                path = self._path(number)
                if number in mine and not path.exists():
                    found = without_repeats(finder.find(texts, done=bar.update), texts)
                    spans = found.spans + np.array([number * self.length, 0, 0], np.int32)
                    save_array(path.with_suffix(f".{KEYS}.npy"), self.section.KEY_FORM.encode(found.vectors))
                    save_array(path.with_suffix(f".{SPANS}.npy"), spans)
                    counts = {"sentences": len(texts), "too_long": found.too_long, "phrases": len(spans)}
                    write_json(path, counts)
                    self.encoded += len(texts)
        self.seconds = time.monotonic() - start

    def _path(self, number: int) -> Path:
        return self.folder / CHUNKS / f"{number:06}.json"

    def _join(self) -> None:
        """Join the arrays of the chunks, write the text alongside them, and count both."""
        # Asked for by name: on shared storage, what another machine has written may come late to a listing.
        paths = [self._path(number) for number in range(len(self.chunks))]
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        totals = {name: sum(count[name] for count in counts) for name in ("phrases", "sentences", "too_long")}
        if not totals["phrases"]:
            nothing = self.segmentation.explain_nothing()
            raise ConfigurationError(f"no phrase is left of {totals['sentences']:,} sentences {nothing}")
        encoder = self.encoder
        places = replace(self.section, size=totals["phrases"], sentences=totals["sentences"])
        if isinstance(encoder, XprEncoder):
            places.dimension = encoder.context.hidden
        check_space(self.folder, places.size * (places.KEY_FORM.row_bytes(places.dimension) + 12))
        for name in places.ROWS:
            chunks = (np.load(path.with_suffix(f".{name}.npy"), allow_pickle=False) for path in paths)
            places.write(self.folder, name, chunks)
        write_lines(self.folder / LINES, self.folder / f"{LINE_OFFSETS}.npy", self.sentences())
        if isinstance(encoder, XprEncoder):
            totals["phrases"] = merge_types(self.folder, places, encoder)
        write_json(self.folder / TOTALS, totals)


def without_repeats(found: FoundPhrases, texts: list[str]) -> FoundPhrases:
    """Keep the first of equal strings in each sentence."""
    first: dict[tuple[int, str], int] = {}
    for row, (number, start, end) in enumerate(found.spans.tolist()):
        first.setdefault((number, texts[number][start:end]), row)
    kept = list(first.values())
    rows = torch.tensor(kept, dtype=torch.int64)
    return FoundPhrases(found.spans[kept], found.probabilities[rows], found.vectors[rows], found.too_long)
