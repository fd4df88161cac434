"""fairseq's generation options, completed by what data folder, datastore and model's folder know."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from fairseq import options
from fairseq.data import data_utils
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

from fairseq_ccpr.datastore.manifest import Manifest
from fairseq_ccpr.datastore.preprocessing import Preprocessing, read_preprocessing, remembered
from fairseq_ccpr.decoding.options import RETRIEVAL, MixtureSettings
from fairseq_ccpr.decoding.retrieval_task import RetrievalTask
from fairseq_ccpr.decoding.task import BILINGUAL, RETRIEVING, TASKS, task_words
from fairseq_ccpr.errors import ConfigurationError, did_you_mean, explain_usage
from fairseq_ccpr.inference.unknown import OFF
from fairseq_ccpr.models.checkpoint import read_task
from fairseq_ccpr.paths import configuration, split_paths
from fairseq_ccpr.settings import as_words
from fairseq_ccpr.storage.data_bin import but_found, check_data_bin
from fairseq_ccpr.storage.fingerprint import of_file, of_files
from fairseq_ccpr.text.schemes import implied_bpe, options_of_file, subword_files

MAX_TOKENS = 12000  # of a batch, as in fairseq-generate
BY_ATTENTION = "@@ "  # what fairseq takes for --replace-unk without a value
MEMORY_NAME = re.compile(r"[\w-]+")
NO_LANGUAGE = (
    "unknown"  # stands for a language that is not known yet, which fairseq's tokenizers want to have
)
OF_RETRIEVAL = tuple(f"--{no}{kind.PREFIX}-" for kind in RETRIEVAL for no in ("", "no-"))


def parse_generation(words: list[str]) -> Any:
    """Return the configuration of `fairseq-generate WORDS`, with retrieval as the default task."""
    return configuration(_parsed(words))


def _parsed(words: list[str]) -> argparse.Namespace:
    parser = options.get_generation_parser(default_task=BILINGUAL)

    def refuse(message: str) -> NoReturn:
        known = [name for action in parser._actions for name in action.option_strings]
        raise ConfigurationError(explain_usage(message, known))

    parser.error = refuse
    given: argparse.Namespace = options.parse_args_and_arch(parser, input_args=words)
    given.no_progress_bar |= given.quiet
    if not issubclass(TASK_REGISTRY[given.task], RetrievalTask):
        raise ConfigurationError(
            f"--task {given.task} does not retrieve: use {RETRIEVING.get(given.task, BILINGUAL)}"
        )
    if given.beam < 1:
        raise ConfigurationError(f"--beam is {given.beam}: at least 1 is needed")
    if given.replace_unk not in (None, BY_ATTENTION, OFF):
        raise ConfigurationError(
            f"--replace-unk is {given.replace_unk}, and dictionaries of alignments are for fairseq-generate alone: leave it "
            f"out, or give {OFF}, which leaves <unk> in translations"
        )
    alone = "lm_path", "prefix_size", "score_reference", "constraints", "print_alignment", "tokens_log"
    for name in alone:
        if getattr(given, name, None):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} is for fairseq-generate alone: leave it out here"
            )
    if given.max_tokens is None and given.batch_size is None:
        given.max_tokens = MAX_TOKENS
    return given


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
    """Return options given by name, such as `beam=5`, as words; False is the opposite, if there is one."""
    known = {action.dest for action in decoding_actions()}
    given = {}
    for name, value in named.items():
        has_opposite = value is False and f"no_{name}" in known
        if value in (None, False) and name not in known and not has_opposite:
            raise ConfigurationError(f"there is no option {name}{did_you_mean(name, known)}")
        given[f"no_{name}" if has_opposite else name] = has_opposite or (
            OFF if (name, value) == ("replace_unk", False) else value
        )
    return as_words(given)


def configure(words: list[str], data: Path | None = None) -> Any:
    """Return the configuration of fairseq-generate for these options, completed by what is found."""
    words = [*_task_of(words), *implied_bpe(words)]
    given = _parsed([str(data or "."), "-s", NO_LANGUAGE, "-t", NO_LANGUAGE, *words])
    datastores = [Path(folder) for folder in split_paths(given.datastore)] if given.datastore else []
    for folder in datastores:
        Manifest.read(folder)  # or say that it is none
    source, target = (None if one == NO_LANGUAGE else one for one in (given.source_lang, given.target_lang))
    kept = [one for one in map(remembered, datastores) if one]
    # Of several datastores of a multilingual model, the one for the language pair, if any.
    kept = [one for one in kept if (one.source_lang, one.target_lang) == (source, target)] or kept
    known = [found for found in (read_preprocessing(data) if data else None, *kept) if found]
    path = given.path or _model_of(known, datastores)
    models = [Path(one) for one in split_paths(path)]
    for model in models:
        if not model.is_file():
            raise ConfigurationError(
                f"--path: there is no checkpoint {model}{f' (of {path})' if models[1:] else ''}"
            )
    known += [beside for model in models if (beside := read_preprocessing(model.parent))]
    source, target = _languages(source, target, known, data, models[0])
    folder = data or _dictionaries(
        [one.folder for one in known] + [models[0].parent], source, target, models[0]
    )
    found = ["--path", path, "-s", source, "-t", target]
    if given.bpe is None:
        found += _subwords(known, [data, models[0].parent] if data else [models[0].parent], given)
    cfg = parse_generation([str(folder), *found, *words])
    if cfg.bpe is not None:
        cfg.common_eval.post_process = None  # --remove-bpe; the subword model does that, and more
    return cfg


def _task_of(words: list[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--path", "--datastore"):
        parser.add_argument(name, nargs="?", default="")
    given, _ = parser.parse_known_args(words)
    path = given.path or ""
    for folder in split_paths(given.datastore or ""):
        known = remembered(Path(folder)) if not path and folder else None
        path = known.model if known is not None else path
    return task_words(Path(split_paths(path)[0])) if path else []


def configure_system(words: list[str], data: Path | None = None) -> Any:
    """Read the configuration as `configure` does; refuse options of retrieval where there is no datastore.

    A plug-in may have memories without one, which Lambda_max bounds.
    """
    cfg = configure(words, data)
    wasted = sorted(word.partition("=")[0] for word in words if word.startswith(OF_RETRIEVAL))
    if TASK_REGISTRY[cfg.task._name].build_memories is not RetrievalTask.build_memories:
        wasted = [name for name in wasted if not name.startswith(f"--{MixtureSettings.PREFIX}-")]
    if wasted and not cfg.task.datastore:
        raise ConfigurationError(
            f"{wasted[0]} has no effect without a datastore: give --datastore DIR, or leave it out"
        )
    return cfg


def configure_named(
    words: list[str], datastores: Mapping[str, str | Path], data: Path | None = None
) -> dict[str, Any]:
    """Read a configuration for each of several datastores, by name; without --path of the first's model."""
    found: dict[str, Any] = {}
    folders: dict[Path, str] = {}
    for name, datastore in datastores.items():
        if not MEMORY_NAME.fullmatch(name):
            raise ConfigurationError(
                f"a memory is called '{name}': use letters, digits, - and _, as in --datastore NAME={datastore}"
            )
        if (other := folders.setdefault(Path(datastore).resolve(), name)) != name:
            raise ConfigurationError(f"the memories {other} and {name} are the same folder: leave one out")
        first = next(iter(found.values()), None)
        shared = ["--path", first.common_eval.path] if first is not None and "--path" not in words else []
        found[name] = configure_system([*words, *shared, "--datastore", str(datastore)], data)
    return found


