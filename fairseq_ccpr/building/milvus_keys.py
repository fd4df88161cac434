"""Bringing the keys of a phrase datastore into Milvus, where they stay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search.base import MILVUS, IndexDescription
from fairseq_ccpr.search.milvus_index import MilvusIndex
from fairseq_ccpr.search.milvus_server import read_address


class KeyStore:
    """What `--store` names.

    Args:
        store: a URI or a file, as the user gives it.
        collection: its name; that of the output folder if not given.
        output: the datastore's folder.
        timeout: seconds that Milvus may take to answer.

    Attributes:
        address: where it is, without credentials.
    """

    def __init__(self, store: str, collection: str | None, output: Path, timeout: float) -> None:
        name = re.sub(r"^(?=\d)|\W", "_", output.resolve().name, flags=re.ASCII)
        self.address, self._token = read_address(store, collection or name)
        self.timeout = timeout

    def check_free(self, identity: dict[str, Any]) -> None:
        """Before any work is done: Milvus answers, and has no other collection of this name.

        Args:
            identity: of the keys, as far as it is known.

        Raises:
            UnreachableError, DatastoreError: one sentence for the user.
        """
        anything = IndexDescription(MILVUS, "ip")
        index = MilvusIndex(self.address, anything, 0, identity["dimension"], identity, self.timeout, self._token)
        if index.exists():
            index.refuse_foreign()

    def fill(self, section: PhraseSection, keys: np.ndarray, quiet: bool) -> None:
        """Write those keys that are not there yet, and wait until they can be searched.

        Args:
            section: what they are.
            keys: fp16 [N, o].
        """
        with tqdm(desc="Milvus", total=len(keys), unit="key", unit_scale=True, disable=quiet) as bar:
            self.open(section).fill(keys, bar.update)

    def open(self, section: PhraseSection) -> MilvusIndex:
        """The index over the keys of a section."""
        size, dimension = section.size, section.dimension
        return MilvusIndex(self.address, section.index, size, dimension, section.identity(), self.timeout, self._token)

    def check_published(self, output: Path, published: PhraseSection, description: IndexDescription) -> None:
        """See that a finished datastore is the one asked for.

        Raises:
            DatastoreError: its keys are elsewhere in Milvus, or have another index there.
        """
        if (published.store, published.index) != (self.address, description):
            raise DatastoreError(
                f"the keys of {output} are in {published.store}, index {published.index}, and {self.address}, index "
                f"{description}, is asked for: give the same --store, --collection and --index, or another --output"
            )
        self.open(published).check()


def refuse_without_store(output: Path, published: PhraseSection | None) -> None:
    """Refuse to index keys that are not in the folder.

    Raises:
        DatastoreError: says where they are.
    """
    if published is not None and published.store is not None:
        raise DatastoreError(
            f"the keys of {output} are in {published.store}: give the same --store, or another --output to have them in "
            "a folder"
        )
