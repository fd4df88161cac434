"""The crash-safe life of a datastore part: planned, filled in one process or many, indexed, published."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from fairseq_ccpr.building.defaults import LogProbs, measure_defaults
from fairseq_ccpr.building.options import KeyStore
from fairseq_ccpr.child_process import lock_within
from fairseq_ccpr.datastore.manifest import PHRASE, TEXT, TOKEN, Manifest, Section, TokenSection
from fairseq_ccpr.datastore.parts import KEYS, PROVENANCE, SYMBOLS, VALUES
from fairseq_ccpr.datastore.source_index import SourceIndex, Sources, write_source_index
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.parent import end_with_parent
from fairseq_ccpr.search import Index, IndexDescription, RemoteKeys, build_index, open_index
from fairseq_ccpr.search.base import Progress
from fairseq_ccpr.search.index_plan import index_bytes, plan_index
from fairseq_ccpr.search.recall import recall_of_sample
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import ArrayWriter, check_space, write_behind
from fairseq_ccpr.storage.files import MANIFEST, PLAN, check_sizes, describe_files, write_json, write_text
from fairseq_ccpr.timing import progress_bar

# folders alongside the token part while an adapter is trained
RAW, VALID, ADAPTER = "raw", "valid", "adapter"
BACK_TRANSLATIONS = "back-translations"  # folder alongside the token part of monolingual text
PATIENCE = 10.0  # seconds that a folder may stay locked by what reads batches for a build that was killed
# Names in plans and manifests that users know by another one.
KNOWN_AS = {"share": "fraction", "shard_tokens": "chunk tokens", "shard_sentences": "chunk sentences"}


S = TypeVar("S", bound=Section)
ChunkRows = tuple[int, int, dict[str, np.ndarray]]  # number of a chunk, its first row, and its arrays


class Part(Generic[S]):
    """A part of the datastore at `output`: what exists of it, and the stages to come. Each survives a kill.

    While its owner fills it, its folder is NAME.partial, where a plan says what it is built from. Publishing
    renames the folder and then writes the manifest; a folder that has its final name and still its plan was
    killed in between.
    """

    def __init__(
        self,
        output: Path,
        kind: type[S],
        show: bool,
        identity: dict[str, Any] | None = None,
        store: KeyStore | None = None,
    ) -> None:
        self.output, self.kind, self.show = output, kind, show
        self.store = store  # the database that keys move to, so that no file of them stays; None: they stay
        self.log_probs: LogProbs | None = None  # of the model, of tokens, while it is there to be asked
        # What makes two parts the same, named as in the manifest; empty: it is not made from a corpus.
        self.identity = identity or {}
        manifest = Manifest.read(output) if (output / MANIFEST).exists() else Manifest()
        self.published: S | None = getattr(manifest, kind.PART)  # None until the part is complete
        self.final = output / (self.published.folder if self.published is not None else kind.PART)
        self.partial = output / f"{kind.PART}.partial"
        if self.published is not None:
            if self.identity:
                refuse_rewritten(output, self.published)
                refuse_differences(output, asdict(self.published), self.identity)
            check_sizes(output, self.published.files)

    @property
    def folder(self) -> Path:
        return self.partial if self.published is None else self.final

    def prepare(self, settings: dict[str, Any], lay_out: Callable[[], object], needed: int = 0) -> None:
        """Begin the part, unless an earlier run did; `settings` must stay the same until the part is full."""
        if (self.final / PLAN).exists():  # killed while publishing
            self.final.rename(self.partial)
        plan, path = self.identity | settings, self.partial / PLAN
        if path.exists():
            refuse_differences(self.partial, json.loads(path.read_text(encoding="utf-8")), plan)
            return
        refuse_foreign(self.output)
        check_space(self.output, needed)
        existed = self.output.exists()
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            lay_out()
            write_json(path, plan)
        except OSError:
            rmtree(self.partial if existed else self.output, ignore_errors=True)
            raise

    def plan_index(
        self, choice: str, metric: str, parameters: str, size: int, dimension: int, gpu: bool
    ) -> IndexDescription:
        """Decide what the options of an index mean for so many keys, see `search.index_plan.plan_index`."""
        address = self.store.address if self.store is not None else None
        return plan_index(choice, metric, parameters, size, dimension, gpu, self.kind.EFFORT, address)

    def check_store(self, index: IndexDescription) -> None:
        """Check that keys in a database are to stay there, or that it answers, and has no others of this name."""
        elsewhere = self.published.store if self.published is not None else None
        if self.store is None and elsewhere is not None:
            raise DatastoreError(
                f"the keys of {self.output} are in {elsewhere}: give the same --store, or another folder to "
                "have them in"
            )
        if self.store is not None and elsewhere is None:  # otherwise `make_index` compares
            store, width = self.store, self.identity["dimension"]
            keys = RemoteKeys(store.address, 0, width, self.identity, store.timeout, store.token)
            open_index(index, keys, self.output).refuse_foreign()

    def discard(self) -> None:
        """Remove what was begun, and the output if nothing else is in it."""
        rmtree(self.partial)
        with contextlib.suppress(OSError):  # not empty
            self.output.rmdir()

    def publish(self, section: S) -> None:
        """Complete the part; at every moment readers see the old one, an unfinished one, or the new one.

        1. Index the keys, unless that was done, and give the folder its final name.
        2. Describe the files and measure the index, in `section`; what was published before keeps its
           checksum, since a new one would vouch for whatever has happened to the file since.
        3. Write the manifest, if anything is new, and no other process has replaced the part.
        4. Remove everything that it does not name: the plan, marks of progress, an index that was replaced.
        """
        section.store = self.store.address if self.store is not None else None
        try:
            self._describe(section)
        except Exception:
            if self.published is not None:  # it may have been compacted, and its folder is gone then
                Manifest.read(self.output).refuse_changed(self.output, self.kind.PART, self.published)
            raise
        if section != self.published:
            Manifest.update(self.output, [(self.published, section)])
            self.published = section
        for path in [path for path in self.final.iterdir() if path.name not in section.names]:
            rmtree(path) if path.is_dir() else path.unlink()

    def _describe(self, section: S) -> None:
        self.make_index(section)
        if self.published is None:
            self.partial.rename(self.final)
        paths = [f"{self.final.name}/{name}" for name in section.names]
        old = {} if self.published is None else self.published.files
        new = describe_files(self.output, [path for path in paths if path not in old])
        section.files = {path: old.get(path) or new[path] for path in paths}
        if section.index.backend == "exact":
            section.index_recall = None
        elif self.published is not None and self.published.index == section.index:  # is not measured again
            section.index_recall = self.published.index_recall
        else:
            keys = section.open_keys(self.final)
            section.index_recall = recall_of_sample(self.open_index(section), keys, section.DEPTH)
        if isinstance(section, TokenSection):
            section.suits = self._suits(section)

    def _suits(self, section: TokenSection) -> dict[str, float]:
        """Measure what settings suit the keys, once; what was measured before a rewriting may stay."""
        known = self.published.suits if isinstance(self.published, TokenSection) else section.suits
        # Keys may be in a database alone.
        if "temperature" in known or not section.size or not (self.final / f"{KEYS}.npy").exists():
            return known
        values, provenance = section.open_arrays(self.final, VALUES, PROVENANCE).values()
        sources = SourceIndex(self.final, section.source_index)
        index, keys = self.open_index(section), section.open_keys(self.final)
        return known | measure_defaults(index, keys, values, provenance, self.log_probs, sources)

    def make_index(self, section: S) -> None:
        """Make the keys searchable as `section.index` says, unless an earlier run did."""
        if self.store is not None:
            self._bring_keys(section, self.store)
            return
        description, path = section.index, self.folder / section.index.file
        if not description.file or path.exists():
            return
        check_space(self.folder, index_bytes(description, section.size, section.dimension))
        with self.progress(f"index {description.factory}", section.size) as bar:
            build_index(section.open_keys(self.folder), description, path, bar.update)

    def _bring_keys(self, section: S, store: KeyStore) -> None:
        published = self.published
        if published is not None and published.store is not None:
            if (published.store, published.index) != (section.store, section.index):
                raise DatastoreError(
                    f"the keys of {self.output} are in {published.store}, index {published.index}, and "
                    f"{section.store}, index {section.index}, is asked for: give the same --store, "
                    "--collection and --index, or another --output"
                )
            section.fingerprints = published.fingerprints
            self.open_index(section).check()
            return
        section.fingerprints = section.fingerprints | {KEYS: fingerprint.of_file(self.folder / f"{KEYS}.npy")}
        with self.progress(store.address.backend.capitalize(), section.size) as bar:
            keys = section.open_keys(self.folder)
            build_index(keys, section.index, section.remote_keys(store.timeout, store.token), bar.update)

    def open_index(self, section: Section) -> Index:
        """Open what `make_index` has made, in the folder's final place."""
        if self.store is None:
            return open_index(section.index, section.open_keys(self.final), self.final)
        keys = section.remote_keys(self.store.timeout, self.store.token)
        return open_index(section.index, keys, self.final)

    def progress(self, what: str, total: int, done: int = 0, unit: str = "key") -> tqdm[Any]:
        return progress_bar(what, unit, total=total, done=done, quiet=not self.show)


