"""What every command of this package shares: its words, its tables, how it ends."""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_ccpr.errors import ConfigurationError, describe
from fairseq_ccpr.settings import add_options, check, read_options


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, where there are any, and keeps the line breaks of descriptions, which hold examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        empty = action.default is None or action.default is False or action.default in ("", [])
        return action.help if empty else super()._get_help_string(action)


def own_arguments() -> list[str]:
    """The command line's words, less `--user-dir fairseq_ccpr`, which has no work to do here.

    They are taken out of `sys.argv`, since fairseq looks there for itself, and refuses to import a package twice.
    """
    for at, (option, value) in enumerate(zip(sys.argv, sys.argv[1:])):
        if option == "--user-dir" and Path(value).name == "fairseq_ccpr":
            del sys.argv[at : at + 2]
            break
    return sys.argv[1:]


def command(text: str, work: Callable[..., int], *kinds: type, rest: bool = False) -> Callable[[], None]:
    """Make the `main` of a command, which is called as the file that `work` is in.

    Args:
        text: what `--help` says before the options.
        work: the command; takes the options of each kind, and with `rest` the words that are no options of its own; returns
            the exit code.
        kinds: dataclasses of options, see `settings.option`.
    """
    name = Path(inspect.getfile(work)).name

    def main() -> None:
        parser = argparse.ArgumentParser(
            prog=name, description=text, formatter_class=HelpFormatter, allow_abbrev=not rest
        )
        for kind in kinds:
            add_options(parser, kind)
        words = own_arguments()
        given, *others = parser.parse_known_args(words) if rest else [parser.parse_args(words)]

        def checked() -> int:
            options: list[Any] = [read_options(kind, given) for kind in kinds]
            for one in options:
                check(one)
            return work(*options, *others)

        run(name, checked)

    return main


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
