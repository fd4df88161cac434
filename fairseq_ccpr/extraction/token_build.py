"""Building a token datastore: force-decode the corpus, index the keys, publish. Each stage survives a kill."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.datastore import fingerprint
from fairseq_ccpr.datastore.arrays import ArrayWriter, check_space, open_array
from fairseq_ccpr.datastore.manifest import (
    MANIFEST,
    PLAN,
    Manifest,
    TokenSection,
    check_sizes,
    describe_files,
    write_json,
)
from fairseq_ccpr.datastore.token import KEYS, SYMBOLS, TOKEN, array_shapes
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.extraction.corpus import Corpus, read_corpus
from fairseq_ccpr.extraction.force_decoding import force_decode
from fairseq_ccpr.extraction.loading import load_model, load_task
from fairseq_ccpr.extraction.processes import Processes
from fairseq_ccpr.models.key_layer import KEY_LAYERS, KeyCapture
from fairseq_ccpr.search import METRICS
from fairseq_ccpr.search.faiss_index import build_index
from fairseq_ccpr.search.plan import entry_bytes, plan_index


@dataclass
class TokenBuildSettings:
    """What `build_datastore.py tokens` is told. The command's options have these names and defaults."""

    data_bin: Path
    source_lang: str
    target_lang: str
    path: str
    output: Path
    subset: list[str] = field(default_factory=lambda: ["train"])
    key_layer: str = KEY_LAYERS[0]
    metric: str = METRICS[0]
    index: str = "auto"
    index_parameters: str = ""
    max_tokens: int = 4000
    shard_tokens: int = 131072
    fp16: bool = False
    cpu: bool = False
    user_dir: str | None = None
    quiet: bool = False


def build_token_datastore(settings: TokenBuildSettings, processes: Processes) -> tuple[TokenSection, int]:
    """Build, or go on building, a token datastore; what is already there is reused.

    1. Plan: read the corpus, fingerprint everything, see that the output is free, or ours, and that it fits.
    2. Extract: keys, values and provenance, shard by shard, shared among the processes.
    3. Index the keys.
    4. Publish: give the part its final name and write the manifest.

    Returns:
        The token section of the finished datastore, and how many sentences were left out as longer than the model takes.

    Raises:
        ConfigurationError, CheckpointError, DatastoreError: one sentence for the user.
    """
    for name in ("max_tokens", "shard_tokens"):
        if (value := getattr(settings, name)) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}: give at least 1")
    build = _TokenBuild(settings, processes)
    if not build.extracted:
        if processes.first:
            build.prepare()
        processes.barrier()
        build.extract()
        processes.barrier()
    if processes.first and not build.up_to_date:
        build.make_index()
        build.publish()
    processes.barrier()
    return build.section, build.corpus.left_out


