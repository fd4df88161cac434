"""Keys in Milvus, a server or its embedded form: connecting, retrying, building, searching."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from torch import Tensor

from fairseq_ccpr.errors import ConfigurationError, DatastoreError, UnreachableError
from fairseq_ccpr.search.base import (
    EXACT_UP_TO,
    MILVUS,
    Index,
    IndexDescription,
    IndexRequest,
    Progress,
    RemoteKeys,
    StoreAddress,
    Target,
)

logger = logging.getLogger(__name__)

TOKEN = "MILVUS_TOKEN"  # of the environment: user:password, or an API key
TIMEOUT = 30.0  # seconds
SLOW = 20  # writing, counting and the like may take this many times as long as a query
TOLD = 10.0  # seconds of waiting after which that is said
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts, each twice the one before
POLL = 0.2  # seconds between questions after what Milvus is doing
LONGEST_ANSWER = 300  # characters of what Milvus says
OLDEST = (2, 3)  # version of a server
SCHEMES = ("http", "https", "tcp")
# A connection of its own, opened again as soon as the server is back.
CHANNEL = {
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # questions have a time limit; more pings, the embedded one takes for an attack
    "grpc.keepalive_time_ms": 300_000,
}
# What a server says that was stopped, or of parts that it has lost, until it has found itself again. Some of
# it is called unrecoverable, which it is for that connection. Its codes do not tell: an error of several
# causes has that of the last.
RESTARTED = re.compile(
    r"service not ready|service unavailable|not healthy|not serving|no available|empty grpc client|leader changed|"
    r"(node|session|channel|segment|replica) (not found|not match|not available|lacks|offline)|not (fully )?loaded|"
    r"in state 'released'|timeout|timed out|deadline exceeded|context canceled|connection (error|refused|reset|is closing)"
)

ID, KEY = "entry", "key"
PROPERTY = "fairseq_ccpr"  # of a collection: JSON, what its keys are
METRICS = {"ip": "IP", "l2": "L2"}  # as Milvus has them: squared distances, too
DEEPEST = 16384  # Milvus's own limit, of neighbours and of rows read
QUERIES, RESULTS = 512, 1 << 19  # in one request, at most
BLOCK_ROWS = 4096  # written or read at a time
WIDENED = ("ef", "search_list")  # search parameters that may not be less than the number of neighbours


def read_address(store: str, collection: str) -> tuple[StoreAddress, str]:
    """Parse `--store` and `--collection`: the address, and the credentials that were in it, if any.

    >>> read_address("https://me:a%2Fb@host:19530/db", "mine")
    (StoreAddress(uri='https://host:19530/db', collection='mine'), 'me:a/b')
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", collection):
        raise ConfigurationError(
            f"--collection is '{collection}': Milvus takes letters, digits and _, and no digit in front"
        )
    try:
        parts = urlsplit(store)
        if "@" not in parts.path:
            _ = parts.port  # raises where it is none
    except ValueError:  # its message may have the password in it
        raise ConfigurationError(
            "--store is no URI such as http://localhost:19530: its host or port cannot be read; "
            f"user:password can also be in the environment variable {TOKEN}"
        ) from None
    credentials, _, host = parts.netloc.rpartition("@")
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":
        raise ConfigurationError(
            "--store has an @ beyond its host: where a password has one of / # ? @ in it, write it in per "
            f"cent (%2F %23 %3F %40), or put user:password in the environment variable {TOKEN}"
        )
    if parts.scheme in SCHEMES and host:
        address = parts._replace(netloc=host, path=parts.path.rstrip("/")).geturl()
        return StoreAddress(address, collection), unquote(credentials)
    path = Path(store)
    if parts.scheme or path.suffix != ".db":
        raise ConfigurationError(
            f"--store {parts._replace(netloc=host).geturl()} is neither a server, such as "
            "http://localhost:19530, nor a file that ends in .db, which Milvus makes"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"--store {store}: there is no folder {path.parent}")
    return StoreAddress(str(path.resolve()), collection), ""