def refuse_rewritten(output: Path, section: Section) -> None:
    """Refuse to build a part again that was merged or compacted: no corpus alone is what it was made from."""
    if section.sources or section.ancestors:
        what = "compacted" if section.ancestors else "merged"
        raise DatastoreError(
            f"the {section.PART} part of {output} was {what}, and is not what a build makes: give another "
            f"--output; fairseq-ccpr compact {output} --index auto replaces its index alone"
        )


def refuse_differences(where: Path, found: dict[str, Any], plan: dict[str, Any]) -> None:
    """Refuse to mix a new build with an old one that was made from something else."""
    # The digest of keys that moved elsewhere follows from the others.
    old, new = ({k: v for k, v in one["fingerprints"].items() if k != KEYS} for one in (found, plan))
    compared = [(name, old.get(name), digest) for name, digest in new.items()]
    compared += [(name, found.get(name), value) for name, value in plan.items() if name != "fingerprints"]
    compared += [(name, digest, None) for name, digest in old.items() if name not in new]
    for name, before, expected in compared:
        if before != expected:
            raise DatastoreError(
                f"{where} was built with another {KNOWN_AS.get(name, name).replace('_', ' ')}: "
                f"{fingerprint.brief(before)} there, {fingerprint.brief(expected)} now; give the same "
                "options, or another --output, or delete it"
            )


