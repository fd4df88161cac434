"""What takes long to make: made once for all processes of a run, and kept for later ones while its sources stay the same."""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import inspect
import os
import platform
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers import ROOT

LIBRARIES = ("torch", "ve-fairseq", "numpy", "sentencepiece")
WEEK = 7 * 24 * 3600
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# What trained models depend on, of the package: from text to training pairs, networks and losses.
MODELS = (
    "models", "phrases", "storage", "text", "training", "building/preparation.py", "settings.py", "paths.py",
)  # fmt: skip
XPR = (*MODELS, "lab/xpr")
# What datastores depend on besides: all but what only uses them, or runs commands.
DATASTORES = (*MODELS, "building", "datastore", "decoding", "search", "device.py")


class Workshop:
    """A folder of pytest's cache, or of this run where that is switched off."""

    def __init__(self, config: pytest.Config, temporary: Path) -> None:
        cache = getattr(config, "cache", None)
        folder = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
        self.folder = Path(cache.mkdir("trained") if cache else folder / "trained")
        self.folder.mkdir(exist_ok=True)
        for other in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process was first
                if other.stat().st_mtime < time.time() - WEEK:
                    shutil.rmtree(other)

    def fill(self, name: str, make: Callable[[Path], object], made_by: Sequence[str], *made_of: Path) -> Path:
        """Let a function fill the folder of this name, unless that was done before; tests leave it as it is.

        Args:
            made_by: folders and modules of the package that decide what is made, besides the function.
            made_of: other folders that were filled.
        """
        kept = self.folder / f"{name}-{_digest(make, made_by, made_of)}"
        kept.mkdir(exist_ok=True)
        os.utime(kept)
        folder, complete = kept / name, kept / "complete"
        with (kept / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder


def _digest(make: Callable[[Path], object], made_by: Sequence[str], made_of: Sequence[Path]) -> str:
    """Digest the code, the libraries and the folders that decide what is made."""
    paths = [ROOT / "tests/small_models.py"]
    for name in made_by:
        path = ROOT / "fairseq_ccpr" / name
        paths += [path] if path.suffix else sorted(path.rglob("*.py"))
    parts = [
        platform.machine(),
        *(version(name) for name in LIBRARIES),
        *(path.parent.name for path in made_of),
    ]
    parts += [code_of(textwrap.dedent(inspect.getsource(make))), *map(_code_in, paths)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _code_in(path: Path) -> str:
    return code_of(path.read_text(encoding="utf-8"))


def code_of(text: str) -> str:
    """Return what code does: its syntax tree, which has no comments, without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