def preprocessing_of(cfg: Any) -> Preprocessing:
    """Describe the preprocessing of a complete configuration."""
    options: dict[str, Any] = {}
    languages = "source_lang", "target_lang"
    for kind in ("tokenizer", "bpe"):
        if (given := cfg[kind]) is not None:
            named = {name: value for name, value in given.items() if value and name not in languages}
            options |= {kind: named.pop("_name"), **named}
    model = os.pathsep.join(str(Path(one).resolve()) for one in split_paths(cfg.common_eval.path))
    task = cfg.task
    return Preprocessing(Path(split_paths(task.data)[0]), task.source_lang, task.target_lang, options, model)


def find_beside(
    model: Path, source: str, target: str, given: Mapping[str, Any] = MappingProxyType({})
) -> Preprocessing | None:
    """Return the dictionaries and subwords next to a checkpoint; None without the dictionaries."""
    if (beside := read_preprocessing(model.parent)) is not None:
        _languages(source, target, [beside], None, model)
        return replace(beside, options={**beside.options, **given})
    if not _has_dictionaries(model.parent, source, target):
        return None
    files = subword_files(model.parent)
    if "bpe" not in given and len(files) > 1:
        raise _two_models(*files[:2])
    found = options_of_file(files[0], given.get("tokenizer")) if files and "bpe" not in given else {}
    return Preprocessing(model.parent, source, target, {**found, **given})


