"""The reference of the site: commands from their parsers, options of decoding from their dataclasses, Python from docstrings.

scripts/docs.py writes it among the pages of the site. The options of all commands are kept as data, too, for completion and
for what is typed wrongly:

    python scripts/reference.py

writes them, and a test fails where they are out of date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import fairseq_ccpr
from fairseq_ccpr.cli import COMMANDS, DAILY, RESEARCH, load
from fairseq_ccpr.cli.command import HelpFormatter, markdown_table
from fairseq_ccpr.decoding.options import RETRIEVAL, RetrievalConfig
from fairseq_ccpr.settings import option_name

PACKAGE = Path(__file__).resolve().parent.parent / "fairseq_ccpr"
OPTIONS = PACKAGE / "cli" / "options.json"
CLASSES = (
    *("Translator", "Translation", "TokenDatastore", "PhraseDatastore", "Memory", "Retriever"),
    *("LearningRetriever", "TokenRetriever", "ModelView", "Neighbours"),
)
KEYED = ("keys_fingerprint", "keys_fingerprints", "open_index", "find_damage")
INHERITED = {  # what is public of the classes above
    "Translator": ("translate",), "TokenDatastore": KEYED, "PhraseDatastore": KEYED
}  # fmt: skip
OWN_OPTIONS = ("datastore", "untuned", "trust", "tokens_log")  # of the task itself


def pages() -> dict[str, str]:
    return {"commands.md": commands(), "decoding-options.md": decoding_options(), "python.md": python()}


def commands() -> str:
    parts = ["# Commands", "Generated from the parsers of the commands."]
    for title, named in (("Daily work", DAILY), ("Research", RESEARCH)):
        parts += [f"## {title}", *(_command(name, what) for name, what in named.items())]
    return _page(parts)


def options() -> str:
    lines = []
    for name in COMMANDS:
        command = load(name)
        own = [
            [
                group.title,
                action.option_strings or [action.dest],
                _shown(action),
                action.nargs,
                _named(action),
            ]
            for group in command.parser()._action_groups
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
        ]
        said = {"text": command.text, "own": own, "of_fairseq": sorted(command.passed_on())}
        lines.append(f"{json.dumps(name)}: {json.dumps(said)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def decoding_options() -> str:
    of_task = {one.name: one.metadata.get("help", "") for one in fields(RetrievalConfig)}
    own = [["option", "meaning"], *([f"`--{n.replace('_', '-')}`", _cell(of_task[n])] for n in OWN_OPTIONS)]
    rows = [["option", "default", "values", "meaning"]]
    for kind in RETRIEVAL:
        rows += [_decoding_option(kind, one) for one in fields(kind) if "help" in one.metadata]
    text = "Generated from the dataclasses of the options. [Options of decoding](../options.md) explains their use."
    return _page(["# Options of decoding, generated", text, markdown_table(own), markdown_table(rows)])


def python() -> str:
    parts = ["# Python", "Generated from docstrings. All names are imported from `fairseq_ccpr`."]
    for name in CLASSES:
        kind = getattr(fairseq_ccpr, name)
        parts += [f"## {name}", _documented(name, kind)]
        members = {
            **{inherited: getattr(kind, inherited) for inherited in INHERITED.get(name, ())},
            **vars(kind),
        }
        for method, value in members.items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if method.startswith("_"):
                continue
            if isinstance(value, property) and value.__doc__:
                parts += [f"### {name}.{method}", _code(f"{method}\n\n{inspect.getdoc(value)}")]
            elif inspect.isfunction(function) and function.__doc__:
                parts += [f"### {name}.{method}", _documented(method, function)]
    return _page(parts)


def _command(name: str, what: str) -> str:
    command = load(name)
    parts = [f"### {name}", f"{what[0].upper()}{what[1:]}.", _code(command.text)]
    rows = [["option", "default", "meaning"]]
    rows += [
        _own_option(action) for action in command.parser(everything=False)._actions if action.dest != "help"
    ]
    parts += [markdown_table(rows)] if len(rows) > 1 else []
    if command.rest and command.retrieval:
        parts.append(
            "It also accepts the [options of decoding](decoding-options.md) and those of fairseq-generate."
        )
    elif command.rest:
        parts.append("It also accepts fairseq's options of tokenizers and subwords.")
    return "\n\n".join(parts)


def _shown(action: argparse.Action) -> str:
    return HelpFormatter("")._expand_help(action)


def _named(action: argparse.Action) -> dict[str, Any]:
    if action.nargs == 0:
        return {}
    named = {
        "choices": action.choices,
        "metavar": action.metavar,
        "required": bool(action.option_strings) and action.required,
    }
    return {name: value for name, value in named.items() if value}


def _own_option(action: argparse.Action) -> list[str]:
    value = action.metavar or ("\\|".join(map(str, action.choices)) if action.choices else "")
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    shown = f"`{names}`" + (f" {_cell(str(value))}" if value and action.option_strings else "")
    default = "required" if action.required and action.option_strings else _default(action.default)
    return [shown, default, _cell(action.help or "")]


def _decoding_option(kind: type, one: Any) -> list[str]:
    metadata = one.metadata
    values = ", ".join(metadata["choices"]) or metadata["within"]
    return [f"`{option_name(kind, one)}`", _default(one.default), values, _cell(metadata["help"])]


def _default(value: Any) -> str:
    if value is None or value is False or value is MISSING or value == "" or value == []:
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}`"


def _cell(text: str) -> str:
    text = " ".join(text.replace("%%", "%").split())
    return "".join(
        f"\\{letter}" if letter in "|<>*_[]" and text[at - 1] != "\\" else letter
        for at, letter in enumerate(text)
    )


def _documented(name: str, thing: Any) -> str:
    doc = inspect.getdoc(thing) or ""
    if getattr(thing, "_is_protocol", False):
        return _code(f"{name}, an interface\n\n{doc}")
    function = (
        thing.__new__ if _is_named_tuple(thing) else thing.__init__ if inspect.isclass(thing) else thing
    )
    signature = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
    signature = re.sub(r"<function .+? at 0x\w+>", "...", signature)  # whose address is another each time
    return _code(f"{name}{signature}\n\n{doc}")


def _is_named_tuple(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, tuple)


def _code(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def _page(parts: list[str]) -> str:
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    OPTIONS.write_text(options(), encoding="utf-8")
