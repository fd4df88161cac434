"""What takes long to train: made once for all processes of a run, and kept for later ones while its sources are the same."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers import ROOT

LIBRARIES = ("torch", "ve-fairseq", "numpy", "sentencepiece")
AFTERWARDS = (
    "cli",
    "server",
    "evaluation",
    "inference",
    "lab/commands",
    "lab/experiments",
    "lab/mining",
    "lab/accuracy",
)
WEEK = 7 * 24 * 3600


@functools.cache
def sources() -> str:
    """A digest of all that decides what is made."""
    made_by = " ".join([platform.machine(), *(version(name) for name in LIBRARIES)])
    digest = hashlib.sha256(made_by.encode())
    package = ROOT / "fairseq_ccpr"
    files = [
        path
        for path in package.rglob("*.py")
        if not path.relative_to(package).as_posix().startswith(AFTERWARDS)
    ]
    for path in [*sorted(files), ROOT / "conftest.py", ROOT / "tests/small_models.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Workshop:
    """A folder of pytest's cache, or of this run where that is switched off."""

    def __init__(self, config: pytest.Config, temporary: Path) -> None:
        cache = getattr(config, "cache", None)
        folder = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
        self.folder = Path(cache.mkdir("trained") if cache else folder / "trained") / sources()
        self.folder.mkdir(parents=True, exist_ok=True)
        os.utime(self.folder)
        for other in self.folder.parent.iterdir():
            with suppress(FileNotFoundError):  # another process was first
                if other.stat().st_mtime < time.time() - WEEK:
                    shutil.rmtree(other)

    def fill(self, name: str, make: Callable[[Path], object]) -> Path:
        """Let a function fill the folder of this name, unless that was done before; tests leave it as it is."""
        folder, complete = self.folder / name, self.folder / f"{name}.complete"
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder
