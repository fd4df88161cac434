"""The token part of a datastore while it is built: its arrays are laid out at once and filled chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_ccpr.building.domain_sample import sample_domain
from fairseq_ccpr.building.part import TOKENS, FolderKeys, Part, open_keys
from fairseq_ccpr.datastore.manifest import TokenSection
from fairseq_ccpr.datastore.token import DOMAIN, PROVENANCE, SYMBOLS, array_shapes
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search.index_plan import index_bytes
from fairseq_ccpr.storage.arrays import ArrayWriter, open_array
from fairseq_ccpr.storage.atomic import atomic_file
from fairseq_ccpr.storage.write_behind import write_behind


class TokenPart(Part):
    """The token part at `output`, of known size.

    Args:
        output: the datastore's folder.
        section: what the part is to be, all but its files.
        symbols: the target vocabulary, by token id.
        show: whether to draw progress bars.

    Raises:
        DatastoreError: the folder holds a part built from something else.
    """

    def __init__(self, output: Path, section: TokenSection, symbols: list[str], show: bool) -> None:
        super().__init__(output, TOKENS, FolderKeys(show), _identity(section))
        self.section, self.symbols = section, symbols
        self.shapes = array_shapes(section.size, section.dimension)
        self.writer = ArrayWriter(self.partial, self.shapes)

    @property
    def filled(self) -> bool:
        """Whether the part needs no more keys: it is published, perhaps with another index."""
        return self.published is not None

    def lay_out(self, batching: dict[str, Any]) -> None:
        """Take the space of the arrays and the index, unless an earlier run did.

        Args:
            batching: what decides which sentences share a batch, and must stay the same until the part is full.
        """
        arrays = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.shapes.values())
        needed = arrays + index_bytes(self.section.index, self.section.size, self.section.dimension)
        self.prepare(batching, self.writer.create, needed)

    def fill(
        self,
        chunks: dict[int, int],
        write: Callable[[list[int], Callable[[int], object]], Iterable[tuple[int, int, dict[str, np.ndarray]]]],
        what: str,
    ) -> None:
        """Write those chunks that are not done yet, each while the next is computed.

        Args:
            chunks: rows of each, by number.
            write: from the numbers of chunks to each one's number, first row and arrays; it tells how many more rows there
                are, as often as it can.
            what: is being done, for the progress bar.
        """
        done = self.writer.done()
        todo = [number for number in chunks if number not in done]
        total, left = sum(chunks.values()), sum(chunks[number] for number in todo)
        with self.keys.progress(what, total, total - left, "token") as bar:
            try:
                for _ in write_behind(self._write, write(todo, bar.update)):
                    pass
            except DatastoreError:
                if not self.writer.done():  # nothing to resume from, and space may be scarce
                    self.discard()
                raise

    def _write(self, chunk: tuple[int, int, dict[str, np.ndarray]]) -> None:
        self.writer.write_chunk(*chunk)

    def finish(self) -> None:
        """Publish the part, with the vocabulary and the statistics of its own text alongside its arrays."""
        if not self.filled:
            with atomic_file(self.partial / SYMBOLS) as path:
                path.write_bytes("".join(f"{symbol}\n" for symbol in self.symbols).encode())
        domain = self.folder / DOMAIN
        if not domain.exists() and self.section.projection is None:
            provenance = open_array(self.folder / f"{PROVENANCE}.npy", *self.shapes[PROVENANCE])
            sample_domain(open_keys(self.section, self.folder), provenance).save(domain)
        self.section.domain = domain.exists()
        self.publish(self.section)


def _identity(section: TokenSection) -> dict[str, Any]:
    """Return what makes two token parts the same; options come before the size, which follows from them."""
    values = asdict(section)
    free = ("index", "files", "index_recall", "sources", "domain", "ancestors")
    return {name: values[name] for name in ("share", "shard", *values) if name not in free}
