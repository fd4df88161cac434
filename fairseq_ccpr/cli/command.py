"""What all commands share: options parsed, tables printed, errors reported, completion for the shell."""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Optional, get_args, get_origin, get_type_hints

import shtab

from fairseq_ccpr.cli import COMMANDS, add_declared
from fairseq_ccpr.errors import PROGRAM, ConfigurationError, describe, did_you_mean, explain_usage, naming
from fairseq_ccpr.settings import (
    add_options,
    check,
    option,
    read_options,
    source_language_option,
    target_language_option,
)

INTERRUPTED = 130  # the exit code, as of a shell
SHELLS = ("bash", "zsh", "fish")
# What `--help` shows of the options that are passed on, with other words than fairseq's where these say too
# little.
EVERYDAY = {
    "model": {
        "--path": "the model's checkpoint; an ensemble's, separated by colons (the datastore's)",
        "--source-lang": "language to translate from (the datastore's)",
        "--target-lang": "language to translate into (the datastore's)",
        "--tokenizer": "tokenizer, before subwords: moses, nltk or space (the datastore's)",
        "--bpe": "kind of subwords, such as sentencepiece, subword_nmt or fastbpe (the datastore's)",
        "--sentencepiece-model": "file of the subword model (the datastore's)",
        "--bpe-codes": "file of the subword model (the datastore's)",
    },
    "beam search": {
        "--beam": "hypotheses that are kept at each step",
        "--nbest": "hypotheses that are returned for each sentence",
        "--lenpen": "length penalty: above 1 favours long translations, below 1 short ones",
        "--max-len-a": "with B of --max-len-b, a translation has at most A times the subwords of the source, and B",
        "--max-len-b": "see --max-len-a",
        "--replace-unk": "none: unknown characters are written as <unk>, not copied from the source by attention",
    },
    "batches and device": {
        "--batch-size": "sentences in a batch, at most",
        "--max-tokens": "source subwords in a batch, at most (12000, unless there is a --batch-size)",
        "--cpu": "use the CPU even where there is a GPU",
        "--precision": "",
    },
    "retrieval": dict.fromkeys(
        (
            "--datastore", "--untuned", "--trust", "--glossary", "--tokens-k", "--tokens-lambda", "--tokens-temperature",
            "--tokens-likeness", "--phrases-k", "--phrases-lambda", "--phrases-encoder", "--text-alpha", "--text-beta",
        ), ""
    ),
}  # fmt: skip
# What commands show of these that do not read all.
MODEL, SHOWN = frozenset(EVERYDAY["model"]), frozenset(name for group in EVERYDAY.values() for name in group)
DEVICE = frozenset({"--cpu", "--precision"})


@dataclass
class Shared:
    """Options that are the same in all commands that have a parameter, or settings with a field, of that name."""

    data_bin: Path = option(
        help="folder that fairseq-ccpr prepare or fairseq-preprocess wrote",
        positional=True,
        metavar="DATA_BIN",
    )
    text: list[Path] = option(
        help="files of one sentence per line", positional=True, nargs="+", metavar="TEXT"
    )
    valid: Optional[Path] = option(None, "pairs to tune on, the subset 'valid'", metavar="TSV|PREFIX")
    test: Optional[Path] = option(None, "pairs to measure on, the subset 'test'", metavar="TSV|PREFIX")
    against: list[Path] = option(
        [],
        "general text of the target language, whose expectations the text is weighed against",
        nargs="+",
        metavar="TEXT",
    )
    source_lang: Optional[str] = source_language_option(None, "source language (as the model says)")
    target_lang: Optional[str] = target_language_option(None, "target language (as the model says)")
    encoder: Optional[Path] = option(None, "build phrases with this phrase encoder", metavar="CKPT")
    data: Optional[Path] = option(
        None,
        "folder with the model's dictionaries (found in the datastore, or next to the model)",
        metavar="DATA_BIN",
    )
    json: Optional[Path] = option(None, "where the figures go as JSON", metavar="FILE")
    plot: Optional[Path] = option(None, "where a picture goes, as PNG", metavar="FILE")
    bf16: bool = option(False, "run the encoder in bfloat16, faster where the processor has it")
    cpu: bool = option(False, "use the CPU even where there is a GPU")
    quiet: bool = option(False, "no progress bars")


SHARED = Shared.__dataclass_fields__


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, where there are any, and keeps the line breaks of descriptions, which hold examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", []):
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


