"""What is generated from parsers, dataclasses and docstrings is kept up to date, or made with the site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fairseq_ccpr
from fairseq_ccpr.cli import COMMANDS
from scripts import reference, results
from tests.helpers import ROOT


def test_the_options_that_are_kept_are_up_to_date() -> None:
    kept = reference.OPTIONS.read_text(encoding="utf-8")
    assert reference.options() == kept, f"{reference.OPTIONS.name} is out of date: run python scripts/reference.py"


def test_the_site_has_the_reference_and_the_results_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from scripts import docs

    docs.gather(tmp_path / "pages")
    commands, python = (
        (tmp_path / f"pages/docs/reference/{name}.md").read_text(encoding="utf-8") for name in ("commands", "python")
    )
    assert [name for name in COMMANDS if f"\n### {name}\n" not in commands] == []
    assert [name for name in reference.CLASSES if f"\n## {name}\n" not in python] == []
    assert set(reference.CLASSES) <= set(dir(fairseq_ccpr))
    data = {path.name: json.loads(path.read_text("utf-8")) for path in (tmp_path / "pages/docs/results/data").iterdir()}
    assert data.keys() == {f"{path.stem}.json" for path in results.FOLDER.glob("*.md")}
    assert (tmp_path / "pages/docs/images/step.svg").is_file() and (tmp_path / "pages/README.md").is_file()