def refuse_foreign(output: Path) -> None:
    """Refuse an output that exists and is neither empty, nor a datastore, nor the beginning of one."""
    if not output.exists() or (output / MANIFEST).exists():
        return
    parts = (TOKEN, PHRASE, TEXT)
    ours = {RAW, VALID, ADAPTER, BACK_TRANSLATIONS}
    ours |= {f"{part}.partial" for part in (*parts, BACK_TRANSLATIONS)}
    ours |= {part for part in parts if (output / part / PLAN).exists()}  # killed while publishing
    if not output.is_dir() or {path.name for path in output.iterdir()} - ours:
        raise DatastoreError(
            f"--output {output} exists and is not a datastore: give a new or an empty folder"
        )


class TokenPart(Part[TokenSection]):
    """The token part at `output`, of known size: `section` describes all but its files."""

    def __init__(
        self,
        output: Path,
        section: TokenSection,
        symbols: list[str],
        show: bool,
        store: KeyStore | None = None,
    ) -> None:
        super().__init__(output, TokenSection, show, section.entries(section.IDENTITY), store)
        if self.published is not None:
            section.source_index = self.published.source_index
        self.section, self.symbols = section, symbols
        self.writer = ArrayWriter(self.partial, section.shapes(*section.ROWS))

    def lay_out(self, batching: dict[str, Any]) -> None:
        """Take the space of arrays and index; `batching`, which decides what shares a batch, must stay the same."""
        shapes = self.writer.shapes.values()
        arrays = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes)
        needed = arrays + index_bytes(self.section.index, self.section.size, self.section.dimension)
        self.prepare(batching, self.writer.create, needed)

    def fill(
        self, chunks: dict[int, int], write: Callable[[list[int], Progress], Iterable[ChunkRows]], what: str
    ) -> None:
        """Write those chunks that are not done yet, each while the next is computed.

        Args:
            chunks: rows of each, by number.
            write: from the numbers of chunks to each one's number, first row and arrays; it reports how many
                more rows there are, as often as it can.
        """
        done = self.writer.done()
        todo = [number for number in chunks if number not in done]
        total, left = sum(chunks.values()), sum(chunks[number] for number in todo)
        with self.progress(what, total, total - left, "token") as bar:
            try:
                for _ in write_behind(lambda chunk: self.writer.write_chunk(*chunk), write(todo, bar.update)):
                    pass
            except DatastoreError:
                if not self.writer.done():  # nothing to resume from, and space may be scarce
                    self.discard()
                raise

    def finish(self, sources: Sources, vocabulary: int, unknown: int) -> None:
        """Publish the part, with vocabulary and sources alongside its arrays.

        Args:
            sources: see `write_source_index`, as `vocabulary` and `unknown`.
        """
        provenance = self.section.open_arrays(self.folder, PROVENANCE)[PROVENANCE]
        if self.published is None:
            write_text(
                self.partial / SYMBOLS, "".join(f"{symbol}\n" for symbol in self.symbols), follow=False
            )
            with self.progress("source index", 0, unit="sentence") as bar:
                described = write_source_index(
                    self.folder, sources, provenance, vocabulary, unknown, bar.update
                )
            self.section.source_index = described
        self.publish(self.section)


