"""What the pages show as code is code: commands as their parsers take them, programs that run, data that is read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from fairseq import options, tasks

from fairseq_ccpr.cli import COMMANDS, COMPLETION, load, options_of
from scripts import docs
from tests.helpers import ROOT
from tests.small_models import World
from tests.test_pages import name, pages

PAGES = pages("*.md")
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"\b(?:scripts|examples|tests)/[\w/.-]+\.(?:py|sh|yaml)\b")
# Bash asks this for every command that it does not find, and here it finds none.
ASKED = """command_not_found_handle() { printf '%s\\0' "$@" $'\\n' >> "$ASKED"; }\n"""


def blocks(page: Path, *languages: str) -> list[str]:
    """The blocks of a page in some languages, without their indentation."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        re.sub(f"^{space}", "", text, flags=re.MULTILINE) for space, kind, text in found if kind in languages
    ]


def commands(script: str, folder: Path) -> Iterator[list[str]]:
    """Return the commands of a script, with their arguments as bash expands them; none of them runs."""
    for file in re.findall(r"[<>]\s*([\w./-]+)", script):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    asked = folder / "asked"
    asked.touch()
    subprocess.run(
        [shutil.which("bash") or "bash", "-c", ASKED + script],
        cwd=folder, env={"PATH": "/nowhere", "ASKED": str(asked)}, stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
    )  # fmt: skip
    words = iter(asked.read_text(encoding="utf-8").split("\0"))
    while command := [*takewhile(lambda word: word != "\n", words)]:
        yield command
        asked.unlink(missing_ok=True)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=name)
def test_commands_are_taken_by_their_parsers(page: Path, tmp_path: Path) -> None:
    for script in blocks(page, "bash"):
        assert all((ROOT / file).is_file() for file in SCRIPT.findall(script)), script
        found = [*commands(script, tmp_path)]
        assert sum(words[0] == "fairseq-ccpr" for words in found) >= len(
            re.findall("^fairseq-ccpr", script, re.MULTILINE)
        )
        for words in found:
            if words[0] == "fairseq-ccpr" and not words[1].startswith("-"):
                command = next((one for one in (" ".join(words[1:3]), words[1]) if one in COMMANDS), None)
                assert command is not None or words[1] == COMPLETION, words
                if command is not None and "…" in words:
                    assert {word for word in words if word.startswith("--")} <= {*options_of(command)}, words
                elif command is not None:
                    load(command).parse(words[1 + len(command.split()) :])
            elif words[0] == "fairseq-generate":
                parser = options.get_generation_parser(default_task=words[words.index("--task") + 1])
                options.parse_args_and_arch(parser, input_args=words[1:])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "json", "yaml")], ids=name)
def test_data_is_read(page: Path) -> None:
    assert all(json.loads(text) for text in blocks(page, "json"))
    assert all(yaml.safe_load(text) for text in blocks(page, "yaml"))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_programs_run(page: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after another, where there are its model and datastore."""
    examples = {path.read_text("utf-8") for path in pages("examples/*.py")}  # test_examples.py runs them
    for file in ("dict.de.txt", "dict.en.txt", "spm.model"):
        (tmp_path / file).symlink_to(world.data_bin / file)
    (tmp_path / "model.pt").symlink_to(world.model)
    shutil.copytree(world.datastore, tmp_path / "datastores/mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {}
    with patch.dict(tasks.TASK_REGISTRY), patch.object(tasks, "TASK_CLASS_NAMES", {*tasks.TASK_CLASS_NAMES}):
        for program in blocks(page, "python"):
            code = compile(program, str(page), "exec")
            unknown = {"model_configs", "BigramConfig"} & {
                *code.co_names
            }  # of others, and of user_dir/bigrams.py
            if program not in examples and not unknown:
                exec(code, names)


def test_llms_txt_lists_the_pages() -> None:
    """It has a line for each page of the site, what it says first."""
    assert (ROOT / "llms.txt").read_text("utf-8") == docs.llms(), (
        "llms.txt is out of date: run python scripts/docs.py"
    )
