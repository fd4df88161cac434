"""The commands: one list, which scripts and console entry points agree with, and options that are read from it."""

from __future__ import annotations

from importlib import import_module

import pytest

from fairseq_ccpr.cli import COMMANDS
from tests.helpers import ROOT, call, run


def test_scripts_and_entry_points_are_the_listed_commands() -> None:
    scripts = {path.stem: path.read_text() for path in (ROOT / "scripts").glob("*.py")}
    assert scripts.keys() == COMMANDS.keys() and len(set(scripts.values())) == 1
    code = "import setuptools, distutils.core as core; made = core.run_setup('setup.py', stop_after='init')"
    lines = run("python", "-c", f"{code}; print(*made.entry_points['console_scripts'], sep='\\n')").stdout.splitlines()
    names = [name.replace("_", "-") for name in COMMANDS]
    assert lines == [f"fairseq-ccpr-{n} = fairseq_ccpr.cli.{m}:main" for n, m in zip(names, COMMANDS)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_no_empty_default(name: str) -> None:
    assert callable(import_module(f"fairseq_ccpr.cli.{name}").main)
    shown = call(name, "--help").stdout
    assert f"{name}.py" in shown and "(default: None)" not in shown and "(default: False)" not in shown