@dataclass(frozen=True)
class Processes:
    """This process's place among `world` processes."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def device(self, cpu: bool) -> torch.device:
        """Choose this process's GPU and make it the current one, or the CPU if there is none or `cpu`."""
        if cpu or not torch.cuda.is_available():
            return torch.device("cpu")
        if self.local_rank >= (count := torch.cuda.device_count()):
            raise ConfigurationError(
                f"torchrun started process {self.local_rank + 1} of this machine, which has {count} GPUs: "
                f"give --nproc-per-node {count}, or --cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)


@contextmanager
def launched(output: Path) -> Iterator[Processes]:
    """Join the processes that torchrun started, by its environment variables; else there is just this one.

    They build `output`, and no others may while they do. They end with torchrun, even where it is killed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with only_builder(output):
            yield Processes()
        return
    end_with_parent()
    # Where torchrun was killed before that, nobody is met.
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # with several machines, each counts its own restarts
        # The store outlives the processes, and has the addresses of those that died.
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    # The first process indexes alone when all keys are written, for an unknown time.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(days=7))
    try:
        processes = Processes(rank, world, int(os.environ["LOCAL_RANK"]))
        with only_builder(output) if processes.first else contextlib.nullcontext():
            yield processes
    finally:
        dist.destroy_process_group()


@contextmanager
def only_builder(output: Path) -> Iterator[None]:
    """Keep other builds out of a folder, which is made, and removed if nothing is in it at the end."""
    made = not output.exists()
    if made:
        output.mkdir(parents=True)
    # The folder itself is locked: what is in it must be the same, whoever built it.
    descriptor = os.open(output, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks, or without those of folders
            if not lock_within(PATIENCE, descriptor):
                raise DatastoreError(f"{output} is being built by another process: wait for it, or end it")
        yield
    finally:
        os.close(descriptor)
        if made:
            with contextlib.suppress(OSError):  # not empty
                output.rmdir()
