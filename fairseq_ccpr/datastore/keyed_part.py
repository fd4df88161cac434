"""A part of a datastore whose entries have keys: tokens or phrases, their keys in the folder or in a database."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fairseq_ccpr.datastore.manifest import OpenedPart, S
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import TIMEOUT, Index
from fairseq_ccpr.search.index_plan import CPU, open_for_device
from fairseq_ccpr.storage.arrays import npy_header, open_array


class KeyedPart(OpenedPart[S]):
    """A part opened for reading, with its keys.

    Args:
        timeout: seconds that a database which has the keys may take to answer.
    """

    def __init__(self, directory: Path | str, kind: type[S], timeout: float = TIMEOUT) -> None:
        super().__init__(directory, kind)
        shape = self.section.size, self.section.dimension
        self._keys = (
            open_array(self.folder / "keys.npy", shape, "float16") if self.section.store is None else None
        )
        self.timeout = timeout

    @property
    def keys(self) -> np.ndarray:
        """The keys, fp16 [N, d], mapped from their file; a ConfigurationError where a database has them."""
        if self._keys is None:
            raise ConfigurationError(
                f"the keys of {self.directory} are in {self.section.store}, and only those in a folder can be merged, "
                "compacted, sampled or trained on: build it without --store"
            )
        return self._keys

    def open_index(self, device: torch.device = CPU) -> Index:
        """Open the index over the keys, see `open_for_device`; that of a database is checked when it is first searched."""
        keys = self._keys if self._keys is not None else self.section.remote_keys(self.timeout)
        rebuild = f"`fairseq-ccpr compact {self.directory} --index auto --cpu`"
        return open_for_device(self.section.index, keys, self.folder, device, rebuild)

    def find_damaged_keys(self, block_rows: int) -> Iterator[str]:
        """Read all keys, and open their index; yields a sentence for each fault."""
        index, section = self.open_index(), self.section
        index.check()
        if self._keys is None:
            digest = hashlib.sha256(npy_header((section.size, section.dimension), "<f2"))
            for block in index.read():
                digest.update(np.ascontiguousarray(block, np.float16).data)
            if digest.hexdigest() != self.keys_fingerprint:  # of the file that they would be in
                yield f"{section.PART} keys: those in {section.store} have changed since they were written"
            return
        for start in range(0, section.size, block_rows):
            if not np.isfinite(self._keys[start : start + block_rows]).all():
                yield f"{section.PART} keys: NaN or infinite numbers in rows {start:,} to {start + block_rows:,}"
