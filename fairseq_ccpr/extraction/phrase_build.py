"""Building a phrase datastore: segment and encode text, join the shards, index, publish. Each stage survives a kill."""

from __future__ import annotations

import hashlib
import json
import random
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
from fairseq_ccpr.datastore.phrase import KEYS, OFFSETS, PHRASE, SENTENCES, SPANS
from fairseq_ccpr.datastore.text_lines import write_lines
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.extraction.corpus import SEED, check_share
from fairseq_ccpr.extraction.phrase_store import KeyStore, refuse_without_store
from fairseq_ccpr.extraction.token_part import refuse_differences, refuse_foreign
from fairseq_ccpr.extraction.type_merge import merge_types
from fairseq_ccpr.models.phrase_finder import FoundPhrases, PhraseFinder, Segmentation, choose_segmentation
from fairseq_ccpr.models.span_encoder import SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.phrases.text_pairs import read_lines
from fairseq_ccpr.search import IndexDescription, open_index
from fairseq_ccpr.search.faiss_index import build_index
from fairseq_ccpr.search.milvus_server import TIMEOUT
from fairseq_ccpr.search.plan import plan_index, plan_milvus_index
from fairseq_ccpr.search.recall import recall_of_sample

PROBES = 64  # inverted lists to search: more than a step of decoding could afford, but this is once a sentence
TOTALS = "totals.json"
SHARDS = "shards"  # in the unfinished part: keys, spans and counts of each, the counts last


@dataclass
class PhraseBuildSettings:
    """What `build_datastore.py phrases` is told. The command's options have these names and defaults."""

    text: list[Path]
    encoder: Path
    output: Path
    share: float = 1.0
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
        if self.collection is not None and self.store is None:
            raise ConfigurationError(f"--collection {self.collection} is of Milvus: say with --store where that is")
        if not self.store_timeout > 0:
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


@dataclass
class TextCounts:
    """The lines of a text."""

    sentences: int = 0  # different ones
    empty: int = 0
    repeated: int = 0


def build_phrase_datastore(settings: PhraseBuildSettings) -> PhraseBuildReport:
    """Build, or go on building, the phrase part of a datastore.

    1. Plan: load the encoder, fingerprint everything, see that the output is free, or ours, and that the text can be read.
    2. Find the phrases of each shard of sentences, the same sentence once.
    3. Join the shards; of XPR, whose phrases have no context of their own, equal strings become one entry, the first
       place standing for all. Index the keys, or bring them into Milvus; publish.

    Raises:
        ConfigurationError, CheckpointError, DatastoreError: one sentence for the user.
    """
    encoder = load_phrase_encoder(settings.encoder)
    kind = choose_segmentation(settings.segmentation, encoder)
    segmentation = Segmentation(kind, settings.threshold, settings.max_words)
    encoder.context.bf16 = settings.bf16
    part = _Part(settings, encoder, segmentation)
    part.plan(10**6)  # a typing error shows now
    part.check_store()
    if part.published is None:
        finder = PhraseFinder(encoder.to(_device(settings.cpu)), segmentation, pooled=isinstance(encoder, XprEncoder))
        part.prepare()
        try:
            part.count_lines()
            part.find(finder)
            part.join()
        except ConfigurationError:  # other text, or another threshold, is another build
            part.discard()
            raise
    part.index()
    return part.publish()


