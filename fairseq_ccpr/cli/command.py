"""What every command of this package shares: its words, its tables, how it ends."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import ConfigurationError, describe


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of descriptions, which hold examples."""


def own_arguments() -> list[str]:
    """The command line's words, less `--user-dir fairseq_ccpr`, which has no work to do here.

    They are taken out of `sys.argv`, since fairseq looks there for itself, and refuses to import a package twice.
    """
    for at, (option, value) in enumerate(zip(sys.argv, sys.argv[1:])):
        if option == "--user-dir" and Path(value).name == "fairseq_ccpr":
            del sys.argv[at : at + 2]
            break
    return sys.argv[1:]


def add_evaluation_options(parser: argparse.ArgumentParser) -> None:
    """What every command that evaluates phrases has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the same goes as JSON")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def named(words: list[str], what: str) -> dict[str, str]:
    """What words such as [NAME=]PATH stand for, by name: the one given, or that of the folder.

    Args:
        words: of the command line.
        what: they are called together.

    Raises:
        ConfigurationError: two have the same name.
    """
    by_name: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():  # a path may have the sign in it
            name, path = "", word
        name = name or (Path(path).parent.resolve().name if Path(path).is_file() else Path(path).name)
        if name in by_name:
            raise ConfigurationError(f"two {what} are called '{name}': name them, as in NAME={path}")
        by_name[name] = path
    return by_name


def check_folder(option: str, path: Path | None) -> None:
    """See that the file of an option, where it was given, can be written to.

    Raises:
        ConfigurationError: its folder is missing.
    """
    if path is not None and not path.parent.is_dir():
        raise ConfigurationError(f"{option} {path}: there is no folder {path.parent}")


def markdown_table(rows: list[list[Any]]) -> str:
    """A Markdown table, the first row being its head.

    >>> print(markdown_table([["a", "b"], [1, 2.5]]))
    | a | b |
    |---|---|
    | 1 | 2.5 |
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def run(name: str, command: Callable[[], int]) -> None:
    """Run a command and exit: 0 when all is well, 1 after one sentence on stderr, 130 when interrupted."""
    warnings.simplefilter("ignore")  # of libraries beneath us, about their own future
    logging.getLogger().setLevel(logging.WARNING)
    try:
        code = command()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        sentence = describe(error)
        if sentence is None:
            raise
        print(f"{name}: error: {sentence}", file=sys.stderr)
        code = 1
    sys.exit(code)
