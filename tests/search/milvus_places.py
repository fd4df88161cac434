"""Where the tests of Milvus put keys: on the server at MILVUS_URI, or with embedded Milvus where there is none.

scripts/recipes/milvus_server.sh starts such a server. Its credentials are those of MILVUS_TOKEN.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from fairseq_ccpr.search import milvus
from fairseq_ccpr.search.base import StoreAddress
from fairseq_ccpr.search.milvus import MilvusIndex
from tests.helpers import ROOT

pymilvus = pytest.importorskip("pymilvus", reason="needs the extra [milvus]")
pytest.importorskip("milvus_lite", reason="needs the extra [milvus]")

URI = os.environ.get("MILVUS_URI", "")
PREFIX = f"test_{os.getpid()}_"  # of all collections that are made
SHORT, LONG = 1.0, 300.0  # seconds that a server is waited for which is gone, and one which is there


def address(folder: Path, name: str) -> StoreAddress:
    """A collection of a name."""
    return StoreAddress(URI or str(folder / "keys.db"), PREFIX + name)


def where(folder: Path, name: str) -> list[object]:
    """The options that bring keys there."""
    place = address(folder, name)
    return ["--store", place.uri, "--collection", place.collection, "--store-timeout", LONG]


def client(folder: Path) -> Any:
    """Milvus's own client."""
    return pymilvus.MilvusClient(URI or str(folder / "keys.db"), token=os.environ.get("MILVUS_TOKEN", ""))


class Server:
    """Embedded Milvus in another process, which can be killed."""

    def __init__(self, folder: Path, token: str = "") -> None:
        self.words, self.port = [sys.executable, str(ROOT / "tests/search/milvus_server.py"), str(folder)], 0
        self.token = [token] if token else []
        self.start()

    def start(self) -> None:
        """Begin, or begin again where it was."""
        self.process = subprocess.Popen(
            [*self.words, str(self.port), *self.token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def killed_while_written(self, rows: int) -> Iterator[list[int]]:
        """Write so many rows at a time, and kill it at the fourth block; gives the first row of each block."""
        firsts, write = list[int](), MilvusIndex.write

        def write_until_killed(index: MilvusIndex, first: int, keys: np.ndarray) -> None:
            firsts.append(first)
            if len(firsts) == 4:
                self.kill()
                index.server.timeout = SHORT
            write(index, first, keys)

        with patch.object(milvus, "BLOCK_ROWS", rows), patch.object(MilvusIndex, "write", write_until_killed):
            yield firsts

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"