class _Part:
    """The phrase part at the output, as far as it is there."""

    def __init__(self, settings: PhraseBuildSettings, encoder: SpanEncoder, segmentation: Segmentation) -> None:
        self.settings, self.segmentation, self.encoder = settings, segmentation, encoder
        self.lines, self.found_in, self.seconds = TextCounts(), 0, 0.0
        self.final, self.partial = settings.output / PHRASE, settings.output / f"{PHRASE}.partial"
        self.identity: dict[str, Any] = {
            "dimension": encoder.dimension,
            "segmentation": asdict(segmentation),
            "share": settings.share,
            "fingerprints": {"encoder": encoder.fingerprint(), "corpus": fingerprint.of_files(settings.text)},
        }
        if segmentation.lexicon and segmentation.lexicon.is_file():  # what is not there is told by who reads it
            self.identity["fingerprints"]["lexicon"] = fingerprint.of_file(segmentation.lexicon)
        has_manifest = (settings.output / MANIFEST).exists()
        self.manifest = Manifest.read(settings.output) if has_manifest else Manifest()
        self.published = self.manifest.phrase
        self.store: KeyStore | None = None
        if settings.store is not None:
            self.store = KeyStore(settings.store, settings.collection, settings.output, settings.store_timeout)
        else:
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

    def sentences(self, counts: TextCounts | None = None) -> Iterator[str]:
        """The sentences of the share of the text, each once, without empty ones; `counts` learns what was passed over."""
        counts = counts or TextCounts()
        seen: set[bytes] = set()
        draw = random.Random(SEED)
        for path in self.settings.text:
            for line in read_lines(path):
                digest = hashlib.blake2b(line.encode(), digest_size=8).digest()
                if not line.strip():
                    counts.empty += 1
                elif digest in seen:
                    counts.repeated += 1
                else:
                    seen.add(digest)
                    if draw.random() < self.settings.share:
                        counts.sentences += 1
                        yield line

    def count_lines(self) -> None:
        """Read the whole text once: a line that cannot be read shows now, not after hours of work."""
        for _ in self.sentences(self.lines):
            pass
        if not self.lines.sentences:
            names = ", ".join(map(str, self.settings.text))
            raise ConfigurationError(f"{names}: there is no text in it; give files of one sentence a line")

    def find(self, finder: PhraseFinder) -> None:
        """Find the phrases of those shards that are not done yet."""
        sentences, start = self.sentences(), time.monotonic()
        with tqdm(
            desc="sentences", total=self.lines.sentences, unit="sentence", unit_scale=True, disable=self.settings.quiet
        ) as bar:
            number = 0
            while texts := list(islice(sentences, self.settings.shard_sentences)):
                path = self.partial / SHARDS / f"{number:06}.json"
                if not path.exists():
                    found = without_repeats(finder.find(texts), texts)
                    first = number * self.settings.shard_sentences
                    save_array(path.with_suffix(f".{KEYS}.npy"), found.vectors.half().numpy())
                    save_array(path.with_suffix(f".{SPANS}.npy"), found.spans + np.array([first, 0, 0], np.int32))
                    write_json(path, {"sentences": len(texts), "too_long": found.too_long, "phrases": len(found.spans)})
                    self.found_in += len(texts)
                number += 1
                bar.update(len(texts))
        self.seconds = time.monotonic() - start

    def join(self) -> None:
        """One array out of the shards, and the text beside it."""
        shards = sorted((self.partial / SHARDS).glob("*.json"))
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in shards]
        size = sum(count["phrases"] for count in counts)
        if not size:
            raise ConfigurationError(
                f"no phrase is left of {sum(count['sentences'] for count in counts):,} sentences "
                f"{self.segmentation.explain_nothing()}"
            )
        is_pooled = isinstance(self.encoder, XprEncoder)
        key_width = self.encoder.context.hidden if is_pooled else self.encoder.dimension
        check_space(self.settings.output, size * (2 * key_width + 12))
        for name, width, dtype in ((KEYS, key_width, "float16"), (SPANS, 3, "int32")):
            array = GrowingArray(self.partial / f"{name}.npy", (width,), dtype)
            for path in shards:
                array.append(np.load(path.with_suffix(f".{name}.npy"), allow_pickle=False))
            array.close()
        write_lines(self.partial / SENTENCES, self.partial / f"{OFFSETS}.npy", self.sentences())
        totals = {name: sum(count[name] for count in counts) for name in ("phrases", "sentences", "too_long")}
        if isinstance(self.encoder, XprEncoder):
            totals["phrases"] = merge_types(self.partial, totals["sentences"], self.encoder)
        write_json(self.partial / TOTALS, totals)

    def discard(self) -> None:
        """Remove what was begun, and the output where nothing else is in it."""
        shutil.rmtree(self.partial)
        if not any(self.settings.output.iterdir()):
            self.settings.output.rmdir()

    def plan(self, size: int) -> IndexDescription:
        """What the options mean for so many keys."""
        choice, parameters = self.settings.index, self.settings.index_parameters
        if self.store is not None:
            return plan_milvus_index(choice, parameters, size, self.store.address.embedded)
        gpu = _device(self.settings.cpu).type == "cuda"
        return plan_index(choice, "ip", parameters, size, self.encoder.dimension, gpu, PROBES)

    def check_store(self) -> None:
        """Where the keys go to Milvus: see before any work is done that they can."""
        if self.store is not None and (self.published is None or self.published.store is None):
            self.store.check_free(self.identity)

    def index(self) -> None:
        """Index the keys, unless that was done."""
        if self.published is not None and self.published.store is not None and self.store is not None:
            self.description = self.plan(self.published.size)
            self.store.check_published(self.settings.output, self.published, self.description)
            self.identity["fingerprints"] = self.published.fingerprints
            return
        folder = self.partial if self.published is None else self.final
        keys = np.load(folder / f"{KEYS}.npy", mmap_mode="r", allow_pickle=False)
        self.description = self.plan(len(keys))
        if self.store is not None:
            self.identity["fingerprints"][KEYS] = fingerprint.of_file(folder / f"{KEYS}.npy")
            self.store.fill(self._section(folder, {}, None), keys, self.settings.quiet)
            return
        path = folder / self.description.file if self.description.file else None
        if path is None or path.exists():
            return
        partial = path.with_name(path.name + ".partial")
        with tqdm(desc="index", total=len(keys), unit="key", unit_scale=True, disable=self.settings.quiet) as bar:
            build_index(keys, self.description, partial, bar.update)
        partial.replace(path)

    def publish(self) -> PhraseBuildReport:
        """Bring the part under its final name."""
        files = [] if self.store is not None else [f"{KEYS}.npy"]
        files += [f"{SPANS}.npy", f"{OFFSETS}.npy", SENTENCES, TOTALS]
        files += [self.description.file] if self.description.file else []
        if self.published is None:
            self.partial.rename(self.final)
        old = self.published.files if self.published is not None else {}
        paths = [f"{PHRASE}/{name}" for name in files]
        new = describe_files(self.settings.output, [path for path in paths if path not in old])
        described = {path: old.get(path) or new[path] for path in paths}
        section = self._section(self.final, described, self._measure_recall())
        if section != self.published:
            self.manifest.phrase = section
            self.manifest.write(self.settings.output)
        for path in [path for path in self.final.iterdir() if path.name not in files]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return PhraseBuildReport(section, _totals(self.final)["too_long"], self.lines, self.found_in, self.seconds)

    def _section(self, folder: Path, files: dict[str, dict[str, Any]], recall: float | None) -> PhraseSection:
        """What is published, the part being in `folder`."""
        totals = _totals(folder)
        return PhraseSection(
            totals["phrases"], self.encoder.dimension, totals["sentences"], self.identity["segmentation"],
            str(self.settings.encoder.resolve()), self.identity["fingerprints"], self.description, files,
            self.settings.share, recall, self.store.address if self.store is not None else None,
        )  # fmt: skip

    def _measure_recall(self) -> float | None:
        """Of the index over the keys, both in their final place."""
        if self.description.backend == "exact":
            return None
        if self.published is not None and self.published.index == self.description:
            return self.published.index_recall
        keys = np.load(self.final / f"{KEYS}.npy", mmap_mode="r", allow_pickle=False)
        if self.store is not None:
            return recall_of_sample(self.store.open(self._section(self.final, {}, None)), keys)
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


def _totals(folder: Path) -> dict[str, int]:
    return json.loads((folder / TOTALS).read_text(encoding="utf-8"))


def _device(cpu: bool) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
