"""The options that all builds of keys share, and the database that they may bring the keys to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Optional

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.search import SLOW, TIMEOUT, StoreAddress, read_address
from fairseq_ccpr.settings import check, option


def refuse(*cases: tuple[object, str]) -> None:
    """Raise the sentence of the first case that holds, as a ConfigurationError."""
    for holds, sentence in cases:
        if holds:
            raise ConfigurationError(sentence)


def check_texts(paths: Iterable[Path]) -> None:
    """Refuse text files that are not there."""
    refuse(
        *(
            (not one.is_file(), f"there is no text {one}: give files of one sentence per line")
            for one in paths
        )
    )


@dataclass(frozen=True)
class KeyStore:
    """A database that keys move to, so that no file of them stays."""

    address: StoreAddress
    token: str = field(repr=False)  # credentials; if empty, those of the environment
    timeout: float  # seconds of an answer


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of `fairseq-ccpr build tokens` and `build phrases` alike."""

    # What the collection's name ends in, where --collection does not give it: phrases and tokens of one
    # folder have one each.
    ENDING: ClassVar[str] = ""

    output: Path = option(
        help="the datastore: a new folder, one to resume, or one that has other parts", metavar="DIR"
    )
    fraction: float = option(
        1.0,
        "take a random fraction of the sentences; a larger fraction holds a smaller one",
        within="(0, 1]",
        needs="more than 0, and at most 1,",
        metavar="X",
    )
    num_shards: int = option(
        1,
        "build one of N shards, each a datastore, by as many commands on any machines; fairseq-ccpr merge "
        "joins them",
        within="[1, inf)",
        needs="at least 1 shard",
        metavar="N",
    )
    shard_id: int = option(0, "which of them, from 0", metavar="I")
    index: str = option(
        "auto",
        "exact search, or a FAISS factory string such as IVF2048,SQfp16; disk, or disk:FACTORY, for one "
        "whose inverted lists stay on disk; auto takes exact on a GPU and for small stores",
        metavar="exact|FACTORY",
    )
    index_parameters: str = option(
        "",
        "search parameters such as nprobe=32, stored with the index (chosen for the index)",
        metavar="P=V,...",
    )
    store: Optional[str] = option(
        None,
        "keep the keys in Milvus: a server, or a file of its embedded form; --index is then exact or a type "
        "of Milvus (HNSW,M=16,efConstruction=200), --index-parameters its parameters (ef=128)",
        metavar="URI|FILE.db",
    )
    collection: Optional[str] = option(
        None,
        "name of the collection in Milvus (the name of the folder; of tokens, and _tokens)",
        metavar="NAME",
    )
    store_timeout: float = option(
        TIMEOUT,
        f"seconds that Milvus may take to answer, all attempts together; writing may take {SLOW} times as "
        "long",
        within="(0, inf)",
        needs="a number of seconds above 0",
        metavar="S",
    )
    cpu: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Check that values are in range, that a shard exists and has no index of its own, and the store."""
        check(self)
        refuse(
            (
                not 0 <= self.shard_id < self.num_shards,
                f"--shard-id is {self.shard_id}, and --num-shards {self.num_shards}: give a number from 0 to "
                f"{self.num_shards - 1}",
            ),
            (
                self.num_shards > 1 and self.index not in ("auto", "exact"),
                f"--index {self.index}: a shard has no index; leave it out, and give it to fairseq-ccpr "
                "merge",
            ),
        )
        self.key_store()

    def key_store(self) -> KeyStore | None:
        """Read the options of the database; None without --store."""
        refuse(
            (
                self.collection is not None and self.store is None,
                f"--collection {self.collection} needs --store, which says where Milvus runs",
            ),
            (
                self.store is not None and self.num_shards > 1,
                "--store takes all keys together, and a shard has some of them: leave it out, merge the "
                "shards with fairseq-ccpr merge, and run this command on the result with --store and "
                "without --num-shards",
            ),
        )
        if self.store is None:
            return None
        name = re.sub(r"^(?=\d)|\W", "_", self.output.resolve().name, flags=re.ASCII) + self.ENDING
        return KeyStore(*read_address(self.store, self.collection or name), self.store_timeout)
