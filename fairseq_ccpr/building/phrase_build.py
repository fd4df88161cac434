"""Building a phrase datastore: segment and encode text, join the chunks, index, publish. Each stage survives a kill."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq_ccpr.building.corpus import fraction_option
from fairseq_ccpr.building.distributed import Processes
from fairseq_ccpr.building.part import PHRASES, Part
from fairseq_ccpr.building.phrase_chunks import CHUNKS, PhraseChunks
from fairseq_ccpr.building.phrase_keys import PhraseKeys, StoreKeys
from fairseq_ccpr.building.shards import check_shard, describe_shard, num_shards_option, shard_id_option
from fairseq_ccpr.building.text_sentences import TextCounts, TextSentences
from fairseq_ccpr.building.type_merge import merge_types
from fairseq_ccpr.common_options import bf16_option, cpu_option, quiet_option
from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.phrase import HASHES, TOTALS, write_string_hashes
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.phrase_finder import SEGMENTATIONS, PhraseFinder, Segmentation, choose_segmentation
from fairseq_ccpr.models.span_encoder import SpanEncoder, load_phrase_encoder
from fairseq_ccpr.models.xpr_encoder import XprEncoder
from fairseq_ccpr.search import SLOW, TIMEOUT, IndexDescription
from fairseq_ccpr.settings import check, option
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.files import write_json


@dataclass(frozen=True)
class PhraseBuildSettings:
    """The options of `fairseq-ccpr build phrases`."""

    text: list[Path] = option(help="files of one sentence per line", positional=True, nargs="+", metavar="TEXT")
    encoder: Path = option(help="checkpoint of fairseq-train --task phrase_contrast or phrase_lexicon", metavar="CKPT")
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
        Segmentation.threshold, "probability above which the encoder takes words for a phrase",
        within="[0, 1)", needs="a probability in [0, 1)", metavar="P",
    )  # fmt: skip
    max_words: int = option(7, "words of a phrase, at most", metavar="N")
    index: str = option(
        "auto",
        "exact search, or a FAISS factory string; disk, or disk:FACTORY, for one whose inverted lists "
        "stay on disk; auto takes exact on a GPU and for small stores",
        metavar="exact|FACTORY",
    )
    index_parameters: str = option("", "search parameters", metavar="P=V,...")
    store: Optional[str] = option(
        None,
        "keep the keys in Milvus: a server, or a file of its embedded form; --index is then exact or a type of Milvus "
        "(HNSW,M=16,efConstruction=200), --index-parameters its parameters (ef=128)",
        metavar="URI|FILE.db",
    )
    collection: Optional[str] = option(
        None, "name of the collection in Milvus (the name of the output folder)", metavar="NAME"
    )
    store_timeout: float = option(
        TIMEOUT, f"seconds that Milvus may take to answer, all attempts together; writing may take {SLOW} times as long",
        within="(0, inf)", needs="a number of seconds above 0", metavar="S",
    )  # fmt: skip
    chunk_sentences: int = option(
        4096, "checkpoint interval in sentences",
        within="[1, inf)", needs="at least 1 sentence", metavar="N",
    )  # fmt: skip
    bf16: bool = bf16_option()
    cpu: bool = cpu_option()
    quiet: bool = quiet_option()

    def check(self) -> None:
        """Check that all values are in range and go together.

        Raises:
            ConfigurationError: names the option.
        """
        check(self)
        check_shard(self.num_shards, self.shard_id, self.index)
        if self.store is not None and self.num_shards > 1:
            raise ConfigurationError(
                "--store takes all keys together, and a shard has some of them: leave it out, merge the shards with "
                "fairseq-ccpr merge, and run this command on the result with --store and without --num-shards"
            )
        if self.collection is not None and self.store is None:
            raise ConfigurationError(f"--collection {self.collection} needs --store, which says where Milvus runs")
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
    """Build, or resume building, the phrase part of a datastore.

    1. Plan: load the encoder, fingerprint everything, check that the output is free, or ours, and that the text can be read.
    2. Find the phrases of each chunk of sentences, repeated sentences once; the processes share the chunks.
    3. Join the chunks. XPR's phrases have no context of their own: equal strings become one entry, the first place standing
       for all.
    4. Index the keys, or bring them into Milvus; publish.

    Returns:
        What was done; None in all processes but the first.

    Raises:
        ConfigurationError, CheckpointError, DatastoreError: one sentence for the user.
    """
    encoder = load_phrase_encoder(settings.encoder, bf16=settings.bf16)
    kind = choose_segmentation(settings.segmentation, encoder)
    segmentation = Segmentation(kind, settings.threshold, settings.max_words)
    build = _Build(settings, encoder, segmentation, processes)
    build.plan_index(10**6)  # a typing error shows now
    part, chunks = build.part, build.chunks
    if processes.first:
        build.keys.check(part.published, part.identity)
    if part.published is None:
        finder = PhraseFinder(encoder.to(build.device), segmentation, pooled=build.pooled)
        processes.barrier()  # all have seen the same
        if processes.first:
            plan = {"shard_sentences": settings.chunk_sentences, "bf16": settings.bf16}
            part.prepare(plan, lambda: (part.partial / CHUNKS).mkdir(exist_ok=True))
        try:
            chunks.read()
            chunks.find(finder, settings.quiet)
            processes.barrier()
            if processes.first:
                build.join()
        except ConfigurationError:  # other text, or another threshold, is another build
            if processes.first:
                part.discard()
            raise
    report = None
    if processes.first:
        totals = _totals(part.folder)
        too_long = totals["too_long"]
        if not (part.folder / f"{HASHES}.npy").exists():  # older datastores have none
            write_string_hashes(part.folder, totals["sentences"])
        part.publish(section := build.section())
        report = PhraseBuildReport(section, too_long, chunks.lines, chunks.encoded, chunks.seconds)
    processes.barrier()  # torchrun ends soon after a process does
    return report


class _Build:
    """What a phrase part is built from and with."""

    def __init__(
        self, settings: PhraseBuildSettings, encoder: SpanEncoder, segmentation: Segmentation, processes: Processes
    ) -> None:
        self.settings, self.encoder, self.segmentation = settings, encoder, segmentation
        self.device, self.pooled = processes.device(settings.cpu), isinstance(encoder, XprEncoder)
        if self.pooled and settings.num_shards > 1:
            raise ConfigurationError(
                f"--num-shards is {settings.num_shards}, but an XPR encoder makes one entry of all places of a string: "
                "share the work with torchrun instead"
            )
        self.keys = PhraseKeys(settings.output, not settings.quiet)
        if settings.store is not None:
            self.keys = StoreKeys(
                settings.output, not settings.quiet, settings.store, settings.collection, settings.store_timeout
            )
        self.part = Part(settings.output, PHRASES, self.keys, self._identity())
        text = TextSentences(settings.text, settings.fraction, self.part.partial)
        shard = settings.shard_id, settings.num_shards
        self.chunks = PhraseChunks(text, settings.chunk_sentences, shard, self.part.partial, processes)

    def _identity(self) -> dict[str, Any]:
        s = self.settings
        digests = {"encoder": self.encoder.fingerprint(), "corpus": fingerprint.of_files(s.text)}
        lexicon = self.segmentation.lexicon
        if lexicon and lexicon.is_file():  # its reader reports a missing one
            digests["lexicon"] = fingerprint.of_file(lexicon)
        return {
            "dimension": self.encoder.dimension,
            "segmentation": asdict(self.segmentation),
            "share": s.fraction,
            "shard": describe_shard(s.num_shards, s.shard_id, s.chunk_sentences),
            "fingerprints": digests,
        }

    def plan_index(self, size: int) -> IndexDescription:
        """Resolve the index options for this many keys."""
        choice = "exact" if self.settings.num_shards > 1 else self.settings.index
        gpu = self.device.type == "cuda"
        return self.keys.plan(choice, self.settings.index_parameters, size, self.encoder.dimension, gpu)

    def join(self) -> None:
        """Join the chunks to one part."""
        key_width = self.encoder.context.hidden if self.pooled else self.encoder.dimension
        totals = self.chunks.join(key_width, self.segmentation.explain_nothing())
        if isinstance(self.encoder, XprEncoder):
            totals["phrases"] = merge_types(self.part.partial, totals["sentences"], self.encoder)
        write_json(self.part.partial / TOTALS, totals)

    def section(self) -> PhraseSection:
        """Describe the part that was joined, without its files and recall."""
        totals, identity = _totals(self.part.folder), self.part.identity
        return PhraseSection(
            totals["phrases"], self.encoder.dimension, totals["sentences"], identity["segmentation"],
            str(self.settings.encoder.resolve()), identity["fingerprints"], self.plan_index(totals["phrases"]),
            share=identity["share"], pooled=self.pooled, shard=identity["shard"], store=self.keys.address, hashes=True,
        )  # fmt: skip


def _totals(folder: Path) -> dict[str, int]:
    return json.loads((folder / TOTALS).read_text(encoding="utf-8"))
