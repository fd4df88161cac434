"""The package can be installed, and advice on what to install can be followed."""

from __future__ import annotations

import re
import subprocess
import sys

from fairseq_ccpr.version import __version__
from tests.helpers import ROOT


def test_no_advice_names_a_package_that_is_not_published() -> None:
    """This one is installed from a checkout."""
    for path in (ROOT / "fairseq_ccpr").rglob("*.py"):
        assert not re.search(r"pip install [^\n]*fairseq-ccpr", path.read_text(encoding="utf-8")), path


def test_the_package_can_be_installed() -> None:
    """`setup.py` reads constants out of modules, which it does not import."""
    printed = subprocess.check_output([sys.executable, "setup.py", "--version"], cwd=ROOT, text=True)
    assert printed.strip() == __version__
