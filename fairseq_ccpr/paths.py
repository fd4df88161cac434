"""Paths of any name in the hands of fairseq, which splits them at colons and takes `${` for a reference to an option."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from fairseq import utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

_split_anywhere = utils.split_paths
_OF_FAIRSEQ = re.compile(
    rf"\$\{{({'|'.join(FairseqConfig.__dataclass_fields__)})\.\w+\}}"
)  # defaults that it refers to


def split_paths(paths: str, separator: str = os.pathsep) -> list[str]:
    """Split paths as fairseq does, but not inside the name of a file or folder that exists."""
    pieces = _split_anywhere(paths, separator)
    if "://" in paths or len(pieces) == 1:
        return list(pieces)
    first = next((n for n in range(len(pieces), 1, -1) if Path(separator.join(pieces[:n])).exists()), 1)
    rest = separator.join(pieces[first:])
    return [separator.join(pieces[:first]), *(split_paths(rest, separator) if first < len(pieces) else [])]


def literal(value: Any, levels: int = 1) -> Any:
    """Escape text that is put into a configuration, so that reading it gives the text and not what its `${...}` refers to.

    Args:
        levels: how often it is read in between.

    >>> literal("runs/${a}"), literal("runs/${a}", 2)
    ('runs/\\\\${a}', 'runs/\\\\\\\\\\\\${a}')
    """
    if not isinstance(value, str) or levels == 0 or _OF_FAIRSEQ.fullmatch(value):
        return value
    return literal(re.sub(r"(\\*)\$\{", r"\1\1\\${", value), levels - 1)


def configuration(args: Namespace) -> Any:
    """Convert parsed options of fairseq to its configuration, in which `${` stands for itself."""
    escaped = Namespace(**{name: literal(value, 2) for name, value in vars(args).items()})
    cfg = convert_namespace_to_omegaconf(escaped)
    for part in (cfg.task, cfg.model):
        if isinstance(part, Namespace):  # of a class without a dataclass, which gets the options as they were parsed
            vars(part).update(vars(args))
    return cfg


utils.split_paths = split_paths  # for fairseq's own classes, and ours
