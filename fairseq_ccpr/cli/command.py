"""What all commands share: how options are parsed, tables printed, errors reported."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fairseq_ccpr.errors import ConfigurationError, describe, did_you_mean, explain_usage, naming
from fairseq_ccpr.settings import add_options, check, read_options

CLOSED_PIPE, INTERRUPTED = 141, 130  # exit codes, as of a shell


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, where there are any, and keeps the line breaks of descriptions, which hold examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", []):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, with the option that may have been meant."""

    of_fairseq: Collection[str] = ()  # options that are passed on to it
    words: Collection[str] = ()  # of the command line

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit."""
        known = [name for action in self._actions for name in action.option_strings] + [*self.of_fairseq]
        if "arguments are required" in message:  # perhaps since the option that was given is misspelt
            names = [word.partition("=")[0] for word in self.words if word.startswith("--")]
            misspelt = [name for name in names if name not in known and did_you_mean(name, known)]
            message = f"unrecognized arguments: {misspelt[0]}" if misspelt else message
        print(f"{self.prog}: error: {explain_usage(message, known)}", file=sys.stderr)
        sys.exit(2)


@dataclass(frozen=True)
class Command:
    """A subcommand, called without arguments to run with those of the command line.

    Attributes:
        name: as it is typed.
        text: what `--help` says before the options.
        work: takes the options of each kind, a function that reads those of each of `tuned` from what was tuned, and with
            `rest` the words that are no options of its own; returns the exit code.
        kinds: dataclasses of options, see `settings.option`.
        tuned: kinds whose options, when left out, take the values tuned for a datastore; see `read_options`.
        rest: whether it takes options of fairseq as well.
        retrieval: whether these are all options of decoding; otherwise those of tokenizers and subwords alone.
    """

    name: str
    text: str
    work: Callable[..., int]
    kinds: tuple[type, ...]
    tuned: tuple[type, ...]
    rest: bool
    retrieval: bool

    def parser(self) -> Parser:
        """Return the parser of the command's own options."""
        parser = Parser(prog=self.name, description=self.text, formatter_class=HelpFormatter, allow_abbrev=False)
        for kind in (*self.kinds, *self.tuned):
            add_options(parser, kind)
        return parser

    def help_parser(self) -> Parser:
        """Return the parser with all options that the command takes: those of retrieval as well, and fairseq's by name."""
        parser = self.parser()
        if self.rest and self.retrieval:
            from fairseq_ccpr.decoding.options import RETRIEVAL, TranslationRetrievalConfig

            group = parser.add_argument_group("retrieval")
            of_task = {one.name: one.metadata.get("help") for one in fields(TranslationRetrievalConfig)}
            group.add_argument("--datastore", metavar="DIR", help=of_task["datastore"])
            group.add_argument("--untuned", action="store_true", help=of_task["untuned"])
            for kind in RETRIEVAL:
                add_options(group, kind)
        if self.rest:
            listed = {name for action in parser._actions for name in action.option_strings}
            names = " ".join(sorted(n for n in self.passed_on() if n.startswith("--") and n not in listed))
            wrapped = textwrap.wrap(names, 110, break_on_hyphens=False, break_long_words=False)
            parser.epilog = "options of fairseq-generate, whose --help explains them:\n  " + "\n  ".join(wrapped)
        return parser

    def passed_on(self) -> dict[str, int | str | None]:
        """Return the options that are passed on to fairseq."""
        from fairseq_ccpr.inference.passed_on import options_of_decoding, options_of_subwords

        return {**options_of_subwords(), **(options_of_decoding() if self.retrieval else {})}

    def parse(self, words: list[str]) -> tuple[argparse.Namespace, list[list[str]]]:
        """Return the command's own options and, with `rest`, the words of others, which fairseq must know."""
        parser = self.parser()
        parser.words = words
        if not self.rest:
            return parser.parse_args(words), []
        from fairseq_ccpr.inference.passed_on import part

        parser.of_fairseq = self.passed_on()
        own = [name for action in parser._actions for name in action.option_strings]
        mine, others = part(words, own, parser.of_fairseq)
        if "--user-dir" not in others:
            return parser.parse_args(mine), [others]
        given, of_plug_in = parser.parse_known_args(mine)  # whose tasks may have options of their own
        return given, [[*others, *of_plug_in]]

    def __call__(self) -> None:
        """Parse, check, work, exit."""
        words = own_arguments()
        if {"-h", "--help"} & set(words):
            self.help_parser().print_help()
            sys.exit(0)
        given, others = self.parse(words)

        def checked() -> int:
            options: list[Any] = [read_options(kind, given) for kind in self.kinds]
            for one in options:
                check(one)
            return self.work(*options, *(partial(read_options, kind, given) for kind in self.tuned), *others)

        run(self.name, checked)


def counted(number: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "pair"), counted(1200, "pair")
    ('1 pair', '1,200 pairs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def command(
    text: str,
    work: Callable[..., int],
    *kinds: type,
    tuned: tuple[type, ...] = (),
    rest: bool = False,
    retrieval: bool = True,
) -> Command:
    """Make the command that is named as the file that `work` is in; see `Command`."""
    stem = Path(inspect.getfile(work)).stem
    return Command(f"fairseq-ccpr {stem.replace('_', ' ')}", text, work, kinds, tuned, rest, retrieval)


def own_arguments() -> list[str]:
    """Return the words of the command line, without `--user-dir fairseq_ccpr`, which is not needed here.

    They are taken out of `sys.argv`, since fairseq looks there for itself, and refuses to import a package twice.
    """
    for at, (option, value) in enumerate(zip(sys.argv, sys.argv[1:], strict=False)):
        if option == "--user-dir" and Path(value).name == "fairseq_ccpr":
            del sys.argv[at : at + 2]
            break
    return sys.argv[1:]


def named(words: list[str], what: str) -> dict[str, str]:
    """Name the paths of words such as [NAME=]PATH: as given, or as the folder is called.

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
    """Check that the file of an option, where it was given, can be written.

    Raises:
        ConfigurationError: its folder is missing, or it is one.
    """
    if path is not None and path.is_dir():
        raise ConfigurationError(f"{option} {path} is a folder: give a file")
    if path is not None and not path.parent.is_dir():
        raise ConfigurationError(f"{option} {path}: there is no folder {path.parent}")


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write what a command found as JSON."""
    with naming(path):
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def markdown_table(rows: list[list[Any]]) -> str:
    """Write a Markdown table, the first row being its head.

    >>> print(markdown_table([["a", "b"], [1, 2.5]]))
    | a | b |
    |---|---|
    | 1 | 2.5 |
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def run(name: str, command: Callable[[], int]) -> None:
    """Run a command and exit: 0 when all is well, 1 after one sentence on stderr, or as a shell tells an interruption."""
    warnings.simplefilter("ignore")  # of libraries beneath us, about their own future
    logging.basicConfig()
    logging.getLogger().setLevel(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):  # text is UTF-8 whatever the locale; names of files are any bytes
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        code = command()
        with naming("the standard output"):
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader stopped early, as `head` does
        code = CLOSED_PIPE
    except Exception as error:
        sentence = describe(error)
        if sentence is None:
            raise
        print(f"{name}: error: {sentence}", file=sys.stderr)
        code = 1
    try:
        sys.stdout.flush()
    except OSError:  # which Python would tell again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
