"""Phrase keys in Milvus: a server or an embedded one, and one in another process that is killed at the worst moment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import quote

import numpy as np
import pytest
import torch

from fairseq_ccpr.datastore.phrase import PhraseDatastore
from fairseq_ccpr.decoding import remote_answers
from fairseq_ccpr.decoding.options import SKIP, STOP, StoreSettings
from fairseq_ccpr.decoding.phrase_retriever import PhraseRetriever, QueryPhrase
from fairseq_ccpr.errors import ConfigurationError, DatastoreError, UnreachableError
from fairseq_ccpr.lab.speed.search_speed import recall
from fairseq_ccpr.models.phrase_encoder import load_phrase_encoder
from fairseq_ccpr.models.phrase_finder import Segmentation
from fairseq_ccpr.search import ExactIndex, distinct_strings, milvus
from fairseq_ccpr.search.base import IndexDescription, RemoteKeys, StoreAddress
from fairseq_ccpr.search.milvus import TOKEN, MilvusIndex
from fairseq_ccpr.storage.files import MANIFEST
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import call, edit_manifest, equal, refused, run
from tests.search.milvus_places import LONG, PREFIX, SHORT, URI, Server, address, client, pymilvus, where
from tests.small_models import Ccpr, World, subword_options

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("tidy")]

SEGMENTATION = Segmentation("all", 0.5, 2)
HNSW = "HNSW,M=8,efConstruction=64" if URI else "HNSW,M=8"  # a server has no defaults of its own


@pytest.fixture(scope="module")
def text(ccpr: Ccpr, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("milvus") / "mono.txt"
    lines = [target for _, target in list(read_pairs(ccpr.pairs))[:30]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build(
    ccpr: Ccpr, text: Path, output: Path, *extra: object, check: bool = True
) -> subprocess.CompletedProcess[str]:
    words = ["--encoder", ccpr.checkpoint, "--output", output, "--segmentation", "all", "--max-words", 2]
    words += ["--store-timeout", LONG, "--cpu", "--quiet"]
    return call("build phrases", text, *words, *extra, check=check)


@pytest.fixture(scope="module")
def local(ccpr: Ccpr, text: Path) -> Path:
    build(ccpr, text, text.parent / "local", "--index", "exact")
    return text.parent / "local"


@pytest.fixture(scope="module")
def stored(ccpr: Ccpr, text: Path) -> Path:
    """The same phrases, their keys in Milvus."""
    build(ccpr, text, text.parent / "stored", *where(text.parent, "stored"))
    return text.parent / "stored"


def retriever(ccpr: Ccpr, store: Path, unreachable: str = STOP) -> PhraseRetriever:
    encoder, waiting = load_phrase_encoder(ccpr.checkpoint), StoreSettings(LONG, unreachable)
    return PhraseRetriever(
        PhraseDatastore(store, LONG), encoder, SEGMENTATION, 3, 0.0, torch.device("cpu"), waiting
    )


def sources(ccpr: Ccpr, count: int) -> list[str]:
    return [source for source, _ in list(read_pairs(ccpr.pairs))[:count]]


def assert_same(one: list[list[QueryPhrase]], two: list[list[QueryPhrase]]) -> None:
    """The same phrases, but that those as good as each other may change places."""
    pairs = [(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)]
    assert len(pairs) > 20
    for a, b in pairs:
        assert (a.string, a.start) == (b.string, b.start) and len(a.retrieved) == len(b.retrieved)
        for p, q in zip(a.retrieved, b.retrieved, strict=True):
            assert p.score == pytest.approx(q.score, abs=1e-5)
    assert np.mean([p.entry == q.entry for a, b in pairs for p, q in zip(a.retrieved, b.retrieved)]) > 0.95


@pytest.mark.parametrize("metric", ["ip", *(["l2"] if URI else [])])
@pytest.mark.parametrize("size, k, depth", [(700, 5, 3), (700, 64, 700), (3, 8, 2)])
def test_search_equals_exact_search(
    tmp_path: Path, size: int, k: int, depth: int, metric: str, rng: np.random.Generator
) -> None:
    keys = rng.standard_normal((size, 12)).astype(np.float16)
    with patch.multiple(milvus, BLOCK_ROWS=256, QUERIES=7, DEEPEST=depth):
        remote = RemoteKeys(address(tmp_path, f"c_{metric}_{size}_{k}"), size, 12, {"a": 1}, LONG)
        index = MilvusIndex(remote, IndexDescription("milvus", metric, "FLAT"))
        index.fill(keys, lambda rows: None)
        index.write(0, keys[: min(size, 100)])  # again
        index.finish()
        assert np.array_equal(np.concatenate(list(index.read())), keys)
        queries = torch.from_numpy(rng.standard_normal((16, 12)).astype(np.float32))
        scores, ids = index.search(queries, k)
        exact, wanted = ExactIndex(keys, metric).search(queries, k)
        found = min(k, index.deepest)
        assert torch.allclose(scores[:, :found], exact[:, :found], atol=1e-4)
        assert (ids[:, :found] == wanted[:, :found]).float().mean() > 0.99
        assert (ids[:, found:] == -1).all() and (scores[:, found:] == -np.inf).all()
        assert recall(index, ExactIndex(keys, metric), queries, min(depth, size)) == 1
        assert index.search(queries[:0], k)[1].shape == (0, k)


def certain(printed: str) -> list[str]:
    """Return rows above the lowest score of their source phrase: of equal ones there, an index may find any."""
    rows = [line for line in printed.splitlines() if line.count(" | ") >= 4]
    lowest: dict[str, str] = {}
    for row in rows:
        lowest[row.partition(" | ")[0]] = row.split(" | ")[3]
    return sorted(row for row in rows if row.split(" | ")[3] > lowest[row.partition(" | ")[0]])


def test_same_phrases_as_in_a_folder(ccpr: Ccpr, local: Path, stored: Path) -> None:
    assert not (stored / "phrase/keys.npy").exists()
    one, two = retriever(ccpr, local), retriever(ccpr, stored)
    assert_same(one.retrieve(sources(ccpr, 4)), two.retrieve(sources(ccpr, 4)))
    assert "index:milvus:FLAT" in two.signature()
    assert two.signature().replace("milvus:FLAT", "exact") == one.signature()
    words = ["--phrases-encoder", ccpr.checkpoint, "--phrases-segmentation", "all", "--cpu"]
    words += ["--store-timeout", LONG]
    line = sources(ccpr, 1)[0]
    with patch("fairseq_ccpr.cli.retrieve.read_standard_input", side_effect=lambda: iter([line])):
        printed = [call("retrieve", store, *words).stdout for store in (local, stored)]
    assert certain(printed[0]) == certain(printed[1]) and len(certain(printed[0])) > 100


def test_same_translations_as_from_a_folder(
    world: World, ccpr: Ccpr, decode: Callable, local: Path, stored: Path, text: Path
) -> None:
    options = [*subword_options(world), "--phrases-k", 2, "--phrases-segmentation", "ngram:2"]
    options += ["--store-timeout", LONG]
    # each entry found takes the embedded one its time
    with patch.object(distinct_strings, "PHRASE_DEPTH", 4):
        found = [decode("--datastore", store, *options) for store in (local, stored)]
    assert equal(*found, tolerance=1e-3)
    assert not equal(found[1], decode(base=True), tolerance=1e-2)


def test_inspect_reads_all_of_it(ccpr: Ccpr, stored: Path, tmp_path: Path) -> None:
    shown = call("inspect", stored).stdout
    assert (
        "recall         100.0%" in shown
        and f"keys in        the collection '{PREFIX}stored'" in shown
        and "health" in shown
    )
    refused(call("evaluate retrieved", "--source", "x", "--target", "y", "--datastore", stored, check=False))
    with pytest.raises(Exception, match="only those in a folder can be merged, compacted, sampled"):
        PhraseDatastore(stored).sample(3)
    # One key that is another: its place among the others is all that tells.
    index = PhraseDatastore(stored).open_index()
    assert isinstance(index, MilvusIndex)
    key = next(index.read())[5:6]
    index.write(5, key + np.float16(0.5))
    damaged = call("inspect", stored, check=False)
    index.write(5, key)
    assert damaged.returncode == 1 and "have changed since they were written" in damaged.stdout
    assert call("inspect", stored).returncode == 0


def test_finished_datastore_is_built_again_in_no_time_and_refuses_other_options(
    ccpr: Ccpr, text: Path, stored: Path
) -> None:
    store = where(text.parent, "stored")
    before = (stored / MANIFEST).read_bytes()
    with patch.object(MilvusIndex, "write", side_effect=AssertionError("nothing is to be written again")):
        build(ccpr, text, stored, *store)
    refused(
        build(ccpr, text, stored, check=False),
        f"are in the collection '{PREFIX}stored' .*: give the same --store",
    )
    refused(
        build(ccpr, text, stored, *store, "--collection", "x", check=False), "'x' of Milvus .* is asked for"
    )
    refused(
        build(ccpr, text, stored, *store, "--index", "HNSW,M=8", check=False), "milvus:FLAT.*milvus:HNSW,M=8"
    )
    assert (stored / MANIFEST).read_bytes() == before


def test_keys_in_milvus_are_not_merged(
    ccpr: Ccpr, text: Path, local: Path, stored: Path, tmp_path: Path
) -> None:
    done = call("merge", local, stored, "--output", tmp_path / "both", check=False)
    refused(
        done,
        f"the keys of .*stored are in the collection '{PREFIX}stored' .*, and only those in a folder can be merged",
    )
    shard = "--store", tmp_path / "p.db", "--num-shards", 2, "--shard-id", 0
    refused(build(ccpr, text, tmp_path / "s", *shard, check=False), "--store takes all keys together")
    assert not list(tmp_path.iterdir())
    assert "| exact |" in call("inspect", stored, "--plan", "--speeds", "host=100").stdout


def test_keys_of_a_folder_move_to_milvus(ccpr: Ccpr, text: Path, local: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(local, moved)
    build(ccpr, text, moved, *where(tmp_path, "moved"), "--index", HNSW, "--index-parameters", "ef=64")
    assert not (moved / "phrase/keys.npy").exists()
    made = PhraseDatastore(moved)
    assert (
        made.find_damage() == [] and made.section.index_recall is not None and made.section.index_recall > 0.9
    )
    assert_same(
        retriever(ccpr, local).retrieve(sources(ccpr, 2)), retriever(ccpr, moved).retrieve(sources(ccpr, 2))
    )


def test_build_goes_on_after_the_server_was_killed(
    ccpr: Ccpr, text: Path, local: Path, server: Server, tmp_path: Path
) -> None:
    output = tmp_path / "s"
    store = "--store", server.uri
    with server.killed_while_written(64) as firsts:
        with patch.object(milvus, "SLOW", 1):
            refused(
                build(ccpr, text, output, *store, check=False),
                rf"Milvus at {server.uri} does not answer: asked \d+ times in {SHORT:g} s",
            )
        refused(call("inspect", output, check=False), "is unfinished")
        server.start()
        build(ccpr, text, output, *store)
    made = PhraseDatastore(output)
    assert firsts[:5] == [0, 64, 128, 192, 192]  # what had come was not sent again
    assert len(firsts) == 1 + -(-made.section.size // 64) and made.find_damage() == []
    assert_same(
        retriever(ccpr, local).retrieve(sources(ccpr, 2)), retriever(ccpr, output).retrieve(sources(ccpr, 2))
    )


def test_decoding_when_the_server_is_killed(
    world: World, ccpr: Ccpr, text: Path, decode: Callable, server: Server, tmp_path: Path
) -> None:
    output = tmp_path / "s"
    build(ccpr, text, output, "--store", server.uri)
    sentences = sources(ccpr, 2)
    stopping, skipping = (retriever(ccpr, output, unreachable) for unreachable in (STOP, SKIP))
    before = stopping.retrieve(sentences)
    assert_same(skipping.retrieve(sentences), before)
    server.kill()
    servers = [made.index.server for made in (stopping, skipping) if isinstance(made.index, MilvusIndex)]
    for one in servers:
        one.timeout = SHORT
    with pytest.raises(
        UnreachableError, match=r"does not answer: asked .* --store-unreachable skip continues"
    ):
        stopping.retrieve(sentences)
    assert skipping.retrieve(sentences) == [[], []] and skipping.retrieve(sentences) == [[], []]
    assert sum(skipping.remote.skipped) == 4
    server.start()
    for one in servers:
        one.timeout = LONG
    assert_same(stopping.retrieve(sentences), before)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * LONG)
    with patch.object(remote_answers, "time", later):
        assert_same(skipping.retrieve(sentences), before)
    server.kill()
    options = ["--datastore", output, *subword_options(world), "--store-timeout", SHORT]
    refused(call("fairseq-generate", *world.options(*options), check=False), "Milvus at .* does not answer")
    assert equal(decode(*options, "--store-unreachable", "skip"), decode(base=True))
    told = run(
        "fairseq-generate",
        *world.options(*options, "--store-unreachable", "skip", "--beam", 1),
        LANG="C.UTF-8",
    )
    assert (
        f"20 sentences went without phrases: the collection 's' of Milvus at {server.uri} did not answer"
        in told.stderr
    )
    assert "--phrases-min-similarity" not in told.stderr


def test_retrieval_waits_while_the_encoder_runs(ccpr: Ccpr, stored: Path) -> None:
    made = retriever(ccpr, stored)
    search, done = made.index.search, threading.Event()

    def telling(*arguments: Any) -> Any:
        found = search(*arguments)
        done.set()
        return found

    with patch.object(made.index, "search", telling):
        answer = made.start(sources(ccpr, 1))
        assert done.wait(LONG)  # nobody waits for the answer, and it is there
        assert (answer().entries >= 0).any()


def test_what_is_there_is_not_ours(ccpr: Ccpr, text: Path, stored: Path, tmp_path: Path) -> None:
    made = client(tmp_path)

    def make(name: str, width: int, metric: str, **properties: str) -> None:
        schema = pymilvus.MilvusClient.create_schema(auto_id=False)
        schema.add_field("entry", pymilvus.DataType.INT64, is_primary=True)
        schema.add_field("key", pymilvus.DataType.FLOAT_VECTOR, dim=width)
        index = pymilvus.MilvusClient.prepare_index_params()
        index.add_index("key", index_type="FLAT", metric_type=metric)
        made.create_collection(PREFIX + name, schema=schema, index_params=index, properties=properties)

    identity = json.dumps(
        PhraseDatastore(stored).section.remote_keys(1.0).identity | {"fingerprints": {"encoder": "0" * 64}}
    )
    make("wide", 24, "IP")
    make("far", 16, "L2")
    make("foreign", 16, "IP")
    make("other", 16, "IP", fairseq_ccpr=identity)
    wanted = {
        "wide": r"'\w*wide' of Milvus at .* has keys of width 24, and 16 is the width of these: give another --collection",
        "far": r"'\w*far' of Milvus at .* has an index of metric L2, and IP is that of these keys",
        "foreign": r"'\w*foreign' of Milvus at .* was not made by fairseq-ccpr",
        "other": r"'\w*other' of Milvus at .* was built with another encoder: 000000000000 there, [0-9a-f]{12} now",
    }
    for name, sentence in wanted.items():
        done = build(ccpr, text, tmp_path / "s", *where(tmp_path, name), check=False)
        refused(done, sentence)
        assert not (tmp_path / "s").exists()
    phrase = json.loads((stored / MANIFEST).read_text())["phrase"]
    for name, sentence in {**wanted, "none": r"'\w*none' of Milvus at .* is missing"}.items():
        shutil.copytree(stored, moved := tmp_path / name)
        edit_manifest(moved, phrase=phrase | {"store": vars(address(tmp_path, name))})
        with pytest.raises(DatastoreError, match=sentence):
            retriever(ccpr, moved)
    index = PhraseDatastore(stored).open_index()
    assert isinstance(index, MilvusIndex)
    with (
        patch.object(MilvusIndex, "count", lambda self: self.size - 1),
        pytest.raises(DatastoreError, match="is unfinished"),
    ):
        index.check()


def test_what_does_not_end_is_told(stored: Path) -> None:
    index = PhraseDatastore(stored).open_index()
    assert isinstance(index, MilvusIndex)
    index.check()  # a connection
    for found, seconds in (({"state": "Failed"}, LONG), ({"state": "InProgress"}, 0.05)):
        index.server.timeout = seconds
        with (
            patch.object(MilvusIndex, "_ask", lambda *arguments, **others: None),
            patch.object(
                MilvusIndex, "_index_type", lambda self, found=found: found | {"pending_index_rows": 5}
            ),
            pytest.raises(
                UnreachableError, match=rf"to index the keys, and 5 are left \(state {found['state']}\)"
            ),
        ):
            index.finish()

    # Compaction makes it more; 1 s without a change is too long.
    rows = iter([3, *range(9, 0, -1), 0])
    with (
        patch.object(MilvusIndex, "_ask", lambda *arguments, **others: None),
        patch.object(MilvusIndex, "_index_type", lambda self: {"pending_index_rows": next(rows)}),
        patch.object(MilvusIndex, "check"),
    ):
        index.finish()

    def too_long(*arguments: Any, timeout: float, **others: Any) -> None:
        time.sleep(timeout)
        raise index.server.pymilvus.MilvusException(message="wait for loading collection timeout")

    index.server.timeout = 0.2
    with (
        patch.object(index.server._client, "load_collection", too_long),
        pytest.raises(UnreachableError, match="does not answer"),
    ):
        index.server.ask("load_collection", "stored")


@pytest.mark.parametrize(
    "said, again",
    [
        # Answers of servers 2.3.5 and 2.2.16 after they were killed, and to requests that they do not take.
        ("session not found->datanode-1: node not found[node=1]: unrecoverable error", True),
        ("stack trace: /milvus/pkg/tracer/stack_trace.go:51\nempty grpc client: find no available rootcoord, check", True),
        ("failed to search: collection not loaded[collection=470737143642980381]", True),
        ("service not ready[standalone=1]: Initializing", True),
        ("rpc error: code = Unknown desc = node not match[expectedNodeID=8][actualNodeID=11]", True),
        ("etcdserver: leader changed", True),
        # the embedded one
        ("Collection 's' is in state 'released'; call load() before search/get/query", True),
        ("nodes not enough", False),
        ("maximum shards's number should be limited to 16", False),
        ("fail to Search, QueryNode ID=1, reason=collection:4, metric type not match: invalid parameter[expected=IP]", False),
        ("index not found[collection=probe]", False),
        ("database not found[database=nodb]", False),
    ],
)  # fmt: skip
def test_what_a_restarted_server_says_is_asked_again_and_a_refusal_is_not(
    stored: Path, said: str, again: bool
) -> None:
    index = PhraseDatastore(stored, LONG).open_index()
    assert isinstance(index, MilvusIndex)
    assert index.exists()  # a connection
    refusal = index.server.pymilvus.MilvusException(65535, said)
    with patch.object(index.server._client, "has_collection", side_effect=refusal) as asked:
        if again:  # on a new connection
            assert index.exists()
        else:
            with pytest.raises(DatastoreError, match=f"refuses: {re.escape(said)}$"):
                index.exists()
    assert asked.call_count == 1


def test_what_older_servers_say(stored: Path) -> None:
    """Answers of servers 2.3.0, whose package is of no release by its own words, and 2.2.16."""
    index = PhraseDatastore(stored, LONG).open_index()
    assert isinstance(index, MilvusIndex)
    assert index.exists()  # a connection
    said = "code: UnexpectedError, reason: code: CollectionNotExists, reason: can't find collection: 470744056181434164"
    one = index.server._client
    with (
        patch.object(one, "search", side_effect=pymilvus.MilvusException(1, said)),
        pytest.raises(DatastoreError, match=r"stored' of Milvus at .* is missing: restore it"),
    ):
        index.server.ask("search", index.address.collection)
    index.address = replace(index.address, uri="http://127.0.0.1:1")  # the embedded one is of any version
    with patch.object(one, "get_server_version", create=True) as asked:
        asked.return_value = "v2.2-testing-20230824-68-ga34a9d6-lite"
        index.refuse_foreign()
        asked.return_value = "v2.2.16-lite"
        with pytest.raises(
            ConfigurationError, match=r"is version v2\.2\.16-lite, which cannot count or replace keys"
        ):
            index.refuse_foreign()


def test_stack_traces_are_left_out() -> None:
    said = "stack trace: /milvus/pkg/tracer/stack_trace.go:51 github.com/milvus-io/milvus/pkg/tracer.StackTrace\n"
    said += (
        "/usr/local/go/src/runtime/asm_amd64.s:1598 runtime.goexit: attempt #0: find no available rootcoord"
    )
    error = pymilvus.MilvusException(65535, said)
    assert milvus._first_line(error) == "attempt #0: find no available rootcoord"


def test_other_encoder_is_refused(ccpr: Ccpr, stored: Path, tmp_path: Path) -> None:
    call(*ccpr.training(tmp_path / "other", 1, "--disable-validation"))
    words = [stored, "--phrases-encoder", tmp_path / "other/checkpoint_last.pt", "--cpu"]
    refused(call("retrieve", *words, check=False), "built with another encoder")


def test_credentials_are_used_and_never_shown(
    ccpr: Ccpr, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the server at MILVUS_URI, where MILVUS_TOKEN says that it asks for some."""
    token = URI and os.environ.get(TOKEN)
    monkeypatch.delenv(TOKEN, raising=False)
    guarded = None if token else Server(tmp_path / "server.db", token="me:s3cr/t")
    uri, token = (guarded.uri, "me:s3cr/t") if guarded else (URI, token)
    user, _, password = token.partition(":")
    try:
        output, right = tmp_path / "s", uri.replace("//", f"//{user}:{quote(password, safe='')}@")
        words = ["--collection", f"{PREFIX}guarded"]
        for wrong in (uri, right.replace(f"{user}:", f"{user}:wr0ng")):
            done = build(ccpr, text, output, "--store", wrong, *words, check=False)
            refused(done, f"Milvus at {uri} refuses these credentials: .*MILVUS_TOKEN")
            assert "wr0ng" not in done.stdout + done.stderr and not output.exists()
        done = build(ccpr, text, output, "--store", right, *words)
        shown = done.stdout + done.stderr + (output / MANIFEST).read_text()
        assert f":{password}" not in shown and quote(password, safe="") + "@" not in shown
        with pytest.raises(DatastoreError, match="refuses these credentials"):
            retriever(ccpr, output)
        monkeypatch.setenv(TOKEN, token)
        assert retriever(ccpr, output).retrieve(sources(ccpr, 1))[0]
    finally:
        if guarded:
            guarded.kill()


