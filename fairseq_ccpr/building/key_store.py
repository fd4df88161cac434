"""Where a build brings the keys of tokens or phrases, if not to its folder: the options, and the same of all parts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Self

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import SLOW, TIMEOUT, StoreAddress, read_address
from fairseq_ccpr.settings import option


def store_option() -> Any:
    """Return the field `store` of a build's settings."""
    return option(
        None,
        "keep the keys in Milvus: a server, or a file of its embedded form; --index is then exact or a type of Milvus "
        "(HNSW,M=16,efConstruction=200), --index-parameters its parameters (ef=128)",
        metavar="URI|FILE.db",
    )


def collection_option(default: str) -> Any:
    """Return the field `collection`."""
    return option(None, f"name of the collection in Milvus ({default})", metavar="NAME")


def store_timeout_option() -> Any:
    """Return the field `store_timeout`."""
    return option(
        TIMEOUT,
        f"seconds that Milvus may take to answer, all attempts together; writing may take {SLOW} times as long",
        within="(0, inf)",
        needs="a number of seconds above 0",
        metavar="S",
    )


@dataclass(frozen=True)
class KeyStore:
    """A database that keys move to, so that no file of them stays."""

    address: StoreAddress
    token: str = field(repr=False)  # credentials; if empty, those of the environment
    timeout: float  # seconds of an answer

    @classmethod
    def of(cls, settings: Any, suffix: str = "") -> Self | None:
        """Read the options of a build; None without --store.

        Args:
            settings: of any part; `output` and `num_shards` count besides those above.
            suffix: of the collection's name, where --collection does not give it: after that of the folder.
        """
        if settings.collection is not None and settings.store is None:
            raise ConfigurationError(
                f"--collection {settings.collection} needs --store, which says where Milvus runs"
            )
        if settings.store is None:
            return None
        if settings.num_shards > 1:
            raise ConfigurationError(
                "--store takes all keys together, and a shard has some of them: leave it out, merge the shards with "
                "fairseq-ccpr merge, and run this command on the result with --store and without --num-shards"
            )
        name = re.sub(r"^(?=\d)|\W", "_", settings.output.resolve().name, flags=re.ASCII) + suffix
        return cls(*read_address(settings.store, settings.collection or name), settings.store_timeout)
