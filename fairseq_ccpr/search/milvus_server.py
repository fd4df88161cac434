"""Talking to Milvus: addresses, credentials, and retries."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from fairseq_ccpr.errors import ConfigurationError, DatastoreError, UnreachableError
from fairseq_ccpr.search.base import StoreAddress

TOKEN = "MILVUS_TOKEN"  # of the environment: user:password, or an API key
TIMEOUT = 30.0  # seconds
SLOW = 20  # writing, loading and the like may take this many times as long as a query
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts, each twice the one before
SCHEMES = ("http", "https", "tcp")
# A connection of its own, opened again as soon as the server is back.
CHANNEL = {
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    "grpc.keepalive_time_ms": 300_000,  # questions have a time limit; more pings, the embedded one takes for an attack
}


def read_address(store: str, collection: str) -> tuple[StoreAddress, str]:
    """Parse `--store` and `--collection`: the address, and the credentials that were in it, if any.

    >>> read_address("https://me:a%2Fb@host:19530/db", "mine")
    (StoreAddress(uri='https://host:19530/db', collection='mine'), 'me:a/b')

    Raises:
        ConfigurationError: neither a URI nor a file, or a collection Milvus could not have; credentials are not in it.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", collection):
        raise ConfigurationError(
            f"--collection is '{collection}': Milvus takes letters, digits and _, and no digit in front"
        )
    parts = _split(store)
    credentials, _, host = parts.netloc.rpartition("@")
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":
        raise ConfigurationError(
            "--store has an @ beyond its host: where a password has one of / # ? @ in it, write it in per cent "
            f"(%2F %23 %3F %40), or put user:password in the environment variable {TOKEN}"
        )
    if parts.scheme in SCHEMES and host:
        address = parts._replace(netloc=host, path=parts.path.rstrip("/")).geturl()
        return StoreAddress(address, collection), unquote(credentials)
    path = Path(store)
    if parts.scheme or path.suffix != ".db":
        raise ConfigurationError(
            f"--store {parts._replace(netloc=host).geturl()} is neither a server, such as http://localhost:19530, nor a "
            "file that ends in .db, which Milvus makes"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"--store {store}: there is no folder {path.parent}")
    return StoreAddress(str(path.resolve()), collection), ""


def _split(store: str) -> SplitResult:
    try:
        parts = urlsplit(store)
        if "@" not in parts.path:
            _ = parts.port  # raises where it is none
    except ValueError:  # its message may have the password in it
        raise ConfigurationError(
            "--store is no URI such as http://localhost:19530: its host or port cannot be read; user:password can also be "
            f"in the environment variable {TOKEN}"
        ) from None
    return parts


class MilvusServer:
    """A server, or an embedded one in this process, whose calls are retried for a while when it does not answer.

    Args:
        address: of one of its collections.
        token: credentials; if there are none, those of the environment.
        timeout: seconds that a question may take, all attempts together.

    Attributes:
        loaded: whether the collection can be searched, and must be so again after a break.

    Raises:
        ConfigurationError: pymilvus is not installed, or the embedded Milvus is not.
    """

    def __init__(self, address: StoreAddress, token: str, timeout: float) -> None:
        self.pymilvus = import_pymilvus(address.embedded)
        self.address, self.timeout = address, timeout
        self._token = token or os.environ.get(TOKEN, "")
        self._client: Any = None
        self.loaded = False

    def ask(self, method: str, *args: Any, slow: bool = False, **kwargs: Any) -> Any:
        """Call a method of pymilvus's client, again and again until it answers or time is up.

        Args:
            slow: whether it may take `SLOW` times as long.

        Raises:
            UnreachableError: no answer in time.
            DatastoreError: the server refuses.
        """
        seconds = self.timeout * (SLOW if slow else 1)
        give_up, pause, attempts = time.monotonic() + seconds, FIRST_PAUSE, 0
        while True:
            attempts += 1
            try:
                left = max(give_up - time.monotonic(), FIRST_PAUSE)
                if self._client is None:
                    self._connect(left)
                return getattr(self._client, method)(*args, timeout=left, **kwargs)
            except (self.pymilvus.MilvusException, self.pymilvus.grpc.RpcError) as error:
                if time.monotonic() < give_up:  # afterwards it may say no more than that it took too long
                    self._refuse(error)
            if time.monotonic() + pause >= give_up:
                raise UnreachableError(
                    f"Milvus at {self.address.uri} does not answer: asked {attempts} times in {seconds:g} s; see that it "
                    "runs and can be reached from here, or give --store-timeout more seconds"
                )
            self._disconnect()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _connect(self, timeout: float) -> None:
        self._client = self.pymilvus.MilvusClient(
            self.address.uri, token=self._token, timeout=timeout, dedicated=True, grpc_options=CHANNEL
        )
        if self.loaded:  # a server that comes back may have forgotten
            self._client.load_collection(self.address.collection, timeout=timeout)

    def _disconnect(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):  # it is broken, and may not even close
                self._client.close()
        self._client = None

    def _refuse(self, error: Exception) -> None:
        """Raise an error that a retry would not cure."""
        code = self.pymilvus.grpc.StatusCode
        status = _rpc_status(error, self.pymilvus.grpc.RpcError)
        if status in (code.UNAUTHENTICATED, code.PERMISSION_DENIED):
            raise DatastoreError(
                f"Milvus at {self.address.uri} refuses these credentials: give user:password in the environment variable "
                f"{TOKEN}, or in the URI of --store"
            ) from None
        if status in (code.UNAVAILABLE, code.DEADLINE_EXCEEDED, code.CANCELLED, code.UNKNOWN, code.INTERNAL):
            return
        if isinstance(error, self.pymilvus.MilvusException):
            if self.address.embedded and self._client is None:
                raise DatastoreError(
                    f"{self.address.uri} cannot be opened: another process has it open, or it is no file of embedded Milvus"
                ) from None
            if error.code == self.pymilvus.client.types.Status.CONNECT_FAILED or error.retriable:
                return
        reason = getattr(error, "message", None) or status
        raise DatastoreError(f"Milvus at {self.address.uri} refuses: {reason}") from None


def import_pymilvus(embedded: bool) -> Any:
    """Import pymilvus.

    Args:
        embedded: whether Milvus itself is needed here as well.

    Raises:
        ConfigurationError: says how to install it.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # fairseq forks to load data: those do not ask
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name in ("pymilvus", "milvus_lite", "grpc"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they log with tracebacks is told in a sentence here
    try:
        import grpc
        import pymilvus

        if embedded:
            import milvus_lite  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"these keys are in Milvus, and {error.name} is not installed: pip install pymilvus (and milvus-lite for the "
            "embedded one), or the extra [milvus]"
        ) from None
    pymilvus.grpc = grpc
    return pymilvus


def _rpc_status(error: BaseException | None, kind: type[BaseException]) -> Any:
    """Find the status of the RPC that caused an error; pymilvus raises errors from themselves, too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error.code()  # type: ignore[attr-defined]
        seen.add(id(error))
        error = error.__cause__ if error.__cause__ not in (None, error) else error.__context__
    return None
