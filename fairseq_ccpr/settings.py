"""One field, one option: help, default and range stand with it, and all else is derived from them.

    @dataclass(frozen=True)
    class Settings:
        PREFIX: ClassVar[str] = "tokens"
        k: int = option(8, "neighbours retrieved for each token", within="[1, inf)", needs="at least 1 neighbour")

gives argparse and fairseq the option `--tokens-k` with its help and default, refuses `--tokens-k 0` (`check`),
reads the options back (`read_options`), writes them out (`as_options`), and names the value in signatures
(`signed`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from enum import Enum
from functools import partial
from typing import Any, Optional, TypeVar, get_args, get_origin, get_type_hints

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.version import __version__

NUMBERS = {int: "N", float: "X"}  # what the value of an option is called, unless it says so

S = TypeVar("S")
C = TypeVar("C", bound=type)


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    within: str = "",
    needs: str = "",
    choices: tuple[str, ...] = (),
    sign: str = "",
    unsigned: str = "",
    automatic: bool = False,
    metavar: str | None = None,
    flags: tuple[str, ...] = (),
    nargs: str | None = None,
    positional: bool = False,
) -> Any:
    """Return a dataclass field that is an option.

    Args:
        default: of the option; none: it must be given.
        help: what `--help` says.
        within: the interval of a number, such as "(0, 1]".
        needs: that interval in words, for the sentence that refuses others.
        choices: the values of a string.
        sign: the name in signatures, if not that of the field.
        unsigned: why no signature has the value; every other value is in one.
        automatic: an option that is left out may have another value than the field's default, such as one
            that was tuned: `read_options` is given it.
        flags: other names of the option in our own commands, such as -s.
        metavar, nargs: as in argparse.
        positional: an argument without a name.
    """
    metadata = locals().copy()
    del metadata["default"]
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check(settings: Any) -> None:
    """See that all values are in their ranges."""
    for one in _options_of(type(settings)):
        given, metadata = getattr(settings, one.name), one.metadata
        several = isinstance(given, (list, tuple))
        name = f"{option_name(type(settings), one)} {'has' if several else 'is'}"
        for value in given if several else [given]:
            if value is None:
                continue
            if metadata["within"] and not inside(value, metadata["within"]):
                raise ConfigurationError(f"{name} {value}: {metadata['needs']} is needed")
            if metadata["choices"] and value not in metadata["choices"]:
                raise ConfigurationError(f"{name} {value}: choose one of {', '.join(metadata['choices'])}")


def add_options(parser: argparse._ActionsContainer, kind: type, *, without: tuple[str, ...] = ()) -> None:
    """Give a parser the options of a dataclass, but for the fields `without`."""
    hints = get_type_hints(kind)
    for one in _options_of(kind):
        if one.name in without:
            continue
        metadata, hint = one.metadata, _bare(hints[one.name])
        if metadata["positional"]:
            given = {name: metadata[name] for name in ("nargs", "metavar", "help")}
            parser.add_argument(one.name, type=_item(hint), default=_default(one), **given)
            continue
        names = sorted((option_name(kind, one), *metadata["flags"]), key=lambda name: name.startswith("--"))
        given = {"dest": _dest(kind, one), "help": _help(one), "default": _default(one)}
        if hint is bool:
            action = argparse.BooleanOptionalAction if metadata["automatic"] else "store_true"
            given["default"] = None if metadata["automatic"] else False
            parser.add_argument(*names, action=action, **given)
            continue
        if one.default is one.default_factory is MISSING and not metadata["automatic"]:
            given["required"] = True
        if metadata["choices"]:
            given["choices"] = metadata["choices"]
        if given["default"] == []:  # an option that is given twice has all that is given
            given["action"] = "extend"
        metavar = metadata["metavar"] or (NUMBERS.get(_item(hint)) if not metadata["choices"] else None)
        parser.add_argument(*names, type=_item(hint), nargs=metadata["nargs"], metavar=metavar, **given)


def with_options(*kinds: type) -> Callable[[C], C]:
    """Return a decorator that makes a fairseq configuration a dataclass with the options of settings."""

    from fairseq.dataclass import ChoiceEnum  # here, as the command needs this module before it needs fairseq

    def decorate(config: C) -> C:
        annotations = dict(vars(config).get("__annotations__", {}))
        for kind in kinds:
            hints = get_type_hints(kind)
            for one in _options_of(kind):
                hint, default, name = _bare(hints[one.name]), _default(one), _dest(kind, one)
                if hint is bool:
                    default = False
                    if one.metadata["automatic"]:
                        annotations[f"no_{name}"] = bool
                        opposite = {"help": f"the opposite of --{_dashed(name)}"}
                        setattr(config, f"no_{name}", field(default=False, metadata=opposite))
                elif one.metadata["choices"]:
                    hint = ChoiceEnum(list(one.metadata["choices"]))
                if default is None:
                    hint = Optional[hint]
                annotations[name] = hint
                setattr(config, name, field(default=default, metadata={"help": _help(one)}))
        config.__annotations__ = annotations
        made: Any = dataclasses.dataclass(config)
        return made

    return decorate


def read_options(kind: type[S], options: Any, automatic: Mapping[str, Any] | None = None, **others: Any) -> S:
    """Return the settings that a parser, or fairseq, has read.

    Args:
        automatic: values of the automatic fields whose option was left out, where they are not the field's
            default.
        others: values of the fields that are no options.
    """
    values = {}
    for one in _options_of(kind):
        name = _dest(kind, one)
        if not hasattr(options, name):
            continue
        value = getattr(options, name)
        if _negated(one):
            value = not value
        elif one.metadata["automatic"]:
            if getattr(options, f"no_{name}", False):
                if value:
                    raise ConfigurationError(
                        f"--{_dashed(name)} and --no-{_dashed(name)} exclude each other: give one of them"
                    )
                value = False
            elif value is None or (value is False and hasattr(options, f"no_{name}")):
                value = (automatic or {}).get(one.name, one.default)
        values[one.name] = str(value) if isinstance(value, Enum) else value
    return kind(**others, **values)


def as_options(
    settings: Any, always: tuple[str, ...] = (), automatic: Mapping[str, Any] | None = None
) -> str:
    """Write the options that give these settings: those that differ from what they are when left out.

    Args:
        always: fields that are written whatever their value.
        automatic: values of the automatic fields where their option is left out, see `read_options`.
    """
    words = []
    for one in _options_of(type(settings)):
        value, name = getattr(settings, one.name), option_name(type(settings), one)
        left_out = (automatic or {}).get(one.name, one.default)
        if value == left_out and one.name not in always:
            continue
        if isinstance(value, bool):
            words += (
                [name] if value != _negated(one) else [f"--no{name[1:]}"] if one.metadata["automatic"] else []
            )
        else:
            words.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return " ".join(words)


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Write options given by name as words of a command line: False and None are left out.

    >>> as_words({"beam": 5, "tokens_k": 8, "bf16": True, "quiet": False})
    ['--beam', '5', '--tokens-k', '8', '--bf16']
    """
    given = {
        f"--{_dashed(name)}": value
        for name, value in options.items()
        if value is not None and value is not False
    }
    return [
        word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])
    ]


