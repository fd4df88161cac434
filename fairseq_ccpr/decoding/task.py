"""The tasks that retrieve: fairseq's translation tasks with a datastore alongside the model."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.data import ConcatDataset
from fairseq.data.multilingual.multilingual_utils import get_lang_tok
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from fairseq_ccpr.decoding.options import RetrievalConfig, TranslationRetrievalConfig
from fairseq_ccpr.decoding.retrieval_task import RetrievalTask
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.models.checkpoint import read_task
from fairseq_ccpr.settings import as_words
from fairseq_ccpr.storage.data_bin import check_data_bin
from fairseq_ccpr.text.languages import LanguageTags, same_language

BILINGUAL, MULTILINGUAL, BART = (
    "translation_retrieval",
    "translation_retrieval_multi",
    "translation_retrieval_bart",
)
# The task that a checkpoint was trained with, and the one that retrieves with it.
RETRIEVING = {"translation_multi_simple_epoch": MULTILINGUAL, "translation_from_pretrained_bart": BART}
# What a multilingual model needs again as it was trained.
OF_TASK: Mapping[str, tuple[str, ...]] = {
    MULTILINGUAL: (
        "langs", "lang_pairs", "encoder_langtok", "decoder_langtok", "langtoks_specs", "lang_tok_style",
        "lang_tok_replacing_bos_eos",
    ),
    BART: ("langs", "prepend_bos"),
}  # fmt: skip
FILES: Mapping[str, tuple[str, ...]] = {
    MULTILINGUAL: ("lang_dict", "fixed_dictionary", "source_dict", "target_dict")
}
TASKS = (BILINGUAL, MULTILINGUAL, BART)


def task_words(model: Path) -> list[str]:
    """Return words of a command line: the task that retrieves with a model, and its options; none for a bilingual one.

    Files that the checkpoint names are looked for at their recorded paths, and next to it.
    """
    if not model.is_file():
        return []  # whoever loads it will say so
    trained = read_task(model)
    name = str(trained.get("task") or trained.get("_name") or "")
    task = RETRIEVING.get(name, name)
    if task not in OF_TASK:
        return []
    options: dict[str, Any] = {}
    for option in OF_TASK[task]:
        value = trained.get(option)
        options[option] = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    for option in FILES.get(task, ()):
        if given := trained.get(option):
            places = (Path(given), model.parent / Path(given).name)
            options[option] = next((str(place) for place in places if place.is_file()), None)
    return as_words({"task": task, **{option: value for option, value in options.items() if value}})


@register_task(BILINGUAL, dataclass=TranslationRetrievalConfig)
class TranslationRetrievalTask(RetrievalTask, TranslationTask):
    """fairseq's `translation`."""

    name = BILINGUAL

    def __init__(self, cfg: TranslationRetrievalConfig, src_dict: Any, tgt_dict: Any) -> None:
        super().__init__(cfg, src_dict, tgt_dict)
        self.open_datastore(cfg)

    @classmethod
    def setup_task(cls, cfg: TranslationRetrievalConfig, **kwargs: Any) -> Any:
        check_data_bin(Path(cfg.data), *(lang for lang in (cfg.source_lang, cfg.target_lang) if lang))
        return super().setup_task(cfg, **kwargs)


class ArgumentsTask(RetrievalTask):
    """A task of fairseq that adds its options to a parser, and calls them `args`."""

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        super().add_args(parser)
        gen_parser_from_dataclass(parser, RetrievalConfig())

    def with_data(self, data_bin: Path) -> Any:
        task = super().with_data(data_bin)
        task.args = task.cfg
        return task


@register_task(MULTILINGUAL)
class MultilingualRetrievalTask(ArgumentsTask, TranslationMultiSimpleEpochTask):
    """fairseq's `translation_multi_simple_epoch`: M2M-100, NLLB, mBART-50."""

    name = MULTILINGUAL

    def __init__(self, args: Any, langs: list[str], dicts: dict[str, Any], training: bool) -> None:
        super().__init__(args, langs, dicts, training)
        self.cfg = args
        source_tag, target_tag = args.langtoks["main"]
        symbols = (
            get_lang_tok(one, args.lang_tok_style, spec) for one in langs for spec in args.langtoks_specs
        )
        self.tags = LanguageTags(
            frozenset(symbols),
            added=int(bool(source_tag)),
            begin=get_lang_tok(args.target_lang, args.lang_tok_style, target_tag) if target_tag else None,
            languages=f"{args.source_lang}-{args.target_lang}",
        )
        self.open_datastore(args)

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> Any:
        _check_languages(cls.name, args)
        if args.lang_tok_replacing_bos_eos:
            raise ConfigurationError(f"--lang-tok-replacing-bos-eos does not work with --task {cls.name}")
        if args.lang_pairs is None:
            args.lang_pairs = f"{args.source_lang}-{args.target_lang}"
        if args.fixed_dictionary is None and args.source_dict is None and args.target_dict is None:
            check_data_bin(Path(args.data), args.source_lang, args.target_lang)
        try:
            return super().setup_task(args, **kwargs)
        except (AssertionError, ValueError, FileNotFoundError) as error:
            raise ConfigurationError(
                f"--task {cls.name}: {' '.join(str(error).split())}; give --langs or --lang-dict, and the "
                "dictionaries, of the model"
            ) from None

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a subset, as sentence pairs where it is of the one language pair."""
        super().load_dataset(split, epoch, combine, **kwargs)
        loaded = self.datasets[split]
        if isinstance(loaded, ConcatDataset) and len(loaded.datasets) == 1:
            self.datasets[split] = loaded.datasets[0]

    def with_data(self, data_bin: Path) -> Any:
        task = super().with_data(data_bin)
        task.data_manager = copy.copy(self.data_manager)
        task.data_manager.args = task.cfg
        return task


@register_task(BART)
class BartRetrievalTask(ArgumentsTask, TranslationFromPretrainedBARTTask):
    """fairseq's `translation_from_pretrained_bart`: models that were made of mBART."""

    name = BART

    def __init__(self, args: Any, src_dict: Any, tgt_dict: Any) -> None:
        super().__init__(args, src_dict, tgt_dict)
        self.cfg = self.args = args  # fairseq's class reads both
        symbols = frozenset(f"[{language}]" for language in self.langs) | {"<mask>"}
        end = f"[{args.target_lang}]"
        self.tags = LanguageTags(
            symbols, added=1, end=end, languages=f"{args.source_lang}-{args.target_lang}"
        )
        self.open_datastore(args)

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> Any:
        _check_languages(cls.name, args)
        if not args.langs:
            raise ConfigurationError(
                f"--task {cls.name} needs --langs, the languages of the pretrained model in their order"
            )
        check_data_bin(Path(args.data), args.source_lang, args.target_lang)
        return super().setup_task(args, **kwargs)


def _check_languages(name: str, args: Any) -> None:
    if not args.source_lang or not args.target_lang:
        raise ConfigurationError(f"--task {name} translates from one language to another: give -s and -t")
    known = args.langs.split(",") if isinstance(args.langs, str) else args.langs or ()
    for language in (args.source_lang, args.target_lang):
        if known and language not in known:
            alike = ", ".join(one for one in known if same_language(one, language)) or ", ".join(known[:10])
            raise ConfigurationError(
                f"--langs has no {language}, but {alike}: give -s and -t as the model's languages are called"
            )
