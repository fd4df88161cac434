"""What spares in-process commands their start: fairseq's configuration composed from memory, processes forked or not begun.

fairseq composes its configuration with Hydra, a quarter of a second each time, and starts a process to read
data; the tests here do both a thousand times over, with models that translate in milliseconds. Adapters are
trained in processes that import everything again; here they are forked from one that already has. Tuning
trains trust and votes with fewer updates.
"""

from __future__ import annotations

import copy
import functools
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from fairseq import options
from fairseq.dataclass import utils
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from fairseq_ccpr.building import adapter_build
from fairseq_ccpr.evaluation import training
from tests.helpers import begin

hydra_compose, hydra_initialize, fairseq_dataset_args = (
    utils.compose,
    utils.initialize,
    options.add_dataset_args,
)


@functools.cache
def _composed(config: str, groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    with initialize_config_dir(str(Path(utils.__file__).parents[1] / "config"), version_base="1.1"):
        composed = hydra_compose(config, overrides=list(groups), strict=False)
    return composed, dict(_leaves(OmegaConf.to_container(composed)))


def _leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name, node


@functools.cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def compose(config: str, overrides: list[str], strict: bool = False) -> DictConfig:
    """Compose as Hydra does: the groups that are chosen once, the values that are not what they were on a copy."""
    groups = tuple(word for word in overrides if "." not in word.split("=")[0])
    known, before = _composed(config, groups)
    composed = copy.deepcopy(known)
    with open_dict(composed):
        for word in overrides:
            if word not in groups:
                override = _parsed(word)
                key, value = override.key_or_group, override.value()
                if key not in before or type(value) is not type(before[key]) or value != before[key]:
                    OmegaConf.update(composed, key, value, merge=True)
    return composed


def add_dataset_args(parser: ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    """Add fairseq's options, --num-workers with another default."""
    group = fairseq_dataset_args(parser, *args, **kwargs)
    parser.set_defaults(num_workers=0)
    return group


def run_child(
    command: list[str],
    lock: IO[str],
    output: IO[str],
    environment: dict[str, str],
    folder: Path,
    own_group: bool,
) -> int | None:
    """Train as `child_process.run_child` does."""
    process = begin("fairseq-train", *command[3:], out=output.name, err=output.name)
    process.join()
    return process.exitcode


def install() -> None:
    """Let commands in this process use them."""
    utils.compose = compose
    utils.initialize = lambda config_path: nullcontext()  # which reads the source of each module on the stack
    options.add_dataset_args = add_dataset_args
    adapter_build.run_child = run_child
    training.OF_TRUST = training.OF_TRUST._replace(updates=120)
    training.OF_VOTES = training.OF_VOTES._replace(updates=60)
