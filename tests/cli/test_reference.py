"""The reference that is kept is the one that parsers, dataclasses and docstrings give."""

from __future__ import annotations

import pytest

from scripts import reference


@pytest.mark.parametrize("page", ["commands.md", "decoding-options.md", "python.md", reference.OPTIONS])
def test_the_reference_is_up_to_date(page: str) -> None:
    kept = (reference.FOLDER / page).read_text(encoding="utf-8")
    assert reference.pages()[page] == kept, f"docs/reference/{page} is out of date: run python scripts/reference.py"