def automatic_values(settings: Any) -> dict[str, Any]:
    """Return the values of the automatic fields, as `read_options` takes them."""
    return {
        one.name: getattr(settings, one.name)
        for one in _options_of(type(settings))
        if one.metadata["automatic"]
    }


def signed(settings: Any) -> dict[str, object]:
    """Tell what a signature says of settings: each value that is not `unsigned`, by its short name."""
    signing = [one for one in _options_of(type(settings)) if not one.metadata["unsigned"]]
    values = {one.metadata["sign"] or one.name.rstrip("_"): getattr(settings, one.name) for one in signing}
    return {
        name: ("no", "yes")[value] if isinstance(value, bool) else value for name, value in values.items()
    }


def signature(parts: Mapping[str, object]) -> str:
    """Name all that decides a result in one line, which ends with the version of this package.

    >>> signature({"k": 8, "T": 0.05}).rpartition("|")[0]
    'k:8|T:0.05'
    """
    return "|".join(f"{name}:{value}" for name, value in {**parts, "v": __version__}.items())


def option_name(kind: type, one: Field[Any]) -> str:
    """As typed: --tokens-lambda of `lambda_` with the prefix tokens; --no-tokens-guard of what is on by default."""
    return f"--{_dashed(_dest(kind, one))}"


def _options_of(kind: Any) -> list[Field[Any]]:
    return [one for one in fields(kind) if "help" in one.metadata]


def _dest(kind: type, one: Field[Any]) -> str:
    prefix = getattr(kind, "PREFIX", "")
    name = f"{prefix}_{one.name}".strip("_")
    return f"no_{name}" if _negated(one) else name


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _negated(one: Field[Any]) -> bool:
    return one.default is True


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING or one.metadata["automatic"] else one.default


def _help(one: Field[Any]) -> str:
    text: str = one.metadata["help"]
    shown = one.metadata["automatic"] and one.default is not None and one.default is not False
    return f"{text} (default: {one.default}, or as tuned)" if shown else text


def _bare(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return (
        kinds[0]
        if get_origin(hint) is not list and len(kinds) == 1 and type(None) in get_args(hint)
        else hint
    )


def _item(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is list else hint


def inside(value: float, interval: str) -> bool:
    """Tell whether a number is in an interval; no NaN is.

    >>> inside(1, "(0, 1]"), inside(0, "(0, 1]"), inside(5, "[1, inf)")
    (True, False, True)
    """
    low, high = map(float, interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    return above and (value < high if interval[-1] == ")" else value <= high)


count_option = partial(option, within="[1, inf)", needs="at least 1", metavar="N")
counts_option = partial(count_option, nargs="+")
source_language_option = partial(option, flags=("-s",), metavar="LANG")
target_language_option = partial(option, flags=("-t",), metavar="LANG")
