"""The recipe for a GPU: it refuses to run without one, and would see what is wrong."""

from __future__ import annotations

import importlib.util
import json
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
    write("search", "a", search=[{**row, "queries": count} for count in (5, 9)])
    decoded = {
        "batch": 800,
        "tokens_per_second": 7.0,
        "speed": 0.5,
        "speed_equipped": 0.4,
        "operations": 99.4,
    }
    alone = {"system": "text", "entries": 0, "parts": {}}
    tokens = {"system": "clknn", "entries": 1000, "parts": {"search": 1.25}}
    write("exact", "a", decoding=[decoded | alone, decoded | tokens, decoded | alone])
    write("faiss", "a", decoding=[decoded | alone, decoded | tokens])
    words = [sys.executable, str(RECIPES / "gpu_section.py"), str(tmp_path)]
    page = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "Of one run, 2026-11-28: device a GPU, commit a," in page
    assert "| 1,000 | 16 | exact, ip | 2.00 | 2.00 | 4.0 |" in page
    assert page.count("| text |  |  | 7 | 50% | 40% | 0.00 | 99 |") == 1  # of one size as of another
    for searched in ("exactly", "by FAISS"):
        assert f"| clknn | 1,000 | {searched} | 7 | 50% | 40% | 1.25 | 99 |" in page
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")).keys() == {
        "search",
        "exact",
        "faiss",
    }
    write("faiss", "b", decoding=[])
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "figures of 2 devices, versions or commits" in done.stderr
