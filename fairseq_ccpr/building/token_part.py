"""The token part of a datastore while it is made: planned, filled shard by shard, indexed, published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.datastore.manifest import Manifest, TokenSection
from fairseq_ccpr.datastore.phrase import PHRASE
from fairseq_ccpr.datastore.token import KEYS, SYMBOLS, TOKEN, array_shapes, part_files
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search import build_index, open_index
from fairseq_ccpr.search.index_plan import index_bytes
from fairseq_ccpr.search.recall import recall_of_sample
from fairseq_ccpr.storage import fingerprint
from fairseq_ccpr.storage.arrays import ArrayWriter, check_space, open_array
from fairseq_ccpr.storage.files import (
    MANIFEST,
    PLAN,
    check_sizes,
    describe_files,
    write_json,
)

RAW, VALID, ADAPTER = "raw", "valid", "adapter"  # beside the part, while an adapter is trained


class TokenPart:
    """The token part at `output`: what is there of it, and the stages that are still to come. Each survives a kill.

    Args:
        output: the datastore's folder.
        section: what the part is to be, all but its files.
        symbols: the target vocabulary, by token id.
        show: whether to draw progress bars.

    Raises:
        DatastoreError: the folder holds a part made from something else.
    """

    def __init__(self, output: Path, section: TokenSection, symbols: list[str], show: bool) -> None:
        self.output, self.section, self.symbols, self.show = output, section, symbols, show
        self.final, self.partial = output / TOKEN, output / f"{TOKEN}.partial"
        self.shapes = array_shapes(section.size, section.dimension)
        self.writer = ArrayWriter(self.partial, self.shapes)
        self.manifest = self._read_manifest()
        self.filled = self.manifest.token is not None

    @property
    def up_to_date(self) -> bool:
        """Whether the part that is there is the one asked for, its index included."""
        return self.manifest.token is not None and self.manifest.token.index == self.section.index

    def keep_index(self) -> None:
        """Be content with the index that is there."""
        if self.manifest.token is not None:
            self.section.index = self.manifest.token.index

    def _read_manifest(self) -> Manifest:
        """The manifest of the datastore at the output, whose token part, if any, must be the one to be built."""
        if not (self.output / MANIFEST).exists():
            return Manifest()
        manifest = Manifest.read(self.output)
        if manifest.token is not None:
            refuse_differences(self.output, asdict(manifest.token), self._identity())
            check_sizes(self.output, manifest.token.files)
        return manifest

    def _identity(self) -> dict[str, Any]:
        """What makes two token parts the same."""
        said = asdict(self.section)
        return {
            k: said[k] for k in ("share", "shard", *said) if k not in ("index", "files", "index_recall", "sources")
        }  # before the size, which follows from it

    def prepare(self, batching: dict[str, Any]) -> None:
        """See that the output can take the part, and lay out its arrays, unless an earlier run did.

        Args:
            batching: what else must not change before the part is full, because it decides what a shard is.
        """
        if (self.final / PLAN).exists():  # killed while publishing
            self.final.rename(self.partial)
        plan = self._identity() | batching
        if (self.partial / PLAN).exists():
            refuse_differences(self.partial, json.loads((self.partial / PLAN).read_text(encoding="utf-8")), plan)
            return
        refuse_foreign(self.output)
        check_space(self.output, self._bytes_needed())
        existed = self.output.exists()
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self.writer.create()
            write_json(self.partial / PLAN, plan)
        except OSError:
            shutil.rmtree(self.partial if existed else self.output, ignore_errors=True)
            raise

    def _bytes_needed(self) -> int:
        arrays = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.shapes.values())
        return arrays + self._index_bytes()

    def _index_bytes(self) -> int:
        return index_bytes(self.section.index, self.section.size, self.section.dimension)

    def fill(
        self, shards: dict[int, int], write: Callable[[list[int]], Iterable[tuple[int, int, dict[str, np.ndarray]]]]
    ) -> None:
        """Write those shards that are not done yet.

        Args:
            shards: rows of each, by number.
            write: from the numbers of shards to each one's number, first row and arrays.
        """
        done = self.writer.done()
        todo = [number for number in shards if number not in done]
        with self.progress("keys", sum(shards.values())) as bar:
            bar.update(bar.total - sum(shards[number] for number in todo))
            try:
                for number, first_row, rows in write(todo):
                    self.writer.write_shard(number, first_row, rows)
                    bar.update(shards[number])
            except DatastoreError:
                if not self.writer.done():  # nothing to go on from, and the space may be dear
                    shutil.rmtree(self.partial)
                raise

    def make_index(self) -> None:
        """Index the keys, unless that was done."""
        description = self.section.index
        folder = self.final if self.filled else self.partial
        path = folder / description.file
        if not description.file or path.exists():
            return
        check_space(folder, self._index_bytes())
        keys = open_array(folder / f"{KEYS}.npy", *self.shapes[KEYS])
        with self.progress(f"index {description.factory}", len(keys)) as bar:
            build_index(keys, description, path, bar.update)

    def publish(self) -> None:
        """Bring the part under its final name; at every moment it is the old one, unfinished, or the new one."""
        if not self.filled:
            with (self.partial / SYMBOLS).open("w", encoding="utf-8", newline="\n") as stream:
                stream.writelines(f"{symbol}\n" for symbol in self.symbols)
            self.partial.rename(self.final)
        names = part_files(self.section)
        # What was published before keeps its checksum: computed anew, it would bless whatever has happened since.
        published = self.manifest.token.files if self.manifest.token is not None else {}
        paths = [f"{TOKEN}/{name}" for name in names]
        new = describe_files(self.output, [path for path in paths if path not in published])
        self.section.files = {path: published.get(path) or new[path] for path in paths}
        self.section.index_recall = self._measure_recall()
        self.manifest.token = self.section
        self.manifest.write(self.output)
        self.filled = True
        # The marks, the plan, and an index that was replaced.
        for path in [path for path in self.final.iterdir() if path.name not in names]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _measure_recall(self) -> float | None:
        """Of the index over the keys, both in their final place."""
        if not self.section.index.file:
            return None
        if self.up_to_date and self.manifest.token is not None:
            return self.manifest.token.index_recall
        keys = open_array(self.final / f"{KEYS}.npy", *self.shapes[KEYS])
        return recall_of_sample(open_index(self.section.index, keys, self.final), keys)

    def progress(self, what: str, total: int) -> tqdm:
        """A bar that counts keys."""
        return tqdm(desc=what, total=total, unit="key", unit_scale=True, disable=not self.show)


def refuse_differences(where: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to mix a new build with an old one that was made from something else."""
    old = found | found["fingerprints"]
    for name, value in (wanted["fingerprints"] | wanted).items():
        if old.get(name) != value:
            both = [fingerprint.short(v) if name in wanted["fingerprints"] and v else v for v in (old.get(name), value)]
            raise DatastoreError(
                f"{where} was built with another {name.replace('_', ' ')}: {both[0]} there, {both[1]} now; "
                "give the same options, or another --output, or delete it"
            )


def refuse_foreign(output: Path) -> None:
    """Refuse an output that exists and is neither empty, nor a datastore, nor the beginning of one."""
    if not output.exists() or (output / MANIFEST).exists():
        return
    ours = {f"{TOKEN}.partial", f"{PHRASE}.partial", RAW, VALID, ADAPTER}
    ours |= {part for part in (TOKEN, PHRASE) if (output / part / PLAN).exists()}  # killed while publishing
    if not output.is_dir() or {path.name for path in output.iterdir()} - ours:
        raise DatastoreError(f"--output {output} exists and is no datastore: give a new or an empty folder")