class MilvusServer:
    """A server, or an embedded one, whose calls are retried for a while when it does not answer."""

    def __init__(self, address: StoreAddress, token: str, timeout: float) -> None:
        self.pymilvus = import_pymilvus(address.embedded)
        self.address, self.timeout = address, timeout  # seconds of a question, all attempts together
        self._token = token or os.environ.get(TOKEN, "")
        self._client: Any = None
        self.loaded = False  # whether the collection can be searched, and must be so again after a break

    def ask(self, method: str, *args: Any, slow: bool = False, **kwargs: Any) -> Any:
        """Call a method of pymilvus's client until it answers or time is up, later for `slow` ones."""
        seconds = self.timeout * (SLOW if slow else 1)
        start = time.monotonic()
        give_up, tell, pause, attempts, last = start + seconds, start + TOLD, FIRST_PAUSE, 0, "nothing"
        while True:
            attempts += 1
            try:
                # An answer that was lost does not come; what takes long gets longer each time.
                left = max(min(give_up - time.monotonic(), self.timeout * 2**attempts / 2), FIRST_PAUSE)
                if self._client is None:
                    self._client = self.pymilvus.MilvusClient(
                        self.address.uri,
                        token=self._token,
                        timeout=left,
                        dedicated=True,
                        grpc_options=CHANNEL,
                    )
                    if self.loaded:  # a server that comes back may have forgotten
                        self._client.load_collection(self.address.collection, timeout=left, _async=True)
                return getattr(self._client, method)(*args, timeout=left, **kwargs)
            except (self.pymilvus.MilvusException, self.pymilvus.grpc.RpcError) as error:
                if time.monotonic() < give_up:  # afterwards it may say no more than that it took too long
                    self._refuse(error)
                last = _first_line(error)
            if time.monotonic() + pause >= give_up:
                raise UnreachableError(
                    f"Milvus at {self.address.uri} does not answer: asked {attempts} times in {seconds:g} s "
                    f"({last}); see that it runs and can be reached from here, or give --store-timeout more "
                    "seconds"
                )
            if time.monotonic() > tell:
                logger.warning(
                    "waiting for Milvus at %s, at most %.0f s: %s: %s",
                    self.address.uri,
                    seconds,
                    method,
                    last,
                )
                tell += time.monotonic() - start  # twice as late each time
            with contextlib.suppress(Exception):  # it is broken, and may not even close
                self._client.close()
            self._client = None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _refuse(self, error: Exception) -> None:
        """Raise an error that a retry would not cure."""
        code = self.pymilvus.grpc.StatusCode
        status = _rpc_status(error, self.pymilvus.grpc.RpcError)
        if status in (code.UNAUTHENTICATED, code.PERMISSION_DENIED):
            raise DatastoreError(
                f"Milvus at {self.address.uri} refuses these credentials: give user:password in the "
                f"environment variable {TOKEN}, or in the URI of --store"
            ) from None
        if status in (code.UNAVAILABLE, code.DEADLINE_EXCEEDED, code.CANCELLED, code.UNKNOWN, code.INTERNAL):
            return
        if isinstance(error, self.pymilvus.MilvusException):
            if self.address.embedded and self._client is None:
                raise DatastoreError(
                    f"{self.address.uri} cannot be opened: another process has it open, or it is no file of "
                    "embedded Milvus"
                ) from None
            gone = error.code == self.pymilvus.exceptions.ErrorCode.COLLECTION_NOT_FOUND
            if gone or "CollectionNotExists" in error.message:  # 2.3.0 calls it an unexpected error
                raise DatastoreError(missing(self.address)) from None
            connecting = error.code == self.pymilvus.client.types.Status.CONNECT_FAILED
            if connecting or error.retriable or RESTARTED.search(error.message.lower()):
                return
        raise DatastoreError(f"Milvus at {self.address.uri} refuses: {_first_line(error)}") from None


