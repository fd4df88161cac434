"""Measuring speed: what is measured, on stores of which sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_ccpr.cli.planning import Limits
from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.token import TokenDatastore
from fairseq_ccpr.decoding.token_memory import TokenMemory
from fairseq_ccpr.decoding.token_retriever import TokenRetriever
from fairseq_ccpr.evaluation.test_set import load
from fairseq_ccpr.inference.resources import parse_generation
from fairseq_ccpr.lab.speed.decoding_speed import BASE, EQUIPPED, SpeedTest, with_entries
from fairseq_ccpr.lab.speed.search_speed import grow, queries_near, recall
from fairseq_ccpr.search import ExactIndex
from fairseq_ccpr.search.recall import recall_of_sample
from fairseq_ccpr.timing import DECODER, MERGE, SEARCH, PhaseTimer
from tests.helpers import call, refused
from tests.small_models import World, build

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


def real_store(rng: np.random.Generator, size: int = 500) -> tuple[np.ndarray, np.ndarray]:
    keys = rng.normal(size=(size, 8)).astype(np.float32)
    return (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float16), np.arange(
        size, dtype=np.int32
    )


def test_smaller_store_is_a_part_of_the_real_one(rng: np.random.Generator) -> None:
    keys, values = real_store(rng)
    made, tokens = grow(keys, values, 200, True, CPU)
    assert len(set(tokens.tolist())) == 200
    torch.testing.assert_close(made, torch.from_numpy(keys)[tokens.long()], rtol=0, atol=1e-3)


@pytest.mark.parametrize("unit", [True, False])
def test_larger_store_lies_around_the_real_one(unit: bool, rng: np.random.Generator) -> None:
    keys, values = real_store(rng)
    made, tokens = grow(keys, values, 1750, unit, CPU)
    counts = np.bincount(tokens, minlength=500)
    assert made.shape == (1750, 8) and made.dtype == torch.float16 and set(counts) == {3, 4}
    assert len(made.unique(dim=0)) > 1700  # none of the new ones stands twice
    lengths = made.float().norm(dim=1)
    assert (lengths - 1).abs().max() < 2e-3 if unit else lengths.std() > 0.05
    apart = (made.float() - torch.from_numpy(keys)[tokens.long()].float()).norm(dim=1)
    assert (apart < 1e-2).sum() >= 500 and 0.1 < apart[500:].median() < 0.6


def test_recall_counts_what_is_as_near() -> None:
    keys = torch.randn(300, 8).half()
    keys[150:] = keys[:150]  # each stands twice
    exact, queries = ExactIndex(keys, "l2"), queries_near(keys, 20, False)

    class Upper(ExactIndex):
        """Prefers the other one of equal keys, and misses every second neighbour."""

        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            ids = (ids + 150) % 300
            ids[:, 1::2] = -1
            return scores, ids

    assert recall(exact, exact, queries, 8) == 1
    assert recall(Upper(keys, "l2"), exact, queries, 8) == 0.5


def test_recall_of_a_sample_leaves_out_the_keys_themselves(rng: np.random.Generator) -> None:
    keys = rng.normal(size=(400, 8)).astype(np.float16)

    class OnlyItself(ExactIndex):
        """Finds of all neighbours the key alone."""

        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            ids[:, 1:] = -1
            return scores, ids

    assert recall_of_sample(ExactIndex(keys, "l2"), keys) == 1
    assert recall_of_sample(OnlyItself(keys, "l2"), keys) == 0
    assert recall_of_sample(ExactIndex(keys[:5], "l2"), keys[:5]) is None

    class Deep(ExactIndex):
        """Finds neighbours only where many are asked for."""

        def search(self, queries, k):
            scores, ids = super().search(queries, k)
            return scores, ids if k > 32 else ids.new_full(ids.shape, -1)

    assert recall_of_sample(Deep(keys, "l2"), keys) == 0
    assert recall_of_sample(Deep(keys, "l2"), keys, 64) == 1
    alike = np.ones_like(keys)
    assert recall_of_sample(ExactIndex(alike, "l2"), alike, 64) == 1  # all 64 are as near as the 8 nearest


def test_recall_is_stored_and_shown(world: World, tmp_path: Path) -> None:
    build(
        world,
        tmp_path / "store",
        "--index",
        "IVF16,PQ8x4",
        "--index-parameters",
        "nprobe=1",
        "--subset",
        "test",
    )
    section = Manifest.read(tmp_path / "store").token
    assert section is not None and section.index_recall is not None and 0 < section.index_recall < 1
    shown = call("inspect", tmp_path / "store").stdout
    assert f"recall         {section.index_recall:.1%} of the 8 nearest keys" in shown
    build(world, tmp_path / "store", "--index", "exact", "--subset", "test")
    assert "\nrecall" not in call("inspect", tmp_path / "store").stdout


def test_floor_is_what_takes_longer() -> None:
    limits = Limits(1e9, 1e12)
    assert limits.floor(1000, 100, 1) == pytest.approx(2e5 / 1e9)
    assert limits.floor(1000, 100, 10_000) == pytest.approx(2e9 / 1e12)


@pytest.fixture(scope="module")
def speed_test(world: World) -> SpeedTest:
    cfg = parse_generation(world.options("--no-progress-bar"))
    return SpeedTest(cfg, *load(cfg), {"one": str(world.datastore), "two": str(world.datastore)})


def test_systems_share_a_store_of_the_size_asked_for(speed_test: SpeedTest) -> None:
    for size in (300, 60_000):
        speed_test.resize(size, "exact")
        one, two = (speed_test.generators[name].model.find(TokenMemory).retriever for name in ("one", "two"))
        assert one.index is two.index and one.index.size == len(one.values) == size
        signature = speed_test.signatures[f"one, {size:,} keys"]
        assert f"|entries:{size}|" in signature and "|index:exact|" in signature


def test_our_beam_search_translates_as_fairseq_does(speed_test: SpeedTest) -> None:
    for sample in speed_test.batches(100):
        own, fairseqs = (
            speed_test.task.inference_step(speed_test.generators[name], speed_test.models, sample)
            for name in (EQUIPPED, BASE)
        )
        assert [[one["tokens"].tolist() for one in best] for best in own] == [
            [one["tokens"].tolist() for one in best] for best in fairseqs
        ]


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_batches_have_the_tokens_asked_for(speed_test: SpeedTest, tokens: int) -> None:
    batches = speed_test.batches(tokens)
    assert sum(len(batch["id"]) for batch in batches) >= 10
    for batch in batches:
        lengths = batch["target"].ne(speed_test.task.target_dictionary.pad()).sum(dim=1)
        assert tokens <= lengths.sum() < tokens + lengths.max()
        assert tokens > 1 or len(lengths) == 1


def test_parts_are_timed_apart_and_left_as_they_were(speed_test: SpeedTest) -> None:
    speed_test.resize(1000, "exact")
    samples = speed_test.batches(1)
    with PhaseTimer(CPU) as timer:
        for sample in samples:
            speed_test.task.inference_step(speed_test.generators["one"], speed_test.models, sample)
    assert timer.calls[DECODER] == timer.calls[SEARCH] == timer.calls[MERGE] / 4 > 10
    assert min(timer.seconds.values()) > 0


def test_command_measures_prints_and_writes(world: World, tmp_path: Path) -> None:
    words = [*world.options(), "--systems", f"knn-mt={world.datastore}", "--sizes", 400, 9000, "--repeats", 2]
    at = words.index("--datastore")
    words = [
        *words[:at],
        *words[at + 2 :],
        "--index",
        "exact",
        "IVF16,Flat",
        "--queries",
        5,
        20,
        "--k",
        4,
        "--quiet",
    ]
    words += ["--batches", 1, 300, "--max-len-b", 8, "--json", tmp_path / "j", "--plot", tmp_path / "p"]
    shown = call("benchmark decoding", *words).stdout
    found = json.loads((tmp_path / "j").read_text(encoding="utf-8"))
    assert len(found["decoding"]) == 2 * 2 * 3 and len(found["search"]) == 2 * 2 * 2
    for row in found["decoding"]:
        assert (
            0 < row["slowest"] <= row["tokens_per_second"] <= row["fastest"] and row["parts"]["decoder"] > 0
        )
        assert (row["speed"] == 1) == (row["system"] == BASE)
        assert (row["system"] in (BASE, EQUIPPED)) == ("search" not in row["parts"])
    for row in found["search"]:
        assert 0 < row["fastest"] <= row["milliseconds"] <= row["slowest"] and row["floor"] > 0
        assert row["recall"] == 1 if row["index"] == "exact" else 0 < row["recall"] <= 1
    assert (
        found["signatures"].keys() == {"knn-mt, 400 keys", "knn-mt, 9,000 keys"}
        and found["limits"]["bytes_per_second"] > 1e8
    )
    assert "| 9,000 | 300 |" in shown and (tmp_path / "p").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sizes", 0], r"--sizes has 0: at least 1"),
        (["--json", "/nowhere/file"], "there is no folder /nowhere"),
        (["--plot", "x.png", "--only", "decoding"], "--plot draws searches"),
        (["--index", "IVF99999,Flat"], "99,999 lists"),
        (["--systems", "base=DIR"], "give the system another name"),
        (["--systems", "a=DIR", "a=DIR"], "two systems are called 'a'"),
        (["--systems", "a=nowhere"], "there is no datastore at nowhere"),
        (["--only", "decoding", "--cpu", "--replace-unk"], "--replace-unk copies unknown characters"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(
    world: World, words: list[object], sentence: str
) -> None:
    given = [str(word).replace("DIR", str(world.datastore)) for word in words]
    always = ["--systems", f"knn={world.datastore}"] * ("--systems" not in given)
    refused(
        call("benchmark decoding", world.data_bin, "--path", world.model, *always, *given, check=False),
        sentence,
    )


def test_a_retriever_over_other_entries_leaves_the_first_as_it_was(world: World) -> None:
    retriever = TokenRetriever(TokenDatastore(world.datastore), torch.device("cpu"))
    before, unknown = retriever.describe(), 3
    assert retriever.always_finds(8, unknown) == (not bool((retriever.values == unknown).any()))
    few = ExactIndex(torch.randn(9, retriever.index.keys.size(1)).half(), retriever.index.metric)
    others = with_entries(retriever, few, torch.full((9,), unknown), "others")
    assert others.describe() == before | {"index": "others", "entries": 9} and retriever.describe() == before
    assert not others.always_finds(8, unknown) and others.always_finds(8, unknown + 1)
    assert others.search(torch.randn(2, few.keys.size(1)), 4).values.eq(unknown).all()


def test_a_search_without_tokens_is_refused(phrase_store: Path, world: World) -> None:
    words = ["--path", world.model, "--systems", f"phrases={phrase_store}", "--only", "search"]
    refused(call("benchmark decoding", world.data_bin, *words, check=False), "none of --systems has one")


def test_what_has_no_size_is_measured_as_it_is(phrase_store: Path, world: World, tmp_path: Path) -> None:
    words = [*world.options("--repeats", 1, "--only", "decoding")]
    at = words.index("--datastore")
    systems = ["--systems", f"phrases={phrase_store}", f"tokens={world.datastore}"]
    sizes = ["--sizes", 300, 400, "--batches", 1, "--quiet", "--json", found := tmp_path / "found.json"]
    call("benchmark decoding", *words[:at], *words[at + 2 :], *systems, *sizes)
    rows = json.loads(found.read_text(encoding="utf-8"))["decoding"]
    entries = [(row["system"], row["entries"]) for row in rows if row["system"] not in (BASE, EQUIPPED)]
    assert sorted(entries) == [("phrases", 0), ("tokens", 300), ("tokens", 400)]
    by_name = {row["system"]: row for row in rows}
    assert "search" in by_name["tokens"]["parts"] and by_name["tokens"]["floor"] > 0
    assert 0 < by_name[EQUIPPED]["operations"] < by_name["tokens"]["operations"]
