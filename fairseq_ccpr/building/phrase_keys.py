"""Where the keys of a phrase datastore are searched: in its folder, or in a database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fairseq_ccpr.building.part import PHRASES, FolderKeys, open_keys
from fairseq_ccpr.datastore.manifest import PhraseSection
from fairseq_ccpr.datastore.token import KEYS
from fairseq_ccpr.errors import DatastoreError
from fairseq_ccpr.search import (
    Index,
    IndexDescription,
    RemoteKeys,
    StoreAddress,
    build_index,
    open_index,
    read_address,
)  # fmt: skip
from fairseq_ccpr.search.index_plan import plan_index
from fairseq_ccpr.storage import fingerprint


class PhraseKeys(FolderKeys):
    """Keys in the folder of the phrase part.

    Args:
        output: the datastore's folder.
        show: whether to draw a progress bar.

    Attributes:
        address: what the manifest says of another place; None for the folder.
    """

    address: StoreAddress | None = None

    def __init__(self, output: Path, show: bool) -> None:
        super().__init__(show)
        self.output = output

    def plan(self, choice: str, parameters: str, size: int, dimension: int, gpu: bool) -> IndexDescription:
        """Resolve `--index` and `--index-parameters` for `size` keys."""
        return plan_index(choice, "ip", parameters, size, dimension, gpu, PHRASES.effort, self.address)

    def check(self, published: Any, identity: dict[str, Any]) -> None:
        """Check, before any work is done, that the keys can be here.

        Args:
            published: the phrase part that is there.
            identity: of the keys, as far as it is known.

        Raises:
            UnreachableError, DatastoreError: one sentence for the user.
        """
        if published is not None and published.store is not None:
            raise DatastoreError(
                f"the keys of {self.output} are in {published.store}: give the same --store, or another --output to have "
                "them in a folder"
            )


class StoreKeys(PhraseKeys):
    """Keys that move to a database, so that a finished part needs no file of them.

    Args:
        output: the datastore's folder.
        show: whether to draw a progress bar.
        store: a URI or a file, as the user gives it.
        collection: its name; that of the output folder if not given.
        timeout: seconds that the database may take to answer.
    """

    address: StoreAddress

    def __init__(self, output: Path, show: bool, store: str, collection: str | None, timeout: float) -> None:
        super().__init__(output, show)
        name = re.sub(r"^(?=\d)|\W", "_", output.resolve().name, flags=re.ASCII)
        self.address, self._token = read_address(store, collection or name)
        self.timeout = timeout

    def check(self, published: Any, identity: dict[str, Any]) -> None:
        """Check that the database answers, and has no other keys under this name."""
        if published is not None and published.store is not None:
            return  # `make_index` compares
        dimension = identity["dimension"]
        keys = RemoteKeys(self.address, 0, dimension, identity, self.timeout, self._token)
        open_index(self.plan("exact", "", 0, dimension, gpu=False), keys, self.output).refuse_foreign()

    def make_index(self, section: PhraseSection, published: PhraseSection | None, folder: Path) -> None:
        """Write those keys that are not there yet, and wait until they can be searched."""
        if published is not None and published.store is not None:
            if (published.store, published.index) != (section.store, section.index):
                raise DatastoreError(
                    f"the keys of {self.output} are in {published.store}, index {published.index}, and {section.store}, "
                    f"index {section.index}, is asked for: give the same --store, --collection and --index, or another "
                    "--output"
                )
            section.fingerprints = published.fingerprints
            self.open_index(section, folder).check()
            return
        section.fingerprints = section.fingerprints | {KEYS: fingerprint.of_file(folder / f"{KEYS}.npy")}
        with self.progress(self.address.backend.capitalize(), section.size) as bar:
            remote = section.remote_keys(self.timeout, self._token)
            build_index(open_keys(section, folder), section.index, folder, bar.update, remote)

    def open_index(self, section: PhraseSection, folder: Path) -> Index:
        """Open the index of the database."""
        return open_index(section.index, section.remote_keys(self.timeout, self._token), folder)
