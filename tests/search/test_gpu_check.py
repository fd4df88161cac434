"""The recipe for a GPU: it refuses to run without one, and would see what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
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


def write(folder: Path, name: str, commit: str) -> None:
    """Write what a stage measures: figures, and the page of their tables."""
    machine = {
        "device": "a GPU",
        "commit": commit,
        "torch": "2",
        "fairseq-ccpr": "0",
        "date": "2026-11-28T20:13",
    }
    (folder / f"{name}.json").write_text(json.dumps({"machine": machine}), encoding="utf-8")
    (folder / f"{name}.md").write_text(f"tables of {name}\n\n", encoding="utf-8")


def test_the_section_is_of_one_run_alone(tmp_path) -> None:
    assert "has no figures" in section(tmp_path).stderr
    write(tmp_path, "exact-1000", "a")
    assert "tables of exact-1000" in section(tmp_path).stdout  # where searching has failed
    for name in ("search", "exact-2000", "faiss"):
        write(tmp_path, name, "a")
    page = section(tmp_path).stdout
    assert page.startswith(
        "Of one run, 2026-11-28: device a GPU, commit a, torch 2, fairseq-ccpr 0.\n\n## search\n"
    )
    assert "\n\n## exact-1000\n\ntables of exact-1000\n\n## exact-2000\n\n" in page
    assert page == (tmp_path / "gpu.md").read_text(encoding="utf-8")
    made = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert list(made) == ["search", "exact-1000", "exact-2000", "faiss"]
    write(tmp_path, "faiss", "b")
    assert "figures of 2 devices, versions or commits" in section(tmp_path).stderr


@pytest.mark.parametrize("commit", ["", "abc-dirty"])
def test_the_section_is_of_a_commit_that_can_be_looked_up(commit, tmp_path) -> None:
    write(tmp_path, "search", commit)
    done = section(tmp_path)
    assert done.returncode == 1 and f"the commit '{commit}', which nobody can look up" in done.stderr
    assert not (tmp_path / "gpu.md").exists()
    assert ("commit abc," in section(tmp_path, "abc").stdout) == (not commit)
