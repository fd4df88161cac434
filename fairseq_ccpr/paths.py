"""Paths of any name for fairseq, which splits them at colons and takes `${` for a reference."""

from __future__ import annotations

import inspect
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from fairseq import utils
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import FairseqConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

_split_anywhere = utils.split_paths
# Defaults that it refers to.
_OF_FAIRSEQ = re.compile(rf"\$\{{({'|'.join(FairseqConfig.__dataclass_fields__)})\.\w+\}}")


def split_paths(paths: str, separator: str = os.pathsep) -> list[str]:
    """Split paths as fairseq does, but not inside the name of a file or folder that exists."""
    pieces = _split_anywhere(paths, separator)
    if "://" in paths or len(pieces) == 1:
        return list(pieces)
    first = next((n for n in range(len(pieces), 1, -1) if Path(separator.join(pieces[:n])).exists()), 1)
    rest = separator.join(pieces[first:])
    return [separator.join(pieces[:first]), *(split_paths(rest, separator) if first < len(pieces) else [])]


def literal(value: Any, levels: int = 1) -> Any:
    """Escape text for a configuration, so that reading it gives the text, not what its `${...}` refers to.

    Args:
        levels: how often it is read in between.

    >>> literal("runs/${a}"), literal("runs/${a}", 2)
    ('runs/\\\\${a}', 'runs/\\\\\\\\\\\\${a}')
    """
    if not isinstance(value, str) or levels == 0 or _OF_FAIRSEQ.fullmatch(value):
        return value
    return literal(re.sub(r"(\\*)\$\{", r"\1\1\\${", value), levels - 1)


def configuration(args: Namespace) -> Any:
    """Convert parsed options of fairseq to its configuration, in which `${` stands for itself.

    This is fairseq's `convert_namespace_to_omegaconf` without Hydra, which takes half a second for it.
    """
    kinds = {
        name: field.type for name, field in FairseqConfig.__dataclass_fields__.items() if name != "_name"
    }
    kinds |= {
        name: known["dataclass_registry"].get(getattr(args, name, None)) for name, known in REGISTRIES.items()
    }
    kinds["task"] = TASK_DATACLASS_REGISTRY.get(args.task)
    kinds["model"] = None
    cfg: Any = OmegaConf.create(
        {name: _section(kind, args) if kind else None for name, kind in kinds.items()}
    )
    for name in ("task", *REGISTRIES):
        # a class without a dataclass has no options but its name
        if (chosen := getattr(args, name, None)) is not None:
            if not kinds[name]:
                cfg[name] = {}
            cfg[name]._name = chosen
    cfg = OmegaConf.create(
        OmegaConf.to_container(cfg, resolve=True, enum_to_str=True), flags={"allow_objects": True}
    )
    if kinds["task"] is None:  # a class without a dataclass, which gets the options as they were parsed
        cfg.task = Namespace(**vars(args), _name=args.task)
    OmegaConf.set_struct(cfg, True)
    return cfg


def _section(kind: type[FairseqDataclass], args: Namespace) -> Any:
    section = OmegaConf.structured(kind)
    for name, field in kind.__dataclass_fields__.items():
        if inspect.isclass(field.type) and issubclass(field.type, FairseqDataclass):
            section[name] = _section(field.type, args)
        elif hasattr(args, name) and name != "_name":
            section[name] = literal(getattr(args, name), 2)
    return section
