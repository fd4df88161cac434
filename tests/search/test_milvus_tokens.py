"""Token keys in Milvus: found as in a folder, a request a step, tuned, learned alongside, and a server that is killed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fairseq_ccpr import Translator
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.token_memory import TokenBatch
from fairseq_ccpr.errors import ConfigurationError, DatastoreError, UnreachableError
from fairseq_ccpr.search import milvus
from fairseq_ccpr.search.milvus import MilvusIndex, MilvusServer
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, contents, equal, refused, run
from tests.search.milvus_places import LONG, PREFIX, SHORT, URI, Server, address, client, where
from tests.small_models import World, build

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("tidy")]
# Embedded Milvus has squared distances, but not fast enough.
METRIC = ["--metric", "l2" if URI else "ip"]
OPTIONS = ["--tokens-k", 4, "--store-timeout", LONG]


@pytest.fixture(scope="module")
def local(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build(world, folder := tmp_path_factory.mktemp("tokens") / "local", *METRIC, "--fraction", 0.2)
    return folder


@pytest.fixture(scope="module")
def stored(world: World, local: Path) -> Path:
    """The same, built for Milvus."""
    keep(world, folder := local.parent / "stored", *where(local.parent, "stored"))
    return folder


def keep(world: World, output: Path, *extra: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return build(world, output, *METRIC, "--fraction", 0.2, *extra, check=check)


def test_same_translations_as_from_a_folder_and_one_request_a_step(
    decode: Callable, local: Path, stored: Path
) -> None:
    assert not (stored / "token/keys.npy").exists()
    found: list[dict[int, Any]] = []
    asked, steps = list[int](), list[int]()
    ask, search = MilvusServer.ask, TokenBatch.search

    def counting(self: MilvusServer, method: str, *args: Any, **kwargs: Any) -> Any:
        asked.extend([len(kwargs["data"])] if method == "search" else [])
        return ask(self, method, *args, **kwargs)

    def stepping(self: TokenBatch, queries: torch.Tensor, *others: Any) -> Any:
        steps.append(len(queries))
        return search(self, queries, *others)

    with patch.object(MilvusServer, "ask", counting):
        for store in (local, stored):
            with patch.object(TokenBatch, "search", stepping if store is stored else search):
                found.append(decode("--datastore", store, *OPTIONS))
    assert equal(*found, tolerance=1e-3)
    assert not equal(found[1], decode(base=True), tolerance=1e-2)
    assert asked == steps and max(steps) > 40  # hypotheses of a batch


def test_keys_of_a_folder_move_and_are_all_there(world: World, local: Path, tmp_path: Path) -> None:
    keys = np.array(TokenDatastore(local).keys)
    before = TokenDatastore(local).keys_fingerprint
    shutil.copytree(local, moved := tmp_path / "moved")
    keep(world, moved, *where(tmp_path, "moved"))
    made = TokenDatastore(moved)
    assert made.keys_fingerprint == before and made.find_damage() == []
    index = made.open_index()
    assert np.array_equal(np.concatenate(list(index.read())), keys)
    shown = call("inspect", moved).stdout
    assert f"keys in        the collection '{PREFIX}moved'" in shown and "health         good" in shown
    assert isinstance(index, MilvusIndex)
    index.write(7, keys[7:8] + np.float16(0.5))
    assert "have changed since they were written" in call("inspect", moved, check=False).stdout
    with patch.object(MilvusIndex, "write", side_effect=AssertionError("nothing is to be written again")):
        keep(world, moved, *where(tmp_path, "moved"))


def test_the_collection_of_tokens_is_another_than_that_of_phrases(world: World, tmp_path: Path) -> None:
    keep(world, tmp_path / "mine", "--store", tmp_path / "keys.db", "--metric", "ip")
    assert TokenDatastore(tmp_path / "mine").section.store is not None
    assert "the collection 'mine_tokens'" in call("inspect", tmp_path / "mine").stdout


def test_tuning_learning_and_explaining(world: World, local: Path, stored: Path, tmp_path: Path) -> None:
    (source, target), *others = list(read_pairs(world.folder / "test.tsv"))[:3]
    keen = {"max_len_b": 45, "device": "cpu", "tokens_lambda": 0.95, "tokens_k": 4, "tokens_temperature": 0.5}
    texts = []
    for store in (local, stored):
        translator = Translator(datastore=Path(shutil.copytree(store, tmp_path / store.name)), **keen)
        number = translator.learn(source, target).id
        texts.append([one.text for one in translator.translate([source, *(one for one, _ in others)])])
        assert number in {
            n.learned for t in translator.explain(source).sentences[0].tokens for n in t.neighbours
        }
        if store is stored:
            with pytest.raises(ConfigurationError, match="only those in a folder can be merged, compacted"):
                translator.compact()
        translator.close()
    assert texts[0] == texts[1] and texts[0][0] == target
    again = Translator(datastore=tmp_path / "stored", **keen)
    assert next(iter(again.translate([source]))).text == target
    again.close()
    words = [
        *world.options("--datastore", tmp_path / "stored"),
        "--remove-bpe",
        "sentencepiece",
        "--no-progress-bar",
    ]
    shown = call("tune", *words, "--combiner", "fixed", "--decode", 1).stdout
    assert "base" in shown and "tuned" in call("inspect", tmp_path / "stored").stdout


def test_what_works_on_keys_in_a_folder_is_refused(
    world: World, local: Path, stored: Path, tmp_path: Path
) -> None:
    shutil.copytree(stored, mine := tmp_path / "mine")
    words = "--datastore", mine, "--path", world.model, "--cpu"
    call("learn", *words, "--source", "Haus", "--target", "house")
    before = contents(mine)
    elsewhere = "the keys of .* are in the collection '.*stored' of Milvus at .*"
    refused(call("compact", mine, "--cpu", check=False), elsewhere)
    refused(call("merge", local, stored, "--output", tmp_path / "both", check=False), elsewhere)
    adapter = "--adapter", "clknn", "--raw-datastore", mine
    refused(build(world, tmp_path / "projected", "--fraction", 0.2, *adapter, check=False), elsewhere)
    refused(keep(world, mine, check=False), f"{elsewhere}: give the same --store")
    shards = "--num-shards", 2, "--shard-id", 0
    refused(
        keep(world, tmp_path / "shard", *where(tmp_path, "shard"), *shards, check=False),
        "--store takes all keys",
    )
    refused(
        build(world, tmp_path / "l2", "--store", tmp_path / "keys.db", check=False),
        "squared distances .*--metric ip",
    )
    assert contents(mine) == before and sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_a_dropped_collection_is_missing(world: World, decode: Callable, local: Path, tmp_path: Path) -> None:
    shutil.copytree(local, mine := tmp_path / "mine")
    keep(world, mine, *where(tmp_path, "dropped"))
    index = TokenDatastore(mine, LONG).open_index()
    queries = torch.zeros(1, index.dimension)
    index.search(queries, 1)
    client(tmp_path).drop_collection(address(tmp_path, "dropped").collection)
    with pytest.raises(DatastoreError, match=r"dropped' of Milvus at .* is missing: restore it, or build"):
        index.search(queries, 1)
    for done in (
        call("fairseq-generate", *world.options("--datastore", mine, *OPTIONS), check=False),
        keep(world, mine, *where(tmp_path, "dropped"), check=False),
    ):
        refused(done, "dropped' of Milvus at .* is missing: restore it, or build the datastore again")


def test_half_an_upload_is_finished_and_the_folder_serves_meanwhile(
    world: World, decode: Callable, server: Server, tmp_path: Path
) -> None:
    build(world, mine := tmp_path / "mine", "--metric", "ip", "--fraction", 0.2)
    before, wanted = contents(mine), decode("--datastore", mine, *OPTIONS)
    words = "--metric", "ip", "--fraction", 0.2, "--store", server.uri, "--store-timeout", LONG
    with server.killed_while_written(256) as firsts:
        with patch.object(milvus, "SLOW", 1):
            refused(build(world, mine, *words, check=False), f"Milvus at {server.uri} does not answer: asked")
        assert contents(mine) == before and equal(decode("--datastore", mine, *OPTIONS), wanted)
        server.start()
        build(world, mine, *words)
    assert firsts[:5] == [0, 256, 512, 768, 768] and TokenDatastore(mine, LONG).find_damage() == []
    assert equal(decode("--datastore", mine, *OPTIONS), wanted, tolerance=1e-3)


def test_decoding_when_the_server_is_killed(
    world: World, decode: Callable, server: Server, tmp_path: Path
) -> None:
    words = "--metric", "ip", "--fraction", 0.1, "--store", server.uri, "--store-timeout", LONG
    build(world, mine := tmp_path / "killed", *words)
    options = ["--datastore", mine, "--tokens-k", 4]
    before, search = decode(*options, "--store-timeout", LONG), MilvusIndex.search
    searched = list[int]()

    def restarting(self: MilvusIndex, queries: torch.Tensor, k: int) -> Any:
        searched.append(len(queries))
        if len(searched) == 5:
            server.kill()
            server.start()
        return search(self, queries, k)

    with patch.object(MilvusIndex, "search", restarting):
        assert equal(decode(*options, "--store-timeout", LONG), before, tolerance=1e-3)
    assert len(searched) > 5
    index = TokenDatastore(mine, SHORT).open_index()
    index.search(torch.zeros(1, index.dimension), 1)
    server.kill()
    with pytest.raises(
        UnreachableError, match=rf"Milvus at {server.uri} does not answer: asked \d+ times in 1 s \(.+\);"
    ):
        index.search(torch.zeros(1, index.dimension), 1)
    options += ["--store-timeout", SHORT]
    refused(
        call("fairseq-generate", *world.options(*options), check=False),
        f"Milvus at {server.uri} does not answer: .*--store-unreachable skip continues without tokens",
    )
    assert equal(decode(*options, "--store-unreachable", "skip"), decode(base=True))
    told = run(
        "fairseq-generate",
        *world.options(*options, "--store-unreachable", "skip", "--beam", 1),
        LANG="C.UTF-8",
    )
    assert (
        f"20 sentences went without tokens: the collection 'killed_tokens' of Milvus at {server.uri} did not answer"
        in told.stderr
    )
    server.start()
    assert equal(decode(*options[:-2], "--store-timeout", LONG), before, tolerance=1e-3)
