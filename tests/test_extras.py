"""Advice on what to install can be followed."""

from __future__ import annotations

import re

from tests.helpers import ROOT


def test_no_advice_names_a_package_that_is_not_published() -> None:
    """This one is installed from a checkout."""
    for path in (ROOT / "fairseq_ccpr").rglob("*.py"):
        assert not re.search(r"pip install [^\n]*fairseq-ccpr", path.read_text(encoding="utf-8")), path
