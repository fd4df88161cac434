"""Servers of Milvus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.search.milvus_places import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An embedded one in another process, which can be killed."""
    from tests.search.milvus_places import Server

    made = Server(tmp_path_factory.mktemp("server") / "server.db")
    yield made
    made.kill()


@pytest.fixture(scope="module")
def tidy() -> Iterator[None]:
    """Leave nothing on the server at MILVUS_URI."""
    from tests.search.milvus_places import PREFIX, URI, client

    yield
    if URI:
        for name in (server := client(Path())).list_collections():
            if name.startswith(PREFIX):
                server.drop_collection(name)
