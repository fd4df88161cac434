"""The options of fairseq that some commands pass on to it."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from typing import Union

from fairseq import options
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.registry import REGISTRIES

from fairseq_ccpr.decoding.task_options import TASKS

Known = dict[str, Union[int, str, None]]  # options by name, and how many values they take, as argparse has it


def options_of_decoding() -> Known:
    """Return fairseq's options of generation, and those of the tasks that retrieve."""
    return _known([action for task in TASKS for action in generation_parser(task)._actions])


def generation_parser(task: str) -> argparse.ArgumentParser:
    """Return fairseq's parser of options of generation, those of a task included."""
    parser = options.get_generation_parser(default_task=task)
    options.parse_args_and_arch(parser, input_args=["."], parse_known=True)  # this adds those of the task
    return parser


def options_of_subwords() -> Known:
    """Return fairseq's options of tokenizers and subwords, whichever are chosen."""
    parser = argparse.ArgumentParser(add_help=False)
    for kind in ("tokenizer", "bpe"):
        parser.add_argument(f"--{kind}")
        for config in REGISTRIES[kind]["dataclass_registry"].values():
            gen_parser_from_dataclass(parser, config(), delete_default=True)
    return _known(parser._actions)


def part(words: list[str], own: Collection[str], known: Known) -> tuple[list[str], list[str]]:
    """Part the words of a command line.

    Args:
        own: names of the command's own options.
        known: those of fairseq.

    Returns:
        The words without fairseq's options, and these with their values.

    >>> part(["--path", "model.pt", "DATA", "--cpu", "--k", "3"], ["--k"], {"--path": None, "--cpu": 0})
    (['DATA', '--k', '3'], ['--path', 'model.pt', '--cpu'])
    """
    mine: list[str] = []
    others: list[str] = []
    at = 0
    while at < len(words):
        name, equals, _ = words[at].partition("=")
        if name in own or name not in known:
            mine.append(words[at])
            at += 1
            continue
        nargs, end = known[name], at + 1
        most = 0 if equals or nargs == 0 else 1 if nargs in (None, "?") else nargs
        values = len(words) - end if isinstance(most, str) else most
        while end < len(words) and end - at <= values and (nargs is None or not words[end].startswith("-")):
            end += 1
        others += words[at:end]
        at = end
    return mine, others


def _known(actions: Iterable[argparse.Action]) -> Known:
    return {name: action.nargs for action in actions for name in action.option_strings}
