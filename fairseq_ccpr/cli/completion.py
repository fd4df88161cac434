"""`fairseq-ccpr completion`: a script that completes commands and options in the shell."""

from __future__ import annotations

import argparse

import shtab

from fairseq_ccpr.cli import COMMANDS, PROGRAM, declared
from fairseq_ccpr.cli.command import command
from fairseq_ccpr.errors import ConfigurationError, did_you_mean
from fairseq_ccpr.settings import option

SHELLS = ("bash", "zsh", "fish")


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
        for names, nargs, choices, metavar, text in declared()[name]["own"]:
            flag = {"action": "help" if "--help" in names else "store_true"}
            named = flag if nargs == 0 else {"nargs": nargs, "choices": choices, "metavar": metavar}
            parser.add_argument(*names, **named, help=text)
    print(shtab.complete(root, shell))
    return 0