def test_benchmark_searches_milvus_too(tmp_path: Path) -> None:
    words = ["--sizes", 300, "--quiet", "--cpu"]
    shown = call("benchmark phrases", *words, "--store", address(tmp_path, "").uri).stdout
    assert "| exact | 300 |" in shown and "| milvus:exact | 300 |" in shown
    assert "benchmark_300" not in client(tmp_path).list_collections()


def test_bad_options_are_refused_before_any_work(ccpr: Ccpr, text: Path, local: Path, tmp_path: Path) -> None:
    output = tmp_path / "s"

    def fails(*words: object) -> subprocess.CompletedProcess[str]:
        done = build(ccpr, text, output, *words, check=False)
        assert not output.exists() and "s3cret" not in done.stderr
        return done

    refused(
        fails("--store", "http://127.0.0.1:9", "--store-timeout", 0.5),
        "http://127.0.0.1:9 does not answer: asked",
    )
    refused(fails("--store", "ftp://me:s3cret@host/"), "--store ftp://host/ is neither a server")
    refused(fails("--store", "http://me:s3/s3cret@host"), "--store has an @ beyond its host")
    for uri in (
        "http://me:s3cret[@host:19530",
        "http://me:s3cret@host:1953O",
        "http://me:s3cret\uff03x@host",
        "http://h:195300",
    ):
        refused(fails("--store", uri), "--store is no URI such as .*: its host or port cannot be read")
    refused(fails("--store", tmp_path / "phrases"), "neither a server, .* nor a file that ends in .db")
    refused(fails("--store", tmp_path / "no/p.db"), "there is no folder .*no")
    refused(fails("--store", tmp_path / "p.db", "--collection", "a-b"), "--collection is 'a-b'")
    refused(fails("--collection", "a"), "--collection a needs --store, which says where")
    refused(fails("--store", tmp_path / "p.db", "--store-timeout", 0), "--store-timeout is 0")
    refused(fails("--store", tmp_path / "p.db", "--index", "IVF16,Flat"), "not one of Milvus: give exact, or")
    refused(fails("--store", tmp_path / "p.db", "--index-parameters", "ef"), "--index-parameters are 'ef'")
    (tmp_path / "file.db").write_text("something else")
    refused(
        fails("--store", tmp_path / "file.db"),
        r"file\.db cannot be opened: another process has it open, or it is no",
    )
    words = [local, "--phrases-encoder", ccpr.checkpoint, "--cpu", "--store-timeout", 0]
    refused(call("retrieve", *words, check=False), "--store-timeout is 0")
    gone = StoreAddress(str(tmp_path / "gone.db"), "c")
    with pytest.raises(DatastoreError, match=r"gone\.db is missing"):
        MilvusIndex(RemoteKeys(gone, 1, 2, {}, 30), IndexDescription("milvus", "ip", "FLAT")).check()
