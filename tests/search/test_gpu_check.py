"""The recipe for a GPU: it refuses to run without one, and would see what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from fairseq_ccpr.cli.planning import Limits
from fairseq_ccpr.lab.speed.search_speed import Sweep
from fairseq_ccpr.search import ExactIndex
from tests.helpers import ROOT
from tests.vectors import DEVICE

pytestmark = pytest.mark.full

RECIPES = ROOT / "scripts/recipes"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    """The module of the recipe."""
    spec = importlib.util.spec_from_file_location("gpu_search", RECIPES / "gpu_search.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
@pytest.mark.parametrize("command", [["bash", "gpu_check.sh"], [sys.executable, "gpu_search.py"]])
def test_without_a_gpu_it_refuses_in_one_sentence(command, tmp_path) -> None:
    words = [command[0], str(RECIPES / command[1]), str(tmp_path / "output")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout and not (tmp_path / "output").exists()
    assert len(done.stderr.splitlines()) == 1 and " needs a GPU" in done.stderr


def test_wrong_searches_are_seen(recipe, monkeypatch) -> None:
    monkeypatch.setattr(recipe, "WIDTHS", (16,))
    assert not list(recipe.faults(DEVICE, 300))
    right = ExactIndex.search

    def of_other_keys(index: ExactIndex, queries, k):
        scores, ids = right(index, queries, k)
        return scores, ids.flip(1)

    def too_low(index: ExactIndex, queries, k):
        scores, ids = right(index, queries, k)
        return scores - 0.01, ids

    for search, sentence in ((of_other_keys, "ids are of other keys"), (too_low, "scores differ by 0.01")):
        monkeypatch.setattr(ExactIndex, "search", search)
        found = list(recipe.faults(DEVICE, 300))
        assert len(found) == 20 and all(sentence in line for line in found)


def test_rows_are_those_of_the_benchmark(recipe, monkeypatch) -> None:
    monkeypatch.setattr(recipe, "REAL", 400)
    monkeypatch.setattr(recipe, "measure_limits", lambda device: Limits(1e9, 1e12))
    sweep = Sweep([300, 500], ["exact", "IVF4,SQfp16"], [5], [8], 1)
    lines = recipe.table(list(recipe.measure(16, "l2", sweep, torch.device("cpu")))).splitlines()
    assert [line.split(" | ")[:4] for line in lines[2:]] == [
        ["| 16", "300", "exact, l2", "5"],
        ["| 16", "300", "IVF4,SQfp16, l2", "5"],
        ["| 16", "500", "exact, l2", "5"],
        ["| 16", "500", "IVF4,SQfp16, l2", "5"],
    ]


def test_stores_are_looked_for_before_any_work(tmp_path) -> None:
    words = ["bash", str(RECIPES / "gpu_check.sh"), str(tmp_path / "output"), str(tmp_path)]
    for sentence in ("has no datastore called raw, clknn, text or phrases", "clknn is not tuned"):
        rehearsing = os.environ | {"REHEARSE": "1"}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=rehearsing)
        assert done.returncode == 2 and not (tmp_path / "output").exists()
        assert len(done.stderr.splitlines()) == 1 and sentence in done.stderr
        (tmp_path / "clknn").mkdir(exist_ok=True)


def section(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the recipe that makes the page."""
    command = [sys.executable, str(RECIPES / "gpu_section.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_section_is_of_one_run_alone(tmp_path) -> None:
    def write(name: str, commit: str, **rows: object) -> None:
        machine = {
            "device": "a GPU",
            "commit": commit,
            "torch": "2",
            "fairseq-ccpr": "0",
            "date": "2026-11-28T20:13",
        }
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": machine, **rows}), encoding="utf-8")

    row = {"dimension": 16, "keys": 1000, "index": "exact, ip", "k": 8, "milliseconds": 2.0, "floor": 0.5}
    speeds = {"tokens_per_second": 7.0, "speed": 0.5, "speed_equipped": 0.4, "operations": 99.4}
    decoded = {"batch": 800, "parts": {"search": 1.25}, "system": "clknn", **speeds}
    base = decoded | {"system": "base", "entries": 0, "parts": {}}
    text = base | {"system": "text"}
    assert "has no figures" in section(tmp_path).stderr
    signed = {"signatures": {"clknn": "k:8 trust:abc"}}
    write("exact-1000", "a", decoding=[base, decoded | {"entries": 1000}, text], **signed)
    assert "clknn" in section(tmp_path).stdout  # where searching has failed
    write(
        "search", "a", search=[{**row, "queries": 5}, {**row, "queries": 9}, {**row, "queries": 9, "keys": 7}]
    )
    write("exact-2000", "a", decoding=[base, decoded | {"entries": 2000}], **signed)
    write("sentences", "a", decoding=[base, decoded | {"entries": 0}], **signed)
    write("faiss", "a", decoding=[base, decoded | {"entries": 1000}], **signed)
    page = section(tmp_path).stdout
    assert "Of one run, 2026-11-28: device a GPU, commit a," in page
    assert "| 1,000 | 16 | exact, ip | 2.00 | 2.00 | 4.0 |" in page
    assert "| 7 | 16 | exact, ip |  | 2.00 | 4.0 |" in page
    for system in ("base", "text"):
        assert page.count(f"| {system} |  |  | 7 | 50% | 40% | 0.00 | 99 |") == 1
    ways = (
        ("1,000", "exactly"),
        ("2,000", "exactly"),
        ("", "in the 64 nearest sentences"),
        ("1,000", "by FAISS"),
    )
    for keys, searched in ways:
        assert f"| clknn | {keys} | {searched} | 7 | 50% | 40% | 1.25 | 99 |" in page
    assert "- clknn, by FAISS: `k:8 trust:abc`" in page
    made = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert made.keys() == {"search", "exact-1000", "exact-2000", "sentences", "faiss"}
    write("faiss", "b", decoding=[], **signed)
    assert "figures of 2 devices, versions or commits" in section(tmp_path).stderr


@pytest.mark.parametrize("commit", ["", "abc-dirty"])
def test_the_section_is_of_a_commit_that_can_be_looked_up(commit, tmp_path) -> None:
    machine = {"device": "a GPU", "commit": commit, "date": "2026-11-28T20:13"}
    (tmp_path / "search.json").write_text(json.dumps({"machine": machine, "search": []}), encoding="utf-8")
    done = section(tmp_path)
    assert done.returncode == 1 and f"the commit '{commit}', which nobody can look up" in done.stderr
    assert not (tmp_path / "gpu.md").exists()
    assert ("commit abc." in section(tmp_path, "abc").stdout) == (not commit)
