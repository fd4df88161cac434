"""Building a phrase datastore: segment and encode text, join the shards, index, publish. Each stage survives a kill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.building.corpus import check_shard, check_share, place_of_shard
from fairseq_ccpr.building.distributed import Processes
from fairseq_ccpr.building.milvus_keys import KeyStore, refuse_without_store
from fairseq_ccpr.building.phrase_chunks import SHARDS, PhraseRuns
from fairseq_ccpr.building.text_sentences import TextCounts, TextSentences
from fairseq_ccpr.building.token_part import refuse_differences, refuse_foreign
from fairseq_ccpr.building.type_merge import merge_types
from fairseq_ccpr.datastore.manifest import Manifest, PhraseSection
from fairseq_ccpr.datastore.phrase import KEYS, PHRASE, TOTALS, part_files
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_finder import PhraseFinder, Segmentation, choose_segmentation
from fairseq_ccpr.models.span_encoder import SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.search import TIMEOUT, IndexDescription, build_index, open_index
from fairseq_ccpr.search.index_plan import (
    PHRASE_DEPTH,
    PHRASE_EFFORT,
    index_bytes,
    plan_index,
)
from fairseq_ccpr.search.milvus_index import plan_milvus_index
from fairseq_ccpr.search.recall import recall_of_sample
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import check_space
from fairseq_ccpr.storage.files import (
    MANIFEST,
    PLAN,
    check_sizes,
    describe_files,
    write_json,
)


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
    store: str | None = None  # Milvus: the keys go there
    collection: str | None = None  # named as the output
    store_timeout: float = TIMEOUT
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
        if self.store is not None and self.num_shards > 1:
            raise ConfigurationError(
                "--store takes all keys together, and a shard has some of them: leave it out, merge the shards with "
                "merge_datastores.py, and run this command on the result with --store and without --num-shards"
            )
        if self.collection is not None and self.store is None:
            raise ConfigurationError(f"--collection {self.collection} is of Milvus: say with --store where that is")
        if not 0 < self.store_timeout < float("inf"):
            raise ConfigurationError(f"--store-timeout is {self.store_timeout}: give seconds")
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
       place standing for all. Index the keys, or bring them into Milvus; publish.

    Returns:
        What was done; None in all processes but the first.

    Raises:
        ConfigurationError, CheckpointError, DatastoreError: one sentence for the user.
    """
    encoder = load_phrase_encoder(settings.encoder)
    kind = choose_segmentation(settings.segmentation, encoder)
    segmentation = Segmentation(kind, settings.threshold, settings.max_words)
    encoder.context.bf16 = settings.bf16
    part = _Part(settings, encoder, segmentation, processes)
    part.plan(10**6)  # a typing error shows now
    if processes.first:
        part.check_store()
    if part.published is None:
        finder = PhraseFinder(encoder.to(part.device), segmentation, pooled=part.pooled)
        processes.barrier()  # all have seen the same
        if processes.first:
            part.prepare()
        try:
            part.runs.read()
            part.runs.find(finder, settings.quiet)
            processes.barrier()
            if processes.first:
                part.join()
        except ConfigurationError:  # other text, or another threshold, is another build
            if processes.first:
                part.discard()
            raise
    report = None
    if processes.first:
        part.index()
        report = part.publish()
    processes.barrier()  # torchrun ends soon after a process does
    return report


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
        self.final, self.partial = settings.output / PHRASE, settings.output / f"{PHRASE}.partial"
        self.store: KeyStore | None = None
        if settings.store is not None:
            self.store = KeyStore(settings.store, settings.collection, settings.output, settings.store_timeout)
        shard, text = (
            (settings.shard_id, settings.num_shards),
            TextSentences(settings.text, settings.share, self.partial),
        )
        self.runs = PhraseRuns(text, settings.shard_sentences, shard, self.partial, processes)
        self.identity: dict[str, Any] = {
            "dimension": encoder.dimension,
            "segmentation": asdict(segmentation),
            "share": settings.share,
            "shard": place_of_shard(settings.num_shards, settings.shard_id, settings.shard_sentences),
            "fingerprints": {"encoder": encoder.fingerprint(), "corpus": fingerprint.of_files(settings.text)},
        }
        if segmentation.lexicon and segmentation.lexicon.is_file():  # what is not there is told by who reads it
            self.identity["fingerprints"]["lexicon"] = fingerprint.of_file(segmentation.lexicon)
        has_manifest = (settings.output / MANIFEST).exists()
        self.manifest = Manifest.read(settings.output) if has_manifest else Manifest()
        self.published = self.manifest.phrase
        if self.store is None:
            refuse_without_store(settings.output, self.published)
        if self.published is not None:
            found = asdict(self.published)
            found["fingerprints"].pop(KEYS, None)  # of keys in Milvus; it follows from the others
            refuse_differences(settings.output, found, self.identity)
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

    def join(self) -> None:
        """One part out of the runs."""
        key_width = self.encoder.context.hidden if self.pooled else self.encoder.dimension
        totals = self.runs.join(key_width, self.segmentation.explain_nothing())
        if isinstance(self.encoder, XprEncoder):
            totals["phrases"] = merge_types(self.partial, totals["sentences"], self.encoder)
        write_json(self.partial / TOTALS, totals)

    def discard(self) -> None:
        """Remove what was begun, and the output where nothing else is in it."""
        rmtree(self.partial)
        if not any(self.settings.output.iterdir()):
            self.settings.output.rmdir()

    def plan(self, size: int) -> IndexDescription:
        """What the options mean for so many keys."""
        choice, parameters = self.settings.index, self.settings.index_parameters
        if self.store is not None:
            return plan_milvus_index(choice, parameters, size, self.store.address.embedded)
        if self.settings.num_shards > 1:
            choice = "exact"
        gpu = self.device.type == "cuda"
        return plan_index(choice, "ip", parameters, size, self.encoder.dimension, gpu, PHRASE_EFFORT)

    def check_store(self) -> None:
        """Where the keys go to Milvus: see before any work is done that they can."""
        if self.store is not None and (self.published is None or self.published.store is None):
            self.store.check_free(self.identity)

    def index(self) -> None:
        """Index the keys, unless that was done."""
        if self.store is not None and self.published is not None and self.published.store is not None:
            self.description = self.plan(self.published.size)
            self.store.check_published(self.settings.output, self.published, self.description)
            self.identity["fingerprints"] = self.published.fingerprints
            return
        folder = self.partial if self.published is None else self.final
        keys = np.load(folder / f"{KEYS}.npy", mmap_mode="r", allow_pickle=False)
        self.description = self.plan(len(keys))
        if self.store is not None:
            self.identity["fingerprints"][KEYS] = fingerprint.of_file(folder / f"{KEYS}.npy")
            self.store.fill(self._section(folder), keys, self.settings.quiet)
            return
        path = folder / self.description.file if self.description.file else None
        if path is None or path.exists():
            return
        check_space(folder, index_bytes(self.description, *keys.shape))
        with tqdm(desc="index", total=len(keys), unit="key", unit_scale=True, disable=self.settings.quiet) as bar:
            build_index(keys, self.description, path, bar.update)

    def publish(self) -> PhraseBuildReport:
        """Bring the part under its final name."""
        if self.published is None:
            self.partial.rename(self.final)
        section = self._section(self.final)
        section.index_recall = self._measure_recall(section)
        old = self.published.files if self.published is not None else {}
        files = part_files(section)
        paths = [f"{PHRASE}/{name}" for name in files]
        new = describe_files(self.settings.output, [path for path in paths if path not in old])
        section.files = {path: old.get(path) or new[path] for path in paths}
        if section != self.published:
            self.manifest.phrase = section
            self.manifest.write(self.settings.output)
        for path in [path for path in self.final.iterdir() if path.name not in files]:
            rmtree(path) if path.is_dir() else path.unlink()
        runs = self.runs
        return PhraseBuildReport(section, _totals(self.final)["too_long"], runs.lines, runs.found_in, runs.seconds)

    def _section(self, folder: Path) -> PhraseSection:
        """What is published, the part being in `folder`; without files and recall."""
        totals = _totals(folder)
        return PhraseSection(
            totals["phrases"], self.encoder.dimension, totals["sentences"], self.identity["segmentation"],
            str(self.settings.encoder.resolve()), self.identity["fingerprints"], self.description,
            share=self.settings.share, pooled=self.pooled, shard=self.identity["shard"],
            store=self.store.address if self.store is not None else None,
        )  # fmt: skip

    def _measure_recall(self, section: PhraseSection) -> float | None:
        """Of the index over the keys, both in their final place."""
        if self.description.backend == "exact":
            return None
        if self.published is not None and self.published.index == self.description:
            return self.published.index_recall
        keys = np.load(self.final / f"{KEYS}.npy", mmap_mode="r", allow_pickle=False)
        if self.store is not None:
            return recall_of_sample(self.store.open(section), keys, PHRASE_DEPTH)
        return recall_of_sample(open_index(self.description, keys, self.final), keys, PHRASE_DEPTH)


def _totals(folder: Path) -> dict[str, int]:
    return json.loads((folder / TOTALS).read_text(encoding="utf-8"))
