"""What spares in-process commands their start: fairseq's configuration composed from memory, data read without processes.

fairseq composes its configuration with Hydra, a quarter of a second each time, and starts a process to read data; the tests
here do both a thousand times over, with models that translate in milliseconds.
"""

from __future__ import annotations

import copy
import functools
from argparse import ArgumentParser
from typing import Any

from fairseq import options
from fairseq.dataclass import utils
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

hydra_compose, fairseq_dataset_args = utils.compose, options.add_dataset_args


@functools.cache
def _composed(config: str, groups: tuple[str, ...]) -> DictConfig:
    return hydra_compose(config, overrides=list(groups), strict=False)


@functools.cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def compose(config: str, overrides: list[str], strict: bool = False) -> DictConfig:
    """Compose as Hydra does: the groups that are chosen once, the values on a copy."""
    groups = tuple(word for word in overrides if "." not in word.split("=")[0])
    composed = copy.deepcopy(_composed(config, groups))
    with open_dict(composed):
        for word in overrides:
            if word not in groups:
                override = _parsed(word)
                value: Any = override.value()
                OmegaConf.update(composed, override.key_or_group, value, merge=True)
    return composed


def add_dataset_args(parser: ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    """Add fairseq's options, --num-workers with another default."""
    group = fairseq_dataset_args(parser, *args, **kwargs)
    parser.set_defaults(num_workers=0)
    return group


def install() -> None:
    """Let fairseq in this process use both."""
    utils.compose = compose
    options.add_dataset_args = add_dataset_args
