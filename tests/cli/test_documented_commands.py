"""What README and quickstart tell a reader to type does what they say, with the demo's model on a few verses."""

from __future__ import annotations

import io
import lzma
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import pytest

from fairseq_ccpr.building import adapter_build
from fairseq_ccpr.child_process import run_child
from fairseq_ccpr.text.pairs import read_pairs
from tests.helpers import DEMO, ROOT, call

pytestmark = pytest.mark.full

# They make an environment, or are fairseq's own; CI and scripts/test.sh make the same environment.
NOT_RUN = ("git clone", "export PIP_EXTRA_INDEX_URL", "python3 -m venv", "pip install", "fairseq-generate")
LINES = {"train": 500, "valid": 12, "test": 5}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that both pages speak of: the demo's models, and some of its text."""
    folder = tmp_path_factory.mktemp("reader")
    demo = folder / "datastores/demo"
    demo.mkdir(parents=True)
    for target in (folder, demo):
        for name in ("model.pt", "dict.de.txt", "dict.en.txt", "spm.model"):
            (target / name).symlink_to(DEMO / name)
    (demo / "ccpr").symlink_to(DEMO / "ccpr")
    for subset, count in LINES.items():
        rows = [pair for pair in read_pairs(DEMO / f"bible.{subset}.tsv.xz") if len(pair[1]) < 60][:count]
        text = "".join(f"{source}\t{target}\n" for source, target in rows)
        (folder / f"{subset}.tsv").write_text(text, encoding="utf-8")
        with lzma.open(demo / f"bible.{subset}.tsv.xz", "wt", encoding="utf-8") as packed:
            packed.write(text)
        if subset == "train":
            rows = rows[:60]
            (folder / "general.en.txt").write_text(
                "".join(f"{target}\n" for _, target in rows), encoding="utf-8"
            )
    (folder / "mono.en.txt").write_text("".join(f"{target}\n" for _, target in rows), encoding="utf-8")
    (folder / "in.txt").write_text("".join(f"{source}\n" for source, _ in rows[:3]), encoding="utf-8")
    return folder


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in a language, in their order."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(page: str) -> list[str]:
    """The commands of a page that are run here, one per line."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"\s+# .*", "", line) for line in lines]
    return [line for line in lines if line and not line.startswith(NOT_RUN)]


def run(line: str) -> str:
    """Run a command line with at most a pipe from echo, or input and output from files; what it printed."""
    typed, _, rest = line.partition(" | ") if line.startswith("echo ") else ("", "", line)
    words = shlex.split(rest)
    files = {sign: words[words.index(sign) + 1] for sign in "<>" if sign in words}
    words = words[: min([words.index(sign) for sign in files], default=len(words))]
    text = (
        Path(files["<"]).read_text(encoding="utf-8")
        if "<" in files
        else f"{shlex.split(typed)[1]}\n"
        if typed
        else ""
    )
    assert words[0] == "fairseq-ccpr", line
    with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")):
        done = call("", *words[1:])
    if ">" in files:
        Path(files[">"]).write_text(done.stdout, encoding="utf-8")
    return done.stdout


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        adapter_build, "DEFAULTS", adapter_build.DEFAULTS.replace(" 1000", " 20")
    )  # for speed
    monkeypatch.chdir(place)

    def train(
        command: list[str], lock: IO[str], output: IO[str], environment: dict[str, str], *rest: Any
    ) -> int:
        """Train an adapter here, as commands do, with what it prints in a file, as there is no terminal."""
        with (place / "train.log").open("w") as log:
            return run_child(
                command, lock, log, environment | {"PYTHONPATH": str(ROOT)}, place, own_group=False
            )

    monkeypatch.setattr(adapter_build, "run_child", lambda *given, own_group: train(*given))
    return place


def test_the_commands_of_the_quickstart(here: Path) -> None:
    printed = [run(line) for line in commands("docs/quickstart.md")]
    version, alone, _, _, tuned, translated, inspected, _ = printed
    assert f"`{version.strip()}`" in (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    assert alone.count("\n") == translated.count("\n") == 1
    assert "entries" in inspected and tuned
    assert "<html" in (here / "page.html").read_text(encoding="utf-8")


def test_the_commands_of_the_readme(here: Path) -> None:
    shutil.rmtree(here / "data-bin", ignore_errors=True)
    for line in commands("README.md"):
        run(line)
    assert (here / "out.txt").read_text(encoding="utf-8").count("\n") == 3
    assert {path.name for path in (here / "datastores/mine").iterdir()} >= {
        "token",
        "phrase",
        "text",
        "tuned.json",
    }
    (code,) = blocks("README.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert "<html" in (here / "page.html").read_text(encoding="utf-8")