def import_pymilvus(embedded: bool) -> Any:
    """Import pymilvus, and check for Milvus itself where it is `embedded`."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # fairseq forks to load data: those do not ask
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name in ("pymilvus", "milvus_lite", "grpc"):
        # they log tracebacks of what is reported in a sentence here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        import grpc
        import pymilvus

        if embedded:
            import milvus_lite  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"these keys are in Milvus, and {error.name} is not installed: pip install pymilvus (and "
            "milvus-lite for the embedded one), or the extra [milvus]"
        ) from None
    pymilvus.grpc = grpc
    return pymilvus


def missing(address: StoreAddress) -> str:
    """Say that a collection is not there, and what to do."""
    return f"{address} is missing: restore it, or build the datastore again, in a new folder"


def _first_line(error: Exception) -> str:
    """What was answered, without the stack traces of Milvus's own language."""
    text = str(getattr(error, "message", "") or getattr(error, "details", lambda: "")() or error)
    text = re.sub(r"stack trace: .*runtime\.goexit: ", "", text, flags=re.DOTALL)
    return (text.splitlines() or [type(error).__name__])[0].strip()[:LONGEST_ANSWER]


def _rpc_status(error: BaseException | None, kind: type[BaseException]) -> Any:
    """Find the status of the RPC that caused an error; pymilvus raises errors from themselves, too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error.code()  # type: ignore[attr-defined]
        seen.add(id(error))
        error = error.__cause__ if error.__cause__ not in (None, error) else error.__context__
    return None


class MilvusIndex(Index):
    """A collection: an int64 id and a vector in fp32 for each key."""

    remote = True

    def __init__(self, keys: RemoteKeys, description: IndexDescription) -> None:
        self.address, self.description, self.metric = keys.address, description, description.metric
        self.size, self.dimension = keys.shape
        self.identity = json.loads(json.dumps(keys.identity))
        self.server = MilvusServer(keys.address, keys.token, keys.timeout)
        self.checked = False

    @classmethod
    def plan(cls, request: IndexRequest) -> IndexDescription:
        if request.store is None:
            raise ConfigurationError(
                f"--index is '{request.choice}', but these keys stay in a folder: give --store, or another "
                "index"
            )
        choice, parameters = request.choice, request.parameters
        if choice in ("auto", "exact"):  # where Milvus is embedded, nothing else is faster
            exact = choice == "exact" or request.store.embedded or request.size <= EXACT_UP_TO
            choice = "FLAT" if exact else "AUTOINDEX"
        if request.metric == "l2" and request.store.embedded:
            raise ConfigurationError(
                f"--store {request.store.uri} is embedded Milvus, which finds squared distances far too "
                "slowly: give --metric ip, --adapter clknn, or a server"
            )
        number = r"\w+=[0-9]*\.?[0-9]+"
        if not re.fullmatch(rf"[A-Z][A-Z0-9_]*(,{number})*", choice):
            raise ConfigurationError(
                f"--index is '{choice}', which is not one of Milvus: give exact, or a type and its numbers, "
                "such as HNSW,M=16,efConstruction=200"
            )
        if not re.fullmatch(rf"({number}(,{number})*)?", parameters):
            raise ConfigurationError(
                f"--index-parameters are '{parameters}': give numbers by name, such as ef=128"
            )
        return IndexDescription(MILVUS, request.metric, choice, parameters)

    @classmethod
    def build(
        cls, keys: np.ndarray, description: IndexDescription, target: Target, progress: Progress
    ) -> None:
        assert isinstance(target, RemoteKeys)  # Milvus has no file
        cls(target, description).fill(keys, progress)

    @classmethod
    def open(cls, description: IndexDescription, keys: np.ndarray | RemoteKeys, folder: Path) -> MilvusIndex:
        assert isinstance(keys, RemoteKeys)
        return cls(keys, description)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if not self.checked:
            self.check()
        scores, sign = np.full((len(queries), k), -np.inf, np.float32), 1 if self.metric == "ip" else -1
        ids = np.full((len(queries), k), -1, np.int64)
        depth = min(k, self.deepest)
        rows = min(QUERIES, max(1, RESULTS // max(depth, 1)))
        vectors = queries.float().cpu().numpy()
        numbers = _parameters(self.description.parameters)
        numbers |= {name: max(numbers[name], depth) for name in WIDENED if name in numbers}
        parameters = {"metric_type": METRICS[self.metric], "params": numbers}
        for start in range(0, len(vectors) if depth else 0, rows):
            found = self.server.ask(
                "search",
                self.address.collection,
                data=list(vectors[start : start + rows]),
                anns_field=KEY,
                limit=depth,
                search_params=parameters,
                consistency_level="Eventually",
            )
            for row, hits in enumerate(found, start):
                scores[row, : len(hits)] = sign * np.array(hits.distances, np.float32)
                ids[row, : len(hits)] = hits.ids
        return torch.from_numpy(scores).to(queries.device), torch.from_numpy(ids).to(queries.device)

    @property
    def deepest(self) -> int:
        return min(self.size, DEEPEST)

    def check(self) -> None:
        """Check that the collection is there, complete, and the one that was built."""
        if not self.exists():
            raise DatastoreError(missing(self.address))
        self._refuse_foreign()
        self._load()
        if (found := self.count()) != self.size:
            unfinished = "unfinished: run the command that was building it again; it"
            fault = unfinished if found < self.size else "damaged: it"
            raise DatastoreError(
                f"{self.address} is {fault} has {found:,} keys, and should have {self.size:,}"
            )
        self.checked = True

    def exists(self) -> bool:
        if self.address.embedded and not Path(self.address.uri).exists():
            return False  # querying would create the file
        return self._ask("has_collection")

    def refuse_foreign(self) -> None:
        """Refuse a server that is too old, or a collection of another width, metric or making."""
        if not self.address.embedded:
            version = self.server.ask("get_server_version")
            # That of a release: the package of 2.3.0 calls itself v2.2-testing-20230824-68-ga34a9d6-lite.
            number = re.match(r"v?(\d+)\.(\d+)\.\d", version)
            if number and (int(number[1]), int(number[2])) < OLDEST:
                raise ConfigurationError(
                    f"Milvus at {self.address.uri} is version {version}, which cannot count or replace "
                    "keys: give one of 2.3 or later"
                )
        if self.exists():
            self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        described = self._ask("describe_collection")
        width = next(
            (field["params"].get("dim") for field in described["fields"] if field["name"] == KEY), None
        )
        advice = "give another --collection, or drop that one"
        if width != self.dimension:
            was = f"has keys of width {width}" if width else f"has no keys called '{KEY}'"
            raise DatastoreError(
                f"{self.address} {was}, and {self.dimension} is the width of these: {advice}"
            )
        expected = METRICS[self.metric]
        if (metric := self._index_type().get("metric_type", expected)) != expected:
            raise DatastoreError(
                f"{self.address} has an index of metric {metric}, and {expected} is that of these keys: "
                f"{advice}"
            )
        try:
            found = json.loads(described["properties"][PROPERTY])
        except (KeyError, ValueError):
            raise DatastoreError(f"{self.address} was not made by fairseq-ccpr: {advice}") from None
        # The fingerprints, which are shortened, and everything else.
        before, wanted = (
            {name: value[:12] for name, value in identity.get("fingerprints", {}).items()}
            | {name: value for name, value in identity.items() if name != "fingerprints"}
            for identity in (found, self.identity)
        )
        for name, value in wanted.items():
            if (other := before.get(name)) != value:
                raise DatastoreError(
                    f"{self.address} was built with another {name}: {other} there, {value} now; {advice}"
                )

    def fill(self, keys: np.ndarray, progress: Progress) -> None:
        """Write the keys [N, d] that the collection lacks, and wait until they can be searched."""
        pymilvus, name = self.server.pymilvus, self.address.collection
        if self.exists():
            self._refuse_foreign()
        else:
            schema = pymilvus.MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
            schema.add_field(ID, pymilvus.DataType.INT64, is_primary=True)
            schema.add_field(KEY, pymilvus.DataType.FLOAT_VECTOR, dim=self.dimension)
            self._ask("create_collection", schema=schema, properties={PROPERTY: json.dumps(self.identity)})
        if not self._index_type():  # new, or killed in between
            kind, _, build = self.description.factory.partition(",")
            parameters = pymilvus.MilvusClient.prepare_index_params()
            parameters.add_index(
                KEY,
                index_type=kind,
                metric_type=METRICS[self.metric],
                index_name=KEY,
                params=_parameters(build),
            )
            self.server.ask("create_index", name, parameters, slow=True)
        self._load()
        # Blocks are written one after another: all but the last one that came are whole.
        done = self.count() // BLOCK_ROWS * BLOCK_ROWS
        progress(done)
        for start in range(done, len(keys), BLOCK_ROWS):
            block = keys[start : start + BLOCK_ROWS]
            self.write(start, block)
            progress(len(block))
        self.finish()

    def drop(self) -> None:
        self._ask("drop_collection", slow=True)

    def write(self, first: int, keys: np.ndarray) -> None:
        """Write keys [n, d] of the entries from `first` on; earlier ones are overwritten."""
        rows = [{ID: first + row, KEY: key} for row, key in enumerate(keys.astype(np.float32))]
        self._ask("upsert", rows, slow=True)

    def finish(self) -> None:
        """Wait until the index covers all that was written, then check."""
        self._ask("flush", slow=True)

        def left() -> tuple[int, object]:
            index = self._index_type()
            return index.get("pending_index_rows", 0), index.get("state")

        self._wait("index the keys", left)
        self.check()

    def _wait(self, what: str, ask: Callable[[], tuple[int, object]]) -> None:
        """Wait until nothing is left to do, as long as what is left changes now and then, and say so.

        Compaction makes new segments of indexed ones: it may also become more.

        Args:
            ask: how much is left, and the state that Milvus calls it.
        """
        patience, start = SLOW * self.server.timeout, time.monotonic()
        before, give_up, tell = -1, start + patience, start + TOLD
        while True:
            (left, state), now = ask(), time.monotonic()
            if not left:
                return
            if left != before:
                before, give_up = left, now + patience
            if state == "Failed" or now > give_up:
                raise UnreachableError(
                    f"{self.address} does not get ready: Milvus was to {what}, and {left:,} are left (state "
                    f"{state}); see the server's log, then run the same command again"
                )
            if now > tell:
                logger.warning("waiting for Milvus at %s to %s: %s left", self.address.uri, what, f"{left:,}")
                tell += now - start
            time.sleep(POLL)

    def read(self) -> Iterator[np.ndarray]:
        """Read the keys, fp32 [n, d], block by block, in their order; missing ones are left out."""
        for first in range(0, self.size, BLOCK_ROWS):
            block = f"{ID} >= {first} and {ID} < {first + BLOCK_ROWS}"
            rows = self._ask(
                "query",
                filter=block,
                output_fields=[ID, KEY],
                limit=BLOCK_ROWS,
                consistency_level="Strong",
                slow=True,
            )
            keys = [row[KEY] for row in sorted(rows, key=lambda row: row[ID])]
            yield np.array(keys, np.float32).reshape(len(keys), self.dimension)

    def count(self) -> int:
        counted = self._ask("query", output_fields=["count(*)"], consistency_level="Strong", slow=True)
        return int(counted[0]["count(*)"])

    def _index_type(self) -> dict[str, Any]:
        """Milvus's description of the index over the keys; empty if there is none."""
        names = self._ask("list_indexes", field_name=KEY)
        return self._ask("describe_index", index_name=names[0]) if names else {}

    def _load(self) -> None:
        self._ask("load_collection", slow=True, _async=True)
        self.server.loaded = True

        def left() -> tuple[int, object]:
            state = self._ask("get_load_state")
            return (0 if str(state["state"]) == "Loaded" else 100 - int(state.get("progress", 0))), state[
                "state"
            ]

        self._wait("load the collection (per cent)", left)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.server.ask(method, self.address.collection, *args, **kwargs)


def _parameters(text: str) -> dict[str, float]:
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {name: int(value) if value.isdigit() else float(value) for name, value in pairs}
