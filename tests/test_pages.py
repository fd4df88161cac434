"""The pages are readable, and each figure stands in one place."""

from __future__ import annotations

from scripts import results


def test_the_figures_as_data_are_those_of_the_pages() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (results.FOLDER / "data").glob("*.json")}
    assert results.files() == kept, "docs/results/data is out of date: run python scripts/results.py"
