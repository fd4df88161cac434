"""fairseq's generation options, read from the words of a command line."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from fairseq import options
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

from fairseq_ccpr.decoding.retrieval_task import RetrievalTask
from fairseq_ccpr.decoding.task import BILINGUAL, RETRIEVING
from fairseq_ccpr.decoding.task_options import TASKS
from fairseq_ccpr.errors import ConfigurationError, did_you_mean, explain_usage
from fairseq_ccpr.paths import configuration
from fairseq_ccpr.settings import as_words

MAX_TOKENS = 12000  # of a batch, as in fairseq-generate


def parse_generation(words: list[str]) -> Any:
    """Return the configuration of `fairseq-generate WORDS`, with retrieval as the default task.

    Args:
        words: the folder with the dictionaries first, then options.

    Raises:
        ConfigurationError: an option that does not exist, that has no effect here, or whose value is none of its own.
    """
    parser = options.get_generation_parser(default_task=BILINGUAL)
    _refuse_in_one_sentence(parser)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Hydra, about how fairseq uses it
        cfg = configuration(options.parse_args_and_arch(parser, input_args=words))
    cfg.common.no_progress_bar |= cfg.common_eval.quiet
    if not issubclass(TASK_REGISTRY[cfg.task._name], RetrievalTask):
        retrieving = RETRIEVING.get(cfg.task._name, BILINGUAL)
        raise ConfigurationError(f"--task {cfg.task._name} does not retrieve: use {retrieving}")
    if cfg.generation.beam < 1:
        raise ConfigurationError(f"--beam is {cfg.generation.beam}: at least 1 is needed")
    of_generate_alone = {
        "--lm-path": cfg.generation.lm_path,
        "--replace-unk": cfg.generation.replace_unk,
        "--prefix-size": cfg.generation.prefix_size,
        "--score-reference": cfg.generation.score_reference,
        "--constraints": cfg.generation.constraints,
        "--print-alignment": cfg.generation.print_alignment,
        "--knn-log": getattr(cfg.task, "knn_log", None),
    }
    for name, value in of_generate_alone.items():
        if value:
            raise ConfigurationError(f"{name} is for fairseq-generate alone: leave it out here")
    if cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        cfg.dataset.max_tokens = MAX_TOKENS
    return cfg


def decoding_actions() -> list[argparse.Action]:
    """Return fairseq's options of generation, and those of the tasks that retrieve."""
    actions: list[argparse.Action] = []
    for task in TASKS:
        parser = options.get_generation_parser(default_task=task)
        options.parse_args_and_arch(parser, input_args=["."], parse_known=True)  # this adds those of the task
        actions += parser._actions
    return actions


def subword_actions() -> list[argparse.Action]:
    """Return fairseq's options of tokenizers and subwords, whichever are chosen."""
    parser = argparse.ArgumentParser(add_help=False)
    for kind in ("tokenizer", "bpe"):
        parser.add_argument(f"--{kind}")
        for config in REGISTRIES[kind]["dataclass_registry"].values():
            gen_parser_from_dataclass(parser, config(), delete_default=True)
    return parser._actions


def words_by_name(named: Mapping[str, Any]) -> list[str]:
    """Return options given by name, such as `beam=5`, as words; False is the opposite of an option that has one."""
    known = {action.dest for action in decoding_actions()}
    given = {}
    for name, value in named.items():
        has_opposite = value is False and f"no_{name}" in known
        if value in (None, False) and name not in known and not has_opposite:
            raise ConfigurationError(f"there is no option {name}{did_you_mean(name, known)}")
        given[f"no_{name}" if has_opposite else name] = has_opposite or value
    return as_words(given)


def _refuse_in_one_sentence(parser: argparse.ArgumentParser) -> None:
    """Make a parser raise what it would print and exit for, with what may have been meant."""

    def refuse(message: str) -> NoReturn:
        known = [name for action in parser._actions for name in action.option_strings]
        raise ConfigurationError(explain_usage(message, known))

    parser.error = refuse  # type: ignore[method-assign]
