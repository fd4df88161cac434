"""The programs in examples/ run, and do what they say."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sacrebleu.metrics import CHRF

from tests.helpers import ROOT

Run = Callable[..., list[str]]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example where a reader would, and return the lines that it prints."""
    monkeypatch.chdir(ROOT)

    def run(name: str, *words: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_translate(printed: Run) -> None:
    lines = printed("translate.py")
    assert (
        len(lines) == 5
        and sum(line.startswith(" or ") for line in lines) == 2
        and "|entries:5125|" in lines[-1]
    )


def test_learn(printed: Run) -> None:
    before, learned, forgotten = (line.split(maxsplit=1)[1] for line in printed("learn.py"))
    assert learned == "The centurion went to Capernaum." and before == forgotten != learned


def test_explain(printed: Run, tmp_path: Path) -> None:
    printed("explain.py", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text("utf-8").lower().startswith("<!doctype html>")


def test_retriever(printed: Run) -> None:
    translation, signature = printed("retriever.py")
    assert translation and signature.startswith("retriever:Cosine|")


def test_memory(printed: Run) -> None:
    plain, avoiding = printed("memory.py")
    assert "▁him" in plain.split() and "▁him" not in avoiding.split() and avoiding


def test_knn_mt(printed: Run) -> None:
    model, retrieval = (line.split(maxsplit=1)[1] for line in printed("knn_mt.py"))
    wanted = 'But Jesus said to them, "What did Moses command?"'
    chrf = CHRF()
    assert chrf.sentence_score(retrieval, [wanted]).score > chrf.sentence_score(model, [wanted]).score + 10


def test_knn_mt_is_the_program_on_the_page() -> None:
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/how-it-works.md").read_text("utf-8"), re.M | re.S
    )
    assert program == (ROOT / "examples/knn_mt.py").read_text("utf-8")