class _TokenBuild:
    """One build: what it starts from, and its stages."""

    def __init__(self, settings: TokenBuildSettings, processes: Processes) -> None:
        self.settings, self.processes = settings, processes
        self.task = load_task(settings.data_bin, settings.source_lang, settings.target_lang, settings.user_dir)
        self.device = processes.device(settings.cpu)
        self.model = load_model(settings.path, self.task, self.device, settings.fp16)
        model_fingerprint = fingerprint.of_parameters(self.model.named_parameters())
        self.capture = KeyCapture(self.model, settings.key_layer, keys_only=True)
        self.corpus: Corpus = read_corpus(self.task, settings.subset, self.model.max_positions(), settings.shard_tokens)
        size, dimension = self.corpus.size, self.capture.dimension
        self.section = TokenSection(
            size=size,
            dimension=dimension,
            key_layer=settings.key_layer,
            subsets=self.corpus.subsets,
            fingerprints={
                "model": model_fingerprint,
                "target_dictionary": fingerprint.of_strings(self.task.target_dictionary.symbols),
                "corpus": self.corpus.fingerprint,
            },
            index=plan_index(
                settings.index,
                settings.metric,
                settings.index_parameters,
                size,
                dimension,
                gpu=self.device.type == "cuda",
            ),
        )
        self.final = settings.output / TOKEN
        self.partial = settings.output / f"{TOKEN}.partial"
        self.shapes = array_shapes(size, dimension)
        self.writer = ArrayWriter(self.partial, self.shapes)
        self.manifest = self._read_manifest()
        self.extracted = self.manifest.token is not None

    @property
    def up_to_date(self) -> bool:
        """Whether the datastore that is there is the one asked for."""
        return self.manifest.token is not None and self.manifest.token.index == self.section.index

    @property
    def folder(self) -> Path:
        """Where the files are at this moment."""
        return self.final if self.extracted else self.partial

    def _read_manifest(self) -> Manifest:
        """The manifest of the datastore at the output, whose token part, if any, must be the one to be built."""
        output = self.settings.output
        if not (output / MANIFEST).exists():
            return Manifest()
        manifest = Manifest.read(output)
        if manifest.token is not None:
            _refuse_differences(output, asdict(manifest.token), self._identity())
            check_sizes(output, manifest.token.files)
        return manifest

    def _identity(self) -> dict[str, Any]:
        """What makes two token parts the same."""
        return {k: v for k, v in asdict(self.section).items() if k not in ("index", "files")}

    def prepare(self) -> None:
        """See that the output can take the datastore, and lay out its arrays, unless an earlier run did."""
        output = self.settings.output
        if (self.final / PLAN).exists():  # killed while publishing
            self.final.rename(self.partial)
        batching = {name: getattr(self.settings, name) for name in ("max_tokens", "shard_tokens", "fp16")}
        plan = self._identity() | batching
        if (self.partial / PLAN).exists():
            _refuse_differences(self.partial, json.loads((self.partial / PLAN).read_text(encoding="utf-8")), plan)
            return
        _refuse_foreign(output)
        check_space(output, self._bytes_needed())
        existed = output.exists()
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self.writer.create()
            write_json(self.partial / PLAN, plan)
        except OSError:
            shutil.rmtree(self.partial if existed else output, ignore_errors=True)
            raise

    def _bytes_needed(self) -> int:
        arrays = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.shapes.values())
        return arrays + self._index_bytes()

    def _index_bytes(self) -> int:
        return self.section.size * entry_bytes(self.section.index, self.section.dimension)

    def extract(self) -> None:
        """Force-decode those shards of this process that are not done yet."""
        mine = self.corpus.shards[self.processes.rank :: self.processes.world]
        done = self.writer.done()
        todo = [shard for shard in mine if shard.number not in done]
        with self._progress("keys", sum(shard.rows for shard in mine)) as bar:
            bar.update(bar.total - sum(shard.rows for shard in todo))
            shards = force_decode(self.model, self.capture, self.corpus, todo, self.settings.max_tokens)
            try:
                for shard, rows in shards:
                    self.writer.write_shard(shard.number, shard.first_row, rows)
                    bar.update(shard.rows)
            except DatastoreError:
                if not self.writer.done():  # nothing to go on from, and the space may be dear
                    shutil.rmtree(self.partial)
                raise

    def make_index(self) -> None:
        """Index the keys, unless that was done."""
        description = self.section.index
        path = self.folder / description.file
        if description.backend == "exact" or path.exists():
            return
        check_space(self.folder, self._index_bytes())
        keys = open_array(self.folder / f"{KEYS}.npy", *self.shapes[KEYS])
        partial = path.with_name(path.name + ".partial")
        with self._progress(f"index {description.factory}", len(keys)) as bar:
            build_index(keys, description, partial, bar.update)
        partial.replace(path)

    def publish(self) -> None:
        """Bring the datastore under its final name; at every moment it is the old one, unfinished, or the new one."""
        if not self.extracted:
            with (self.partial / SYMBOLS).open("w", encoding="utf-8", newline="\n") as stream:
                stream.writelines(f"{symbol}\n" for symbol in self.task.target_dictionary.symbols)
            self.partial.rename(self.final)
        names = [*(f"{name}.npy" for name in self.shapes), SYMBOLS]
        if self.section.index.file:
            names.append(self.section.index.file)
        # What was published before keeps its checksum: computed anew, it would bless whatever has happened since.
        published = self.manifest.token.files if self.manifest.token is not None else {}
        paths = [f"{TOKEN}/{name}" for name in names]
        new = describe_files(self.settings.output, [path for path in paths if path not in published])
        self.section.files = {path: published.get(path) or new[path] for path in paths}
        self.manifest.token = self.section
        self.manifest.write(self.settings.output)
        # The marks, the plan, and an index that was replaced.
        for path in [path for path in self.final.iterdir() if path.name not in names]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _progress(self, what: str, total: int) -> tqdm:
        return tqdm(
            desc=what, total=total, unit="key", unit_scale=True, disable=self.settings.quiet or not self.processes.first
        )


def _refuse_differences(where: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to mix a new build with an old one that was made from something else."""
    old = found | found["fingerprints"]
    for name, value in (wanted["fingerprints"] | wanted).items():
        if old.get(name) != value:
            both = [fingerprint.short(v) if name in found["fingerprints"] else v for v in (old.get(name), value)]
            raise DatastoreError(
                f"{where} was built with another {name.replace('_', ' ')}: {both[0]} there, {both[1]} now; "
                "give the same options, or another --output, or delete it"
            )


def _refuse_foreign(output: Path) -> None:
    """Refuse an output that exists and is neither empty, nor a datastore, nor the beginning of one."""
    if not output.exists() or (output / MANIFEST).exists():
        return
    if not output.is_dir() or {path.name for path in output.iterdir()} - {f"{TOKEN}.partial"}:
        raise DatastoreError(f"--output {output} exists and is no datastore: give a new or an empty folder")
