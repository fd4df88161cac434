"""What files of figures say of the run that measured them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fairseq_ccpr.lab.commands.report import write_results
from fairseq_ccpr.version import __version__


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("/home/me/data/test.en", "test.en"),
        ("/home/me/stores/", "stores/"),
        ("knn=/home/me/stores/raw:/home/me/more/text", "knn=raw:text"),
        ("--output=/tmp/a/b", "--output=b"),
        ("data/test.en", "data/test.en"),
        ("http://localhost:19530/a/b", "http://localhost:19530/a/b"),
        ("de/en and / or /", "de/en and / or /"),
        ("--path /home/me/m.pt --lr 1", "--path m.pt --lr 1"),
    ],
)
def test_figures_name_their_run_without_folders_of_the_machine(
    word: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fairseq-ccpr evaluate systems", word])
    write_results(tmp_path / "found.json", {"rows": [1]})
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert list(found) == ["command", "date", "versions", "commit", "machine", "rows"]
    assert found["command"] == ["fairseq-ccpr", "evaluate", "systems", kept]
    assert found["versions"]["fairseq-ccpr"] == __version__ and "threads" in found["machine"]