class PassedOn(argparse.Action):
    """An option of fairseq, which is kept as it was typed, for fairseq to read."""

    def __call__(self, parser: Any, given: Any, values: Any, name: str | None = None) -> None:
        glued = isinstance(values, str) and values.startswith("-")
        words = (
            [f"{name}={values}"]
            if glued
            else [name, *([values] if isinstance(values, str) else values or [])]
        )
        given.rest = [*getattr(given, "rest", []), *words]


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, with the option that may have been meant."""

    def error(self, message: str) -> NoReturn:
        known = [name for action in self._actions for name in action.option_strings]
        print(f"{self.prog}: error: {explain_usage(message, known)}", file=sys.stderr)
        sys.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, PassedOn):  # whose choices are for --help alone: fairseq checks them
            super()._check_value(action, value)


class Command:
    """A subcommand, called without arguments to run with those of the command line.

    Args:
        text: what `--help` says before the options.
        work: a function, named as the command, that returns the exit code. Its parameters are the options:
            one whose default is a `settings.option`; one of `Shared`, by its name; a dataclass, for all options
            of that, and the shared ones that it has fields for; a callable that returns a dataclass, and reads its
            options given what was tuned, see `read_options`; and `rest`, the words of options of fairseq.
        retrieval: whether these are all options of decoding; otherwise those of tokenizers and subwords
            alone.
        shown: those of every day that it reads, which `--help` shows.
    """

    def __init__(self, text: str, work: Callable[..., int], retrieval: bool, shown: Collection[str]) -> None:
        self.shown, self.work, self.retrieval = shown, work, retrieval
        self.name, self.text = f"{PROGRAM} {work.__name__.replace('_', ' ')}", text
        hints = get_type_hints(work)
        parameters = {name: one.default for name, one in inspect.signature(work).parameters.items()}
        self.rest = parameters.pop("rest", None) is not None
        own = [(name, hints[name], one) for name, one in parameters.items() if isinstance(one, Field)]
        self.kinds: dict[str, type] = {"": make_dataclass("Options", own, kw_only=True)}  # by parameter
        self.tuned = {name for name, hint in hints.items() if get_origin(hint) is Callable}
        for name, default in parameters.items():
            if name not in SHARED and not isinstance(default, Field):
                self.kinds[name] = get_args(hints[name])[-1] if name in self.tuned else hints[name]
        self.shared = {  # of each of these, the last for the function itself
            name: {one.name for one in fields(kind) if one.name in SHARED and "help" not in one.metadata}
            for name, kind in self.kinds.items()
        }
        self.shared[""] = {
            name for name, one in parameters.items() if name in SHARED and not isinstance(one, Field)
        }

    def parser(self, everything: bool = True, help_all: bool = False) -> Parser:
        """Return the parser of the command's own options and, with `everything`, of those that are passed on to fairseq.

        Args:
            help_all: whether its help has all of these, or only those of every day.
        """
        parser = Parser(
            prog=self.name, description=self.text, formatter_class=HelpFormatter, allow_abbrev=False
        )
        for kind in self.kinds.values():
            add_options(parser, kind)
        wanted = {name for names in self.shared.values() for name in names}
        add_options(parser, Shared, without=tuple(SHARED.keys() - wanted))
        if not self.rest or not everything:
            return parser
        if help_all:
            parser.usage = f"{self.name} [OPTION ...]"
        parser.add_argument(
            "--help-all", action="help", help="show every option of retrieval and of fairseq as well"
        )
        taken = {name for action in parser._actions for name in action.option_strings}
        passed_on = self.passed_on()
        for title, names in (*EVERYDAY.items(), ("all other options", dict.fromkeys(passed_on, ""))):
            group = parser.add_argument_group(title)
            for name, text in names.items():
                action, hidden = passed_on.get(name), not help_all and name not in self.shown
                if action is not None and name not in taken:
                    free = [one for one in action.option_strings if one not in taken]
                    taken.update(free)
                    kept: dict[str, Any] = {
                        key: getattr(action, key) for key in ("nargs", "default", "metavar")
                    }
                    kept["choices"] = [str(one) for one in action.choices or ()] or None
                    kept["help"] = argparse.SUPPRESS if hidden else text or action.help
                    group.add_argument(*free, action=PassedOn, **kept)
        return parser

    def passed_on(self) -> dict[str, argparse.Action]:
        """Return the options that are passed on to fairseq by their names, those of retrieval with our help."""
        from fairseq_ccpr.decoding.options import RETRIEVAL, TranslationRetrievalConfig
        from fairseq_ccpr.inference.resources import decoding_actions, subword_actions

        actions = [*subword_actions(), *(decoding_actions() if self.retrieval else ())] if self.rest else []
        if self.rest and self.retrieval:
            ours = argparse.ArgumentParser(add_help=False)
            of_task = {one.name: one.metadata.get("help") for one in fields(TranslationRetrievalConfig)}
            for name, metavar in {"datastore": "DIR", "trust": "FILE", "glossary": "TSV"}.items():
                ours.add_argument(f"--{name}", metavar=metavar, help=of_task[name])
            ours.add_argument("--untuned", action="store_true", help=of_task["untuned"])
            for kind in RETRIEVAL:
                add_options(ours, kind)
            actions += ours._actions
        return {name: action for action in actions for name in action.option_strings}

    def parse(self, words: list[str]) -> argparse.Namespace:
        """Return the command's own options and, as `rest`, the words of those that are passed on."""
        parser = self.parser()
        given, others = parser.parse_known_intermixed_args(words)
        given.rest = getattr(given, "rest", [])
        if others and "--user-dir" not in given.rest:
            parser.error(f"unrecognized arguments: {' '.join(others)}")
        given.rest += others  # of a plug-in, whose tasks may have options of their own
        return given

    def __call__(self) -> None:
        # fairseq looks for --user-dir in sys.argv for itself, and refuses to import a package twice.
        for at, (word, value) in enumerate(zip(sys.argv, sys.argv[1:], strict=False)):
            if word == "--user-dir" and Path(value).name == "fairseq_ccpr":
                del sys.argv[at : at + 2]
                break
        words = sys.argv[1:]
        if {"-h", "--help", *(["--help-all"] if self.rest else [])} & set(words):
            self.parser(help_all="--help-all" in words).print_help()
            sys.exit(0)
        given = self.parse(words)

        def checked() -> int:
            options: dict[str, Any] = {"rest": given.rest} if self.rest else {}
            for name, kind in self.kinds.items():
                if name in self.tuned:
                    options[name] = partial(read_options, kind, given)
                else:
                    shared = {one: getattr(given, one) for one in self.shared[name]}
                    read: Any = read_options(kind, given, **(shared if name else {}))
                    check(read)
                    options |= {name: read} if name else {**vars(read), **shared}
            return self.work(**options)

        run(self.name, checked)


