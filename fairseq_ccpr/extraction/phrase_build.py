"""Building a phrase datastore: segment and encode text, join the shards, index, publish. Each stage survives a kill."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from fairseq_ccpr.datastore import fingerprint
from fairseq_ccpr.datastore.arrays import GrowingArray, check_space, save_array
from fairseq_ccpr.datastore.manifest import (
    MANIFEST,
    PLAN,
    Manifest,
    PhraseSection,
    check_sizes,
    describe_files,
    write_json,
)
from fairseq_ccpr.datastore.phrase import KEYS, OFFSETS, PHRASE, SENTENCES, SPANS, TOTALS, part_files
from fairseq_ccpr.datastore.text_lines import write_lines
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extraction.corpus import check_shard, check_share, shard_of
from fairseq_ccpr.extraction.processes import Processes
from fairseq_ccpr.extraction.text_sentences import TextCounts, TextSentences
from fairseq_ccpr.extraction.token_part import refuse_differences, refuse_foreign
from fairseq_ccpr.extraction.type_merge import merge_types
from fairseq_ccpr.models.phrase_finder import FoundPhrases, PhraseFinder, Segmentation, choose_segmentation
from fairseq_ccpr.models.span_encoder import SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.search import build_index, open_index
from fairseq_ccpr.search.plan import PHRASE_PROBES, plan_index
from fairseq_ccpr.search.recall import recall_of_sample

SHARDS = "shards"  # in the unfinished part: keys, spans and counts of each, the counts last


@dataclass
class PhraseBuildSettings:
    """What `build_datastore.py phrases` is told. The command's options have these names and defaults."""

    text: list[Path]
    encoder: Path
    output: Path
    share: float = 1.0
    num_shards: int = 1
    shard_id: int = 0
    segmentation: str | None = None  # learned, where the encoder has; else all
    threshold: float = 0.7
    max_words: int = 7
    index: str = "auto"
    index_parameters: str = ""
    shard_sentences: int = 4096
    bf16: bool = False
    cpu: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Raise a ConfigurationError where an option is out of its range."""
        if self.shard_sentences < 1:
            raise ConfigurationError(f"--shard-sentences is {self.shard_sentences}: give at least 1")
        check_share(self.share)
        check_shard(self.num_shards, self.shard_id, self.index)
        for path in self.text:
            if not path.is_file():
                raise ConfigurationError(f"there is no text {path}: give files of one sentence a line")


@dataclass
class PhraseBuildReport:
    """What a build did; of a finished datastore, what is known of it."""

    section: PhraseSection
    too_long: int  # sentences that the encoder cannot take
    lines: TextCounts  # of this run; nothing where the datastore was finished
    found_in: int = 0  # sentences whose phrases this run has found, not an earlier one
    seconds: float = 0.0  # that took


def build_phrase_datastore(settings: PhraseBuildSettings, processes: Processes) -> PhraseBuildReport | None:
    """Build, or go on building, the phrase part of a datastore.

    1. Plan: load the encoder, fingerprint everything, see that the output is free, or ours, and that the text can be read.
    2. Find the phrases of each run of sentences, the same sentence once, shared among the processes.
    3. Join the shards; of XPR, whose phrases have no context of their own, equal strings become one entry, the first
       place standing for all. Index the keys; publish.

    Returns:
        What was done; None in all processes but the first.

    Raises:
        ConfigurationError, CheckpointError, DatastoreError: one sentence for the user.
    """
    encoder = load_phrase_encoder(settings.encoder)
    kind = choose_segmentation(settings.segmentation, encoder)
    segmentation = Segmentation(kind, settings.threshold, settings.max_words)
    encoder.context.bf16 = settings.bf16
    plan_index(settings.index, "ip", settings.index_parameters, 10**6, encoder.dimension)  # a typing error shows now
    part = _Part(settings, encoder, segmentation, processes)
    if part.published is None:
        finder = PhraseFinder(encoder.to(part.device), segmentation, pooled=part.pooled)
        processes.barrier()  # all have seen the same
        if processes.first:
            part.prepare()
        try:
            runs = part.read_text()
            part.find(finder, runs)
            processes.barrier()
            if processes.first:
                part.join(runs)
        except ConfigurationError:  # other text, or another threshold, is another build
            if processes.first:
                part.discard()
            raise
    if not processes.first:
        return None
    part.index()
    return part.publish()


class _Part:
    """The phrase part at the output, as far as it is there."""

    def __init__(
        self, settings: PhraseBuildSettings, encoder: SpanEncoder, segmentation: Segmentation, processes: Processes
    ) -> None:
        self.settings, self.segmentation, self.encoder, self.processes = settings, segmentation, encoder, processes
        self.device, self.pooled = processes.device(settings.cpu), isinstance(encoder, XprEncoder)
        if self.pooled and settings.num_shards > 1:
            raise ConfigurationError(
                f"--num-shards is {settings.num_shards}, but an XPR encoder makes one entry of all places of a string: "
                "share the work with torchrun instead"
            )
        self.lines, self.found_in, self.seconds = TextCounts(), 0, 0.0
        self.final, self.partial = settings.output / PHRASE, settings.output / f"{PHRASE}.partial"
        self.text = TextSentences(settings.text, settings.share, self.partial)
        self.identity: dict[str, Any] = {
            "dimension": encoder.dimension,
            "segmentation": asdict(segmentation),
            "share": settings.share,
            "shard": [settings.shard_id, settings.num_shards] if settings.num_shards > 1 else None,
            "fingerprints": {"encoder": encoder.fingerprint(), "corpus": fingerprint.of_files(settings.text)},
        }
        if segmentation.lexicon and segmentation.lexicon.is_file():  # what is not there is told by who reads it
            self.identity["fingerprints"]["lexicon"] = fingerprint.of_file(segmentation.lexicon)
        has_manifest = (settings.output / MANIFEST).exists()
        self.manifest = Manifest.read(settings.output) if has_manifest else Manifest()
        self.published = self.manifest.phrase
        if self.published is not None:
            refuse_differences(settings.output, asdict(self.published), self.identity)
            check_sizes(settings.output, self.published.files)

    def prepare(self) -> None:
        """Make the folder of shards, unless an earlier run did."""
        if (self.final / PLAN).exists():  # killed while publishing
            self.final.rename(self.partial)
        plan = self.identity | {name: getattr(self.settings, name) for name in ("shard_sentences", "bf16")}
        if (self.partial / PLAN).exists():
            refuse_differences(self.partial, json.loads((self.partial / PLAN).read_text(encoding="utf-8")), plan)
            return
        refuse_foreign(self.settings.output)
        (self.partial / SHARDS).mkdir(parents=True, exist_ok=True)
        write_json(self.partial / PLAN, plan)

    def read_text(self) -> range:
        """Read the whole text; which runs of sentences are to be encoded, of all its runs."""
        if self.processes.first:
            self.lines = self.text.read()
        self.processes.barrier()
        s, runs = self.settings, -(-len(self.text) // self.settings.shard_sentences)
        return shard_of(runs, s.num_shards, s.shard_id, "sentences")

    def sentences(self, runs: range) -> Iterator[str]:
        """Those of some runs."""
        length = self.settings.shard_sentences
        return islice(self.text, runs.start * length, runs.stop * length)

    def find(self, finder: PhraseFinder, runs: range) -> None:
        """Find the phrases of those of this process's runs of sentences that are not done yet."""
        sentences, start = self.sentences(runs), time.monotonic()
        hidden = self.settings.quiet or not self.processes.first
        length = self.settings.shard_sentences
        total = min(len(self.text) - runs.start * length, len(runs) * length)
        with tqdm(desc="sentences", total=total, unit="sentence", unit_scale=True, disable=hidden) as bar:
            for number in range(len(runs)):
                texts = list(islice(sentences, length))
                path = self._run_path(number)
                if number % self.processes.world == self.processes.rank and not path.exists():
                    found = without_repeats(finder.find(texts), texts)
                    spans = found.spans + np.array([number * length, 0, 0], np.int32)
                    save_array(path.with_suffix(f".{KEYS}.npy"), found.vectors.half().numpy())
                    save_array(path.with_suffix(f".{SPANS}.npy"), spans)
                    write_json(path, {"sentences": len(texts), "too_long": found.too_long, "phrases": len(found.spans)})
                    self.found_in += len(texts)
                bar.update(len(texts))
        self.seconds = time.monotonic() - start

    def _run_path(self, number: int) -> Path:
        return self.partial / SHARDS / f"{number:06}.json"

    def join(self, runs: range) -> None:
        """One array out of the runs, and the text beside it."""
        # Asked for by name: on shared storage, what another machine has written may come late to a listing.
        shards = [self._run_path(number) for number in range(len(runs))]
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in shards]
        size = sum(count["phrases"] for count in counts)
        if not size:
            raise ConfigurationError(
                f"no phrase is left of {sum(count['sentences'] for count in counts):,} sentences "
                f"{self.segmentation.explain_nothing()}"
            )
        key_width = self.encoder.context.hidden if self.pooled else self.encoder.dimension
        check_space(self.settings.output, size * (2 * key_width + 12))
        for name, width, dtype in ((KEYS, key_width, "float16"), (SPANS, 3, "int32")):
            array = GrowingArray(self.partial / f"{name}.npy", (width,), dtype)
            for path in shards:
                array.append(np.load(path.with_suffix(f".{name}.npy"), allow_pickle=False))
            array.close()
        write_lines(self.partial / SENTENCES, self.partial / f"{OFFSETS}.npy", self.sentences(runs))
        totals = {name: sum(count[name] for count in counts) for name in ("phrases", "sentences", "too_long")}
        if isinstance(self.encoder, XprEncoder):
            totals["phrases"] = merge_types(self.partial, totals["sentences"], self.encoder)
        write_json(self.partial / TOTALS, totals)

    def discard(self) -> None:
        """Remove what was begun, and the output where nothing else is in it."""
        shutil.rmtree(self.partial)
        if not any(self.settings.output.iterdir()):
            self.settings.output.rmdir()

    def index(self) -> None:
        """Index the keys, unless that was done."""
        folder = self.partial if self.published is None else self.final
        keys = np.load(folder / f"{KEYS}.npy", mmap_mode="r", allow_pickle=False)
        choice, gpu = self.settings.index if self.settings.num_shards == 1 else "exact", self.device.type == "cuda"
        self.description = plan_index(
            choice, "ip", self.settings.index_parameters, len(keys), self.encoder.dimension, gpu, PHRASE_PROBES
        )
        path = folder / self.description.file if self.description.file else None
        if path is None or path.exists():
            return
        with tqdm(desc="index", total=len(keys), unit="key", unit_scale=True, disable=self.settings.quiet) as bar:
            build_index(keys, self.description, path, bar.update)

    def publish(self) -> PhraseBuildReport:
        """Bring the part under its final name."""
        totals_path = (self.partial if self.published is None else self.final) / TOTALS
        totals = json.loads(totals_path.read_text(encoding="utf-8"))
        if self.published is None:
            self.partial.rename(self.final)
        section = PhraseSection(
            totals["phrases"], self.encoder.dimension, totals["sentences"], self.identity["segmentation"],
            str(self.settings.encoder.resolve()), self.identity["fingerprints"], self.description, {},
            self.settings.share, self._measure_recall(), self.pooled, self.identity["shard"],
        )  # fmt: skip
        old = self.published.files if self.published is not None else {}
        files = part_files(section)
        paths = [f"{PHRASE}/{name}" for name in files]
        new = describe_files(self.settings.output, [path for path in paths if path not in old])
        section.files = {path: old.get(path) or new[path] for path in paths}
        if section != self.published:
            self.manifest.phrase = section
            self.manifest.write(self.settings.output)
        for path in [path for path in self.final.iterdir() if path.name not in files]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return PhraseBuildReport(section, totals["too_long"], self.lines, self.found_in, self.seconds)

    def _measure_recall(self) -> float | None:
        """Of the index over the keys, both in their final place."""
        if not self.description.file:
            return None
        if self.published is not None and self.published.index == self.description:
            return self.published.index_recall
        keys = np.load(self.final / f"{KEYS}.npy", mmap_mode="r", allow_pickle=False)
        return recall_of_sample(open_index(self.description, keys, self.final), keys)


def without_repeats(found: FoundPhrases, texts: list[str]) -> FoundPhrases:
    """The first of equal strings in a sentence stands for all of them."""
    seen: set[tuple[int, str]] = set()
    kept = []
    for row, (number, start, end) in enumerate(found.spans.tolist()):
        key = number, texts[number][start:end]
        if key not in seen:
            seen.add(key)
            kept.append(row)
    rows = torch.tensor(kept, dtype=torch.int64)
    return FoundPhrases(found.spans[kept], found.probabilities[rows], found.vectors[rows], found.too_long)
