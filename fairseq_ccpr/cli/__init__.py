"""The command `fairseq-ccpr` and its subcommands: each is a module here that parses, calls and prints."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_ccpr.errors import PROGRAM, CcprError, did_you_mean, explain_usage
from fairseq_ccpr.version import __version__

if TYPE_CHECKING:
    from fairseq_ccpr.cli.command import Command

DAILY = {
    "demo": "translate twenty sentences without and with a datastore, in seconds",
    "adapt": "build, tune and measure a datastore of sentence pairs, in one command",
    "convert": "convert a Hugging Face model to fairseq: Marian (OPUS-MT), or an encoder",
    "prepare": "make a DATA_BIN from sentence pairs",
    "build tokens": "build a token datastore from sentence pairs",
    "build phrases": "build a phrase datastore from target-language text alone",
    "build text": "build a text memory from target-language text alone, by counting",
    "build monolingual": "build text memory, phrases and back-translations from target-language text alone",
    "build memory": "make an empty datastore that learns",
    "learn": "learn sentence pairs, which count from the next translation on",
    "forget": "take pairs out of what was learned",
    "memory": "show what was learned, or export it",
    "compact": "move what was learned into the datastore, and remove what was forgotten",
    "tune": "choose the settings of retrieval, and store them with the datastore",
    "translate": "translate text with a model and a datastore",
    "serve": "serve translations, and learn corrections, by LibreTranslate's API and a page in the browser",
    "explain": "write a page that shows where each token of a translation came from",
    "inspect": "show what a datastore holds, and whether it is whole",
    "merge": "merge datastores, or take texts out of one",
    "compare": "measure what retrieval changes, in quality and speed",
    "retrieve": "show which phrases of a datastore translate those of a text",
    "extract": "extract phrase pairs from sentence pairs",
}
RESEARCH = {
    "evaluate systems": "compare translations of a test set, with significance",
    "evaluate keys": "measure how often keys find the right token",
    "evaluate phrases": "measure how often a phrase in its sentence finds its translation",
    "evaluate types": "measure how often a phrase of a dictionary finds its translation",
    "evaluate retrieved": "compare what phrase datastores retrieve with reference translations",
    "evaluate alignment": "measure the alignment error rate on gold alignments",
    "evaluate mining": "measure how well mining finds translations where many sentences have none",
    "lexicon": "find example sentences for the phrases of a dictionary",
    "mine": "mine sentence pairs from two texts that were not aligned",
    "benchmark decoding": "measure the speed of decoding and of search with datastores of any size",
    "benchmark phrases": "measure the speed and size of phrase datastores",
    "experiment run": "run a domain-adaptation experiment from a file of its settings",
    "experiment report": "show the results of experiments as a page",
}
COMMANDS = DAILY | RESEARCH
CLOSED_PIPE = 141  # the exit code, as of a shell
COMPLETION = "completion"  # prints a script for the shell
MODULES = {  # of commands by their first word, and of those that have another
    "demo": "cli.demo", "adapt": "cli.adapt", "build": "cli.build", "convert": "cli.text",
    "prepare": "cli.text", "extract": "cli.text", "retrieve": "cli.retrieve",
    "tune": "cli.decode", "translate": "cli.decode", "serve": "cli.serve", "explain": "cli.decode",
    "compare": "cli.decode", COMPLETION: "cli.command", "evaluate": "lab.commands.evaluate",
    "benchmark": "lab.commands.benchmark", "experiment": "lab.commands.experiment", "mine": "lab.commands.mining",
    "lexicon": "lab.commands.mining", "evaluate mining": "lab.commands.mining",
}  # fmt: skip


def main() -> None:
    """Run the subcommand that the command line names; where the reader of its output left, as `head` does, end silently."""
    try:
        try:
            _main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tells it again at exit
        sys.exit(CLOSED_PIPE)


def _main() -> None:
    in_utf8()
    gc.set_threshold(100_000)  # loading makes many objects and hardly a cycle
    # Before torch: otherwise its threads spin for each other, which on a busy machine takes most of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = sys.argv[1:]
    command = next((name for name in (" ".join(words[:2]), " ".join(words[:1])) if name in COMMANDS), None)
    if words[:1] == [COMPLETION]:
        command = COMPLETION
    if command is not None:
        sys.argv = [f"{PROGRAM} {command}", *words[len(command.split()) :]]
        if command in COMMANDS:
            if {"-h", "--help"} & {*sys.argv[1:]} and "--help-all" not in sys.argv:
                print_help(command)
                return
            known = options_of(command)
            refuse_misspelt(known, sys.argv[1:], command)
        try:
            load(command)()
        except KeyboardInterrupt:  # before the command itself would notice
            print(f"{PROGRAM} {command}: interrupted", file=sys.stderr)
            sys.exit(130)
        except CcprError as error:  # of what is imported
            print(f"{PROGRAM} {command}: error: {error}", file=sys.stderr)
            sys.exit(1)
    elif words[:1] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
    elif words[:1] == ["--user-dir"]:  # of fairseq's commands, wherever this package was installed
        print(Path(__file__).parent.parent)
    elif not words or words[-1] in ("-h", "--help") or (len(words) == 1 and _group(words[0])):
        asked = words[-1:] in (["-h"], ["--help"])
        print(
            overview(words[0] if words and _group(words[0]) else ""), file=sys.stdout if asked else sys.stderr
        )
        sys.exit(0 if asked else 2)
    else:
        typed = " ".join(words[:2]) if _group(words[0]) else words[0]
        near = did_you_mean(" ".join(words[:2]), COMMANDS) or did_you_mean(words[0], COMMANDS)
        near = near or f"; {PROGRAM} --help lists them"
        print(f"{PROGRAM}: error: there is no command '{typed}'{near}", file=sys.stderr)
        sys.exit(2)


def in_utf8() -> None:
    """Start Python again in its UTF-8 mode where the locale has another encoding, for words, names of files and text."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1" and sys.executable:
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, words, os.environ | {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"})


def load(command: str) -> Command:
    """Import the module of a command; this is what takes seconds."""
    module = MODULES.get(command) or MODULES.get(command.split()[0], "cli.memory")
    gc.disable()
    try:
        found: Command = getattr(import_module(f"fairseq_ccpr.{module}"), command.replace(" ", "_"))
    finally:
        gc.enable()
    if not gc.get_freeze_count():
        gc.freeze()  # what was imported stays: not even as Python ends are its cycles looked for, for most of a second
    return found


@cache
def declared() -> dict[str, Any]:
    """Return the options of all commands, which scripts/reference.py wrote down: to read these loads no command.

    Of each command, what `--help` says before them, those that it shows, with their group, names, help and
    arguments of argparse, and the names of those that fairseq has.
    """
    options: dict[str, Any] = json.loads(Path(__file__).with_name("options.json").read_text("utf-8"))
    return options


def add_declared(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options that a command shows to a parser, which can do no more than complete or show them."""
    groups: dict[str, Any] = {one.title: one for one in parser._action_groups if one.title}
    for title, names, text, nargs, named in declared()[command]["own"]:
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        flag = {"action": "help" if "--help" in names or "--help-all" in names else "store_true"}
        groups[title].add_argument(
            *names, help=text.replace("%", "%%"), **(flag if nargs == 0 else {"nargs": nargs}), **named
        )


def print_help(command: str) -> None:
    """Print the help of a command, without loading it."""
    formatter = argparse.RawDescriptionHelpFormatter
    name, text = f"{PROGRAM} {command}", declared()[command]["text"]
    parser = argparse.ArgumentParser(prog=name, description=text, formatter_class=formatter, add_help=False)
    add_declared(parser, command)
    print(parser.format_help(), end="")


def options_of(command: str) -> list[str]:
    """Return the names of all options that a command takes."""
    its = declared()[command]
    return [name for _, names, *_ in its["own"] for name in names] + its["of_fairseq"]


def refuse_misspelt(known: list[str], words: list[str], command: str) -> None:
    """Refuse an option that does not exist and looks like one that does, as the command's parser would seconds later."""
    names = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
    for name in names if "--user-dir" not in names else ():  # whose tasks may have options of their own
        if name.startswith("--") and " " not in name and name not in known and did_you_mean(name, known):
            sentence = explain_usage(f"unrecognized arguments: {name}", known)
            print(f"{PROGRAM} {command}: error: {sentence}", file=sys.stderr)
            sys.exit(2)


def overview(group: str = "") -> str:
    """List the commands, or those of a group such as `build`, with what each does."""
    lines = [f"usage: {PROGRAM} {group or 'COMMAND'}{' COMMAND' if group else ''} [OPTION ...]", ""]
    for title, commands in (("daily work", DAILY), ("research", RESEARCH)):
        shown = {name: what for name, what in commands.items() if not group or name.split()[0] == group}
        lines += [f"{title}:", *(f"  {name:20} {what}" for name, what in shown.items()), ""] if shown else []
    lines += [
        f"{PROGRAM} COMMAND --help tells more; {PROGRAM} {COMPLETION} bash|zsh|fish prints completion for the shell;\n"
        f"{PROGRAM} --user-dir prints what fairseq's commands take as --user-dir."
    ]
    return "\n".join(lines)


def _group(word: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(f"{word} ")]