def preprocessing_for_build(data: Path, model: Path, source: str | None, target: str | None) -> Preprocessing:
    """Describe the tokenisation of text for a datastore built from a data folder with a model.

    Subwords that are not known stay out: they are not needed to build.
    """
    check_data_bin(data)
    known = read_preprocessing(data)
    source, target = _languages(source, target, [known] if known else [], data, model)
    if known is None:
        try:
            beside = find_beside(model, source, target)
        except ConfigurationError:  # there are several
            beside = None
        known = Preprocessing(data, source, target, beside.options if beside else {})
    return replace(known, model=str(model.resolve()))


def _model_of(known: list[Preprocessing], datastores: list[Path]) -> str:
    path = next((one.model for one in known if one.model), None)
    if path is None and datastores:
        alone = all(Manifest.read(folder).token is None for folder in datastores)
        raise ConfigurationError(
            f"{', '.join(map(str, datastores))} does not say which model it is for"
            f"{', as phrases alone do not until they are tuned' if alone else ''}: give the model's checkpoint with --path"
        )
    if path is None:
        raise ConfigurationError(
            "give a datastore with --datastore, which knows its model, or the model's checkpoint with --path"
        )
    if not all(Path(one).is_file() for one in split_paths(path)):
        raise ConfigurationError(
            f"the datastore was built with the model {path}, which is not there: give --path"
        )
    return path


def _languages(
    source: str | None, target: str | None, known: list[Preprocessing], data: Path | None, model: Path
) -> tuple[str, str]:
    for one in known:
        source, target = source or one.source_lang, target or one.target_lang
        if (source, target) != (one.source_lang, one.target_lang):
            raise ConfigurationError(
                f"{one.folder} is for {one.source_lang} to {one.target_lang}, and not for {source} to {target}: leave out -s "
                "and -t, or give the data and the datastore of these languages"
            )
    if data is not None and data.is_dir() and not (source and target):
        found = data_utils.infer_language_pair(str(data))
        source, target = source or found[0], target or found[1]
    if not source or not target:
        trained = read_task(model)
        source, target = source or trained.get("source_lang"), target or trained.get("target_lang")
    if not source or not target:
        raise ConfigurationError(f"{model} does not say which languages it translates: give -s and -t")
    return source, target


def _dictionaries(folders: list[Path], source: str, target: str, model: Path) -> Path:
    found = [folder for folder in folders if _has_dictionaries(folder, source, target)]
    digests = {
        of_files(folder / f"dict.{language}.txt" for language in (source, target)): folder for folder in found
    }
    if len(digests) > 1:
        one, other = list(digests.values())[:2]
        raise ConfigurationError(
            f"{one} and {other} have dictionaries that differ: say with --data which are the model's"
        )
    if not found:
        raise ConfigurationError(
            f"there is no dict.{source}.txt and dict.{target}.txt next to {model}{but_found(model.parent)}: put the model's "
            "dictionaries there, give the folder that has them, such as DATA_BIN, with --data, or -s and -t as in their names"
        )
    return found[0]


def _has_dictionaries(folder: Path, *languages: str) -> bool:
    return all((folder / f"dict.{language}.txt").is_file() for language in languages)


def _subwords(known: list[Preprocessing], folders: list[Path], given: Any) -> list[str]:
    described = [one for one in known if one.options]
    for one, other in pairwise(described):
        if one.subword_digests() != other.subword_digests():
            raise _two_models(one.folder, other.folder)
    files = list(
        {of_file(file): file for folder in reversed(folders) for file in subword_files(folder)}.values()
    )
    if not described:
        if len(files) > 1:
            raise _two_models(*files[:2])
        return as_words(options_of_file(files[0], given.tokenizer)) if files else []
    digests = described[0].subword_digests()
    for file in files:
        if of_file(file) not in digests:
            raise _two_models(described[0].folder, file)
    return described[0].words


def _two_models(one: Path, other: Path) -> ConfigurationError:
    return ConfigurationError(
        f"there are two subword models that differ, {one} and {other}: say which is the model's with --bpe and "
        "--sentencepiece-model, or --bpe-codes"
    )
