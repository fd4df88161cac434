"""A part of a datastore opened for reading: checked and mapped as its section says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from fairseq_ccpr.datastore.manifest import Manifest, Section
from fairseq_ccpr.datastore.parts import KEYS
from fairseq_ccpr.errors import ConfigurationError, DatastoreError
from fairseq_ccpr.search import TIMEOUT, Index
from fairseq_ccpr.search.index_plan import CPU, open_for_device
from fairseq_ccpr.storage.arrays import npy_header
from fairseq_ccpr.storage.files import check_checksums, check_sizes

CHECKED_ROWS = 1 << 16  # at a time

S = TypeVar("S", bound=Section)


class OpenedPart(Generic[S]):
    """A part opened for reading, checked for size and shape.

    Args:
        timeout: seconds that a database which has the keys may take to answer.
    """

    def __init__(self, directory: Path | str, kind: type[S], timeout: float = TIMEOUT) -> None:
        self.directory, self.timeout = Path(directory), timeout
        section = getattr(Manifest.read(self.directory), kind.PART)
        if section is None:
            raise DatastoreError(
                f"the datastore {self.directory} has no {kind.PART} part: build one with `fairseq-ccpr "
                f"{kind.COMMAND}`"
            )
        self.section: S = section
        check_sizes(self.directory, section.files)
        self.folder = self.directory / section.folder

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of its arrays that are in files, mapped, by name."""
        return self.section.open_arrays(self.folder)

    @property
    def keys_fingerprint(self) -> str:
        """Digest of the keys' file, or of what it would be where a database has them."""
        digest = self.section.keys_fingerprint
        assert digest is not None
        return digest

    @property
    def keys_fingerprints(self) -> list[str]:
        """Digests of the keys' file, now and before what was learned moved into it."""
        return [self.keys_fingerprint, *self.section.ancestors]

    def find_damage(self) -> list[str]:
        """Read every byte; returns a sentence for each fault, none if the part is healthy."""
        # What is damaged cannot be trusted to be read.
        return check_checksums(self.directory, self.section.files) or list(self.find_nonsense())

    def find_nonsense(self) -> Iterator[str]:
        """Look for what no checksum shows, since it was written so; yields a sentence for each fault."""
        yield from ()


class KeyedPart(OpenedPart[S]):
    """A part whose entries have keys: tokens or phrases."""

    @cached_property
    def keys(self) -> np.ndarray:
        """The keys as vectors [N, d], mapped where they are fp16; a ConfigurationError where a database has them."""
        if self.section.store is not None:
            raise ConfigurationError(
                f"the keys of {self.directory} are in {self.section.store}, and only those in a folder can "
                "be merged, compacted, sampled or trained on: build it without --store"
            )
        return self.section.KEY_FORM.decode(self.arrays[KEYS])

    def open_index(self, device: torch.device = CPU) -> Index:
        """Open the index, see `open_for_device`; that of a database is checked when it is first searched."""
        keys = self.keys if self.section.store is None else self.section.remote_keys(self.timeout)
        rebuild = f"`fairseq-ccpr compact {self.directory} --index auto --cpu`"
        return open_for_device(self.section.index, keys, self.folder, device, rebuild)

    def blocks(self) -> Iterator[tuple[slice, str]]:
        """Divide the entries into blocks, and say which rows these are."""
        for start in range(0, self.section.size, CHECKED_ROWS):
            yield slice(start, start + CHECKED_ROWS), f"rows {start:,} to {start + CHECKED_ROWS:,}"

    def find_nonsense(self) -> Iterator[str]:
        """Open the index, and read all keys."""
        index, section = self.open_index(), self.section
        index.check()
        if section.store is None:
            for rows, said in self.blocks():
                if not np.isfinite(self.keys[rows]).all():
                    yield f"{section.PART} keys: NaN or infinite numbers in {said}"
            return
        form = section.KEY_FORM
        digest = hashlib.sha256(npy_header(*section.shapes(KEYS)[KEYS]))
        for block in index.read():
            digest.update(np.ascontiguousarray(form.encode(torch.from_numpy(block))).data)
        if digest.hexdigest() != self.keys_fingerprint:  # of the file that they would be in
            yield f"{section.PART} keys: those in {section.store} have changed since they were written"