def command(
    text: str, retrieval: bool = True, shown: Collection[str] = SHOWN
) -> Callable[[Callable[..., int]], Command]:
    """Return a decorator that makes a function a command; see `Command`."""
    return lambda work: Command(text, work, retrieval, shown)


def counted(number: int, noun: str) -> str:
    """Write a number of things: `1 pair`, `1,200 pairs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def named(words: list[str], what: str) -> dict[str, str]:
    """Name paths, each [NAME=]PATH, together called `what`: as given, or as the folder, the text or a checkpoint's folder.

    Texts that are called alike have the names of their folders.
    """
    given = []
    for word in words:
        name, equals, path = word.partition("=")
        is_path = not equals or Path(word).exists()  # which may have the sign in it
        given.append(("", word) if is_path else (name, path))
    by_text, by_folder = ([name or _called(Path(path), way) for name, path in given] for way in (False, True))
    for names in (by_text, by_folder):
        if len(set(names)) == len(names):
            return dict(zip(names, (path for _, path in given)))
    name, path = next(
        (name, path) for i, (name, (_, path)) in enumerate(zip(by_text, given)) if name in by_text[:i]
    )
    raise ConfigurationError(f"two {what} are called '{name}': name them, as in NAME={path}")


def _called(path: Path, by_folder: bool) -> str:
    if not path.is_file():
        return path.name
    if by_folder or path.suffix == ".pt":
        return path.parent.resolve().name
    return Path(path.name.removesuffix(".gz").removesuffix(".xz")).stem


def check_folders(**options: Path | None) -> None:
    """Check that the files of options, where they were given, can be written."""
    for name, path in options.items():
        if path is not None and path.is_dir():
            raise ConfigurationError(f"--{name.replace('_', '-')} {path} is a folder: give a file")
        if path is not None and not path.parent.is_dir():
            raise ConfigurationError(f"--{name.replace('_', '-')} {path}: there is no folder {path.parent}")


def markdown_table(rows: list[list[Any]]) -> str:
    """Write a Markdown table, the first row being its head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def run(name: str, command: Callable[[], int]) -> None:
    """Run a command and exit: 0 when all is well, 1 after one sentence on stderr, or as a shell tells an interruption."""
    warnings.simplefilter("ignore")  # of libraries beneath us, about their own future
    logging.basicConfig()
    logging.getLogger().setLevel(logging.WARNING)
    # text is UTF-8 whatever the locale; names of files are any bytes
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        code = command()
        with naming("the standard output"):
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # which ends `main` silently
        raise
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


@command("""\
Print a script that completes the commands and their options in the shell.

  fairseq-ccpr completion bash >> ~/.bashrc
""")
def completion(shell: str = option(help="bash, zsh or fish", positional=True, metavar="SHELL")) -> int:
    if shell not in SHELLS:
        raise ConfigurationError(f"there is no script for '{shell}'{did_you_mean(shell, SHELLS)}")
    root = argparse.ArgumentParser(prog=PROGRAM)
    commands = root.add_subparsers(dest="command")
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for name, what in COMMANDS.items():
        group, _, last = name.partition(" ")
        if last and group not in groups:
            groups[group] = commands.add_parser(group, help=f"{group} ...").add_subparsers(dest=group)
        parser = (groups[group] if last else commands).add_parser(last or group, help=what, add_help=False)
        add_declared(parser, name)
    print(shtab.complete(root, shell))
    return 0
