"""The recipe for a GPU: it refuses to run without one, and would see what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fairseq_ccpr.cli.planning import Limits
from fairseq_ccpr.lab.speed.decoding_speed import DecodingSpeed
from fairseq_ccpr.lab.speed.search_speed import SearchCost, Sweep
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


def write(folder: Path, name: str, commit: str, **figures: Any) -> None:
    """Write what a stage measures: figures, and the page of their tables."""
    about = {"commit": commit, "machine": "a GPU", "versions": {"torch": "2"}} | figures
    (folder / f"{name}.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / f"{name}.md").write_text(f"tables of {name}\n\n", encoding="utf-8")


def test_the_section_is_of_one_run_alone(tmp_path) -> None:
    assert "has no figures" in section(tmp_path).stderr
    write(tmp_path, "exact-1000", "a")
    assert "tables of exact-1000" in section(tmp_path).stdout  # where searching has failed
    for name in ("search", "exact-2000", "faiss"):
        write(tmp_path, name, "a")
    page = section(tmp_path).stdout
    assert page.startswith("Of one run of gpu_check.sh, commit a.\n\n## search\n")
    assert "\n\n## exact-1000\n\ntables of exact-1000\n\n## exact-2000\n\n" in page
    assert page == (tmp_path / "gpu.md").read_text(encoding="utf-8")
    made = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert list(made) == ["search", "exact-1000", "exact-2000", "faiss"]
    write(tmp_path, "faiss", "b")
    assert "figures of 2 commits, machines or versions" in section(tmp_path).stderr


@pytest.mark.parametrize("commit", ["", "abc-dirty"])
def test_the_section_is_of_a_commit_that_can_be_looked_up(commit, tmp_path) -> None:
    write(tmp_path, "search", commit)
    done = section(tmp_path)
    assert done.returncode == 1 and f"the commit '{commit}', which nobody can look up" in done.stderr
    assert not (tmp_path / "gpu.md").exists()
    assert ("commit abc." in section(tmp_path, "abc").stdout) == (not commit)


def test_the_tables_read_what_a_run_measures(tmp_path) -> None:
    """What is measured by which names, seen by a Python that only notes its words; and gathered as under benchmarks/."""
    python, stores, output = tmp_path / "bin/python", tmp_path / "stores", tmp_path / "output"
    for name in ("raw", "clknn"):
        (stores / name).mkdir(parents=True)
        (stores / name / "tuned.json").touch()
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\n', encoding="utf-8")
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", RECIPES / "gpu_check.sh", output, stores, "DATA_BIN"], check=True, env=environment
    )
    words = (tmp_path / "words").read_text(encoding="utf-8")
    systems = f"--systems knn-mt={stores}/raw clknn={stores}/clknn --sizes"
    assert f"{systems} 1000000 --index exact " in words and f"--json {output}/exact-1000000.json" in words

    filed = json.loads((ROOT / "benchmarks/gpu.json").read_text(encoding="utf-8"))
    rows = {SearchCost: filed["search"]["search"], DecodingSpeed: filed["exact-1000000"]["decoding"]}
    for kind, (row, *_) in rows.items():  # of earlier code, which measured less
        assert row.keys() <= {field.name for field in fields(kind)}
    for name, figures in filed.items():
        write(output, name, "", **figures)
    assert section(output, "abc").returncode == 0
    gathered = json.loads((output / "gpu.json").read_text(encoding="utf-8"))
    assert gathered == {name: {**figures, "commit": "abc"} for name, figures in filed.items()}
