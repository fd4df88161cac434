"""What tasks and criterions share: bf16 on a CPU, validation by accuracy, logged sums, folders of pairs."""

# No `from __future__ import annotations` here: fairseq makes its options from the types themselves.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask, register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II

from fairseq_ccpr.device import has_bf16
from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.paths import split_paths
from fairseq_ccpr.text.subwords import SubwordTokenizer
from fairseq_ccpr.text.tokenizers import ENCODER_TOKENIZERS, load_tokenizer


def refuse_below_1(cfg: Any, *names: str) -> None:
    """Refuse options that are below 1."""
    for name in names:
        if (value := getattr(cfg, name)) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} is {value}: give at least 1")


def cpu_autocast(model: torch.nn.Module) -> torch.autocast:
    """Return a bf16 autocast context for a model on the CPU; on other devices it has no effect.

    Nor on a CPU that is slower in bf16.
    """
    device = next(model.parameters()).device
    return torch.autocast("cpu", torch.bfloat16, enabled=device.type == "cpu" and has_bf16(device))


class CpuAutocast:
    """Mixin for a fairseq task, listed before its base: steps of a model on the CPU run under bf16 autocast.

    fairseq's `--bf16` does not work there.
    """

    def train_step(self, sample: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with cpu_autocast(model):
            return super().train_step(sample, model, *args, **kwargs)  # type: ignore[misc]

    def valid_step(self, sample: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with cpu_autocast(model):
            return super().valid_step(sample, model, *args, **kwargs)  # type: ignore[misc]


@register_task("translation_cpu_bf16", dataclass=TranslationConfig)
class TranslationCpuBf16Task(CpuAutocast, TranslationTask):
    """Translation; on a GPU the same as `translation`, with fairseq's own `--fp16` and `--bf16`."""


class SummedCriterion(FairseqCriterion):
    """A criterion whose logged values are sums, with the number of decimals that fairseq shows of each."""

    means: ClassVar[Mapping[str, int]] = {"loss": 3}  # by `sample_size`
    percentages: ClassVar[Mapping[str, int]] = {"accuracy": 2}  # of `queries`, which validation has

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        def total(name: str) -> float:
            return sum(float(log.get(name, 0)) for log in logging_outputs)

        count, queries = total("sample_size"), total("queries")
        for name, decimals in cls.means.items():
            metrics.log_scalar(name, total(name) / max(count, 1), count, round=decimals)
        for name, decimals in cls.percentages.items() if queries else ():
            metrics.log_scalar(name, 100 * total(name) / queries, queries, round=decimals)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


@dataclass
class ContrastTaskConfig(FairseqDataclass):
    """Options of other parts of fairseq that the tasks read; their own include at least `data`."""

    seed: int = II("common.seed")
    cpu: bool = II("common.cpu")
    save_dir: str = II("checkpoint.save_dir")
    best_checkpoint_metric: str = II("checkpoint.best_checkpoint_metric")
    maximize_best_checkpoint_metric: bool = II("checkpoint.maximize_best_checkpoint_metric")
    disable_validation: bool = II("dataset.disable_validation")


class ContrastTask(CpuAutocast, FairseqTask):
    """A task that validates by retrieval accuracy; its data sets leave out examples that are too long."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        tracks_accuracy = cfg.best_checkpoint_metric == "accuracy" and cfg.maximize_best_checkpoint_metric
        if not (tracks_accuracy or cfg.disable_validation):
            raise ConfigurationError(
                f"--task {cfg._name} validates by retrieval accuracy: give --best-checkpoint-metric accuracy "
                "--maximize-best-checkpoint-metric"
            )


class EncoderTask(CpuAutocast, FairseqTask):
    """A task whose model has a `ContextEncoder` as `context`.

    Loading it needs settings and the tokenizer next to it.
    """

    context_settings: Mapping[str, Any] = {}

    def keep(self, model: Any, origin: str) -> Any:
        """Keep what checkpoints of a model need besides weights, whose tokenizer comes from `origin`.

        Return the model.
        """
        self.context_settings = vars(model.context.arguments)
        save_tokenizer(model.context.tokenizer, Path(self.cfg.save_dir), origin)
        return model

    def state_dict(self) -> dict[str, Any]:
        return {"context": self.context_settings}


@dataclass
class PhraseTaskConfig(ContrastTaskConfig):
    """Options of other parts of fairseq that the tasks read.

    Their own include at least `data` and `max_subwords`.
    """

    encoder: str = II("model.encoder")


class PhraseTask(EncoderTask, ContrastTask):
    """A task whose data are folders with a train and a valid part."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        if not cfg.encoder:
            raise ConfigurationError("--encoder is not given: make one with fairseq-ccpr convert")
        self.tokenizer = load_tokenizer(Path(cfg.encoder))

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.max_subwords > (most := model.context.max_positions):
            raise ConfigurationError(
                f"--max-subwords is {self.cfg.max_subwords}, but the encoder {self.cfg.encoder} takes {most}"
            )
        return self.keep(model, self.cfg.encoder)

    def has_sharded_data(self, split: str) -> bool:
        """Return False: several folders are mixed, so every epoch reads all of them."""
        return False

    def open_folders(self, split: str, kind: Any) -> Iterator[Any]:
        """Open and check the part `split` of each folder with `kind`.

        For validation, folders without one are skipped.
        """
        folders = [Path(folder) / split for folder in split_paths(self.cfg.data)]
        if split != "train" and any(folder.is_dir() for folder in folders):
            folders = [folder for folder in folders if folder.is_dir()]
        for folder in folders:
            opened = kind(folder)
            opened.check()
            yield opened


def save_tokenizer(tokenizer: SubwordTokenizer, folder: Path, origin: str) -> None:
    """Write a tokenizer, which comes from `origin`, to the folder of the checkpoints, unless they have it.

    Raises:
        ConfigurationError: they have another.
    """

    def identity(one: SubwordTokenizer) -> tuple[object, ...]:
        return one.filename, one.content, one.symbols

    if any(folder.glob("*.pt")) and any((folder / filename).is_file() for filename in ENCODER_TOKENIZERS):
        if identity(load_tokenizer(folder)) != identity(tokenizer):
            raise ConfigurationError(
                f"--save-dir {folder} holds checkpoints with another tokenizer than that of {origin}: "
                "give the encoder they were trained from, or another --save-dir"
            )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
