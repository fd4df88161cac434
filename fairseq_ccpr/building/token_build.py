"""Building a token datastore: force-decode the corpus, index the keys, publish. Each stage survives a kill."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fairseq_ccpr.building.corpus import (
    Corpus,
    check_shard,
    check_share,
    place_of_shard,
    read_corpus,
)
from fairseq_ccpr.building.distributed import Processes
from fairseq_ccpr.building.force_decoding import force_decode
from fairseq_ccpr.building.loading import load_model, load_task
from fairseq_ccpr.building.part import VALID
from fairseq_ccpr.building.token_part import TokenPart
from fairseq_ccpr.datastore.manifest import TokenSection
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.key_layer import KEY_LAYERS, KeyCapture
from fairseq_ccpr.search import IndexDescription
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.data_bin import has_subset

NO_ADAPTER, TRAINED_ADAPTER = "none", "clknn"


@dataclass
class TokenBuildSettings:
    """What `build_datastore.py tokens` is told. The command's options have these names and defaults."""

    data_bin: Path
    source_lang: str
    target_lang: str
    path: str
    output: Path
    subset: list[str] = field(default_factory=lambda: ["train"])
    share: float = 1.0
    num_shards: int = 1
    shard_id: int = 0
    key_layer: str = KEY_LAYERS[0]
    metric: str | None = None
    index: str = "auto"
    index_parameters: str = ""
    adapter: str = NO_ADAPTER
    adapter_options: str = ""
    pca_dim: int | None = None
    normalize_before_pca: bool = False
    raw_datastore: Path | None = None
    keep_raw_keys: bool = False
    valid_subset: str | None = None
    max_tokens: int = 4000
    shard_tokens: int = 131072
    fp16: bool = False
    cpu: bool = False
    user_dir: str | None = None
    quiet: bool = False

    def check(self) -> None:
        """Raise a ConfigurationError where the options do not go together."""
        for name in ("max_tokens", "shard_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ConfigurationError(f"--{name.replace('_', '-')} is {value}: give at least 1")
        check_share(self.share)
        check_shard(self.num_shards, self.shard_id, self.index)
        if self.num_shards > 1 and self.adapter != NO_ADAPTER:
            raise ConfigurationError(
                f"--num-shards is {self.num_shards}, but --adapter {self.adapter} needs all states together: build shards "
                "without it, merge them, and give the merged datastore as --raw-datastore"
            )
        if self.adapter == NO_ADAPTER:
            for name in ("pca_dim", "normalize_before_pca", "raw_datastore", "keep_raw_keys"):
                if getattr(self, name) not in (None, False):
                    raise ConfigurationError(f"--{name.replace('_', '-')} needs --adapter clknn or --adapter FILE")
        elif self.metric == "l2":
            raise ConfigurationError(
                "--metric is l2, but the keys of an adapter are compared by inner product: leave it out"
            )
        for name in ("adapter_options", "valid_subset"):
            if getattr(self, name) and self.adapter != TRAINED_ADAPTER:
                raise ConfigurationError(f"--{name.replace('_', '-')} is for training: it needs --adapter clknn")
        if self.valid_subset in self.subset:
            raise ConfigurationError(
                f"--valid-subset is {self.valid_subset}, which the datastore is built from: give text that it will not hold"
            )
        if self.pca_dim is not None and self.pca_dim < 0:
            raise ConfigurationError(f"--pca-dim is {self.pca_dim}: give a width, or 0 for no PCA")
        if self.normalize_before_pca and self.pca_dim == 0:
            raise ConfigurationError("--normalize-before-pca needs PCA: leave out --pca-dim 0")


class Extraction:
    """What keys are read from: a model, and a corpus for it to force-decode."""

    def __init__(self, settings: TokenBuildSettings, processes: Processes) -> None:
        self.settings, self.processes = settings, processes
        self.task = load_task(settings.data_bin, settings.source_lang, settings.target_lang, settings.user_dir)
        self.device = processes.device(settings.cpu)
        self.model = load_model(settings.path, self.task, self.device, settings.fp16)
        self.model_fingerprint = fingerprint.of_parameters(self.model.named_parameters())
        self.capture = KeyCapture(self.model, settings.key_layer, keys_only=True)
        self.corpus = self._read(settings.subset, settings.share)
        if settings.num_shards > 1:
            self.corpus = self.corpus.shard(settings.num_shards, settings.shard_id)
        self.symbols: list[str] = self.task.target_dictionary.symbols

    def _read(self, subsets: list[str], share: float) -> Corpus:
        return read_corpus(self.task, subsets, self.model.max_positions(), self.settings.shard_tokens, share)

    def of_valid(self) -> Extraction | None:
        """The same of the text that an adapter's training is to validate on, if there is any."""
        name = self.settings.valid_subset
        if name is None and VALID not in self.settings.subset and has_subset(self.task, VALID):
            name = VALID
        if name is None:
            return None
        other = copy.copy(self)
        other.corpus = self._read([name], 1.0)
        return other

    def section(self, index: IndexDescription) -> TokenSection:
        """What the manifest says of the decoder's own states as keys."""
        return TokenSection(
            size=self.corpus.size,
            dimension=self.capture.dimension,
            key_layer=self.settings.key_layer,
            subsets=self.corpus.subsets,
            fingerprints={
                "model": self.model_fingerprint,
                "target_dictionary": fingerprint.of_strings(self.symbols),
                "corpus": self.corpus.fingerprint,
            },
            index=index,
            share=self.corpus.share,
            shard=place_of_shard(self.settings.num_shards, self.settings.shard_id, self.settings.shard_tokens),
        )

    def fill(self, part: TokenPart) -> None:
        """Force-decode the corpus into `part`, which holds nothing yet, or what an earlier run left; together with the
        other processes."""
        if self.processes.first:
            part.lay_out({name: getattr(self.settings, name) for name in ("max_tokens", "shard_tokens", "fp16")})
        self.processes.barrier()
        mine = {shard.number: shard for shard in self.corpus.shards[self.processes.rank :: self.processes.world]}

        def write(todo: list[int]) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
            shards = [mine[number] for number in todo]
            for shard, rows in force_decode(self.model, self.capture, self.corpus, shards, self.settings.max_tokens):
                yield shard.number, shard.first_row, rows

        part.fill({number: shard.rows for number, shard in mine.items()}, write)
        self.processes.barrier()


def build_token_datastore(settings: TokenBuildSettings, processes: Processes) -> tuple[TokenSection, int]:
    """Build, or go on building, a token datastore of the decoder's own states; what is already there is reused.

    1. Plan: read the corpus, fingerprint everything, see that the output is free, or ours, and that it fits.
    2. Extract: keys, values and provenance, shard by shard, shared among the processes.
    3. Index the keys.
    4. Publish: give the part its final name and write the manifest.

    Returns:
        The token section of the finished datastore, and how many sentences were left out as longer than the model takes.

    Raises:
        ConfigurationError, CheckpointError, DatastoreError: one sentence for the user.
    """
    extraction = Extraction(settings, processes)
    index = plan_index(
        settings.index if settings.num_shards == 1 else "exact",
        settings.metric or "l2",
        settings.index_parameters,
        extraction.corpus.size,
        extraction.capture.dimension,
        gpu=extraction.device.type == "cuda",
    )
    show = processes.first and not settings.quiet
    part = TokenPart(settings.output, extraction.section(index), extraction.symbols, show)
    if not part.filled:
        extraction.fill(part)
    if processes.first:
        part.finish()
    processes.barrier()
    return part.section, extraction.corpus.left_out
